"""Which network interface a worker's backends use, and the hook that prints tracebacks."""

import os
import socket
import sys
from types import SimpleNamespace

import psutil
import pytest

from paceline.dist import world as module
from paceline.dist.place import Place
from paceline.dist.world import _choose_interface

NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture
def unset(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    yield
    for name in NAMES:
        os.environ.pop(name, None)


def address(family, text):
    return SimpleNamespace(family=family, address=text)


def test_an_interface_is_listed_with_its_first_ipv4_address(monkeypatch):
    found = {
        "lo": [address(socket.AF_INET6, "::1"), address(socket.AF_INET, "127.0.0.1")],
        "eth0": [address(socket.AF_INET, "192.0.2.1"), address(socket.AF_INET, "192.0.2.9")],
        "ifb0": [address(socket.AF_PACKET, "2e:be:bc:93:3a:cb")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    assert module.interfaces() == {"lo": "127.0.0.1", "eth0": "192.0.2.1"}


def test_on_one_node_backends_keep_to_the_loopback(unset):
    _choose_interface(Place(size=2, local_size=2))
    assert [os.environ[name] for name in NAMES] == ["lo", "=lo"]


@pytest.mark.parametrize("name", NAMES)
def test_the_users_choice_stays(name, unset, monkeypatch):
    monkeypatch.setenv(name, "eth7")
    _choose_interface(Place(size=2, local_size=2))
    assert os.environ[name] == "eth7"
    assert all(name in os.environ for name in NAMES)


def test_on_several_nodes_nccl_chooses_by_itself(unset, monkeypatch):
    monkeypatch.setattr(module, "meeting_point", lambda place: ("192.0.2.7", None))
    monkeypatch.setattr(module, "_address_toward", lambda host: "192.0.2.1")
    monkeypatch.setattr(module, "interfaces", lambda: {"lo": "127.0.0.1", "eth0": "192.0.2.1"})
    _choose_interface(Place(size=2, local_size=1, nodes=2))
    assert [os.environ.get(name) for name in NAMES] == ["eth0", None]


def test_a_world_of_one_leaves_tracebacks_as_python_prints_them():
    """torch's own hook would put [rank0]: before each line, once more for every world that the program joins."""
    hook = sys.excepthook
    for _ in range(2):
        with module.world("gloo"):
            assert sys.excepthook is hook
        assert sys.excepthook is hook
