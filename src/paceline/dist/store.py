"""TCP stores that listen on one address instead of every interface of the machine."""

import errno
import ipaddress
import socket
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"


def host_store(host: str, port: int, size: int, timeout: timedelta, *, wait: bool = True) -> TCPStore:
    """Host a store for `size` clients on this address; port 0 means any free port. Waits for them unless `wait` is false."""
    server = listen(host, port)
    port = server.getsockname()[1]
    fd = server.detach()  # the store owns it now
    return TCPStore(host, port, size, is_master=True, timeout=timeout, wait_for_workers=wait, master_listen_fd=fd)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at the address of `host`.

    It listens on all interfaces in two cases, because this machine cannot tell which interface the others will use: `host` does
    not resolve to one of this machine's own addresses (NAT, or a service name), or it is a name that only here resolves to the
    loopback (Debian's /etc/hosts says `127.0.1.1 HOSTNAME`).
    """
    local = host == "localhost" or _is_loopback(host)
    for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if _is_loopback(str(address[0])) and not local:
            continue
        try:
            return socket.create_server(address, family=family)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    both = socket.has_dualstack_ipv6()
    return socket.create_server(("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both)


def os_error_text(error: OSError) -> str:
    """The system's error message, without the address that Python appends."""
    return (error.strerror or str(error)).partition(" (while")[0]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return False
