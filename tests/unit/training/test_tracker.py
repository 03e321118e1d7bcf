"""The tracker: what a library gets, and that nothing it does breaks a run. The real libraries are in tests/system."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.training import blobs
from paceline import Hooks, Moment
from paceline.errors import UsageError
from paceline.files import read_json
from paceline.records import read_metrics
from paceline.training import tracker
from paceline.training.run import train
from paceline.training.tracker import About
from paceline.training.tracker_libraries import _has_wandb_account


class Memory:
    """A library that keeps everything."""

    def __init__(self) -> None:
        self.tells, self.fails_at, self.hangs = True, -1, False  # tells: it knows which steps it has
        self.opened: list[About] = []
        self.values: list[tuple[int, dict[str, float]]] = []
        self.summaries: list[Mapping[str, Any]] = []
        self.released = threading.Event()

    def __call__(self, about: About) -> "Memory":
        self.opened.append(about)
        self.remembered = {"id": about.known.get("id", "7")}
        return self

    def last_step(self, name: str) -> int | None:
        return max((step for step, values in self.values if name in values), default=-1) if self.tells else None

    def log(self, values: Mapping[str, float], step: int) -> None:
        if step == self.fails_at:
            raise ValueError("the server\nis gone")
        if self.hangs:
            self.released.wait()
        self.values.append((step, dict(values)))

    def finish(self, summary: Mapping[str, Any]) -> None:
        self.summaries.append(summary)

    def steps(self, name: str) -> list[int]:
        """The steps for which a value was logged."""
        return [step for step, values in self.values if name in values]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    library = Memory()
    monkeypatch.setattr("paceline.training.tracker_libraries.LIBRARIES", {"wandb": library})
    monkeypatch.setattr("paceline.training.run.check_tracker", lambda name: None)
    return library


LONG: dict[str, Any] = {"tracker": "wandb", "epochs": 3, "log_every": 2, "checkpoint_every": "6", "name": "x"}


def failing(steps: list[int]) -> Hooks:
    """A hook that ends the run at these steps, once each."""

    def fail(moment: Moment) -> None:
        if moment.step in steps:
            steps.remove(moment.step)
            raise InterruptedError("for the test")

    return Hooks(on_step=fail)


def test_what_a_library_gets(runs: Path, memory: Memory) -> None:
    result = train(blobs(), **{**LONG, "epochs": 2}, save_best=True)
    (about,) = memory.opened
    assert (about.project, about.name, about.folder, about.resumed_at) == ("blobs", "x", Path("runs/x"), None)
    assert about.params["log_every"] == 2
    assert about.params["contract.total_steps"] == 18
    assert "task: blobs" in about.contract
    assert memory.steps("validation/accuracy") == memory.steps("train/epoch_loss") == memory.steps("samples_per_s") == [9, 18]
    assert memory.steps("step/compute_s") == [9, 18]
    rows = {(row["kind"], row["step"]): row for row in read_metrics(runs / "x") if "step" in row}
    assert memory.steps("train/loss") == [step for kind, step in rows if kind == "step"]
    found = {name: value for step, values in memory.values for name, value in values.items() if step == 18}
    assert found["train/lr"] == rows["step", 18]["lr"]
    assert found["validation/loss"] == result.metrics["loss"]
    assert found["train/epoch_accuracy"] == rows["epoch", 18]["train_accuracy"]
    (summary,) = memory.summaries
    assert (summary["status"], summary["final/loss"], summary["best/epoch"]) == ("done", result.metrics["loss"], 2)
    assert read_json(runs / "x" / "tracker.json") == {"wandb": {"id": "7"}}


@pytest.mark.parametrize("tells", [True, False])
def test_a_resumed_run_is_the_same_run_and_repeats_no_row(runs: Path, memory: Memory, tells: bool) -> None:
    """It fails after step 15 and after the validation at 18; checkpoints are from steps 12 and 18."""
    memory.tells = tells
    task = blobs(hooks=[failing([15]), Hooks(on_checkpoint=print)])
    with pytest.raises(InterruptedError):
        train(task, **LONG)
    train(task, resume="x")
    assert [about.known for about in memory.opened] == [{}, {"id": "7"}]
    assert memory.opened[1].resumed_at == 12
    assert memory.steps("train/loss") == [2, 4, 6, 8, 9, 11, 13, 15, 17, 18, 20, 22, 24, 26, 27]
    assert memory.steps("validation/loss") == [9, 18, 27]
    assert [summary["status"] for summary in memory.summaries] == ["failed", "done"]
    assert "final/loss" not in memory.summaries[0]


def test_a_row_that_was_lost_is_sent_again(runs: Path, memory: Memory) -> None:
    """A killed process may not have written its last rows: a library that knows its steps gets them again."""
    task = blobs(hooks=failing([15]))
    with pytest.raises(InterruptedError):
        train(task, **LONG)
    memory.values[:] = [(step, values) for step, values in memory.values if step < 9]  # the checkpoint is from step 12
    train(task, resume="x")
    assert memory.steps("train/loss") == [2, 4, 6, 8, 9, 11, 13, 15, 17, 18, 20, 22, 24, 26, 27]
    assert memory.steps("validation/loss") == [9, 18, 27]


def test_a_tracker_that_comes_later_gets_the_rows_from_before(runs: Path, memory: Memory) -> None:
    task = blobs(hooks=failing([15]))
    with pytest.raises(InterruptedError):
        train(task, **{**LONG, "tracker": "none"})
    train(task, resume="x", tracker="wandb")
    assert memory.steps("train/loss") == [2, 4, 6, 8, 9, 11, 13, 15, 17, 18, 20, 22, 24, 26, 27]
    assert memory.steps("validation/loss") == [9, 18, 27]


def test_a_library_that_fails_costs_one_line(runs: Path, memory: Memory, capsys: pytest.CaptureFixture[str]) -> None:
    memory.fails_at = 8
    assert train(blobs(), **LONG).status == "done"
    said = "the tracker failed and is left out from here on: ValueError: the server is gone"
    assert capsys.readouterr().out.count(said) == 1
    assert memory.steps("train/loss") == [2, 4, 6]
    assert memory.summaries == []


def test_a_library_that_hangs_does_not_hold_up_a_run(
    runs: Path, memory: Memory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory.hangs = True
    monkeypatch.setattr(tracker, "_END_S", 0.01)
    assert train(blobs(), **LONG).status == "done"
    assert "the tracker is not done after 0 s" in capsys.readouterr().out
    memory.released.set()


def test_a_missing_library_is_one_line(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, title in (("wandb", "W&B"), ("mlflow", "MLflow"), ("trackio", "trackio"), ("tensorboard", "TensorBoard")):
        said = rf"^--tracker {name}: {title} is not installed; pip install 'paceline\[trackers\]'$"
        with pytest.raises(UsageError, match=said):
            train(blobs(), tracker=name)
    assert not runs.exists()
    with pytest.raises(UsageError, match="unknown value for --tracker 'comet'"):
        train(blobs(), tracker="comet")


def test_an_account_is_found_where_wandb_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    assert not _has_wandb_account()
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    assert _has_wandb_account()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.com")
    assert not _has_wandb_account()
    (tmp_path / ".netrc").write_text("machine\n")
    assert not _has_wandb_account()
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert _has_wandb_account()
