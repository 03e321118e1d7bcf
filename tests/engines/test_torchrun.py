"""torchrun, and Paceline's own launcher on one node and on two."""

from pathlib import Path

from harness.engines import PACELINE, TORCHRUN, TRAIN, check_apart, check_run, free_ports, run_together
from harness.processes import run


def test_torchrun_starts_one_world(runs: Path, model: str) -> None:
    done = run([*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "paceline", *TRAIN], timeout_s=90)
    assert done.returncode == 0, done.stderr
    check_run(runs, done.stdout, launcher="by torchrun", model=model)


def test_launchers_at_once_do_not_collide(runs: Path, model: str) -> None:
    torchrun = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "paceline", *TRAIN]
    ours = [*PACELINE, *TRAIN, "--workers", "2", "--seed"]
    for done in run_together(torchrun, [*ours, "1"], [*ours, "2"]):
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("P = 2 (V = 2 parts)") == 1
    check_apart(runs, 3, model)


def test_two_launchers_are_two_nodes_of_one_world(runs: Path, model: str) -> None:
    (port,) = free_ports(1)
    node = [*PACELINE, *TRAIN, "--workers", "1", "--nodes", "2", "--rendezvous", f"127.0.0.1:{port}", "--node-id"]
    first, second = run_together([*node, "0"], [*node, "1"], timeout_s=90)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    check_run(runs, first.stdout + second.stdout, launcher="started here", nodes=2, model=model)
    assert second.stdout == "", "only rank 0's node speaks"
