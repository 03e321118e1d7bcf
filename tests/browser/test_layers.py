"""The section about layers, in a report and on the board."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.boards import add_steps, begin_run, end_run
from harness.pages import make_layers, make_train
from paceline.report.page import write_report

if TYPE_CHECKING:
    from playwright.sync_api import Page

PLOT = "[data-key^='layers '] .plot"
DATA = f'() => (({{type, x, y, z, customdata}}) => ({{type, x, y, z, customdata}}))(document.querySelector("{PLOT}").data[0])'
LONG = "a<b>$x${y}<img src=x onerror='window.broken=1'> and a very long name of a layer"


def show(page: "Page", folder: Path, *records: Path) -> None:
    page.goto(write_report(records, folder / "report.html").as_uri())
    page.locator("#layers").scroll_into_view_if_needed()
    page.wait_for_selector(f"{PLOT} .hm")


def test_colors_are_ratios_or_gradients(page: "Page", tmp_path: Path) -> None:
    show(page, tmp_path, make_layers(make_train(tmp_path / "one")))
    found: Any = page.evaluate(DATA)
    assert (found["type"], len(found["y"]), found["x"]) == ("heatmap", 4, list(range(5, 65, 5)))
    assert [row[0] for row in found["z"]] == pytest.approx([-5, -4, -3, -5])  # a ratio of 0 has the darkest color
    assert found["customdata"][3][0] == "head: 0"
    section = page.locator("#layers")
    assert "layer head does not move" in section.inner_text()
    section.get_by_role("button", name="Show gradient norms").click()
    section.get_by_text("Gradient norm", exact=True).wait_for()
    assert page.evaluate(DATA)["customdata"][0][0] == "stem: 0.5"
    page.locator("[data-x=epoch]").click()
    page.wait_for_function(f'() => document.querySelector("{PLOT}").data[0].x.at(-1) === 3')
    section.get_by_text("Numbers as a table").click()
    assert section.locator("tbody tr").nth(2).inner_text().split() == ["body.1", "0.001", "10", "0.5"]


@pytest.mark.parametrize("page_options", [{"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"}])
def test_names_are_text_and_fit_a_phone(page: "Page", tmp_path: Path) -> None:
    show(page, tmp_path, make_layers(make_train(tmp_path / "one"), ["stem", LONG, *(f"body.{i}" for i in range(90))]))
    assert page.evaluate("() => window.broken") is None
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(DATA)["customdata"][1][0].startswith("a&lt;b&gt;")
    assert 10 < page.locator(PLOT).locator(".yaxislayer-above text").count() <= 40


def test_runs_without_rows_have_no_section(page: "Page", tmp_path: Path) -> None:
    page.goto(write_report([make_train(tmp_path / "one")], tmp_path / "report.html").as_uri())
    page.wait_for_selector(".plot .main-svg")
    assert page.locator("#layers").count() == 0


def test_the_board_shows_the_same(page: "Page", own: str, tmp_path: Path) -> None:
    live, row = begin_run(tmp_path, "live"), {"kind": "layers", "epoch": 1, "names": ["a", "b"], "gradient_norm": [1.0, 2.0]}
    add_steps(live, 1, 3)
    live.row({**row, "step": 3, "time_s": 0.3, "update_ratio": [0.001, 0.002]})
    page.goto(f"{own}?run=live")
    page.locator("#layers").scroll_into_view_if_needed()
    page.wait_for_selector(f"{PLOT} .hm")
    live.row({**row, "step": 4, "time_s": 0.4, "update_ratio": [0.001, 0.002]})
    add_steps(live, 4, 7)
    page.wait_for_function('() => document.querySelector(".plot").data[0].x.at(-1) === 7')
    assert page.evaluate(DATA)["x"] == [3], "later rows come with the next complete record"
    end_run(live)
    page.wait_for_function(f'() => document.querySelector("{PLOT}").data[0].x.length === 2')
