"""Observers: what the printer prints to a pipe and to a terminal, and what recorder and tracker leave behind."""

import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model
from torch import nn

from paceline import models
from paceline.config import Config, make_config
from paceline.contract import Contract
from paceline.errors import RecordError
from paceline.records import Record, read_metrics, read_result
from paceline.toml import read_recipe
from paceline.training.observers import Printer, Recorder, Result
from paceline.training.progress import left_words

CONTRACT = Contract(
    unit="images",
    task="mine",
    model="cnn",
    parameters=10,
    data="noise [with brackets]",
    train_samples=100,
    validation_samples=10,
    workers=2,
    virtual_workers=2,
    parts="one per worker",
    reduce="fast",
    nodes=1,
    launcher="started here",
    devices="2 CPU workers",
    backend="gloo",
    precision="fp32",
    reference_batch=10,
    base_lr=0.1,
    global_batch=20,
    part_batch=10,
    accumulate=1,
    k=2.0,
    lr_rule="linear",
    peak_lr=0.2,
    optimizer="sgd",
    schedule="constant",
    warmup="none",
    steps_per_epoch=5,
    epochs=2,
    total_steps=10,
    seed=0,
    loader="streamed",
    record="runs/x",
)
STEP = {"step": 7, "epoch": 2, "lr": 0.2, "time_s": 3.5, "loss": 1.25, "accuracy": 0.5}
EPOCH = {
    "epoch": 2,
    "step": 10,
    "time_s": 12.3456,
    "epoch_time_s": 6.1234,
    "samples": 100,
    "samples_per_s": 1234.56,
    "val_loss": 0.43219,
    "val_accuracy": 0.87654,
}
RESULT = Result(
    status="done",
    epochs=2,
    steps=10,
    train_time_s=12.3,
    metrics={"loss": 0.4, "accuracy": 0.8},
    model_sha256="ab" * 32,
    record="runs/x",
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    made = Record(str(tmp_path / "runs"), "x")
    yield made
    made._metrics.close()
    made._csv.close()


def tell(observer, result: Result = RESULT, model: nn.Module | None = None) -> None:
    observer.start(CONTRACT)
    observer.step(STEP)
    observer.epoch(EPOCH)
    observer.end(result, model)


def test_piped_the_printer_says_plain_lines(capsys):
    tell(Printer("images", False))
    lines = capsys.readouterr().out.splitlines()
    assert not any("\x1b" in line or "\r" in line for line in lines)
    contract, (epoch, done, model) = lines[:-3], lines[-3:]
    assert [tuple(line.strip().split("  ", 1)) for line in contract] == CONTRACT.lines()
    assert epoch == (
        "Epoch = 2, Cumulative Time = 12.346, Epoch Time = 6.123, Images/sec = 1234.6,"
        " Validation Loss = 0.4322, Validation Accuracy = 0.8765"
    )
    assert done == "done: loss 0.4000, accuracy 0.8000 after 2 epochs, 12.3 s of training"
    assert model == "model abababababababab, all 2 workers agree; record in runs/x"


def test_the_epochs_line_has_the_courses_six_fields(capsys):
    Printer("images", False).epoch(EPOCH)
    fields = [field.split(" = ") for field in capsys.readouterr().out.strip().split(", ")]
    names = ["Epoch", "Cumulative Time", "Epoch Time", "Images/sec", "Validation Loss", "Validation Accuracy"]
    assert [name for name, _ in fields] == names
    assert all(re.fullmatch(r"[0-9.]+", value) for _, value in fields)


def test_the_training_loss_comes_before_the_validation_loss(capsys):
    Printer("images", False).epoch({**EPOCH, "train_loss": 0.51239, "train_accuracy": 0.5})
    assert "Images/sec = 1234.6, Training Loss = 0.5124, Validation Loss = 0.4322" in capsys.readouterr().out
    Printer("images", False, course=True).epoch({**EPOCH, "train_loss": 0.51239})
    assert "Training" not in capsys.readouterr().out, "the course's line has six fields"


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (80, "epoch 2 [========            ] 2/5  loss 1.2500  about 1:02:05 left"),
        (64, "epoch 2 2/5  loss 1.2500  about 1:02:05 left"),
        (30, "epoch 2 2/5  loss 1.2500"),
        (20, "epoch 2 2/5"),
        (8, "epoch 2"),
    ],
)
def test_a_progress_line_never_wraps(monkeypatch, columns, shown):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    printer = Printer("images", True)
    monkeypatch.setenv("COLUMNS", "80")
    printer.start(CONTRACT)
    before = len(terminal.getvalue())
    monkeypatch.setenv("COLUMNS", str(columns))
    printer.step({**STEP, "time_s": 3725 * 7 / 3})
    assert terminal.getvalue()[before:] == f"\r{shown}\x1b[K"


def test_long_times_are_hours_minutes_and_seconds():
    assert [left_words(s) for s in (0.4, 99.4, 100, 3599.6, 90_061)] == ["0 s", "99 s", "0:01:40", "1:00:00", "25:01:01"]


def test_a_long_validation_shows_progress(monkeypatch, capsys):
    now = [50.0]
    monkeypatch.setattr("paceline.training.observers.time.monotonic", lambda: now[0])
    printer = Printer("images", False)
    for done in range(1, 8):
        printer.validating(3, done, 7)
        now[0] += 11
    assert capsys.readouterr().out == "epoch 3: validation, 4 of 7 batches\nepoch 3: validation, 7 of 7 batches\n"
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    printer = Printer("images", True)
    for done in range(1, 5):
        printer.validating(3, done, 4)
        now[0] += 0.3
    assert terminal.getvalue() == "\repoch 3 validation [===============     ] 3/4\x1b[K"


def test_other_units_and_metrics_have_their_names(capsys):
    Printer("sentences", False).epoch({**EPOCH, "val_top_5": 0.5})
    out = capsys.readouterr().out
    assert "Sentences/sec = 1234.6" in out
    assert "Validation Top 5 = 0.5000" in out


@pytest.mark.parametrize("status", ["failed", "diverged", "interrupted"])
def test_a_bad_end_says_where_the_record_is(capsys, status):
    Printer("images", False).end(Result(status=status, steps=4, metrics={}, record="runs/x"), None)
    assert capsys.readouterr().out == f"{status} after 4 steps; the record so far is in runs/x\n"


def test_a_terminal_gets_a_table_and_progress(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    printer = Printer("images", True)
    printer.start(CONTRACT)
    table = terminal.getvalue()
    assert "contract" in table
    assert "noise [with brackets]" in table, "rich took the text for markup"
    printer.step(STEP)
    progress = terminal.getvalue()[len(table) :]
    assert progress.startswith("\repoch 2 [========            ] 2/5  loss 1.2500  about 2 s left")
    assert "\n" not in progress
    printer.step({**STEP, "step": 10})
    assert "[====================] 5/5" in terminal.getvalue()
    printer.epoch(EPOCH)
    last = terminal.getvalue().splitlines()[-1]
    assert last.split("\r")[-1].startswith("Epoch = 2, ") or last.startswith("Epoch = 2, ")
    assert last.endswith("\x1b[K"), "what is left of the progress line must go"


def test_the_record_is_complete(record):
    torch.manual_seed(0)
    config = Config(epochs=2, base_lr=0.1)
    model = models.build("cnn", in_channels=1, image_size=8, classes=3)
    tell(Recorder(record, config, "mine"), model=model)
    names = {path.name for path in record.path.iterdir()}
    assert names == {"config.toml", "environment.json", "metrics.jsonl", "course.csv", "model.safetensors", "result.json"}
    recipe = make_config(read_recipe(str(record.path / "config.toml")))
    resolved = {"workers": 2, "virtual_workers": 2, "global_batch": CONTRACT.global_batch}
    assert recipe == replace(config, **resolved)
    environment = json.loads((record.path / "environment.json").read_text())
    assert environment["contract"] == json.loads(json.dumps(CONTRACT.as_dict()))
    assert environment["versions"]["torch"]
    rows = [json.loads(line) for line in (record.path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"kind": "step", **STEP}, {"kind": "epoch", **EPOCH}]
    assert (record.path / "course.csv").read_text() == "time,val_accuracy\n12.346,0.8765\n"
    assert Result(**read_result(record.path)) == RESULT


def test_the_model_loads_into_the_bare_model_without_pickle(record, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("torch.load")

    monkeypatch.setattr(torch, "load", refuse)
    torch.manual_seed(0)
    model = models.build("resnet:depth=8", in_channels=1, image_size=8, classes=3)
    Recorder(record, Config(), "mine").end(RESULT, model)
    other = models.build("resnet:depth=8", in_channels=1, image_size=8, classes=3)
    other.load_state_dict(load_file(record.path / "model.safetensors"), strict=True)
    ours, theirs = model.state_dict(), other.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_bad_end_keeps_no_model(record):
    tell(Recorder(record, Config(), "mine"), Result(status="diverged", metrics={}), None)
    assert not (record.path / "model.safetensors").exists()
    assert read_result(record.path)["status"] == "diverged"


def test_a_task_without_accuracy_has_no_course_row(record):
    Recorder(record, Config(), "mine").epoch({name: value for name, value in EPOCH.items() if name != "val_accuracy"})
    assert (record.path / "course.csv").read_text() == "time,val_accuracy\n"


class Views(nn.Module):
    """Weights that are tied, a buffer within another, and two buffers that overlap, of which neither is all of its memory."""

    def __init__(self, overlap: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight
        memory, other = torch.arange(6.0), torch.arange(9.0)
        self.register_buffer("whole", memory)
        self.register_buffer("section", memory[:3])
        if overlap:
            self.register_buffer("left", other[:5])
            self.register_buffer("right", other[3:8])


def test_tied_weights_and_views_are_saved_and_loaded_by_safetensors(record):
    model, other = Views(overlap=False), Views(overlap=False)
    Recorder(record, Config(), "mine").end(RESULT, model)
    load_model(other, record.path / "model.safetensors")
    ours, theirs = model.state_dict(), other.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_overlapping_views_are_saved_as_what_they_show(record):
    """safetensors itself refuses to save or load such a model."""
    model, other = Views(overlap=True), Views(overlap=True)
    Recorder(record, Config(), "mine").end(RESULT, model)
    assert read_result(record.path)["status"] == "done"
    other.load_state_dict(load_file(record.path / "model.safetensors"), strict=True)
    ours, theirs = model.state_dict(), other.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("why", ["SafetensorError: No space left on device (os error 28)", "LookupError: no such dtype"])
def test_a_model_that_cannot_be_written_is_one_line_and_no_success(record, monkeypatch, why):
    def full(*_, **__):
        kind, _, text = why.partition(": ")
        raise {"SafetensorError": SafetensorError, "LookupError": LookupError}[kind](f"Error while serializing:\n{text}")

    monkeypatch.setattr("safetensors.torch.save_model", full)
    text = re.escape(why.partition(": ")[2])
    with pytest.raises(RecordError, match=rf"model.safetensors: .*{text}.*choose another --runs-dir") as caught:
        Recorder(record, Config(), "mine").end(RESULT, nn.Linear(2, 2))
    assert "\n" not in str(caught.value)
    assert {path.name for path in record.path.iterdir()} == {"metrics.jsonl", "course.csv", "result.json"}
    assert read_result(record.path)["status"] == "failed"


def test_a_resumed_run_writes_what_a_killed_one_did_not(record):
    recorder = Recorder(record, Config(epochs=2), "mine")
    recorder.start(replace(CONTRACT, resumed_at=0))
    assert make_config(read_recipe(str(record.path / "config.toml"))).epochs == 2
    assert json.loads((record.path / "environment.json").read_text())["task"] == "mine"
    Recorder(record, Config(epochs=2, log_every=3), "mine").start(replace(CONTRACT, resumed_at=0))
    assert make_config(read_recipe(str(record.path / "config.toml"))).log_every == 10, "what was there stays"


def test_an_extended_run_rewrites_how_long_it_trains_and_keeps_what_it_said(record):
    Recorder(record, Config(epochs=2, log_every=3), "mine").start(CONTRACT)
    longer = replace(CONTRACT, resumed_at=4, epochs=3, total_steps=99, workers=1, extended="from 4 steps to 99")
    Recorder(record, Config(epochs=3, target_accuracy=0.9), "mine").start(longer)
    config = make_config(read_recipe(str(record.path / "config.toml")))
    assert (config.epochs, config.target_accuracy, config.log_every, config.workers) == (3, 0.9, 3, 2)
    contract = json.loads((record.path / "environment.json").read_text())["contract"]
    assert (contract["epochs"], contract["total_steps"]) == (3, 99)
    assert contract["workers"] == CONTRACT.workers, "the rest is as the run began"
    (row,) = [row for row in read_metrics(record.path) if row["kind"] == "resume"]
    lengths = {"epochs": 2, "max_steps": 0, "target_accuracy": 0.0, "patience": 1}
    assert row["was"] == {**lengths, "monitor": "", "mode": "auto", "stop_after": 0, "save_best": False}
    assert row["contract"]["extended"] == "from 4 steps to 99"


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"status": 3, "metrics": []},
        {"status": "done", "later": 1},
        {"status": "done", "steps": "7", "metrics": {"loss": 1.0}},
    ],
)
def test_any_result_can_be_read(found):
    read = Result.read(found)
    assert read.status == ("done" if found.get("status") == "done" else "failed")
    assert read.steps == 0
    assert read.metrics == ({"loss": 1.0} if found.get("metrics") else {})


class Gone(io.StringIO):
    """A stream whose reader went away, or that somebody closed."""

    def __init__(self, error: Exception, room: int) -> None:
        super().__init__()
        self._error, self._room, self.asked = error, room, 0

    def write(self, text: str) -> int:
        self.asked += 1
        if self.asked > self._room:
            raise self._error
        return super().write(text)

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("error", [BrokenPipeError(32, "x"), OSError(28, "x"), OSError(5, "x"), ValueError("closed file")])
def test_a_reader_that_goes_away_ends_no_run(monkeypatch, terminal, error):
    stream, notes = Gone(error, room=1), []
    monkeypatch.setattr(sys, "stdout", stream)
    tell(Printer("images", terminal, notes.append))
    assert stream.asked == 2, "after the first failure it is silent"
    assert len(notes) == 1
    assert "could not be printed" in notes[0]


@pytest.mark.parametrize("status", ["done", "failed"])
def test_a_stdout_that_breaks_after_the_record_is_finished_ends_no_run(record, monkeypatch, status):
    recorder = Recorder(record, Config(), "mine")
    printer = Printer("images", False, recorder.note)
    monkeypatch.setattr(sys, "stdout", Gone(BrokenPipeError(32, "x"), room=0))
    result = replace(RESULT, status=status)
    for observer in (recorder, printer):
        observer.end(result, None)
    assert read_result(record.path)["status"] == status


def test_a_note_that_cannot_be_written_ends_no_run(record, monkeypatch):
    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(record._metrics, "append", broken)
    monkeypatch.setattr(sys, "stdout", Gone(BrokenPipeError(32, "x"), room=0))
    Printer("images", False, Recorder(record, Config(), "mine").note).say("hello")


@pytest.mark.parametrize(("error", "said"), [(OSError(28, "No space left"), True), (BrokenPipeError(32, "x"), False)])
def test_stderr_says_why_stdout_is_silent_unless_its_reader_left(monkeypatch, capsys, error, said):
    monkeypatch.setattr(sys, "stdout", Gone(error, room=0))
    printer = Printer("images", False)
    printer.say("one")
    printer.say("two")
    line = "paceline: stdout cannot be written (No space left): training continues, and the record has everything\n"
    assert capsys.readouterr().err == (line if said else "")


def test_a_closed_stdout_ends_no_run(monkeypatch):
    notes = []
    monkeypatch.setattr(sys, "stdout", None)
    tell(Printer("images", False, notes.append))
    assert len(notes) == 1


def test_letters_that_a_stream_does_not_have_end_no_run(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    Printer("images", False, pytest.fail).say("größer")
    assert stream.buffer.getvalue() == b"note: gr\\xf6\\xdfer\n"
