"""A learning curve on its page: points, fit, the prediction of the small sizes, words and a table, wide and narrow."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from paceline.report.page import write_report

if TYPE_CHECKING:
    from playwright.sync_api import Page

RESULTS = Path(__file__).parents[2] / "studies" / "results" / "learning-curve.json"
DESKTOP = {"viewport": {"width": 1400, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
DRAWN = "() => document.querySelector('#learning .plot svg.main-svg')"
TRACES = """() => Object.fromEntries(document.querySelector('#learning .plot').data.map(
    ({uid, x, y, line}) => [uid, {x: [...x], y: [...y], dash: line && line.dash}]))"""


def show(page: "Page", found: Any, folder: Path) -> dict[str, Any]:
    """The traces of its chart."""
    (folder / "curve.json").write_text(json.dumps(found))
    page.goto(write_report([folder / "curve.json"], folder / "page.html").as_uri())
    page.wait_for_function(DRAWN)
    return dict(page.evaluate(TRACES))


@pytest.mark.parametrize("page_options", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_points_fit_and_prediction_are_drawn(page: "Page", tmp_path: Path) -> None:
    found = json.loads(RESULTS.read_text())
    curve, traces = found["learning_curve"], show(page, found, tmp_path)
    sizes = [row["samples"] for row in curve["sizes"]]
    assert traces["meanstrue"]["x"] == sizes
    assert len(traces["seedstrue"]["x"]) == 3 * len(sizes)
    assert traces["fit"]["x"][-1] == traces["beyond"]["x"][0] >= sizes[-1]
    assert traces["beyond"]["x"][-1] == pytest.approx(4 * sizes[-1])
    assert (traces["beyond"]["dash"], traces["check"]["dash"]) == ("dot", "dash")
    assert traces["check"]["x"][0] >= curve["check"]["up_to"]
    assert traces["predicted"]["x"] == [row["samples"] for row in curve["check"]["sizes"]]
    assert page.locator("h2").all_inner_texts()[0] == "Error against data size"
    assert page.locator("#study").count() == 0, "its arms are the table's rows"
    assert page.locator("#learning tbody tr").count() == len(sizes)
    for lines in curve["said"].values():
        assert lines[-1].strip().lower() in page.locator("#learning").inner_text().lower()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_curve_without_a_fit_is_drawn(page: "Page", tmp_path: Path) -> None:
    found = json.loads(RESULTS.read_text())
    curve = found["learning_curve"]
    curve |= {"fit": None, "check": None, "predictions": [], "target": None, "metric": "<b>"}
    curve["sizes"][0] |= {"dropped": "near chance"}
    traces = show(page, found, tmp_path)
    assert set(traces) == {"seedstrue", "meanstrue", "seedsfalse", "meansfalse"}
    assert traces["meansfalse"]["x"] == [curve["sizes"][0]["samples"]]
    assert page.locator("#learning b").count() == 0
