"""The board's list in a real browser: groups that fold, what a row shows, and that nothing overlaps on any screen."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.boards import add_steps, begin_run, end_run, make_run, make_study, serving, wait_for_text
from harness.pages import make_scale

if TYPE_CHECKING:
    from playwright.sync_api import Page

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'paceline[dev]'")
pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("no_charts")]
expect = playwright.expect
NAMES = "tbody .run-name"
NASTY = "<img src=x onerror=document.title='owned'>"
WHY = f"ValueError: label 12 of sample {NASTY} is out of range: expected 0 to 9"
ARMS = {"narrow": 0.81, "wide-batch-512-warm-up-over-half-of-the-run": 0.74, "wider": 0.83}
DEFAULT_NAME = "fashion-mnist-mini-20261116-101500"  # as a run without --name is called
TOO_LONG = f"{DEFAULT_NAME}-with-a-name-that-is-much-too-long-for-any-column-of-the-list"
SCREENS = [(1400, "light"), (1024, "dark"), (800, "light"), (390, "dark")]

OVERLAPS = """() => {
    const box = (element, within) => {  // the part of an element that can be seen
        let { left, right, top, bottom } = element.getBoundingClientRect();
        for (let each = element; each !== within; each = each.parentElement) {
            if (getComputedStyle(each).overflowX === "visible") continue;
            const clip = each.getBoundingClientRect();
            [left, right] = [Math.max(left, clip.left), Math.min(right, clip.right)];
            [top, bottom] = [Math.max(top, clip.top), Math.min(bottom, clip.bottom)];
        }
        return { text: element.textContent, left, right, top, bottom };
    };
    const found = [];
    for (const row of document.querySelectorAll("tbody tr[data-id]")) {
        const texts = [".run-name > *", ".facts", ".second", ".badge", "td:not(.c-status)", ".fold"];
        const seen = [...row.querySelectorAll(texts.join())].filter(each => each.checkVisibility() && each.childNodes.length);
        const boxes = seen.map(each => {
            const range = document.createRange();  // the text, not the cell around it
            range.selectNodeContents(each);
            const [text, whole] = [range.getBoundingClientRect(), box(each, row)];
            const left = Math.max(text.left, whole.left), right = Math.min(text.right, whole.right);
            return { ...whole, left, right, top: Math.max(text.top, whole.top), bottom: Math.min(text.bottom, whole.bottom) };
        });
        const inside = row.getBoundingClientRect();
        boxes.forEach((a, index) => {
            const fits = a.left >= inside.left - 1 && a.right <= inside.right + 1 && a.bottom <= inside.bottom + 1;
            if (!fits) found.push([a.text, "outside"]);
            for (const b of boxes.slice(index + 1)) {
                const apart = a.right <= b.left + 1 || b.right <= a.left + 1 || a.bottom <= b.top + 1 || b.bottom <= a.top + 1;
                if (!apart) found.push([a.text, b.text]);
            }
        });
    }
    return found;
}"""
UNEXPECTED_HEIGHTS = """() => {  // the list computes which rows are visible from these heights
    const style = getComputedStyle(document.getElementById("rows"));
    const [plain, tall] = ["--row", "--tall"].map(name => parseFloat(style.getPropertyValue(name)));
    return [...document.querySelectorAll("tbody tr[data-id]")]
        .filter(row => row.getBoundingClientRect().height !== (row.classList.contains("is-tall") ? tall : plain))
        .map(row => [row.dataset.id, row.getBoundingClientRect().height]);
}"""
SHORTENED = """() => [...document.querySelectorAll(".run-name > :first-child")]
    .filter(each => each.scrollWidth > each.clientWidth + 1).map(each => each.parentElement.textContent)"""

CUT = """() => [...document.querySelectorAll("tbody td")]
    .filter(cell => cell.scrollWidth > cell.clientWidth + 1).map(cell => cell.textContent)"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A board with finished, failed, running and unreadable runs, a study, a folder of runs and a scaling measurement."""
    root = tmp_path_factory.mktemp("runs")
    make_run(root, DEFAULT_NAME, 0.9)
    make_run(root, TOO_LONG, 0.9, workers=128, virtual_workers=1024)
    failed = begin_run(root, "failed", epochs=1000)
    add_steps(failed, 1, 20)
    end_run(failed, 0.5, "failed", why=WHY, samples_per_s=1234567.0, train_time_s=4000.0)
    make_study(root, "study-width", ARMS)
    make_run(root / "sweep", "lr-0.1", 0.9)
    make_scale(root / "scale-mini")
    make_run(root, "linked")
    (root / "linked" / "result.json").unlink()
    (root / "linked" / "result.json").symlink_to(os.devnull)
    live = begin_run(root, "live", total_steps=400)
    add_steps(live, 1, 45)
    with serving(root) as server:
        yield server.url
    end_run(live)


@pytest.mark.parametrize(
    "page_options",
    [{"viewport": {"width": width, "height": 1300}, "color_scheme": scheme} for width, scheme in SCREENS],
    ids=[f"{width} px" for width, _ in SCREENS],
)
def test_nothing_overlaps(page: "Page", url: str) -> None:
    page.goto(f"{url}#sort=name&open=study-width&open=sweep")
    wait_for_text(page, "tr.level-1 .run-name", [*(f"{arm}-seed0" for arm in ARMS), "lr-0.1"])
    expect(page.get_by_role("row", name="Compare live")).to_contain_text("running 11%")
    assert page.evaluate(OVERLAPS) == []
    assert page.evaluate(UNEXPECTED_HEIGHTS) == []
    assert page.evaluate("document.getElementById('rows').scrollWidth <= document.getElementById('rows').clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert set(page.evaluate(SHORTENED)) <= {TOO_LONG, f"{list(ARMS)[1]}-seed0"}


@pytest.mark.parametrize("page_options", [{"viewport": {"width": 1400, "height": 900}}])
def test_numbers_are_whole_and_the_curves_are_on_the_first_screen(page: "Page", own: str, tmp_path: Path) -> None:
    study = make_study(tmp_path, "study-a", {f"adamw-with-decoupled-weight-decay-{arm}": 0.8 for arm in range(8)})
    for place, arm in enumerate(sorted(study.glob("*/result.json"))):
        arm.write_text(json.dumps({**json.loads(arm.read_text()), "samples_per_s": 19078.0 + 5000 * place}))
    found = json.loads((study / "study.json").read_text())
    (study / "study.json").write_text(json.dumps({**found, "mini": True}))
    loss = make_run(tmp_path, "by-loss", task="another")
    for name in ("metrics.jsonl", "course.csv"):
        (loss / name).write_text("")
    (loss / "result.json").write_text(json.dumps({"status": "done", "metrics": {"loss": 0.2207}, "epochs": 3}))
    live = begin_run(tmp_path, "live", total_steps=141000, epochs=3000)
    add_steps(live, 1, 10)
    live.row({"kind": "epoch", "epoch": 999, "step": 9990, "time_s": 999.0, "samples_per_s": 2560.0, "val_accuracy": 0.8})
    page.goto(f"{own}#sort=name&open=study-a")
    expect(page.locator('tr[data-id="study-a"] .c-samples_per_s')).to_have_text("19,078\u201354,078")
    expect(page.locator('tr[data-id="study-a"] .second')).to_contain_text("a trial with --mini: its numbers mean nothing")
    expect(page.locator('tr[data-id="live"] .c-epochs')).to_have_text("999 of 3,000")
    assert page.evaluate(CUT) == []
    assert page.evaluate(SHORTENED) == []
    page.get_by_role("checkbox", name="Compare the runs of study-a").check()
    wait_for_text(page, "h1", ["8 runs of study-a compared"])
    assert page.locator("main h2").all_inner_texts()[:2] == ["Curves", "Results"]  # the list shows the results, too
    expect(page.get_by_role("region", name="Results of each run")).to_have_count(1)
    top = page.locator("[data-key=loss] .plot").bounding_box()
    assert top
    assert top["y"] + 100 < 900
    page.locator(NAMES, has_text="live").click()
    wait_for_text(page, "h1", ["live"])
    top = page.locator("[data-key=loss] .plot").bounding_box()
    assert top
    assert top["y"] + 100 < 900
    end_run(live)


def test_a_group_keeps_its_fold_state_while_runs_come_and_go(page: "Page", own: str, tmp_path: Path) -> None:
    make_study(tmp_path, "study-a", {"one": 0.8, "two": 0.9}, seeds=[0, 1])
    make_study(tmp_path, "study-b", {"one": 0.8})
    page.goto(f"{own}#sort=name")
    wait_for_text(page, NAMES, ["study-a", "study-b"])
    wait_for_text(
        page,
        "tbody .second",
        [
            "study · 4 runs: 2 done, 2 to do · best arm: two, accuracy 0.9000 (1)",
            "study · 1 run done · best arm: one, accuracy 0.8000 (1)",
        ],
    )
    fold = page.get_by_role("button", name="Runs of study-a")
    expect(fold).to_have_attribute("aria-expanded", "false")
    fold.click()
    wait_for_text(page, NAMES, ["study-a", "one-seed0", "two-seed0", "study-b"])
    expect(fold).to_be_focused()
    page.get_by_role("checkbox", name="Compare study-a/one-seed0").check()
    live = begin_run(tmp_path / "study-a", "one-seed1")
    make_run(tmp_path, "another")
    wait_for_text(page, NAMES, ["another", "study-a", "one-seed0", "one-seed1", "two-seed0", "study-b"])
    expect(page.locator('tr[data-id="study-a"] .second')).to_contain_text("4 runs: 2 done, 1 running, 1 to do")
    expect(page.locator('tr[data-id="study-a"] .badge')).to_have_text("running 50%")  # its study.json says: incomplete
    expect(fold).to_have_attribute("aria-expanded", "true")
    expect(page.get_by_role("checkbox", name="Compare study-a/one-seed0")).to_be_checked()
    end_run(live)
    page.reload()  # the URL has it, too
    wait_for_text(page, NAMES, ["another", "study-a", "one-seed0", "one-seed1", "two-seed0", "study-b"])
    fold.click()
    wait_for_text(page, NAMES, ["another", "study-a", "study-b"])
    assert "open=" not in page.url


def test_a_study_is_selected_as_a_whole_and_its_row_shows_its_page(page: "Page", own: str, tmp_path: Path) -> None:
    make_study(tmp_path, "study-a", {"one": 0.8, "two": 0.9})
    make_run(tmp_path, "alpha")
    make_run(tmp_path / "sweep", "lr-0.1")
    page.goto(f"{own}#sort=name")
    box = page.get_by_role("checkbox", name="Compare the runs of study-a")
    box.check()
    wait_for_text(page, "h1", ["2 runs of study-a compared"])
    expect(page.locator("#headline")).to_contain_text("2 runs: two-seed0 ended best")
    wait_for_text(page, "#chosen li > span:nth-child(2)", ["one-seed0", "two-seed0"])
    page.get_by_role("button", name="Remove study-a/one-seed0").click()
    wait_for_text(page, "h1", ["study-a/two-seed0"])
    assert box.evaluate("box => [box.checked, box.indeterminate]") == [False, True]
    box.check()
    wait_for_text(page, "h1", ["2 runs of study-a compared"])
    box.uncheck()
    expect(page.locator("#chosen")).to_be_hidden()
    page.locator(NAMES, has_text="study-a").click()
    wait_for_text(page, "h1", ["study-a"])
    expect(page.locator("#headline")).to_contain_text("2 arms, 2 runs. Best: two")
    page.locator(NAMES, has_text="sweep").click()  # a folder without a page of its own opens
    wait_for_text(page, NAMES, ["alpha", "study-a", "sweep", "lr-0.1"])
    wait_for_text(page, "h1", ["study-a"])


def test_a_study_with_more_runs_than_can_be_compared_says_so(page: "Page", own: str, tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / "sweep" / f"lr-{number:02}").mkdir(parents=True)
        (tmp_path / "sweep" / f"lr-{number:02}" / "result.json").write_text('{"status": "done"}')
    page.goto(f"{own}#sort=name&q=lr")
    expect(page.locator("#count")).to_have_text("30 runs shown")
    page.get_by_role("checkbox", name="Compare the runs of sweep").click()
    expect(page.locator("#count")).to_have_text("At most 24 runs can be compared: 24 of these 30 are selected")
    expect(page.locator("#chosen li")).to_have_count(24)


def test_a_failed_run_shows_why_as_text(page: "Page", own: str, tmp_path: Path) -> None:
    end_run(begin_run(tmp_path, "broken"), status="failed", why=f"{WHY}\nand a second line")
    end_run(begin_run(tmp_path / f"{NASTY}", NASTY), status="diverged", why="diverged: the loss is nan at step 7")
    page.goto(f"{own}#sort=name&open={NASTY}")
    row = page.get_by_role("row", name="Compare broken")
    expect(row.locator(".second")).to_have_text(WHY)
    expect(row.locator(".second")).to_be_visible()
    expect(page.get_by_role("row", name=f"Compare {NASTY}/{NASTY}").locator(".second")).to_have_text(
        "the loss is nan at step 7"
    )
    wait_for_text(page, NAMES, [NASTY, NASTY, "broken"])
    assert page.locator("aside img").count() == 0
    row.locator(".second").click()
    wait_for_text(page, "h1", ["broken"])
    expect(page.locator("header.hero, main").filter(has_text=WHY).first).to_be_visible()
    assert "owned" not in page.title()
    assert page.locator("img").count() == 0


def test_groups_are_sorted_by_their_best_run_and_a_filter_opens_them(page: "Page", own: str, tmp_path: Path) -> None:
    make_study(tmp_path, "study-a", {"low": 0.7, "high": 0.95})
    make_run(tmp_path, "alpha", 0.9)
    (tmp_path / "alpha" / "metrics.jsonl").write_text("")  # its only accuracy is the one in its result
    for arm in ("low", "high"):
        (tmp_path / "study-a" / f"{arm}-seed0" / "metrics.jsonl").write_text("")
    page.goto(f"{own}#sort=-best&open=study-a")
    wait_for_text(page, NAMES, ["study-a", "high-seed0", "low-seed0", "alpha"])
    wait_for_text(page, "tbody .c-best", ["0.9500", "0.9500", "0.7000", "0.9000"])
    page.get_by_role("columnheader", name="best accuracy").get_by_role("button").click()
    wait_for_text(page, NAMES, ["alpha", "study-a", "low-seed0", "high-seed0"])
    page.get_by_role("button", name="Runs of study-a").click()
    wait_for_text(page, NAMES, ["alpha", "study-a"])
    page.get_by_role("searchbox").fill("high")
    wait_for_text(page, NAMES, ["study-a", "high-seed0"])
    expect(page.locator("#count")).to_have_text("1 run shown of 3")
    page.get_by_role("searchbox").fill("")
    wait_for_text(page, NAMES, ["alpha", "study-a"])


def test_new_runs_do_not_move_what_the_user_reads(page: "Page", own: str, tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"run-{number:03}").mkdir()
        (tmp_path / f"run-{number:03}" / "result.json").write_text('{"status": "done"}')
    page.goto(f"{own}#sort=name")
    expect(page.locator("#count")).to_have_text("200 runs shown")
    page.locator("#rows").evaluate("rows => { rows.scrollTop = 100 * 38 + 7; }")
    row = page.locator('tr[data-id="run-105"]')
    expect(row).to_be_in_viewport()
    before = row.bounding_box()
    end_run(begin_run(tmp_path, "an-early-name"), status="failed", why="a reason, so that its row is taller")
    expect(page.locator("#count")).to_have_text("201 runs shown")
    assert row.bounding_box() == before
