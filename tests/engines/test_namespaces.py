"""Two nodes with a network between them: workers choose the interface that leads to the others by themselves."""

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.engines import INSTALL, PACELINE, TORCHRUN, TRAIN, check_run, run_together
from harness.namespaces import ADDRESSES, Node, missing, two_nodes

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(bool(missing()), reason=f"network namespaces need {' and '.join(missing())}: {INSTALL}, run as root"),
]

_PORT = "21500"  # each namespace has all its ports to itself


def test_launchers_on_two_nodes_are_one_world(runs: Path, model: str) -> None:
    with two_nodes() as nodes:
        output = _together(nodes, lambda i: [*_node(i), "--rendezvous", f"{nodes[0].address}:{_PORT}"])
    check_run(runs, output, launcher="started here", nodes=2, model=model)


def test_a_first_node_with_its_name_on_the_loopback(runs: Path, model: str) -> None:
    """Debian's installer writes `127.0.1.1 HOSTNAME` into /etc/hosts: only on node 0, its name resolves to the loopback."""
    with two_nodes(hosts=("127.0.1.1 head", f"{ADDRESSES[0]} head")) as nodes:
        output = _together(nodes, lambda i: [*_node(i), "--rendezvous", f"head:{_PORT}"])
    check_run(runs, output, launcher="started here", nodes=2, model=model)


def test_torchrun_on_two_nodes_is_one_world(runs: Path, model: str) -> None:
    with two_nodes() as nodes:
        flags = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", nodes[0].address, "--master-port", _PORT]
        output = _together(nodes, lambda i: [*TORCHRUN, *flags, "--node-rank", str(i), "-m", "paceline", *TRAIN])
    check_run(runs, output, launcher="by torchrun", nodes=2, model=model)


def _node(i: int) -> list[str]:
    return [*PACELINE, *TRAIN, "--workers", "1", "--nodes", "2", "--node-id", str(i)]


def _together(nodes: tuple[Node, Node], command: Callable[[int], list[str]]) -> str:
    done = run_together(*(node.command(*command(i)) for i, node in enumerate(nodes)), timeout_s=100)
    assert [each.returncode for each in done] == [0, 0], "\n".join(each.stderr for each in done)
    return "".join(each.stdout for each in done)
