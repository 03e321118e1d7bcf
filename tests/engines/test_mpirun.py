"""Open MPI's mpirun: its tasks meet without a given address or port, and a lost one ends the job."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from harness.engines import (
    INSTALL,
    PACELINE,
    TRAIN,
    check_apart,
    check_run,
    check_survived,
    end_family,
    run_together,
    wait_for,
)
from harness.faults import FLAGS, TASK, fail_at, variables
from harness.processes import alive, children, run

pytestmark = [
    pytest.mark.mpirun,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason=f"Open MPI's mpirun is not installed: {INSTALL}"),
]

MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2")
_GRACE = ("--mca", "odls_base_sigkill_timeout", "3")
"""On SIGTERM mpirun waits this many seconds, passes it on, and sends SIGKILL after the same time again (default 1)."""


def test_mpirun_starts_one_world(runs: Path, model: str) -> None:
    done = run([*MPIRUN, *PACELINE, *TRAIN], timeout_s=90)
    assert done.returncode == 0, done.stderr
    check_run(runs, done.stdout, launcher="by mpirun", model=model)


def test_two_mpiruns_at_once_do_not_collide(runs: Path, model: str) -> None:
    job = [*MPIRUN, *PACELINE, *TRAIN]
    for done in run_together(job, [*job, "--seed", "1"]):
        assert done.returncode == 0, done.stderr
    check_apart(runs, 2, model)


def test_a_killed_worker_ends_the_job(runs: Path) -> None:
    endless = ["train", "fashion-mnist-mini", "--model", "linear", "--epochs", "1000000"]
    output = runs.parent / "output"
    with output.open("w") as file:
        job = subprocess.Popen([*MPIRUN, *PACELINE, *endless], stdout=file, stderr=subprocess.STDOUT, text=True)
    try:
        wait_for(lambda: "Epoch = 2," in output.read_text(), 60, lambda: f"it does not train:\n{output.read_text()}")
        family = children(job.pid)
        victim = next(pid for pid in family if psutil.Process(pid).environ().get("OMPI_COMM_WORLD_RANK") == "1")
        os.kill(victim, signal.SIGKILL)
        assert job.wait(30) != 0
        wait_for(lambda: not any(alive(pid) for pid in family), 10, lambda: f"left behind: {children(job.pid) or family}")
    finally:
        end_family(job)
    assert "on signal 9" in output.read_text(), "mpirun says what happened"


def test_a_stopped_mpirun_is_resumed(runs: Path, uninterrupted: str) -> None:
    """SIGTERM to mpirun at step 2; it takes 3 s to pass that on."""
    env = variables([fail_at(1, 2, "stop launcher")])
    train = ["train", TASK, *FLAGS, "--name", "x", "--checkpoint-every", "1000"]  # so that only the stop writes one
    done = run([*MPIRUN, *_GRACE, *PACELINE, *train], env=env, timeout_s=60)
    assert done.returncode == 1, "mpirun's own code when it gets a signal"
    assert done.stderr.count("stopped by SIGTERM after step") == 1, done.stderr  # only rank 0 prints
    done = run([*MPIRUN[:-1], "3", *PACELINE, *train, "--resume"], env=variables(), timeout_s=60)
    assert done.returncode == 0, done.stderr
    check_survived(runs / "x", uninterrupted, [3])
