"""`paceline.train` from a program of one's own: it leaves the program as it found it."""

import fcntl
import os
import signal
import stat
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

import paceline
from harness.training import blobs
from paceline.config import make_config
from paceline.data.loaders import Loader, Resident
from paceline.dist.launch import Outcome
from paceline.dist.messages import Failure
from paceline.errors import Stopped, UsageError
from paceline.records import read_metrics, read_result
from paceline.report.page import report_verb
from paceline.toml import read_recipe
from paceline.training import run
from paceline.training.run import train

TASK = """
from paceline import Arrays, Task
import torch
from torch import nn

def task():
    data = lambda: Arrays((torch.ones(40, 1), torch.ones(40, 1)))
    return Task(name="t", model=lambda: nn.Linear(1, 1), train=data, validation=data,
                objective=lambda model, batch: {"loss": (model(batch[0]) - batch[1]).square().squeeze(1)},
                defaults={"schedule": "cosine", "warmup_steps": 2, "global_batch": 10, "base_lr": 0.01})
"""


def test_flags_are_judged_with_the_tasks_own_defaults(runs: Path) -> None:
    """The task's schedule is cosine with warm-up steps: flags may change either half, or ask for one-cycle instead."""
    Path("task.py").write_text(TASK)
    for options in ({"warmup_steps": 3}, {"warmup_epochs": 0.5}, {"schedule": "one-cycle"}, {"schedule": "linear"}):
        assert train("task.py", epochs=1, **options).status == "done"
    with pytest.raises(UsageError, match="both given"):
        train("task.py", warmup_steps=3, warmup_epochs=0.5)


def test_a_task_object_is_checked_before_workers_start() -> None:
    with pytest.raises(UsageError, match="--set width: the Task blobs is already made"):
        train(blobs(), workers=2, set={"width": 3})
    with pytest.raises(UsageError, match="task blobs has its own model"):
        train(blobs(), workers=2, model="mlp")
    with pytest.raises(UsageError, match="unknown task '<blobs>'"):
        train("<blobs>", workers=2)


def test_a_result_is_one_short_line_and_knows_its_task(runs: Path) -> None:
    task = blobs()
    result = train(task, epochs=1, name="x")
    assert result._task is task  # type: ignore[attr-defined]
    short = f"metrics={{'loss': {result.metrics['loss']:.4g}, 'accuracy': {result.metrics['accuracy']:.4g}}}, record='runs/x')"
    assert repr(result) == f"Result(status='done', epochs=1, steps={result.steps}, {short}"
    failed = replace(result, status="failed", why="ValueError: here", metrics={})
    assert repr(failed).startswith("Result(status='failed', why='ValueError: here', epochs=1, ")


def test_any_thread_can_train_but_only_one_at_a_time(runs: Path) -> None:
    """Only the main thread can have signal handlers."""
    tried: list[Exception] = []

    def objective(model: Any, batch: Any) -> Any:
        if not tried:
            try:
                train(blobs(), workers=2)
            except UsageError as error:
                tried.append(error)
        return blobs().objective(model, batch)

    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(train, blobs(objective=objective), epochs=1, reduce="exact").result()
    assert result.model_sha256 == train(blobs(), epochs=1, reduce="exact").model_sha256
    assert "another run is in progress in this process" in str(tried[0])


def test_a_second_interrupt_lets_the_loaders_close(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes when the run has already stopped: the first error stays the only one."""
    closed: list[Loader] = []

    def close(loader: Loader) -> None:
        signal.raise_signal(signal.SIGINT)
        closed.append(loader)

    monkeypatch.setattr(Resident, "close", close)
    calls: list[int] = []

    def interrupted(model: Any, batch: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return blobs().objective(model, batch)

    with pytest.raises(Stopped, match="stopped by Ctrl-C after step"):
        train(blobs(objective=interrupted))
    assert len(closed) == 2


def test_what_resume_finds_is_said(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("task.py").write_text(TASK)
    first = train("task.py", epochs=1, resume="auto", name="x")
    assert "nothing to resume in runs: starting a new run" in capsys.readouterr().out
    again = train("./task.py", resume="auto", name="x")
    assert "runs/x is already done" in capsys.readouterr().out
    assert again == first
    with pytest.raises(UsageError, match="--resume y: no record of that name"):
        train("task.py", resume="y")
    (runs / "x" / "result.json").write_text('{"status": "diverged"}')
    with pytest.raises(UsageError, match="diverged and would diverge again"):
        train("task.py", resume="x")


def test_a_whole_config_goes_on_with_its_record(runs: Path) -> None:
    """Its precision says auto; the record says what that came to."""
    config = make_config({"epochs": 1, "model": "mlp:width=8", "train_samples": 200, "name": "a", "checkpoint_every": "2"})
    paceline.train("fashion-mnist-mini", config)
    (runs / "a" / "result.json").unlink()
    again = paceline.train("fashion-mnist-mini", replace(config, resume="a", name=""))
    assert again.status == "done"
    assert again.record == "runs/a"


def test_a_done_record_without_its_model_makes_it_again(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("task.py").write_text(TASK)
    first = train("task.py", epochs=2, name="x", checkpoint_every="3")
    model = runs / "x" / "model.safetensors"
    weights = model.read_bytes()
    model.unlink()
    again = train("task.py", resume="x")
    assert "its model.safetensors is missing: continuing from its last checkpoint" in capsys.readouterr().out
    assert again.model_sha256 == first.model_sha256
    assert model.read_bytes() == weights
    model.unlink()
    for path in (runs / "x" / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(UsageError, match=r"no checkpoint to make it from: .* --recipe runs/x/config.toml"):
        train("task.py", resume="x")


@pytest.mark.parametrize("content", [b"[]", b"7", b"\xff", b"{", b'{"status": []}'])
def test_a_damaged_result_is_said_and_costs_nothing(runs: Path, capsys: pytest.CaptureFixture[str], content: bytes) -> None:
    Path("task.py").write_text(TASK)
    first = train("task.py", epochs=1, name="x", checkpoint_every="3")
    (runs / "x" / "result.json").write_bytes(content)
    again = train("task.py", resume="x")
    said = capsys.readouterr().out
    assert again.model_sha256 == first.model_sha256
    assert ("has no readable result.json" in said) == (b"status" not in content)
    (runs / "x" / "result.json").write_text('{"status": "done", "later": 1}')
    assert train("task.py", resume="x").status == "done"


def test_damaged_rows_are_said_and_cost_nothing(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("task.py").write_text(TASK)
    first = train("task.py", epochs=1, name="x", checkpoint_every="3")
    metrics = runs / "x" / "metrics.jsonl"
    metrics.write_bytes(b"\xff\n[1]\n" + metrics.read_bytes())
    (runs / "x" / "result.json").unlink()
    assert train("task.py", resume="x").model_sha256 == first.model_sha256
    assert "note: 2 lines of runs/x/metrics.jsonl cannot be read and are left out" in capsys.readouterr().out


@pytest.mark.parametrize("resume", ["x", "runs/x", "auto"])
def test_a_record_whose_rows_are_gone_goes_on_from_its_checkpoints(runs: Path, capsys: Any, resume: str) -> None:
    Path("task.py").write_text(TASK)
    first = train("task.py", epochs=3, name="x", checkpoint_every="3")
    for name in ("metrics.jsonl", "result.json"):
        (runs / "x" / name).unlink()
    (runs / "x" / "course.csv").write_text("time,val_accuracy\n1.0,0.5\n")
    again = train("task.py", resume=resume)
    note = "note: runs/x/metrics.jsonl is missing: the rows before this resume are lost"
    assert capsys.readouterr().out.count(note) == 1
    assert (again.record, again.model_sha256) == ("runs/x", first.model_sha256)
    assert [row["kind"] for row in read_metrics(runs / "x")][:2] == ["resume", "note"]
    assert (runs / "x" / "course.csv").read_text() == "time,val_accuracy\n1.0,0.5\n", "nothing can make its lines again"


@pytest.mark.parametrize("content", [b"epochs = = 3", b"\xff", b"epochs = 3\nglobal_ba"])
def test_a_damaged_config_is_said_once_and_written_again(runs: Path, capsys: Any, content: bytes) -> None:
    Path("task.py").write_text(TASK)
    first = train("task.py", epochs=3, name="x", checkpoint_every="3")
    (runs / "x" / "config.toml").write_bytes(content)
    (runs / "x" / "result.json").unlink()
    capsys.readouterr()
    with pytest.raises(UsageError, match=r"cannot resume: --epochs was 3, is 5\. A run can only become longer"):
        train("task.py", resume="x")
    note = "note: runs/x/config.toml is not valid TOML"
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith(note)]
    assert len(said) == 1
    assert said[0].endswith("; give the options that the run was started with")
    assert train("task.py", resume="x", epochs=3).model_sha256 == first.model_sha256
    assert read_recipe(str(runs / "x" / "config.toml"))["epochs"] == 3


def test_a_damaged_result_is_said_once(runs: Path, capsys: Any) -> None:
    Path("task.py").write_text(TASK)
    train("task.py", epochs=1, name="x", checkpoint_every="3")
    (runs / "x" / "result.json").write_text("{")
    train("task.py", resume="x")
    assert capsys.readouterr().out.count("has no readable result.json") == 1


def test_a_record_that_the_launcher_closes_has_the_failure_of_the_worker(tmp_path: Path) -> None:
    why, where, text = "worker 1 failed first: ValueError: bad", "my_task.py, line 1", "Traceback ...\nValueError: bad"
    failure = Failure(1, 0.0, 1, why, where=where, traceback=text)
    run._close_record(Outcome(exit_code=1, failure=failure, record=tmp_path))
    assert read_result(tmp_path) == {"status": "failed", "why": why, "where": where, "traceback": text}


def test_a_failed_worker_is_an_exception_with_the_users_line() -> None:
    failure = Failure(1, 0.0, 1, "worker 1 failed first: ValueError: bad", where="my_task.py, line 1\n    x", traceback="all")
    error = run.WorkerFailed(failure.explain(), 1)
    assert str(error) == "worker 1 failed first: ValueError: bad\n  my_task.py, line 1\n      x"
    assert error.explanation.traceback == "all"


def test_a_tracker_that_fails_after_the_record_is_finished_is_said(runs: Path, capsys: Any, monkeypatch: Any) -> None:
    def full(self: Any) -> None:
        close(self)
        raise OSError(28, "No space left on device")

    close = SummaryWriter.close
    monkeypatch.setattr(SummaryWriter, "close", full)
    assert train(blobs(), epochs=1, tracker="tensorboard", name="x").status == "done"
    said = "note: the tracker failed and is left out from here on: No space left on device\n"
    assert capsys.readouterr().out.endswith(said)


def test_a_record_in_use_is_named_before_a_new_run_starts(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("task.py").write_text(TASK)
    train("task.py", epochs=1, name="x")
    (runs / "x" / "result.json").unlink()
    with (runs / "x" / "metrics.jsonl").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        train("task.py", epochs=1, resume="auto")
    said = capsys.readouterr().out
    assert "note: runs/x is skipped: another run is writing to it\nnothing to resume in runs" in said


def test_every_file_of_a_record_has_the_permissions_of_the_umask(runs: Path) -> None:
    Path("task.py").write_text(TASK)
    before = os.umask(0o027)
    try:
        train("task.py", epochs=1, name="x", checkpoint_every="3", profile=True)
        report_verb(["x"], out="", runs_dir="runs")
    finally:
        os.umask(before)
    found = {path.relative_to(runs): stat.S_IMODE(path.stat().st_mode) for path in (runs / "x").rglob("*")}
    assert {path.name for path in found} >= {"model.safetensors", "report.html", "timeline.json", "checkpoints", "result.json"}
    assert {path: mode for path, mode in found.items() if mode != (0o750 if (runs / path).is_dir() else 0o640)} == {}


def test_a_second_argument_that_is_not_a_config_is_one_line() -> None:
    with pytest.raises(UsageError, match="the second argument is 2, not a Config: give options by name"):
        paceline.train(blobs(), 2)  # type: ignore[arg-type]
