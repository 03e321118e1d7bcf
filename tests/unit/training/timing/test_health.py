"""What is said of a run's health, and when."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from harness.training import ALONE, Watcher, blobs, train_in
from paceline.training.observers import Printer
from paceline.training.timing import health
from paceline.training.timing.health import describe, judge

PARTS = {"input": 0.0, "compute": 8.0, "communication": 0.5, "waiting": 0.5, "optimizer": 0.5, "other": 0.5}


def _row(slowest: int | None = None, lag_s: float = 0.0, core_wait: float = 0.0, **parts: float) -> dict[str, Any]:
    found = {**PARTS, **parts}
    about = {"samples_per_s": 8010.4, "step_s": sum(found.values()), "memory_bytes": 400 * 2**20}
    waits = {"core_wait": core_wait, "core_wait_rank": 1}
    return {**about, **waits, "components_s": found, "slowest": slowest, "lag_s": lag_s, "uneven": False}


@pytest.mark.parametrize(
    ("row", "troubles"),
    [
        (_row(), ()),
        (_row(input=2.6), ("input",)),
        (_row(input=2.4), ()),
        (_row(slowest=1, lag_s=2.1), ("straggler 1",)),
        (_row(slowest=1, lag_s=1.9), ()),
        (_row(communication=4.5), ("communication",)),
        (_row(core_wait=0.26), ("cores",)),
        (_row(core_wait=0.24), ()),
        (_row(communication=8.0, input=5.0), ("input", "communication")),
    ],
)
def test_verdicts(row: dict[str, Any], troubles: tuple[str, ...]) -> None:
    assert judge(row) == troubles


def test_the_line() -> None:
    parts = "80% compute, 5% communication, 5% waiting, 5% optimizer, 5% other"
    assert describe(_row(), "images") == f"8,010 images/s; a step of 10000.0 ms is {parts}; 400 MiB per worker"
    slow = _row(slowest=3, lag_s=2.0)
    assert "worker 3 is slowest, 2000.0 ms behind: look at its machine" in describe(slow, "images", ("straggler 3",))
    assert "it has more parts than others" in describe({**slow, "uneven": True}, "images", ("straggler 3",))
    assert "input-bound" in describe(_row(input=9.0), "images", ("input",))
    assert "communication-bound" in describe(_row(communication=9.0), "images", ("communication",))


@pytest.mark.parametrize(
    ("policy", "advice"),
    [("", "set OMP_WAIT_POLICY=passive before Python starts"), ("passive", "fewer --workers or a smaller OMP_NUM_THREADS")],
)
def test_shared_cores_are_named_with_the_fix(policy: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    if policy:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    line = describe(_row(core_wait=0.5), "images", ("cores",))
    assert "worker 1 waits for a core 50% of its time" in line
    assert advice in line


def test_the_first_look_is_told_and_then_what_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    printer, slow = Printer("images", terminal=False), _row(input=9.0)
    for row, told in [(_row(), 1), (slow, 0), (_row(), 0), (slow, 0), (slow, 1), (slow, 0), (_row(), 0), (_row(), 1)]:
        printer.health(row)
        assert capsys.readouterr().out.count("health: ") == told


def test_busy_cores_are_named_at_the_first_look(capsys: pytest.CaptureFixture[str]) -> None:
    Printer("images", terminal=False).health(_row(core_wait=0.5, input=9.0))
    line = capsys.readouterr().out
    assert "waits for a core 50% of its time" in line
    assert "input-bound" not in line


def test_one_look_is_no_proof(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer("images", terminal=False)
    for bound in (False, True):
        printer.health(_row(input=9.0))
        assert ("input-bound" in capsys.readouterr().out) is bound


def test_now_this_worker_and_now_that_one_is_no_straggler(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer("images", terminal=False)
    for rank, told in ((0, 1), (1, 0), (0, 0), (1, 0), (1, 1)):
        printer.health(_row(slowest=rank, lag_s=5.0))
        assert capsys.readouterr().out.count("health: ") == told


def test_looking_and_telling_are_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which each takes days."""
    inner, told, late = health.split_steps, Watcher.timeline, [0.0]

    def days() -> None:
        late[0] += 1e6

    monkeypatch.setattr(health, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + late[0]))
    monkeypatch.setattr(health, "split_steps", lambda *given: (days(), inner(*given))[1])
    monkeypatch.setattr(Watcher, "timeline", lambda self, timeline: (days(), told(self, timeline))[1])
    watcher = train_in(ALONE, blobs(), {"profile": True, "epochs": 3}).watcher
    assert len(watcher.timelines) == 1
    assert len(watcher.healths) >= 3
    assert late[0] >= 4e6
    assert all(row["step_s"] < 1e3 for row in watcher.healths)


def test_no_row_has_steps_of_two_batches() -> None:
    """The batch changes within the first epoch, and again within the second: a row ends there."""
    options = {"batch_schedule": "0:8 0.5:16 1.5:24", "virtual_workers": 2, "smallest_part": 1, "global_batch": 24}
    watcher = train_in(ALONE, blobs(), options).watcher
    begins = [row["step"] for row in watcher.phases]
    looked = [range(row["step"] - row["steps"], row["step"]) for row in watcher.healths]
    assert (len(begins), len(looked)) == (3, 4)
    assert [step for steps in looked for step in steps] == [row["step"] - 1 for row in watcher.steps], "each is in one row"
    assert not any(steps[0] < begin <= steps[-1] for begin in begins for steps in looked)
