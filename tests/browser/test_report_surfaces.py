"""Loss surfaces and sharpness in a real browser: contours and 3-D, sets, paths, and browsers without WebGL."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.pages import landscape, make_landscapes, make_sharpness, make_train
from paceline.report.page import write_report

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
SCRIPT = "<img src=x onerror='window.broken=1'>"
DRAWN = "() => [...document.querySelectorAll('.plot')].every(plot => plot.querySelector('svg.main-svg'))"
NO_WEBGL = """
    const made = HTMLCanvasElement.prototype.getContext;
    HTMLCanvasElement.prototype.getContext = function (kind, ...more) {
        return /webgl/.test(kind) ? null : made.call(this, kind, ...more);
    };
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("surfaces")


def show(page: "Page", folder: Path, name: str, *paths: Path) -> None:
    out = write_report(paths, folder / f"{name}.html", str(folder / "plotly.min.js"))
    assert out.stat().st_size < 600_000
    page.goto(out.as_uri())
    page.wait_for_function(DRAWN)


def card(page: "Page", name: str) -> "Locator":
    found = page.locator(f"#landscape [data-key$='{name}']")
    found.scroll_into_view_if_needed()
    return found


def traces(shown: "Locator") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = shown.locator(".plot").evaluate("plot => plot.data")
    return found


def test_a_plane_switches_between_contours_and_3d_and_between_sets(page: "Page", folder: Path, tmp_path: Path) -> None:
    show(page, folder, "plane", make_landscapes(make_train(tmp_path / "r"), ("plane",)))
    plane = card(page, "plane-0")
    contour, model = traces(plane)
    assert (contour["type"], model["x"], model["y"]) == ("contour", [0], [0])
    train = contour["z"][15][15]
    ticks = contour["colorbar"]["ticktext"]
    assert ticks[0] == "0.2"  # the losses differ by much: colors follow their logarithms, labels do not
    view = plane.locator("[data-focus$=view]")
    assert view.inner_text() == "3-D"
    view.focus()
    page.keyboard.press("Enter")
    assert [trace["type"] for trace in traces(plane)] == ["surface", "scatter3d"]
    assert page.evaluate("document.activeElement.dataset.focus").endswith("view")  # redrawing keeps the focus
    assert plane.locator(".plot canvas").count() >= 1
    assert traces(plane)[0]["z"][15][15] == train
    assert train < traces(plane)[1]["z"][0] < train + 0.2  # on the surface
    eye = "plot => plot.layout.scene.camera.eye"
    before, reset = plane.locator(".plot").evaluate(eye), plane.get_by_role("button", name="Reset zoom")
    assert reset.is_hidden()
    plane.get_by_role("button", name="Turn right").click()
    turned = plane.locator(".plot").evaluate(eye)
    assert turned["x"] != before["x"]
    assert turned["x"] ** 2 + turned["y"] ** 2 == pytest.approx(before["x"] ** 2 + before["y"] ** 2)
    plane.get_by_role("button", name="validation").click()
    assert traces(plane)[0]["z"][15][15] > train
    assert plane.locator(".plot").evaluate(eye)["x"] == pytest.approx(turned["x"])  # the view stays
    reset.click()
    assert plane.locator(".plot").evaluate(eye)["x"] == pytest.approx(before["x"])
    plane.get_by_role("button", name="Contours").click()
    assert traces(plane)[0]["type"] == "contour"
    assert "contours of the validation loss, from 0.2" in (plane.locator(".plot").get_attribute("aria-label") or "")


def test_paths_have_their_colors_ends_and_the_explained_variance(page: "Page", folder: Path, tmp_path: Path) -> None:
    show(page, folder, "path", make_landscapes(make_train(tmp_path / "r"), ("path",)))
    path = card(page, "path")
    assert path.locator(".keys li").all_inner_texts() == ["small", "large", "start", "end"]
    named = {trace["uid"]: trace for trace in traces(path)}
    assert named["path-0"]["line"]["color"] != named["path-1"]["line"]["color"]
    assert named["snapshots-0"]["marker"]["symbol"][-1] == "square"
    assert "step 240<br>loss 0.1212<br>0.0486 away from the plane" in named["snapshots-0"]["text"][-1]
    assert len(named["path-0"]["x"]) > 5 * len(named["snapshots-0"]["x"])
    titles = path.locator(".plot").evaluate("({ layout }) => [layout.xaxis.title.text, layout.yaxis.title.text]")
    assert titles == ["first principal component, 71% of the variance", "second principal component, 18% of the variance"]
    path.get_by_role("button", name="3-D").click()
    solid = {trace["uid"]: trace for trace in traces(path)}
    assert {trace["type"] for trace in solid.values()} == {"surface", "scatter3d"}
    assert None not in solid["path-1"]["z"]
    path.locator("summary").click()
    assert "large, step 240" in path.locator("tbody").inner_text()


def test_lines_have_their_models_and_gaps(page: "Page", folder: Path, tmp_path: Path) -> None:
    record = make_landscapes(make_train(tmp_path / "r"), ("line", "between"))
    found = landscape("line", 9)
    found["sets"]["train"]["loss"][2] = "inf"
    (record / "landscape" / "line-1.json").write_text(json.dumps(found))
    (record / "landscape" / "x.json").write_text(
        json.dumps({**landscape("between", 9), "ends": [SCRIPT, "b"], "about": SCRIPT})
    )
    show(page, folder, "lines", record)
    marks = "({ layout }) => layout.annotations.map(({ x, text }) => [x, text])"
    assert card(page, "between-large loss").locator(".plot").evaluate(marks) == [[0, "demo"], [1, "large"]]
    line = card(page, "line-0 loss")
    assert line.locator(".plot").evaluate(marks) == [[0, "the model"]]
    assert [trace["line"]["dash"] for trace in traces(line)] == ["solid", "dash"]
    assert card(page, "line-0 accuracy").locator("h3").inner_text() == "Along a line (line-0): accuracy"
    assert traces(card(page, "line-1 loss"))[0]["y"][2] is None
    page.get_by_text("How these were measured").click()
    assert "line-1: 1,000 samples of each set, precision: bf16" in page.locator("#landscape").inner_text()
    assert f"Between {SCRIPT} and b: loss" in page.locator("#landscape h3").all_inner_texts()
    assert page.evaluate("window.broken") is None


@pytest.mark.parametrize("page_options", [PHONE], ids=["phone"])
def test_without_webgl_the_contours_stay_and_the_page_says_why(page: "Page", folder: Path, tmp_path: Path) -> None:
    page.add_init_script(NO_WEBGL)
    show(page, folder, "no-webgl", make_landscapes(make_train(tmp_path / "r"), ("plane", "path")))
    plane = card(page, "plane-0")
    plane.get_by_role("button", name="3-D").click()
    assert "This browser has no WebGL" in plane.inner_text()
    assert traces(plane)[0]["type"] == "contour"
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_sharpness_of_several_runs_is_side_by_side(page: "Page", folder: Path, tmp_path: Path) -> None:
    one, two = make_train(tmp_path / "small"), make_train(tmp_path / "large")
    make_sharpness(one)
    make_sharpness(two, 2.5)
    found = json.loads((two / "sharpness.json").read_text())
    (two / "sharpness.json").write_text(json.dumps({**found, "adaptive": {}, "keskar": found["keskar"][:1]}))
    show(page, folder, "sharpness", one, two)
    rows = [row.split("\t")[:3] for row in page.locator("#sharpness tbody").first.inner_text().splitlines()]
    assert ["largest eigenvalue", "84", "210"] in rows
    assert ["trace", "412 ± 18", "1,030 ± 18"] in rows
    assert ["adaptive rise, \u03c1 = 0.5", "0.044", "\u2013"] in rows
    assert ["Keskar's, subspace, ε = 0.001", "2.125", "\u2013"] in rows
    page.locator("[data-key=density]").scroll_into_view_if_needed()
    density, top, other, _ = traces(page.locator("[data-key=density]"))
    assert top["x"][0] == 84
    assert density["line"]["color"] == top["marker"]["color"] != other["line"]["color"]
    page.locator(".chip", has_text="small").click()
    page.wait_for_function("() => document.querySelector('[data-key=density] .plot').data.length === 2")
    assert page.locator("#sharpness thead th").all_inner_texts()[:3] == ["measure", "large", "what it means"]


def test_each_surface_is_clipped_by_itself(page: "Page", folder: Path, tmp_path: Path) -> None:
    """Surfaces of two runs, with different axes. Equal ids would clip all of them like the first."""
    show(page, folder, "clips", *(make_landscapes(make_train(tmp_path / name), ("plane", "path")) for name in ("a", "b")))
    found = page.evaluate("[...document.querySelectorAll('#landscape clipPath')].map(each => each.id)")
    assert len([name for name in found if name.startswith("clipcontour")]) == 4
    assert len(found) == len(set(found))
