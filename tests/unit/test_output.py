"""Tables of aligned text, and the line that says what a program is doing."""

import io
import sys

import pytest

from paceline import output
from paceline.output import Stages, make_table, plural, say


def test_a_table_aligns_words_left_and_numbers_right() -> None:
    lines = make_table(["arm", "loss"], [["small [red]", "0.1"], ["b", "10.25"]]).splitlines()
    assert lines == ["arm            loss", "-------------------", "small [red]     0.1", "b             10.25"]


def test_piped_tables_are_not_wrapped() -> None:
    assert "x" * 500 in make_table(["a"], [["x" * 500]])


def test_numbers_that_do_not_fit_get_a_table_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "30")
    table = make_table(["N", "images/s", "efficiency", "price"], [["1", "123,000", "100%", "1,000.00"]], left=0)
    assert table.splitlines() == [
        "N   images/s   efficiency",
        "-------------------------",
        "1    123,000         100%",
        "",
        "N      price",
        "------------",
        "1   1,000.00",
    ]


def test_a_table_fits_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, make_table(["a", "b"], [["word " * 20, "1"]]).splitlines())) <= 40


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What a reader sees: a carriage return and an erased line replace what was there."""
        return [line.split("\r")[-1].replace("\x1b[K", "") for line in self.getvalue().split("\n")]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("paceline.output.time.monotonic", lambda: now[0])
    return now


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    made = Stages()
    monkeypatch.setattr(output, "stages", made)
    return made


def test_on_a_terminal_each_stage_replaces_the_last(
    stages: Stages, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    stages.start(terminal=True)
    stages.enter("loading torch")
    assert screen.lines() == ["loading torch ..."]
    clock[0] += 4.6
    stages.enter("reading the data")
    assert screen.lines() == ["reading the data ... 5 s"]
    say("a note")
    stages.enter("building the model")
    stages.stop()
    assert screen.lines() == ["a note", ""], "neither the note nor the end leaves a stage behind"
    stages.enter("late")
    assert screen.lines() == ["a note", ""]


def test_a_stage_is_cut_to_the_terminal(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "10")
    stages.start(terminal=True)
    stages.enter("meeting the other workers")
    assert screen.lines() == ["meeting t"]


def test_what_is_handed_over_stays_until_something_is_printed(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    stages.start(terminal=True)
    stages.enter("starting 2 workers")
    stages.hand_over()
    assert screen.lines() == ["starting 2 workers ..."]
    stages.stop()
    assert screen.lines() == [""]


def test_piped_only_a_long_stage_is_said_and_only_once_it_is_over(
    stages: Stages, clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    stages.enter("not started")
    stages.start(terminal=False)
    stages.enter("reading the data")
    clock[0] += 2.5
    stages.enter("building the model")
    assert capsys.readouterr().out == "reading the data took 2.5 s\n"
    clock[0] += 1.9
    stages.stop()
    assert capsys.readouterr().out == ""


def test_a_count_of_one_is_singular() -> None:
    counts = [plural(1, "core"), plural(2, "core"), plural(1, "entry"), plural(2000, "entry"), plural(0, "step")]
    assert counts == ["1 core", "2 cores", "1 entry", "2,000 entries", "0 steps"]
