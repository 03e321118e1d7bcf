"""`paceline toys`: the record and the table it writes, and one line for each mistake."""

import json
from pathlib import Path

import pytest

from paceline import cli
from paceline.report.read import read_source
from paceline.toys import line_toy, minima_toy, threshold_toy
from paceline.toys_verb import describe

PAGE = Path(__file__).parents[2] / "docs" / "toys.md"
QUICK = ("toys", "--seeds", "5", "--steps", "50", "--rates", "0.1", "--noise", "2")


def test_a_record_that_the_report_can_show(runs, capsys):
    assert cli.run(QUICK) == 0
    out = capsys.readouterr().out
    for words in (
        "exact minimum",
        "sharp minimum",
        "2 / lambda max",
        "bounces around",
        "end in the flat minimum, 95% interval",
    ):
        assert words in out
    assert out.rstrip().endswith("numbers in runs/toys/toys.json; to see them move: paceline report runs/toys")
    found = json.loads((runs / "toys" / "toys.json").read_text())
    assert (found["kind"], found["seeds"], found["environment"]["command"] != []) == ("toys", 5, True)
    source = read_source(runs / "toys")
    assert (source["kind"], source["status"], source["problems"]) == ("toys", "done", [])
    assert [toy["toy"] for toy in source["toys"]] == ["line", "minima", "threshold"]


def test_the_same_flags_give_the_same_numbers_and_replace_the_record(runs, capsys):
    assert cli.run(QUICK) == 0
    first = json.loads((runs / "toys" / "toys.json").read_text())["toys"]
    (runs / "toys" / "report.html").write_text("a report")
    assert cli.run(QUICK) == 0
    assert json.loads((runs / "toys" / "toys.json").read_text())["toys"] == first
    assert cli.run([*QUICK, "--seed", "1", "--name", "other"]) == 0
    assert json.loads((runs / "other" / "toys.json").read_text())["toys"] != first


@pytest.mark.parametrize(("which", "kinds"), [("line", ["line"]), ("minima", ["minima", "threshold"])])
def test_one_of_the_toys(runs, capsys, which, kinds):
    assert cli.run([*QUICK, "--toy", which]) == 0
    assert [toy["toy"] for toy in json.loads((runs / "toys" / "toys.json").read_text())["toys"]] == kinds


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--seeds", "0"), "--seeds is 0: it must be between 1 and 100,000"),
        (("--seeds", "many"), "argument --seeds: invalid int value: 'many'"),
        (("--steps", "0"), "--steps is 0: it must be between 1 and 1,000,000"),
        (("--seed", "-1"), "--seed is -1: it must be between 0 and"),
        (("--lr", "nan"), "--lr is nan: it must be above 0, and at most 100"),
        (("--momentum", "1"), "--momentum is 1: it must be at least 0 and below 1"),
        (("--rates", "0.1,x"), "--rates is '0.1,x': it must be up to 12 numbers above 0, and at most 100, such as 0.02,0.05"),
        (("--noise", "0"), "--noise is '0': it must be up to 12 numbers above 0"),
        (("--noise", "inf"), "--noise is 'inf': it must be up to 12 numbers above 0"),
        (("--rates", ",".join(map(str, range(1, 14)))), "it must be up to 12 numbers"),
        (("--name", "a/b"), "--name is 'a/b': it must be a plain name"),
        (("--name", ""), "--name is '': it must be a plain name"),
    ],
)
def test_a_mistake_is_one_line(runs, capsys, flags, words):
    assert cli.run([*QUICK, *flags]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1
    assert words in err
    assert not runs.exists()


def test_other_records_are_not_overwritten(runs, capsys):
    (runs / "toys").mkdir(parents=True)
    (runs / "toys" / "metrics.jsonl").write_text("")
    (runs / "file").write_text("")
    assert cli.run(QUICK) == 2
    assert "runs/toys holds something other than toys: choose another --name" in capsys.readouterr().err
    assert cli.run([*QUICK, "--name", "file"]) == 1
    assert "cannot write runs/file: File exists; choose another --name or --runs-dir" in capsys.readouterr().err
    assert cli.run([*QUICK, "--runs-dir", "runs/file"]) != 0
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_page_shows_what_is_printed():
    """The tables with exact numbers. Walks may differ by a few on another processor: rounding decides who leaves when."""
    page = {line.strip() for line in PAGE.read_text().splitlines()}
    line, limits = describe(line_toy(0.1, 0, 1_000)), describe(threshold_toy())
    points = describe(minima_toy([0.1], [1.0], 0.9, steps=1, seeds=1, seed=0))
    shown = [*line.splitlines()[1:], *limits.splitlines()[1:-2], *points.splitlines()[1:6]]  # a factor of 1.5 is chaotic
    assert len(shown) > 15
    assert not [each for each in shown if each.strip() and each.strip() not in page]
