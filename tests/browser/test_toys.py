"""Toys in a real browser: played, paused and moved by keyboard and pointer; still for those who ask for less motion."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.pages import make_toys
from paceline.report.page import write_report

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
MOVING = {"reduced_motion": "no-preference"}
EVIL = "<b>b<a href='mailto:a'>%{x}<script>window.broken=1</script><img src=x onerror='window.broken=2'>"
DRAWN = "() => [...document.querySelectorAll('.plot')].every(plot => plot.querySelector('svg.main-svg'))"
HEAD = """key => {
    const plot = [...document.querySelectorAll('article')].find(card => card.dataset.key.endsWith(key)).querySelector('.plot');
    return plot.data.find(trace => trace.uid.startsWith('head-0')).x[0];
}"""
LIBRARY = "plotly.min.js"


def show(page: "Page", folder: Path) -> None:
    page.goto(write_report([folder], folder.parent / "page.html", str(folder.parent / LIBRARY)).as_uri())
    page.wait_for_function(DRAWN)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_toys(tmp_path / "toys")


def card(page: "Page", title: str) -> "Locator":
    return page.locator("article", has=page.get_by_role("group", name=f"Animation: {title}"))


def at(page: "Page", title: str) -> float:
    return float(card(page, title).locator("input").input_value())


def test_with_less_motion_whole_paths_are_shown_and_nothing_moves_until_asked(page: "Page", folder: Path) -> None:
    show(page, folder)
    line = card(page, "Line fit")
    assert page.evaluate(HEAD, "line") == 0  # x goes from 2 to 0
    assert at(page, "Line fit") == 100
    page.wait_for_timeout(300)
    assert line.locator(".play").inner_text() == "Play again"
    line.locator("select").select_option("4")
    line.locator(".play").click()
    page.wait_for_function(f"key => ({HEAD})(key) < 1.9", arg="line")
    line.get_by_role("button", name="Play again").wait_for()
    assert page.evaluate(HEAD, "line") == 0


@pytest.mark.parametrize("page_options", [MOVING, {**PHONE, **MOVING}], ids=["desktop", "phone"])
def test_it_plays_pauses_and_follows_the_slider(page: "Page", folder: Path) -> None:
    show(page, folder)
    line = card(page, "Line fit")
    line.locator("input").scroll_into_view_if_needed()
    line.get_by_role("button", name="Pause").wait_for()  # it began by itself
    page.wait_for_function(f"key => ({HEAD})(key) < 2", arg="line")
    line.get_by_role("button", name="Pause").click()
    stopped = at(page, "Line fit"), page.evaluate(HEAD, "line")
    page.wait_for_timeout(200)
    assert (at(page, "Line fit"), page.evaluate(HEAD, "line")) == stopped
    slider = line.locator("input")
    slider.focus()
    page.keyboard.press("End")
    page.wait_for_function(f"key => ({HEAD})(key) === 0", arg="line")
    assert slider.get_attribute("aria-valuetext") == "100 of 100 steps"
    page.keyboard.press("Home")
    page.wait_for_function(f"key => ({HEAD})(key) === 2", arg="line")
    for _ in range(10):
        page.keyboard.press("ArrowRight")
    page.wait_for_function(f"key => ({HEAD})(key) === 1.8", arg="line")
    slider.fill("50")
    page.wait_for_function(f"key => ({HEAD})(key) === 1", arg="line")
    assert line.locator("output").inner_text() == "50 of 100 steps"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Space")  # the play button
    line.get_by_role("button", name="Pause").wait_for()
    other = card(page, "Sharp and flat minimum")
    other.locator(".play").click()
    other.get_by_role("button", name="Pause").wait_for()
    assert line.locator(".play").inner_text() == "Play"  # one at a time
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(overflow) <= 0


def test_the_place_in_time_survives_other_colors_and_3d_keeps_the_paths(page: "Page", folder: Path) -> None:
    show(page, folder)
    line = card(page, "Line fit")
    line.locator("input").fill("30")
    page.locator("#theme").click()
    assert at(page, "Line fit") == 30
    assert page.evaluate(HEAD, "line") == pytest.approx(1.4)
    contours = page.evaluate("document.querySelector('article .plot').data[0].colorscale")
    page.locator("#theme").click()
    assert page.evaluate("document.querySelector('article .plot').data[0].colorscale") != contours
    if not line.locator(".solid").is_enabled():
        return  # this browser has no WebGL: the button says so
    line.locator(".solid").click(timeout=100_000)  # WebGL on a busy CPU
    page.wait_for_function("document.querySelector('article .plot').data[0].type === 'surface'")
    head: Any = page.evaluate("document.querySelector('article .plot').data.find(t => t.uid.startsWith('head-0'))")
    assert (head["type"], head["x"]) == ("scatter3d", [1.4])
    line.locator(".solid").click(timeout=100_000)  # WebGL on a busy CPU
    page.wait_for_function("document.querySelector('article .plot').data[0].type === 'contour'")


def test_results_and_hostile_names(page: "Page", folder: Path) -> None:
    found = json.loads((folder / "toys.json").read_text())
    for toy in found["toys"]:
        toy |= {"title": EVIL, "about": EVIL, "axes": [EVIL, EVIL], "clock": EVIL}
        toy["paths"][0]["name"] = toy["points"][0]["name"] = EVIL
    found["toys"][1]["rows"][1]["optimizer"] = EVIL
    (folder / "toys.json").write_text(json.dumps(found))
    show(page, folder)
    for summary in page.locator("article summary").all():
        summary.click()
    assert page.locator("article").last.locator("tbody tr").first.inner_text().split("\t")[4:6] == ["0.500", "0.200 to 0.800"]
    assert page.locator("article").last.locator(".errorbar").count() == 2
    assert page.evaluate("window.broken") is None
    assert page.locator("main img, main script, main a[href^=mailto]").count() == 0


def test_damaged_toys_leave_the_others(page: "Page", folder: Path) -> None:
    found = json.loads((folder / "toys.json").read_text())
    found["toys"][0]["z"] = "lost"
    found["toys"][1] |= {"paths": [], "points": [], "rows": []}
    (folder / "toys.json").write_text(json.dumps(found))
    show(page, folder)
    assert page.locator("article").count() == 1
    assert "the surface of line has sizes that do not match" in page.locator("#notes").inner_text()
