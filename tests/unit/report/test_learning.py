"""Learning curves as the page shows them: every number checked, broken files listed."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.report.learning import view_learning
from paceline.report.page import render
from paceline.report.read import read_source

RESULTS = Path(__file__).parents[3] / "studies" / "results" / "learning-curve.json"


@pytest.fixture
def results() -> Any:
    return json.loads(RESULTS.read_text())


def test_the_committed_curve_is_shown(results: Any, tmp_path: Path) -> None:
    source = read_source(RESULTS)
    view = source["learning"]
    assert source["problems"] == []
    assert [row["samples"] for row in view["sizes"]] == sorted(row["samples"] for row in results["learning_curve"]["sizes"])
    assert len(view["fit"]["curve"]) > 20
    assert len(view["check"]["curve"]) > 20
    assert len(view["predictions"]) == 2
    assert source["summary"].endswith(view["sentence"])
    assert "the fit predicts" in view["sentence"]
    assert '"learning":{' in render([source])
    for name, text in (("study.json", {**results, "learning_curve": None}), ("learning-curve.json", results)):
        (tmp_path / name).write_text(json.dumps(text))
    assert read_source(tmp_path)["learning"] == view


def test_a_curve_of_other_options_than_the_study_is_not_shown(results: Any, tmp_path: Path) -> None:
    (tmp_path / "learning-curve.json").write_text(json.dumps(results))
    results["study"]["seeds"] = [0]
    (tmp_path / "study.json").write_text(json.dumps(results))
    source = read_source(tmp_path)
    assert source["learning"] is None
    assert "it was made with other options" in source["problems"][-1]


def test_a_study_without_a_curve_has_none(results: Any, tmp_path: Path) -> None:
    del results["learning_curve"]
    (tmp_path / "study.json").write_text(json.dumps(results))
    source = read_source(tmp_path)
    assert source["learning"] is None
    assert source["problems"] == []


WRONG = (None, "x", -1, [], {}, [[]], ["x"], float("nan"), 10**400, {"value": "x"}, [[1, "x", None, 2]], True)


def test_no_wrong_value_stops_the_page(results: Any) -> None:
    """Every value of the curve, to a depth of three, is replaced by values of other types."""
    good = results["learning_curve"]
    paths = [(name,) for name in good]
    paths += [(name, key) for name in ("fit", "check", "target", "said") for key in good[name] or ()]
    paths += [(name, 0, key) for name in ("sizes", "predictions") for key in good[name][0]]
    for path in paths:
        for wrong in WRONG:
            broken = copy.deepcopy(good)
            place = broken
            for step in path[:-1]:
                place = place[step]
            place[path[-1]] = wrong
            problems: list[str] = []
            json.dumps([view_learning(broken, problems), problems], allow_nan=False)


@pytest.mark.parametrize("found", [3, "x", [], {"sizes": []}, {"sizes": [{"samples": 0}]}])
def test_a_broken_curve_is_a_problem(found: Any) -> None:
    problems: list[str] = []
    assert view_learning(found, problems) is None
    assert problems


def test_a_curve_without_a_fit_is_shown_without_one() -> None:
    view = view_learning({"sizes": [{"samples": 10, "errors": [0.5, None]}, {"samples": 5}], "fit": None, "why": "x"}, [])
    assert view is not None
    assert [row["mean"] for row in view["sizes"]] == [None, 0.5]
    assert view["sentence"] == "Error 0.5000 with 10 samples; no fit."
