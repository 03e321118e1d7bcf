"""Which addresses the processes of a run listen at, from /proc (`ss --processes` shows the same, where it may)."""

import ipaddress
import os
import sys
from collections.abc import Iterable
from pathlib import Path

_LISTENS = "0A"


def listening(pids: Iterable[int]) -> set[str]:
    """Local addresses of TCP sockets on which these processes wait for connections."""
    held = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                held.add(os.readlink(fd))
            except OSError:  # closed, or the process ended, while we looked
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and f"socket:[{fields[9]}]" in held:
                found.add(_address(fields[1].partition(":")[0]))
    return found


def outside(addresses: Iterable[str]) -> set[str]:
    """Those that other machines can reach."""
    return {address for address in addresses if not ipaddress.ip_address(address).is_loopback}


def _address(text: str) -> str:
    """The kernel prints an address as words of 32 bits in the machine's byte order."""
    words = [bytes.fromhex(text[i : i + 8]) for i in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(word[::-1] if sys.byteorder == "little" else word for word in words))
    return str(getattr(address, "ipv4_mapped", None) or address)
