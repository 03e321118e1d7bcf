"""The bf16 trial: a real child process, which may crash, hang or be slow; one per node."""

import json
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from harness.processes import run_workers
from harness.training import blobs, train_in
from paceline.config import make_config
from paceline.dist.world import World, world
from paceline.errors import UsageError
from paceline.training import precision
from paceline.training.precision import Trial, choose_precision, run_trial, try_bf16
from unit.training import test_precision as unit_tests
from unit.training.test_precision import SIGILL, choose

amx = unit_tests.amx


cache = unit_tests.cache


def says(bf16_s: float, fp32_s: float = 1.0) -> str:
    return f"print('noise'); print('{json.dumps({'bf16_s': bf16_s, 'fp32_s': fp32_s})}')"


def choose_as_worker(here: World, crashing: int, nodes: int) -> tuple[str, tuple[str, ...], int]:
    """What a worker is told, and how many trials it ran."""
    precision.lists_amx = lambda: True
    if nodes == 2:
        here = replace(here, nodes=2, node=here.rank, local_rank=0, local_size=1)
    trials = []

    def try_it(threads: int, limit_s: float) -> Trial:
        trials.append(threads)
        return Trial(crash="SIGILL") if here.rank == crashing else Trial(ratio=0.5)

    return *choose_precision(make_config({"precision": "auto"}), here, try_it), len(trials)


def test_one_worker_per_node_tries_and_all_agree() -> None:
    assert run_workers(choose_as_worker, 2, 1, 1) == [("bf16", (), 1), ("bf16", (), 0)]  # worker 1 is never asked
    note = "bf16 is off: a trial of bf16 on this CPU was killed by SIGILL (node 1); using fp32"
    assert run_workers(choose_as_worker, 2, 1, 2) == [("fp32", (note,), 1), ("fp32", (note,), 1)]


def refuse_as_worker(here: World) -> str:
    with pytest.raises(UsageError) as caught:
        choose("bf16", Trial(crash="SIGILL"), here)
    return str(caught.value)


def test_all_workers_are_refused_together() -> None:
    first, second = run_workers(refuse_as_worker, 2)
    assert first == second
    assert "was killed by SIGILL" in first


@pytest.mark.usefixtures("amx")
def test_a_run_on_a_cpu_that_crashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real child that executes an illegal instruction: auto trains in fp32 and says so, bf16 is refused."""
    monkeypatch.setattr(precision, "_CODE", SIGILL)
    with world() as here:
        trained = train_in(here, blobs(), {"max_steps": 2})
        with pytest.raises(UsageError, match="killed by SIGILL"):
            train_in(here, blobs(), {"max_steps": 2, "precision": "bf16"})
    assert trained.result.steps == 2
    assert trained.watcher.notes[0] == "bf16 is off: a trial of bf16 on this CPU was killed by SIGILL; using fp32"


def test_the_real_trial() -> None:
    """It runs here: works or crashes, whatever this CPU is, but always gives an answer."""
    found = try_bf16(1)
    assert not found.failure
    assert found.crash or (found.ratio is not None and found.ratio > 0)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (SIGILL, Trial(crash="SIGILL")),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", Trial(crash="SIGSEGV")),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", Trial(failure="was ended by SIGKILL")),
        ("raise RuntimeError('no kernel')", Trial(failure="failed: RuntimeError: no kernel")),
        ("import sys; sys.exit(3)", Trial(failure="failed: exit code 3")),
        (says(2.0), Trial(ratio=2.0)),
        (says(1.0, 0.0), Trial(failure="failed: exit code 0")),
        ("print('[1]')", Trial(failure="failed: exit code 0")),
    ],
)
def test_how_a_child_may_end(code: str, found: Trial) -> None:
    assert run_trial(1, code, 60) == found


def test_a_child_that_hangs_is_ended() -> None:
    """The suite's check for leaks sees that it is gone."""
    assert run_trial(1, "import time; time.sleep(1e6)", 0.5) == Trial(failure="did not finish in 0.5 s")


def test_no_python_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(precision.sys, "executable", str(tmp_path / "python"))
    assert run_trial(1, says(1.0), 60) == Trial(failure="could not start: No such file or directory")


def test_a_child_leaves_no_core_file_and_is_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("KEPT_FOR_THE_CHILD", "1")
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    code = """
import json, os, resource
ours = {"RANK", "WORLD_SIZE", "MASTER_PORT", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"} & os.environ.keys()
wrong = len(ours) + resource.getrlimit(resource.RLIMIT_CORE)[0] + ("KEPT_FOR_THE_CHILD" not in os.environ)
print(json.dumps({"bf16_s": 1 + wrong, "fp32_s": 1}))
"""
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    try:
        assert run_trial(1, code, 60) == Trial(ratio=1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
