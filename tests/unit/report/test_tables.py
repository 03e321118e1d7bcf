"""Scaling and studies as the page shows them."""

import json
from pathlib import Path

import pytest

from paceline.report.read import read_source
from paceline.report.tables import components_of, view_scale, view_study
from paceline.study.results import compare_arm, markdown, read_results, spread_words

RESULTS = sorted((Path(__file__).parents[3] / "studies" / "results").glob("*.json"))


def test_worker_counts_are_sorted_and_broken_ones_listed() -> None:
    problems: list[str] = []
    counts = [{"workers": 4, "samples_per_s": 30.0}, {"workers": 1, "samples_per_s": 10.0, "low": "nan"}, {"workers": 2}, 5]
    found = view_scale({"counts": counts, "links": [{"workers": 2, "bytes": 4, "s": 0.1}, {"bytes": 4}]}, problems)
    assert found is not None
    assert [row["workers"] for row in found["counts"]] == [1, 4]
    assert found["counts"][0]["low"] is None
    assert len(found["links"]) == 1
    assert problems == ["scale.json: 2 of 4 worker counts cannot be read"]


def test_components_come_in_the_order_they_are_drawn() -> None:
    assert list(components_of({"components_s": {"waiting": 1, "new": 2, "input": 3, "other": "nan"}})) == [
        "input",
        "waiting",
        "new",
    ]
    assert components_of({"components_s": None}) == {}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_studys_arms_say_what_its_own_table_says(path: Path) -> None:
    results = read_results(path)
    view = view_study(results, [])
    printed = markdown(results)
    for arm in view["arms"]:
        line = next(line for line in printed.splitlines() if line.startswith(f"| {arm['name']} |"))
        assert arm["spread"] in line
        if not arm["reference"]:
            assert compare_arm(results, arm["name"]).verdict == arm["verdict"]
            assert f"{arm['difference']}: {arm['verdict']}" in line or arm["difference"] == ""


def test_a_failed_run_is_a_problem_and_counted() -> None:
    results = json.loads(RESULTS[0].read_text())
    results["runs"][0] |= {"status": "failed", "why": "out of memory", "metrics": {}}
    problems: list[str] = []
    view = view_study(results, problems)
    arm = next(arm for arm in view["arms"] if arm["name"] == results["runs"][0]["arm"])
    assert arm["failed"] == 1
    assert "out of memory" in problems[0]
    assert spread_words([]) == "- (0)"


def test_a_mini_study_is_marked_as_meaningless(tmp_path: Path) -> None:
    results = json.loads(RESULTS[0].read_text())
    assert view_study(results, [])["mini"] is False
    (tmp_path / "study.json").write_text(json.dumps({**results, "mini": True}))
    source = read_source(tmp_path)
    assert source["study"]["mini"] is True
    assert source["summary"].endswith("A trial with --mini: its numbers mean nothing.")
    assert "Best" not in source["summary"]
