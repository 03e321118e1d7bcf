"""Tables of aligned text."""

import io
import sys

import pytest

from paceline.output import make_table


def test_a_table_aligns_words_left_and_numbers_right() -> None:
    lines = make_table(["arm", "loss"], [["small [red]", "0.1"], ["b", "10.25"]]).splitlines()
    assert lines == ["arm            loss", "-------------------", "small [red]     0.1", "b             10.25"]


def test_piped_tables_are_not_wrapped() -> None:
    assert "x" * 500 in make_table(["a"], [["x" * 500]])


def test_a_table_fits_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, make_table(["a", "b"], [["word " * 20, "1"]]).splitlines())) <= 40
