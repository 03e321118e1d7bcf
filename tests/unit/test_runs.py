"""`paceline runs`: what it says of each record, and that nothing in a folder can break it."""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.boards import add_steps, begin_run, end_run, make_run
from harness.pages import make_scale, make_train
from paceline import cli
from paceline import runs as runs_verb
from paceline.runs import fold, read_runs


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def show(runs: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Runs the verb; returns the lines it prints."""

    def call(*argv: str) -> list[str]:
        assert cli.run(["runs", *argv]) == 0
        out, err = capsys.readouterr()
        assert not err
        return out.splitlines()

    return call


def make_study(folder: Path) -> Path:
    """A study of three runs, one of which failed."""
    for name, status in (("a-seed0", "done"), ("a-seed1", "done"), ("b-seed0", "failed")):
        make_run(folder, name, status=status)
    arms = {name: {"about": "", "options": {"epochs": 4}} for name in "ab"}
    about = {"name": folder.name, "source": "s.toml", "task": "fashion-mnist-mini", "arms": arms, "seeds": [0, 1], "about": ""}
    ended = {"contract": {}, "time_to_target_s": None}
    entries = [{"arm": "a", "seed": seed, "status": "done", "metrics": {"accuracy": 0.8}, **ended} for seed in (0, 1)]
    entries.append({"arm": "b", "seed": 0, "status": "failed", "metrics": {}, "why": "boom", **ended})
    results = {"study": {**about, "reference": "a", "margin": 0.005, "target_accuracy": None}, "metric": "accuracy"}
    (folder / "study.json").write_text(json.dumps({**results, "runs": entries}))
    return folder


def test_the_table_shows_the_monitored_metric(runs, show):
    path = make_train(runs / "first", accuracy=0.5)
    result = json.loads((path / "result.json").read_text())
    result |= {"best": {"metric": "f1\n", "value": 0.93215, "epoch": 2}, "metrics": {"accuracy": 0.5, "f1\n": 0.71}}
    (path / "result.json").write_text(json.dumps(result))
    assert "f1 0.9322 0.7100" in " ".join(show()[-1].split())


def test_the_table_shows_how_each_run_ended(runs, show):
    make_train(runs / "first", accuracy=0.5)
    late = {"when": "2026-11-16T08:00:00+00:00"}
    failed = begin_run(runs, "second", **late, virtual_workers=4, unit="images")
    add_steps(failed, 1, 20)
    end_run(failed, accuracy=0.7, status="failed", why="failed: ValueError: no such thing\nmore lines", epochs=2, steps=20)
    heads, _, first, second, *below = [re.split(r" {3,}", line) for line in show()]
    assert " ".join(" ".join(heads).split()) == "name status task workers epochs metric best last images/s when time"
    mini = "fashion-mnist-mini"
    assert first == ["first", "done", mini, "2", "3", "accuracy", "0.5000", "0.5000", "7,860", "2026-11-15 17:52", "3.0 s"]
    ended = ["2 (V = 4)", "2 of 4", "accuracy", "0.9524", "0.7000", "2,560", "2026-11-16 08:00", "4.0 s"]
    assert second == ["second", "failed", mini, *ended]
    assert below == [[""], ["second: ValueError: no such thing"]]


def test_the_newest_are_last_and_older_ones_are_counted(runs, show):
    for day in range(1, 26):
        make_run(runs, f"run-{25 - day:02}", when=f"2026-03-{day:02}T10:00:00+00:00")
    lines = show()
    assert [line.split()[0] for line in lines[2:22]] == [f"run-{number:02}" for number in range(19, -1, -1)]
    assert lines[22:] == ["", "the newest 20 of 25: `paceline runs --all` lists all"]
    assert len(show("--all")) == 27
    assert [line.split()[0] for line in show("-n", "2")[2:4]] == ["run-01", "run-00"]


def test_a_study_is_one_line(runs, show):
    make_study(runs / "study-s")
    make_run(runs, "alone")
    lines = show()
    assert [line.split()[:3] for line in lines[2:4]] == [
        ["alone", "done", "fashion-mnist-mini"],
        ["study-s/", "incomplete", "fashion-mnist-mini"],
    ]
    assert lines[5].startswith("study-s/: 3 of 4 runs: 2 done, 1 failed; best arm: a, accuracy 0.8")
    assert [line.split()[0] for line in show("--runs-dir", "runs/study-s")[2:5]] == ["a-seed0", "a-seed1", "b-seed0"]


def test_any_folder_of_records_is_folded(runs):
    make_run(runs / "mine", "x")
    make_run(runs / "mine", "y", status="diverged")
    (line,) = fold(read_runs(runs))
    assert (line["name"], line["status"], line["runs"]) == ("mine/", "done", "2 runs: 1 done, 1 diverged")


def test_filters_look_into_studies(runs, show):
    make_study(runs / "study-s")
    make_run(runs, "other", task="my-task")
    assert [line.split()[0] for line in show("--status", "failed")[2:3]] == ["study-s/b-seed0"]
    assert [line.split()[0] for line in show("--task", "fashion-mnist-mini")[2:5]] == [
        "study-s/a-seed0",
        "study-s/a-seed1",
        "study-s/b-seed0",
    ]
    assert [line.split()[0] for line in show("--task", "folder/my_task.py")[2:]] == ["other"]
    assert show("--task", "nothing") == ["no matching runs in runs"]


def test_json_has_every_record(runs, show):
    make_study(runs / "study-s")
    make_train(runs / "x", accuracy=0.5)
    found = json.loads("\n".join(show("--json")))
    assert found[-1]["id"] == "study-s", "its results were written last"
    assert {line["id"] for line in found} == {"study-s", "study-s/a-seed0", "study-s/a-seed1", "study-s/b-seed0", "x"}
    assert (found[-2]["id"], found[-2]["accuracy"], found[-2]["time_s"]) == ("x", 0.5, 3.0)
    assert len(json.loads("\n".join(show("--json", "-n", "2")))) == 2
    assert json.loads("\n".join(show("--json", "--status", "diverged"))) == []


def test_a_run_that_trains_is_running(runs, show):
    record = begin_run(runs, "live")
    add_steps(record, 1, 15)
    row = show()[2].split()
    assert row[:2] == ["live", "running"]
    assert "1 of 4" in show()[2]
    end_run(record)
    assert show()[2].split()[1] == "done"


def test_a_scaling_record_shows_its_range(runs, show):
    make_scale(runs / "s")
    lines = show()
    assert "1 to 4" in lines[2] or "1 to 2" in lines[2]
    assert "of linear" in lines[-1]


def test_nothing_in_a_folder_can_break_it(runs, show):
    """Damaged files, foreign values, links, pipes and names that would control a terminal."""
    make_run(runs, "good")
    for name in ("no result", "\x1b[2J", "a\nb"):
        make_train(runs / name)
    (runs / "no result" / "result.json").unlink()
    for name, content in {
        "torn": '{"status": "do',
        "odd": '{"status": 3, "metrics": [], "epochs": "x", "train_time_s": {}}',
    }.items():
        make_train(runs / name)
        (runs / name / "result.json").write_text(content)
    (runs / "empty").mkdir()
    (runs / "a file").write_text("mine")
    make_train(runs / "deep" / "x")
    (runs / "pipe").mkdir()
    os.mkfifo(runs / "pipe" / "metrics.jsonl")
    (runs / "link").symlink_to(runs / "good")
    (runs / "when").mkdir()
    (runs / "when" / "environment.json").write_text('{"when": "tomorrow", "contract": {"workers": 1e400, "epochs": "three"}}')
    text = "\n".join(show("--all"))
    assert "\x1b" not in text
    assert "\\x1b[2J" in text
    assert "a\\nb" in text
    assert "cut short" in text
    assert "unreadable" in text
    for name in ("good", "torn", "odd", "deep/", "pipe", "when"):
        assert f"\n{name} " in text
    assert "link" not in text.replace("pipe: ", "")


def test_an_empty_folder_and_a_missing_one(runs, show, capsys):
    runs.mkdir()
    assert show() == ["no records in runs"]
    assert cli.run(["runs", "--runs-dir", "nowhere"]) == 2
    assert capsys.readouterr().err == "paceline: --runs-dir nowhere: no such folder; give the folder that holds the records\n"
    assert cli.run(["runs", "--status", "fail"]) == 2
    assert capsys.readouterr().err == "paceline: unknown value for --status 'fail': did you mean 'failed'?\n"
    assert cli.run(["runs", "-n", "0"]) == 2
    assert capsys.readouterr().err == "paceline: -n is 0: it must be at least 1\n"


@pytest.mark.parametrize("width", [200, 100, 80, 60, 30])
def test_a_narrow_terminal_has_fewer_columns(runs, show, monkeypatch, width):
    make_run(runs, "a-rather-long-name-of-a-run")
    make_run(runs, "b", status="failed")
    monkeypatch.setattr(runs_verb, "is_terminal", lambda _: True)
    monkeypatch.setattr("paceline.output.is_terminal", lambda _: True)
    monkeypatch.setenv("COLUMNS", str(width))
    lines = show()
    assert max(map(len, lines)) <= width
    if width > 30:
        assert "a-rather-long-name-of-a-run" in lines[2], "not broken"
        assert "last" in lines[0]
    assert ("task" in lines[0]) == (width == 200)
