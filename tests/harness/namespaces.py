"""Two nodes on one machine: network namespaces connected by a cable (a veth pair), each with its own loopback."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.processes import run

ADDRESSES = ("192.168.77.1", "192.168.77.2")
"""Above 127.0.0.1: in gloo the worker with the higher address calls the other, which can hide a wrong 127.0.0.1."""


@dataclass(frozen=True)
class Node:
    """One namespace."""

    name: str
    address: str

    def command(self, *command: str) -> list[str]:
        """The command that runs `command` on this node."""
        return ["ip", "netns", "exec", self.name, *command]


def missing() -> list[str]:
    """What this machine lacks to make namespaces."""
    return (["root"] if os.geteuid() != 0 else []) + (["ip of iproute2"] if shutil.which("ip") is None else [])


@contextmanager
def two_nodes(hosts: tuple[str, str] | None = None, rate: str = "") -> Iterator[tuple[Node, Node]]:
    """Two connected nodes, removed at the end. `hosts` are their /etc/hosts, `rate` is the speed of the cable ("1gbit")."""
    nodes = tuple(Node(f"paceline-{os.getpid()}-{i}", address) for i, address in enumerate(ADDRESSES))
    cables = [f"pl{os.getpid()}-{i}" for i in range(2)]  # an interface's name has at most 15 characters
    folders = [Path("/etc/netns", node.name) for node in nodes]  # ip netns exec mounts these files over those in /etc
    try:
        for folder, text in zip(folders, hosts or (), strict=False):
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{text}\n")
        for node in nodes:
            _ip("netns", "add", node.name)
        _ip("link", "add", cables[0], "netns", nodes[0].name, "type", "veth", "peer", "name", cables[1], "netns", nodes[1].name)
        for node, cable in zip(nodes, cables, strict=True):
            _ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", cable)
            _ip("-n", node.name, "link", "set", "lo", "up")
            _ip("-n", node.name, "link", "set", cable, "up")
            if rate:
                shaped = ["tc", "-n", node.name, "qdisc", "add", "dev", cable, "root", "tbf", "rate", rate]
                done = run([*shaped, "burst", "256kb", "latency", "50ms"], timeout_s=10)
                assert done.returncode == 0, f"tc: {done.stderr}"
        yield nodes[0], nodes[1]
        left = {
            node.name: pids for node in nodes if (pids := run(["ip", "netns", "pids", node.name], timeout_s=10).stdout.split())
        }
        assert not left, f"processes left behind: {left}"
    finally:
        for node, folder in zip(nodes, folders, strict=True):
            run(["ip", "netns", "delete", node.name], timeout_s=10)
            shutil.rmtree(folder, ignore_errors=True)


def _ip(*args: str) -> None:
    done = run(["ip", *args], timeout_s=10)
    assert done.returncode == 0, f"ip {' '.join(args)}: {done.stderr}"
