"""The report in a real browser, from a file: drawn, switched, zoomed, readable on a phone, and safe from hostile records."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.pages import make_landscapes, make_scale, make_sharpness, make_timeline, make_train
from paceline.records import COMPONENTS
from paceline.report.page import write_report

if TYPE_CHECKING:
    from playwright.sync_api import Page

STUDY = Path(__file__).parents[2] / "studies" / "results" / "ingredients.json"
EVIL = "<b>b<a href='mailto:a'>%{x}<script>window.broken=1</script><img src=x onerror='window.broken=2'>"
TRACES = "key => document.querySelector(`[data-key='${key}'] .plot`).data"
DRAWN = "() => [...document.querySelectorAll('.plot')].every(plot => plot.querySelector('svg.main-svg'))"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One page with everything: two runs (one with a timeline, landscapes and its sharpness), a scaling record and a study."""
    folder = tmp_path_factory.mktemp("report")
    first = make_sharpness(make_landscapes(make_timeline(make_train(folder / "first"))))
    timeline = json.loads((first / "timeline.json").read_text())
    timeline["paceline"]["buckets"][0]["parameters"] = [f"blocks.{place}.weight" for place in range(12)]
    (first / "timeline.json").write_text(json.dumps(timeline))
    paths = [first, make_train(folder / "second", accuracy=0.9), make_scale(folder / "scale"), STUDY]
    return write_report(paths, folder / "report.html").as_uri()


@pytest.fixture
def pair(tmp_path: Path) -> str:
    """Two runs with few charts."""
    paths = [make_train(tmp_path / "first"), make_train(tmp_path / "second", accuracy=0.9)]
    return write_report(paths, tmp_path / "report.html").as_uri()


def traces(page: "Page", key: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = page.evaluate(TRACES, key)
    return found


def test_every_section_is_drawn_and_reachable_by_keyboard(page: "Page", report: str) -> None:
    page.goto(report)
    page.wait_for_function(DRAWN)
    heads = page.locator("h2").all_inner_texts()
    assert heads[:5] == ["Curves", "Study", "Scaling", "Differences", "Where a step's time went"]
    assert heads[5:] == ["Timeline", "Loss surface", "Sharpness", "Notes and problems", "Environment"]
    assert len(traces(page, "loss")) == 4  # training and validation of both
    colors = [trace["line"]["color"] for trace in traces(page, "m-accuracy")]
    assert len(set(colors)) == 2
    assert colors == [trace["line"]["color"] for trace in traces(page, "noise")]  # a run's color is the same in all charts
    assert {trace["uid"] for trace in page.evaluate("document.querySelector('#timeline .plot').data")} >= {"hidden", "exposed"}
    assert page.locator("#scaling .plot svg .errorbar").count() == 3
    assert "second ended best, with accuracy 0.9000" in page.locator("#headline").inner_text()
    assert page.locator("#study tbody tr").count() == 7
    assert page.locator(".plot[role=img][aria-label^='Chart: ']").count() == page.locator(".plot").count()
    reached = set()
    focused = """() => {
        const at = document.activeElement;
        return [at.dataset.focus || at.id || at.tagName, getComputedStyle(at).outlineStyle];
    }"""
    for _ in range(160):
        page.keyboard.press("Tab")
        name, outline = page.evaluate(focused)
        if name == "BODY":  # past the last one
            break
        assert outline != "none", f"{name} has no visible focus"
        reached.add(name)
        if name == "x epoch":
            page.keyboard.press("Enter")
            assert page.evaluate(focused)[0] == "x epoch"  # redrawing keeps the focus
        if name == "loss table":
            page.keyboard.press("Enter")
    page.locator("[data-key=loss] .plot").scroll_into_view_if_needed()
    page.wait_for_function("() => document.querySelector('[data-key=loss] .plot').data[0].x[0] === 0.25")
    assert {"theme", "x step", "x epoch", "x time_s", "loss log", "loss table"} <= reached
    assert any(name.startswith("run ") for name in reached)
    assert page.locator("[data-key=loss] details tbody tr").count() == 30


def test_the_users_choices_survive_an_update_and_the_theme_a_reload(page: "Page", pair: str) -> None:
    page.goto(pair)
    page.wait_for_function(DRAWN)
    page.locator("[data-key=loss] .plot").scroll_into_view_if_needed()  # charts in view are redrawn at once
    assert traces(page, "loss")[0]["x"][:2] == [5, 10]
    page.get_by_role("button", name="epochs").click()
    assert traces(page, "loss")[0]["x"][:2] == [0.25, 0.5]
    page.get_by_role("button", name="time", exact=True).click()
    assert page.get_by_role("button", name="time", exact=True).get_attribute("aria-pressed") == "true"
    page.locator(".chip", has_text="first").click()
    assert len(traces(page, "loss")) == 2
    field = page.locator("[data-key=loss] .plot .nsewdrag")
    field.scroll_into_view_if_needed()
    box = field.bounding_box()
    assert box
    page.mouse.move(box["x"] + 60, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 260, box["y"] + 140, steps=4)
    page.mouse.up()
    reset = page.locator("[data-key=loss] button", has_text="Reset zoom")
    reset.wait_for()
    zoom = page.evaluate("document.querySelector('[data-key=loss] .plot').layout.xaxis.range")
    page.evaluate("""() => {
        const sources = JSON.parse(document.getElementById("sources").textContent);
        sources[1].series.step.loss[0] = 0.123;
        Paceline.update(sources, { headline: "news" });
    }""")
    assert traces(page, "loss")[0]["y"][0] == 0.123
    assert len(traces(page, "loss")) == 2
    assert page.evaluate("document.querySelector('[data-key=loss] .plot').layout.xaxis.range") == zoom
    assert page.locator("#headline").inner_text() == "news"
    reset.click()
    reset.wait_for(state="hidden")
    # The system says dark, the user chooses light, and the choice is kept.
    ink = "() => document.querySelector('[data-key=loss] .plot').layout.font.color"
    light, light_ink = page.evaluate("getComputedStyle(document.body).backgroundColor"), page.evaluate(ink)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function("() => document.documentElement.dataset.theme === 'dark'")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    assert page.evaluate(ink) != light_ink  # charts are drawn again
    page.get_by_role("button", name="Switch to light colors").click()
    assert page.evaluate(ink) == light_ink
    page.reload()
    page.wait_for_function(DRAWN)
    assert page.evaluate("document.documentElement.dataset.theme") == "light"


def test_numbers_times_and_line_styles(page: "Page", tmp_path: Path) -> None:
    one = make_train(tmp_path / "one")
    page.goto(write_report([one], tmp_path / "report.html").as_uri())
    page.wait_for_function(DRAWN)
    times = page.evaluate("[59.94, 59.96, 119.6, 3571, 3599.6, 7199, 0.9996].map(Paceline.time)")
    assert times == ["59.9 s", "1 min", "2 min", "59 min 31 s", "1 h", "2 h", "1 s"]
    figures = page.evaluate("[0, 0.001, 0.88, 0.00012345, 3.2e-9, 12345.6].map(Paceline.figure)")
    assert figures == ["0.0000", "0.0010", "0.8800", "0.0001234", "3.200e-9", "1.235e+4"]
    axis = page.evaluate("(({range, dtick}) => ({range, dtick}))(document.querySelector('[data-key=lr] .plot').layout.yaxis)")
    assert axis == {"range": [0, 0.2], "dtick": 0.05}  # a constant is drawn at its value
    waited = page.locator("#step .list").inner_text()
    assert "the other workers mostly waited for worker 1, which was 2 ms behind the median worker;" in waited
    assert page.locator("[data-key^='health '] .keys li").all_inner_texts() == list(COMPONENTS)
    heads = "[...document.querySelectorAll('#notes h3')].map(head => head.textContent)"
    assert page.evaluate(heads) == ["Notes"]
    shown = page.evaluate("""() => {
        const [one] = JSON.parse(document.getElementById("sources").textContent);
        one.series.health = Object.fromEntries(Object.entries(one.series.health).map(([name, ys]) => [name, ys.slice(0, 2)]));
        one.last.loss = 0.00012345;
        const more = Array.from({ length: 16 }, (_, place) => ({ ...one, id: `${place}`, name: `run ${place}` }));
        Paceline.update([one, ...more]);
        const said = document.querySelector("[data-key=runs]").textContent;
        document.querySelectorAll(".plot").forEach(plot => plot.scrollIntoView());
        return said;
    }""")
    assert "0.0001234" in shown
    assert page.evaluate(heads)[:2] == ["one", "run 0"]
    dashes = "key => document.querySelector(`[data-key='${key}'] .plot`).data.map(line => line.line.dash)"
    page.wait_for_function(f"() => ['speed', 'loss'].every(key => ({dashes})(key).length === 34)")
    assert page.evaluate(dashes, "speed")[:2] == ["solid", "dot"]
    loss = page.evaluate(dashes, "loss")
    assert [loss[2 * place : 2 * place + 2] for place in (0, 8, 16)] == [["solid", "dot"], ["dash", "dash"], ["dot", "dashdot"]]


def test_text_from_records_never_becomes_markup(page: "Page", tmp_path: Path) -> None:
    one = make_train(tmp_path / EVIL.replace("/", "\u2215"), model=EVIL, task=EVIL, optimizer=EVIL)
    broken = tmp_path / "<b>bold %{x} $x$"
    broken.mkdir()
    (broken / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "loss": 2, "<img src=x onerror=broken()>": 1}\n')
    page.goto(write_report([one, broken], tmp_path / "evil.html").as_uri())
    page.wait_for_function(DRAWN)
    assert page.evaluate("window.broken") is None
    assert page.locator("main img, main script, main a[href^=javascript], main svg a, h1 b").count() == 0
    assert page.locator(".chip").first.inner_text().startswith("<b>b<a href='mailto:a'>%{x}<script>window.broken=1")
    page.locator("[data-key=loss] .plot .nsewdrag").hover()
    page.wait_for_function("() => document.querySelector('[data-key=loss] .hoverlayer').textContent.includes('<b>b<a h')")
    assert page.locator(".hoverlayer a, .hoverlayer img").count() == 0
    assert "environment.json is missing" in page.locator("#notes").inner_text()


@pytest.mark.parametrize("page_options", [{"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}])
def test_a_phone_scrolls_only_down(page: "Page", report: str) -> None:
    page.goto(report)
    page.wait_for_function(DRAWN)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    wide = """() => [...document.querySelectorAll("main *")]
        .filter(each => !each.closest(".table-box, .plot, .nav") && each.getBoundingClientRect().right > 361)
        .map(each => each.outerHTML.slice(0, 80))"""
    assert page.evaluate(wide) == []
    heights = "[...document.querySelectorAll('[data-key^=buckets] tbody td')].map(cell => cell.clientHeight)"
    assert max(page.evaluate(heights)) < 40  # text outside the screen leaves no gap between the rows
