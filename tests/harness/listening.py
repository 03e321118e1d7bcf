"""Find the addresses on which the processes of a run listen."""

import ipaddress
from collections.abc import Iterable
from contextlib import suppress

import psutil


def listening(pids: Iterable[int]) -> set[str]:
    """Local addresses of TCP sockets on which these processes wait for connections."""
    found = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            for connection in psutil.Process(pid).net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    address = ipaddress.ip_address(connection.laddr.ip)
                    found.add(str(getattr(address, "ipv4_mapped", None) or address))
    return found


def outside(addresses: Iterable[str]) -> set[str]:
    """Those that other machines can reach."""
    return {address for address in addresses if not ipaddress.ip_address(address).is_loopback}
