"""The board in a real browser: what is listed, selected and compared, and what appears while runs train."""

import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.boards import add_steps, begin_run, end_run, make_run, serving, wait_for_text

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'paceline[dev]'")
expect = playwright.expect
NAMES = "tbody .run-name"

NASTY = "<img src=x onerror=document.title='owned'>"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One board of four finished runs, for all tests that change nothing."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder, "alpha", 0.91, when="2026-03-01T10:00:00+00:00")
    make_run(folder, "beta", 0.93, when="2026-03-02T10:00:00+00:00", optimizer="lars", global_batch=8192)
    make_run(folder, "gamma", 0.5, "diverged", when="2026-03-03T10:00:00+00:00")
    make_run(folder / "study-x", "arm-0", 0.88, when="2026-02-01T10:00:00+00:00", optimizer="lamb")
    with serving(folder) as server:
        yield server.url


def colors(page: "Page", *ids: str) -> list[str]:
    """The colors of these runs in the list."""
    rows = [page.locator(f'tbody tr[data-id="{id}"]') for id in ids]
    return [row.evaluate("row => row.style.getPropertyValue('--color')") for row in rows]


def traces(page: "Page") -> list[dict[str, Any]]:
    """The lines of the first chart."""
    found: list[dict[str, Any]] = page.evaluate("document.querySelector('.plot').data")
    return found


def sections(page: "Page") -> list[str]:
    """The section titles in document order, which is also the order of the Tab key and must be the visual order."""
    found: list[tuple[str, float]] = page.evaluate(
        "[...document.querySelectorAll('main h2')].map(head => [head.textContent, head.getBoundingClientRect().top])"
    )
    assert [top for _, top in found] == sorted(top for _, top in found)
    return [title for title, _ in found]


def wait_for_points(page: "Page", title: str, wanted: list[int]) -> None:
    """Wait until the lines of a chart have these numbers of points."""
    script = """([title, wanted]) => {
        const card = [...document.querySelectorAll(".card")].find(card => card.querySelector("h3")?.textContent === title);
        return JSON.stringify(card?.querySelector(".plot")?.data?.map(line => line.x.length)) === wanted;
    }"""
    page.wait_for_function(script, arg=[title, str(wanted).replace(" ", "")])


@pytest.mark.usefixtures("no_charts")
def test_lists_sorts_and_filters(page: "Page", url: str) -> None:
    page.goto(url)
    expect(page.locator("#count")).to_have_text("4 runs shown, 1 selected")
    wait_for_text(page, NAMES, ["gamma", "beta", "alpha", "study-x"])  # the newest first
    head = page.get_by_role("columnheader", name="last accuracy")
    head.get_by_role("button").click()
    wait_for_text(page, NAMES, ["beta", "alpha", "gamma", "study-x"])  # a group has no last validation
    expect(head).to_have_attribute("aria-sort", "descending")
    head.get_by_role("button").click()
    wait_for_text(page, NAMES, ["gamma", "alpha", "beta", "study-x"])
    expect(head).to_have_attribute("aria-sort", "ascending")
    page.get_by_role("searchbox").fill("lars")
    wait_for_text(page, NAMES, ["beta"])
    expect(page.locator("#count")).to_have_text("1 run shown of 4, 1 selected")
    page.get_by_role("searchbox").fill("no such run")
    expect(page.get_by_text("No run matches.")).to_be_visible()
    page.get_by_role("button", name="Clear the filter").click()
    page.get_by_label("Status", exact=True).select_option("diverged")
    wait_for_text(page, NAMES, ["gamma"])
    assert "status=diverged" in page.url
    assert "sort=last" in page.url


@pytest.mark.usefixtures("no_charts")
def test_the_url_holds_what_is_shown(page: "Page", url: str) -> None:
    page.goto(f"{url}#run=alpha&run=beta&sort=-epochs&q=a&x=epoch")
    wait_for_text(page, "h1", ["2 records compared"])
    expect(page.get_by_role("searchbox")).to_have_value("a")
    expect(page.get_by_role("columnheader", name="epochs")).to_have_attribute("aria-sort", "descending")
    expect(page.locator("[data-x=epoch]")).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="time", exact=True).click()
    expect(page).to_have_url(re.compile("x=time_s"))
    page.get_by_role("link", name="Environment").click()  # within the page: the URL does not change
    assert "run=alpha" in page.url
    page.goto("about:blank")
    page.go_back()
    expect(page.get_by_role("button", name="time", exact=True)).to_have_attribute("aria-pressed", "true")


def test_a_point_appears_while_a_run_trains_and_its_status_changes(page: "Page", own: str, tmp_path: Path) -> None:
    make_run(tmp_path, "alpha", 0.91, when="2026-03-09T10:00:00+00:00")
    live = begin_run(tmp_path, "live", when="2026-03-01T10:00:00+00:00")
    add_steps(live, 1, 12)
    page.goto(own)
    wait_for_text(page, "h1", ["live"])  # a running record is shown first
    row = page.get_by_role("row", name="Compare live")
    expect(row).to_contain_text("running 30%")
    wait_for_points(page, "Loss", [12, 1])
    page.locator("[data-x=epoch]").click()
    page.evaluate("() => Plotly.relayout(document.querySelector('.plot'), {'xaxis.range': [0.5, 1.5]})")
    add_steps(live, 13, 20)
    wait_for_points(page, "Loss", [20, 2])
    assert page.evaluate("() => document.querySelector('.plot').layout.xaxis.range") == [0.5, 1.5]  # a zoom stays
    expect(page.locator("#headline")).to_contain_text("step 20 of 40")
    expect(row).to_contain_text("running 50%")
    expect(page.locator("[data-x=epoch]")).to_have_attribute("aria-pressed", "true")
    add_steps(live, 21, 40)
    end_run(live, 0.87)
    expect(row).to_contain_text("done")
    expect(row).to_contain_text("0.8700")
    expect(page.locator("#headline")).to_contain_text("to accuracy 0.8700")
    wait_for_points(page, "Loss", [40, 4])


def test_a_batch_that_grows_is_listed_as_a_range_and_drawn_live(page: "Page", own: str, tmp_path: Path) -> None:
    live, phase = begin_run(tmp_path, "live", train_samples=2560), {"kind": "phase", "virtual_workers": 2}
    live.row({**phase, "step": 0, "epoch": 0.0, "global_batch": 64, "total_steps": 80})
    add_steps(live, 1, 3)
    page.goto(f"{own}?run=live")
    page.wait_for_selector("[data-key='batch'] .plot .main-svg")
    live.row({**phase, "step": 3, "epoch": 0.1, "global_batch": 256, "total_steps": 41})
    add_steps(live, 4, 5)
    batches = "document.querySelector(\"[data-key='batch'] .plot\").data[0].y.join()"
    page.wait_for_function(f"() => {batches} === '64,256,256'")
    add_steps(live, 6, 7)  # these come as rows: the line becomes longer
    page.wait_for_function("() => document.querySelector(\"[data-key='batch'] .plot\").data[0].x.at(-1) === 7")
    expect(page.get_by_role("row", name="Compare live")).to_contain_text("64\N{EN DASH}256")
    end_run(live)


def test_runs_are_overlaid_in_their_own_colors_and_their_differences_shown(page: "Page", url: str) -> None:
    page.goto(f"{url}#run=alpha&open=study-x")
    wait_for_points(page, "Loss", [40, 4])
    assert sections(page) == ["Curves", "Contract", "Environment"]
    page.get_by_role("checkbox", name="Compare beta").check()
    wait_for_points(page, "Loss", [40, 4, 40, 4])
    assert sections(page) == ["Curves", "Results", "Differences", "Environment"]
    table = page.get_by_role("region", name="Where the runs differ")
    expect(table.get_by_role("columnheader")).to_have_text(["option", "alpha", "beta"])
    expect(table).to_contain_text("8,192")
    expect(table).to_contain_text("lars")
    expect(table).not_to_contain_text("cnn:width=8")
    # The list's colors are the charts'.
    lines = [trace["line"]["color"] for trace in traces(page)]
    assert colors(page, "alpha", "beta") == [lines[0], lines[2]]
    page.locator('tbody tr[data-id="study-x/arm-0"] .c-pick').click(
        position={"x": 3, "y": 3}
    )  # next to the checkbox works, too
    wait_for_points(page, "Loss", [40, 4, 40, 4, 40, 4])
    page.get_by_role("button", name="Remove study-x/arm-0").click()
    wait_for_points(page, "Loss", [40, 4, 40, 4])
    page.get_by_role("button", name="Remove alpha").click()
    wait_for_points(page, "Loss", [40, 4])
    wait_for_text(page, "h1", ["beta"])
    assert sections(page) == ["Curves", "Contract", "Environment"]
    # A new run takes the color of a removed one. When that one returns, it gets another color.
    page.get_by_role("checkbox", name="Compare gamma").check()
    wait_for_points(page, "Loss", [40, 4, 40, 4])
    assert colors(page, "gamma") == [lines[0]]  # this color is free again
    page.get_by_role("checkbox", name="Compare alpha").check()
    wait_for_points(page, "Loss", [40, 4, 40, 4, 40, 4])
    shown = traces(page)
    assert len({trace["uid"] for trace in shown}) == 6
    assert colors(page, "beta", "gamma", "alpha") == [trace["line"]["color"] for trace in shown[::2]]
    assert len(set(colors(page, "beta", "gamma", "alpha"))) == 3
    assert colors(page, "beta") == [lines[2]]  # a run that stays keeps its color


@pytest.mark.usefixtures("no_charts")
def test_names_from_records_are_text(page: "Page", own: str, tmp_path: Path) -> None:
    task = "<script>document.title='owned'<" + "/script>"
    make_run(tmp_path, NASTY, 0.7, when="2026-03-09T10:00:00+00:00", task=task, unit=NASTY)
    make_run(tmp_path, "other", 0.7, optimizer="<b>bold</b>", unit=NASTY)
    page.goto(own)
    wait_for_text(page, "h1", [NASTY])
    page.get_by_role("checkbox", name="Compare other").check()
    expect(page.get_by_role("region", name="Where the runs differ")).to_contain_text("<b>bold</b>")
    assert page.locator("main img, main script, main b, aside img, aside script, aside b").count() == 0
    assert "owned" not in page.title().replace(NASTY, "")


@pytest.mark.usefixtures("no_charts")
def test_everything_works_by_keyboard(page: "Page", url: str) -> None:
    page.goto(f"{url}#sort=name&open=study-x")
    wait_for_text(page, NAMES, ["alpha", "beta", "gamma", "study-x", "arm-0"])
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.type("a")
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("checkbox", name="Compare alpha")).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("checkbox", name="Compare beta")).to_be_focused()
    page.keyboard.press("Space")
    wait_for_text(page, "h1", ["beta"])
    expect(page.get_by_role("checkbox", name="Compare beta")).to_be_focused()
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    wait_for_text(page, "h1", ["study-x/arm-0"])
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("checkbox", name="Compare the runs of study-x")).to_be_focused()
    page.keyboard.press("ArrowLeft")
    wait_for_text(page, NAMES, ["alpha", "beta", "gamma", "study-x"])
    page.keyboard.press("ArrowRight")
    wait_for_text(page, NAMES, ["alpha", "beta", "gamma", "study-x", "arm-0"])
    page.keyboard.press("Home")
    page.keyboard.press("Space")
    wait_for_text(page, "h1", ["2 records compared"])
    ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert ring == "solid"
    page.keyboard.press("Tab")  # out of the list at once, however long it is
    expect(page.get_by_role("button", name="Remove study-x/arm-0")).to_be_focused()
    page.keyboard.press("Enter")
    wait_for_text(page, "h1", ["alpha"])


@pytest.mark.usefixtures("no_charts")
def test_only_visible_rows_of_thousands_exist(page: "Page", own: str, tmp_path: Path) -> None:
    for number in range(600):
        folder = tmp_path / f"run-{number:04}"
        folder.mkdir()
        (folder / "result.json").write_text('{"status": "done"}')
    page.goto(f"{own}#sort=name")
    expect(page.locator("#count")).to_have_text("600 runs shown")
    expect(page.get_by_role("table", name="Runs in this folder")).to_have_attribute("aria-rowcount", "601")
    assert page.locator("tbody tr").count() < 100
    page.get_by_role("checkbox", name="Compare run-0000").focus()
    page.keyboard.press("End")
    expect(page.get_by_role("checkbox", name="Compare run-0599")).to_be_focused()
    expect(page.get_by_role("checkbox", name="Compare run-0599")).to_be_in_viewport()
    assert page.locator("tbody tr").count() < 100


@pytest.mark.usefixtures("no_charts")
def test_an_empty_folder_says_how_to_make_a_run_and_shows_it(page: "Page", own: str, tmp_path: Path) -> None:
    page.goto(own)
    expect(page.get_by_text(f"paceline train fashion-mnist-mini --runs-dir {tmp_path}")).to_be_visible()
    live = begin_run(tmp_path, "first", task="my_task.py", unit="windows")
    wait_for_text(page, NAMES, ["first"])
    expect(page.get_by_role("row", name="Compare first")).to_contain_text("running")
    expect(page.get_by_role("columnheader", name="windows/s")).to_be_visible()
    end_run(live, status="interrupted")
    expect(page.get_by_role("row", name="Compare first")).to_contain_text("interrupted")


@pytest.mark.usefixtures("no_charts")
def test_a_missing_run_is_reported_with_the_reason(page: "Page", tmp_path: Path) -> None:
    root = tmp_path / "runs"
    make_run(root, "alpha")
    shutil.copytree(make_run(tmp_path, "elsewhere"), root / "linked")
    (root / "linked" / "result.json").unlink()
    (root / "linked" / "result.json").symlink_to(tmp_path / "elsewhere" / "result.json")
    with serving(root) as server:
        page.goto(f"{server.url}#run=nosuch")
        wait_for_text(page, "h1", ["Not found"])
        wait_for_text(page, "#headline", ["The runs named in the URL are not in this folder, or were removed."])
        expect(page.locator("#save")).to_be_hidden()
        wait_for_text(page, "#chosen li small", ["missing"])
        expect(page.locator("#count")).to_have_text("2 runs shown, 0 selected, 1 missing")
        page.get_by_role("checkbox", name="Compare alpha").check()
        wait_for_text(page, "h1", ["alpha"])
        with page.expect_response(lambda answer: "events?" in answer.url):  # a new stream, of alpha alone
            page.get_by_role("button", name="Remove nosuch").click()
        shutil.rmtree(root / "alpha")
        wait_for_text(page, "h1", ["Not found"])
        wait_for_text(page, "#chosen li small", ["missing"])
        expect(page.locator("#count")).to_have_text("1 run shown, 0 selected, 1 missing")
        page.locator("tbody tr[data-id=linked] .run-name").click()
        wait_for_text(page, "h1", ["linked"])
        expect(page.locator("#headline")).to_have_text("not read: result.json is a link that leads out of the board's folder")
        make_run(root, "beta")
        page.locator("tbody tr[data-id=beta] .run-name").click()
        wait_for_text(page, "h1", ["beta"])


@pytest.mark.usefixtures("no_charts")
def test_the_age_of_a_run_is_updated_and_a_lost_connection_is_reported(page: "Page", own: str, tmp_path: Path) -> None:
    make_run(tmp_path, "alpha", when=datetime.now(UTC).isoformat())
    page.add_init_script("""
        const Source = EventSource;
        window.EventSource = class extends Source { constructor(address) { super(address); window.stream = this; } };
    """)
    page.clock.install()
    page.goto(own)
    wait_for_text(page, "tbody .c-when", ["just now"])
    page.clock.fast_forward("03:30")
    wait_for_text(page, "tbody .c-when", ["3 min ago"])
    wait_for_text(page, "tbody .facts", ["3 min ago · P 2 · fashion-mnist-mini"])
    page.evaluate("stream.dispatchEvent(new Event('error'))")
    expect(page.locator("#link")).to_have_text("no connection: is the board still running? It may have a new address")


@pytest.mark.usefixtures("no_charts")
def test_a_token_moves_from_the_url_to_a_cookie(page: "Page", tmp_path: Path) -> None:
    make_run(tmp_path, "alpha")
    with serving(tmp_path, "0.0.0.0") as server:
        page.goto(re.sub("//[^:]+:", "//127.0.0.1:", server.url))
        wait_for_text(page, NAMES, ["alpha"])
        assert "token" not in page.url
        page.reload()
        wait_for_text(page, NAMES, ["alpha"])


@pytest.mark.parametrize(
    "page_options", [{"viewport": {"width": 390, "height": 844}, "has_touch": True, "color_scheme": "dark"}]
)
@pytest.mark.usefixtures("no_charts")
def test_a_phone_shows_the_loss_if_there_is_no_accuracy(page: "Page", own: str, tmp_path: Path) -> None:
    end_run(begin_run(tmp_path, "regression"), metrics={"loss": 0.00012345})
    page.goto(own)
    row = page.get_by_role("row", name="Compare regression")
    expect(row.locator(".c-best")).to_have_text("0.0001234")
    expect(row.locator(".c-best")).to_have_attribute("data-metric", "loss")
    expect(row.locator(".c-best")).to_be_visible()
    assert page.evaluate("document.getElementById('rows').scrollWidth <= document.getElementById('rows').clientWidth")


@pytest.mark.parametrize(
    "page_options", [{"viewport": {"width": 390, "height": 844}, "has_touch": True, "color_scheme": "dark"}]
)
@pytest.mark.usefixtures("no_charts")
def test_a_phone_shows_it_without_scrolling_sideways(page: "Page", url: str) -> None:
    page.goto(f"{url}#run=alpha&run=beta")
    wait_for_text(page, "h1", ["2 records compared"])
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.getElementById('rows').scrollWidth <= document.getElementById('rows').clientWidth")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
