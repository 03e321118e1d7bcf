"""`paceline data`: what it prints and the exit codes it gives."""

import sys
from pathlib import Path

import pytest

from paceline.data import fashion_mnist, verb
from paceline.data.fashion_mnist import Verdict
from paceline.errors import DataError, UsageError


@pytest.fixture
def nowhere(tmp_path, monkeypatch) -> Path:
    """The full set is not on this machine."""
    monkeypatch.setattr(fashion_mnist, "_SYSTEM_FOLDER", tmp_path / "system")
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path / "cache"))
    return tmp_path


def pretend_here(folder: Path) -> Path:
    folder.mkdir()
    for file in fashion_mnist.SOURCES["fashion-mnist"].sha256:
        (folder / f"{file}.gz").touch()
    return folder


def test_list_says_how_to_get_missing_data(nowhere, capsys):
    assert verb.list_data() == 0
    full, mini = capsys.readouterr().out.splitlines()
    assert full.startswith("fashion-mnist ")
    assert "60,000 + 10,000" in full
    assert "not found: " in full
    assert "paceline data fetch fashion-mnist" in full
    assert mini.split(maxsplit=1)[0] == "fashion-mnist-mini"
    assert "6,000 + 1,000" in mini
    assert "ships with paceline" in mini


def test_list_says_where_it_is(nowhere, capsys):
    given = pretend_here(nowhere / "given")
    assert verb.list_data(given) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(str(given))


def test_fetch_of_mini_has_nothing_to_do(nowhere, capsys):
    assert verb.fetch("fashion-mnist-mini") == 0
    assert "nothing to fetch" in capsys.readouterr().out


def test_fetch_prints_quarters_when_piped(nowhere, capsys, monkeypatch):
    monkeypatch.setattr(fashion_mnist, "fetch_fashion_mnist", pretend_fetch)
    assert verb.fetch("fashion-mnist", nowhere) == 0
    assert capsys.readouterr().out.splitlines() == [
        "a.gz: 0.2 of 10.0 MB",
        "a.gz: 2.6 of 10.0 MB",
        "a.gz: 5.0 of 10.0 MB",
        "a.gz: 7.6 of 10.0 MB",
        "a.gz: 10.0 of 10.0 MB",
        "b.gz: 1.0 MB",
        f"fashion-mnist is in {nowhere}: all files are correct",
    ]


def test_fetch_draws_bars_on_a_terminal(nowhere, capsys, monkeypatch):
    monkeypatch.setattr(fashion_mnist, "fetch_fashion_mnist", pretend_fetch)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    assert verb.fetch("fashion-mnist", nowhere) == 0
    *bars, last = capsys.readouterr().out.splitlines()
    text = "\n".join(bars)
    assert "a.gz" in text
    assert "10.0/10.0 MB" in text
    assert "1.0/? MB" in text, "the size of b.gz is not known"
    assert "a.gz: " not in text, "no plain lines between the bars"
    assert last.endswith(f"fashion-mnist is in {nowhere}: all files are correct")


def pretend_fetch(data_dir, progress):
    for done in range(200_000, 10_000_001, 200_000):
        progress("a.gz", done, 10_000_000)
        progress("a.gz", done, 10_000_000)
    progress("b.gz", 1_000_000, None)
    progress("b.gz", 1_040_000, None)
    return data_dir


def test_fetch_that_fails_prints_one_line_and_gives_1(nowhere, capsys, monkeypatch):
    def fail(data_dir, progress):
        raise DataError("the network is down")

    monkeypatch.setattr(fashion_mnist, "fetch_fashion_mnist", fail)
    assert verb.fetch("fashion-mnist") == 1
    assert capsys.readouterr().out == "fashion-mnist was not fetched: the network is down\n"


def test_fetch_of_correct_data_has_nothing_to_do(nowhere, capsys, monkeypatch):
    system = pretend_here(nowhere / "system")
    monkeypatch.setattr(fashion_mnist, "verify", lambda folder, name: [Verdict("a.gz", True, "")])
    assert verb.fetch("fashion-mnist") == 0
    assert capsys.readouterr().out == f"fashion-mnist is already in {system}: all files are correct\n"


def test_fetch_replaces_damaged_data(nowhere, monkeypatch):
    pretend_here(nowhere / "system")
    asked = []
    monkeypatch.setattr(fashion_mnist, "fetch_fashion_mnist", lambda data_dir, progress: asked.append(data_dir) or nowhere)
    assert verb.fetch("fashion-mnist") == 0
    assert asked == [None]


def test_verify_of_mini_is_right(nowhere, capsys):
    assert verb.verify("fashion-mnist-mini", nowhere) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert all(line.startswith("  ok ") for line in lines[1:])


def test_verify_of_damaged_files_gives_1(nowhere, capsys):
    given = pretend_here(nowhere / "given")
    assert verb.verify("fashion-mnist", given) == 1
    assert capsys.readouterr().out.count("  BAD ") == 4


def test_verify_of_an_empty_given_folder_does_not_look_elsewhere(nowhere, capsys):
    pretend_here(nowhere / "system")
    assert verb.verify("fashion-mnist", nowhere / "given") == 1
    out = capsys.readouterr().out
    assert out.count("missing") == 4
    assert str(nowhere / "given") in out


def test_verify_of_missing_data_gives_1(nowhere, capsys):
    assert verb.verify("fashion-mnist") == 1
    assert "not found" in capsys.readouterr().out


@pytest.mark.parametrize("act", [verb.fetch, verb.verify])
def test_an_unknown_name_is_the_users_mistake(nowhere, act):
    with pytest.raises(UsageError, match="did you mean"):
        act("fashion-mnist-min", nowhere)
