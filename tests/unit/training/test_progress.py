"""Progress in the terminal: steps, the time left, and the phases of a batch schedule."""

import io
import sys
from types import SimpleNamespace

import pytest

from paceline.records import Record, read_metrics
from paceline.training.observers import Printer, Recorder, Result
from paceline.training.progress import Pace, phase_words

# 100 samples, 2 epochs: 10 steps of 10, then 5 of 20.
GROWING = SimpleNamespace(
    **{
        "total_steps": 15,
        "optimizer": "sgd",
        "steps_per_epoch": 5,
        "epochs": 2,
        "train_samples": 100,
        "epoch_samples": 0,
        "workers": 1,
        "record": "runs/x",
    },
    phases=({"steps": 10, "global_batch": 10}, {"steps": 0, "global_batch": 15}, {"steps": 5, "global_batch": 20}),
    resumed_at=None,
    lines=lambda: [("task", "mine")],
)
STEP = {"step": 7, "epoch": 2, "lr": 0.2, "time_s": 3.5, "loss": 1.25}
EPOCH = {"epoch": 2, "step": 15, "time_s": 12.3, "epoch_time_s": 6.1, "samples": 100, "samples_per_s": 16.4}
FIRST = {
    **{"step": 0, "epoch": 0.0, "global_batch": 10, "virtual_workers": 1, "part_batch": 10},
    **{"lr_scale": 0.84, "total_steps": 15, "why": "schedule"},
}
SECOND = {**FIRST, "step": 10, "epoch": 1.0, "global_batch": 20, "virtual_workers": 2, "lr_scale": 1.0}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (FIRST, "epoch 0: global batch 10 (1 part), lr x0.84"),
        (SECOND, "epoch 1: global batch 20 (2 parts), lr x1"),
        ({**SECOND, "epoch": 0.5, "global_batch": 16384}, "epoch 0.5: global batch 16,384 (2 parts), lr x1"),
        ({**SECOND, "why": "noise scale 41"}, "epoch 1: global batch 20 (2 parts), lr x1 (noise scale 41)"),
    ],
)
def test_a_phase_is_one_line(row, said):
    assert phase_words(row) == said


def test_piped_the_line_of_a_phase_is_plain(capsys):
    Printer("images", False).phase(SECOND)
    assert capsys.readouterr().out == "epoch 1: global batch 20 (2 parts), lr x1\n"


def test_on_a_terminal_the_line_of_a_phase_replaces_the_progress(monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    printer = Printer("images", True)
    printer.start(GROWING)
    printer.phase(FIRST)
    before = len(terminal.getvalue())
    printer.step({**STEP, "step": 5, "epoch": 1, "time_s": 10.0})
    printer.phase(SECOND)
    shown = "\repoch 1, step [======              ] 5/15  loss 1.2500  about 30 s left\x1b[K"
    assert terminal.getvalue()[before:] == f"{shown}\repoch 1: global batch 20 (2 parts), lr x1\x1b[K\n"


def started(**changes) -> Pace:
    pace = Pace()
    pace.start(SimpleNamespace(**{**vars(GROWING), **changes}))
    return pace


def test_the_time_left_follows_from_the_samples():
    pace = started(phases=())
    assert pace.describe({**STEP, "step": 6, "epoch": 2, "time_s": 6.0}) == ("epoch 2", 1, 5, "9 s")
    pace = started()
    assert pace.describe({**STEP, "step": 5, "epoch": 1, "time_s": 10.0}) == ("epoch 1, step", 5, 15, "30 s")
    pace.phase(SECOND)  # known from the contract
    assert pace.describe({**STEP, "step": 12, "epoch": 2, "time_s": 14.0}) == ("epoch 2, step", 12, 15, "6 s")
    assert pace.describe({**STEP, "step": 15, "epoch": 2, "time_s": 20.0}) == ("epoch 2, step", 15, 15, "0 s")


def test_the_time_left_ends_with_the_runs_last_step():
    """`--max-steps 12`: the contract counts the steps of each phase up to there."""
    phases = ({"steps": 10, "global_batch": 10}, {"steps": 2, "global_batch": 20})
    pace = started(total_steps=12, phases=phases)
    assert pace.describe({**STEP, "step": 7, "epoch": 1, "time_s": 7.0}) == ("epoch 1, step", 7, 12, "7 s")
    assert pace.describe({**STEP, "step": 12, "epoch": 2, "time_s": 14.0}) == ("epoch 2, step", 12, 12, "0 s")


def test_a_step_has_at_most_all_samples():
    phases = ({"steps": 10, "global_batch": 10}, {"steps": 1, "global_batch": 1000})
    assert started(total_steps=11, phases=phases).describe({**STEP, "step": 10, "time_s": 10.0})[3] == "10 s"


def test_an_automatic_phase_changes_how_many_steps_there_are():
    pace = started(total_steps=20, phases=({"steps": 20, "global_batch": 10},))
    pace.phase({**FIRST, "total_steps": 20})
    assert pace.describe({**STEP, "epoch": 1})[1:3] == (7, 20)
    pace.phase({**SECOND, "step": 8, "total_steps": 14})
    assert pace.describe({**STEP, "step": 8, "epoch": 1, "time_s": 8.0})[1:] == (8, 14, "12 s")
    assert pace.describe({**STEP, "step": 16, "epoch": 2})[1:3] == (16, 16), "never more done than there are"


def test_a_run_that_ends_within_an_epoch_ends_after_steps(capsys):
    printer = Printer("images", False)
    printer.start(GROWING)
    printer.epoch(EPOCH)
    printer.end(Result(status="done", epochs=2, steps=15, train_time_s=12.3, metrics={}), None)
    assert "after 2 epochs, 12.3 s of training" in capsys.readouterr().out
    printer.epoch({**EPOCH, "step": 14, "samples": 80})
    printer.end(Result(status="done", epochs=2, steps=14, train_time_s=12.3, metrics={}), None)
    assert "after 14 steps, 12.3 s of training" in capsys.readouterr().out


def test_an_epoch_of_weighted_draws_is_whole():
    """40 draws per epoch of 100 samples."""
    pace = started(epoch_samples=40, phases=())
    pace.epoch({**EPOCH, "samples": 40})
    assert pace.whole
    pace.epoch({**EPOCH, "samples": 20})
    assert not pace.whole


def test_the_record_has_a_row_for_each_phase(tmp_path):
    record = Record(str(tmp_path / "runs"), "x")
    recorder = Recorder(record, None, "mine")
    recorder.phase(FIRST)
    recorder.step({**STEP, "step": 10, "global_batch": 10})
    recorder.phase(SECOND)
    record._metrics.close()
    record._csv.close()
    rows = read_metrics(record.path)
    assert [row for row in rows if row["kind"] == "phase"] == [{"kind": "phase", **FIRST}, {"kind": "phase", **SECOND}]
