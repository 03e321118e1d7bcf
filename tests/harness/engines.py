"""A tiny run that any engine (our launcher, torchrun, srun, mpirun) can start, and checks of what it leaves behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness.processes import children
from paceline.records import read_metrics, read_result

PACELINE = (sys.executable, "-m", "paceline")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
TRAIN = ("train", "fashion-mnist-mini", "--model", "linear", "--epochs", "1", "--max-steps", "5", "--timeout-s", "60")
"""Five steps of a linear model: a second of work after the start. A worker waits at most 60 s for a lost one."""

CONTRACT = "P = 2 (V = 2 parts, one per worker)"
"""What the contract says about two workers."""

INSTALL = "tools/install_system_packages.sh installs it"


def check_run(runs: Path, output: str, *, launcher: str, nodes: int = 1, model: str | None = None) -> str:
    """Check that one world of 2 workers wrote one record and printed once; returns its model's hash (`model`, if given)."""
    (record,) = check_runs(runs, 1)
    contract = json.loads((record / "environment.json").read_text())["contract"]
    assert (contract["workers"], contract["nodes"], contract["launcher"]) == (2, nodes, launcher)
    assert output.count(CONTRACT) == 1, f"the contract must be printed once:\n{output}"
    assert output.count("done: loss") == 1, f"the end must be printed once:\n{output}"
    trained = model_of(record)
    assert model in (None, trained), "the same command trained a different model with this engine"
    return trained


def check_survived(record: Path, model: str, resumed: Sequence[int]) -> None:
    """Check that a run resumed from a checkpoint once on each of these numbers of workers, and trained this model."""
    assert read_result(record)["status"] == "done"
    rows = [row for row in read_metrics(record) if row["kind"] == "resume"]
    assert [row["contract"]["workers"] for row in rows] == resumed
    assert all(row["step"] > 0 for row in rows), "there was no checkpoint to resume from"
    assert model_of(record) == model, "the interruption changed the trained model"


def check_runs(runs: Path, n: int) -> list[Path]:
    """The n records in this folder. Checks that each run is done."""
    records = sorted(runs.iterdir())
    assert len(records) == n, f"{n} worlds must write {n} records, not {records}"
    for record in records:
        assert json.loads((record / "result.json").read_text())["status"] == "done"
    return records


def check_apart(runs: Path, n: int, model: str) -> None:
    """Check that n simultaneous runs, the first with seed 0 and the others with other seeds, did not mix: the first trained the
    same model as alone.
    """
    trained = [model_of(record) for record in check_runs(runs, n)]
    assert trained.count(model) == 1, f"a worker of one run joined another: {trained} must contain {model} once"
    assert len(set(trained)) == n


def model_of(record: Path) -> str:
    """The hash of a run's final weights."""
    return str(json.loads((record / "result.json").read_text())["model_sha256"])


def run_together(
    *commands: Sequence[str], env: Mapping[str, str] | None = None, timeout_s: float = 110
) -> list[subprocess.CompletedProcess[str]]:
    """Run commands at the same time to their end and capture their output. At the deadline, kill them and all they started."""
    end = time.monotonic() + timeout_s
    pipe = subprocess.PIPE
    started = [subprocess.Popen(c, env={**os.environ, **(env or {})}, stdout=pipe, stderr=pipe, text=True) for c in commands]
    done = []
    try:
        for process in started:
            out, err = process.communicate(timeout=max(0.1, end - time.monotonic()))
            done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
        return done
    finally:
        for process in started:
            end_family(process)


def end_family(process: "subprocess.Popen[str]") -> None:
    """Kill a process of ours, if it is still running, and everything it started."""
    if process.poll() is None:
        for pid in [process.pid, *children(process.pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait(10)


def wait_for(condition: Callable[[], object], timeout_s: float, why: Callable[[], str]) -> None:
    """Poll until the condition holds; raise AssertionError with `why()` at the deadline."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"not within {timeout_s} s: {why()}"
        time.sleep(0.05)


def free_ports(n: int) -> list[int]:
    """Ports that were free a moment ago."""
    sockets = [socket.socket() for _ in range(n)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
