"""Stores and sockets listen at one address."""

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from paceline.dist.store import host_store, listen


def addresses(*found):
    """The address of a name, instead of the system's resolver."""

    def getaddrinfo(host, port, **_):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

    return getaddrinfo


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_on_the_loopback(host):
    store = host_store("127.0.0.1", 0, 1, timedelta(seconds=20))
    TCPStore("127.0.0.1", store.port, 1, is_master=False).set("key", "value")
    assert store.get("key") == b"value"
    with listen(host, 0) as server:
        assert server.getsockname()[0] in ("127.0.0.1", "::1")


def test_a_name_of_this_machine(monkeypatch):
    """127.0.0.2 stands for an address of one of its interfaces."""
    monkeypatch.setattr(socket, "getaddrinfo", addresses("127.0.0.2"))
    monkeypatch.setattr("paceline.dist.store._is_loopback", lambda address: False)
    with listen("node0", 0) as server:
        assert server.getsockname()[0] == "127.0.0.2"


@pytest.mark.parametrize("address", ["198.51.100.7", "127.0.1.1"], ids=["NAT", "Debian's /etc/hosts"])
def test_a_name_that_does_not_resolve_to_an_own_address(address, monkeypatch):
    """Others reach this machine through an address that it does not know, so it must listen on all."""
    monkeypatch.setattr(socket, "getaddrinfo", addresses(address))
    with listen("node0", 0) as server:
        assert server.getsockname()[0] in ("::", "0.0.0.0")


def test_a_port_that_is_taken_is_an_error():
    with listen("127.0.0.1", 0) as server, pytest.raises(OSError, match="Address already in use"):
        listen("127.0.0.1", server.getsockname()[1])
