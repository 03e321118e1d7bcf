"""Toys as the page shows them: damaged ones are left out and named, and never raise."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from harness.pages import make_toys
from paceline.board.summaries import read_summary
from paceline.report.page import render
from paceline.report.read import read_source
from paceline.report.sources import find_sources
from paceline.report.toys import view_toys


@pytest.fixture
def found(tmp_path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((make_toys(tmp_path / "toys") / "toys.json").read_text())
    return loaded


def test_good_toys_are_shown_whole(found: dict[str, Any], tmp_path: Path) -> None:
    problems: list[str] = []
    line, minima = view_toys(found, problems)
    assert problems == []
    assert (line["log"], line["most"], minima["most"]) == (True, None, 4)
    assert line["rows"] == found["toys"][0]["rows"]
    assert minima["rows"][1]["optimizer"] == "momentum"
    assert len(line["paths"]) == 2
    source = read_source(tmp_path / "toys" / "toys.json")
    assert (source["kind"], source["name"], source["status"]) == ("toys", "toys", "done")
    assert "50.0% of 10 walks of SGD left the sharp minimum for the flat one, and 25.0%" in source["summary"]
    assert (read_summary(tmp_path / "toys")["status"], read_summary(tmp_path / "toys")["kind"]) == ("done", "toys")
    assert find_sources(tmp_path) == [tmp_path / "toys"]


@pytest.mark.parametrize(
    "change",
    [
        {"z": [[1.0]]},
        {"z": 5},
        {"x": [0, 1, 1, 2, 3]},  # does not grow
        {"x": [0, 1, "nan", 2, 3]},
        {"x": list(range(401)), "z": [list(range(401))] * 5},
        {"y": [], "z": []},
        {"toy": "other"},
        {"toy": ["line"]},
    ],
)
def test_a_toy_that_does_not_fit_together_is_left_out(found: dict[str, Any], change: dict[str, Any]) -> None:
    found["toys"][0] |= change
    problems: list[str] = []
    assert [toy["toy"] for toy in view_toys(found, problems)] == ["minima"]
    assert "toys.json: 1 of 2 toys cannot be shown" in problems


@pytest.mark.parametrize(
    "change",
    [
        {"t": [0]},
        {"t": []},
        {"t": [0, 2, 1, *range(3, 11)]},
        {"t": list(range(1, 12))},
        {"x": [None] * 11},
        {"z": "text"},
        {name: list(range(2_001)) for name in "txyz"},
    ],
)
def test_a_broken_path_is_left_out(found: dict[str, Any], change: dict[str, Any]) -> None:
    found["toys"][0]["paths"][0] |= change
    problems: list[str] = []
    line, _ = view_toys(found, problems)
    assert [path["name"] for path in line["paths"]] == ["two"]
    assert problems == ["toys.json: 1 of 2 paths of line cannot be shown"]


def test_rows_and_points_without_their_numbers_are_left_out(found: dict[str, Any]) -> None:
    line = found["toys"][0]
    line["rows"] += [{}, 5, {**line["rows"][0], "sd": "inf"}, {**line["rows"][0], "sd": True}]
    line["points"] += [None, {"x": 1}, {**line["points"][0], "eigenvalues": [1]}]
    line |= {"axes": ["only one"], "most": "nan", "title": 7}
    shown = view_toys(found, [])[0]
    assert (len(shown["rows"]), len(shown["points"])) == (1, 1)
    assert (shown["axes"], shown["most"], shown["title"]) == (["x", "y"], None, "7")


HOLES = [None, True, -1, 1e400, "text", [], {}, [[]], [None], {"x": 1}]


def test_nothing_in_a_toy_raises(found: dict[str, Any], tmp_path: Path) -> None:
    """Every field of both toys, replaced by values of every type, down to the fields of paths, points and rows."""
    places = [(name,) for name in found["toys"][0]]
    places += [(part, 0, name) for part in ("paths", "points", "rows") for name in found["toys"][1][part][0]]
    for place in places:
        for hole in HOLES:
            broken = copy.deepcopy(found)
            for toy in broken["toys"]:
                at: Any = toy
                for step in place[:-1]:
                    at = at[step]
                at[place[-1]] = hole
            (tmp_path / "toys" / "toys.json").write_text(json.dumps(broken))
            source = read_source(tmp_path / "toys")
            json.dumps(source, allow_nan=False)
            assert "unexpected" not in source["summary"]
            assert not any("cannot be read" in problem for problem in source["problems"])


def test_names_cannot_become_markup(found: dict[str, Any], tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    found["toys"][0] |= {"title": evil, "axes": [evil, evil]}
    found["toys"][0]["paths"][0]["name"] = evil
    (tmp_path / "toys" / "toys.json").write_text(json.dumps(found))
    assert "<img" not in render([read_source(tmp_path / "toys")])
