"""On one node, no process of a run listens where another machine could connect."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from harness.engines import INSTALL, PACELINE, end_family, free_ports, wait_for
from harness.listening import listening, outside
from harness.processes import children

_STREAMED = ("fashion-mnist-mini", "--model", "linear", "--loader", "streaming", "--loader-workers", "1")
_ENDLESS = ("train", *_STREAMED, "--epochs", "1000000", "--log-every", "1")
_MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2")


def _watch(command: Sequence[str], runs: Path, until: str, env: Mapping[str, str] | None = None) -> None:
    """Run this until a file of the record has content. Meanwhile its Python processes must listen only on the loopback."""
    seen: set[str] = set()
    output = runs.parent / "output"
    with output.open("w") as file:
        job = subprocess.Popen(command, env={**os.environ, **(env or {})}, stdout=file, stderr=file, text=True)

    def look() -> bool:
        ours = {pid for pid, line in children(job.pid).items() if "mpirun" not in line and "orted" not in line}
        seen.update(listening(ours if command[0] == "mpirun" else {job.pid, *ours}))
        return any(path.stat().st_size for path in runs.glob(until))

    try:
        wait_for(look, 60, output.read_text)
    finally:
        end_family(job)
    assert seen, "no listening socket was seen, so this test shows nothing"
    assert not outside(seen)


def test_workers_of_our_launcher(runs: Path) -> None:
    _watch([*PACELINE, *_ENDLESS, "--workers", "2"], runs, "*/metrics.jsonl")


def test_scale(runs: Path) -> None:
    command = [*PACELINE, "scale", *_STREAMED, "--workers", "2", "--windows", "3", "--window-s", "0.1", "--name", "s"]
    _watch(command, runs, "s/scale.json")


@pytest.mark.mpirun
@pytest.mark.skipif(shutil.which("mpirun") is None, reason=f"Open MPI's mpirun is not installed: {INSTALL}")
@pytest.mark.parametrize("port", [False, True], ids=["any port", "MASTER_PORT"])
def test_workers_of_mpirun(port: bool, runs: Path) -> None:
    env = {"MASTER_ADDR": "0.0.0.0", "MASTER_PORT": str(free_ports(1)[0])} if port else {}
    _watch([*_MPIRUN, *PACELINE, *_ENDLESS], runs, "*/metrics.jsonl", env)
