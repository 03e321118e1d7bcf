"""What a reader of a report sees first, and the choices on the page: far values, shares, smoothing, errors, a small page."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness.pages import COMPONENTS_S, make_growing, make_train
from paceline.report.page import write_report

if TYPE_CHECKING:
    from playwright.sync_api import Page

STUDY = Path(__file__).parents[2] / "studies" / "results" / "ingredients.json"
DESKTOP = {"viewport": {"width": 1400, "height": 900}}
LAPTOP = {"viewport": {"width": 1024, "height": 768}}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
SCRIPT = "<script>window.broken=1</script><img src=x onerror='window.broken=2'>"
DRAWN = "() => [...document.querySelectorAll('.plot')].every(plot => plot.querySelector('svg.main-svg'))"
PLOT = "key => (({data, layout}) => ({data, layout}))(document.querySelector(`[data-key='${key}'] .plot`))"
LIBRARY = "plotly.min.js"
SEEDS = [f"adamw-with-decoupled-weight-decay-and-warm-up-seed{seed}" for seed in range(8)]
CUT = "selector => [...document.querySelectorAll(selector)].filter(each => each.scrollWidth > each.clientWidth + 1).length"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose pages share one library file: they are small, and written quickly."""
    return tmp_path_factory.mktemp("views")


def show(page: "Page", folder: Path, name: str, *paths: Path) -> None:
    out = write_report(paths, folder / f"{name}.html", str(folder / LIBRARY))
    assert out.stat().st_size < 500_000
    page.goto(out.as_uri())
    page.wait_for_function(DRAWN)


def plot(page: "Page", key: str) -> Any:
    return page.evaluate(PLOT, key)


def rewrite(record: Path, change: Any) -> Path:
    """Change the rows of a run."""
    rows = [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]
    (record / "metrics.jsonl").write_text("".join(json.dumps(change(row)) + "\n" for row in rows))
    return record


def box(page: "Page", selector: str) -> dict[str, float]:
    found = page.locator(selector).first.bounding_box()
    assert found
    return dict(found)


@pytest.mark.parametrize(("page_options", "most"), [(DESKTOP, 900), (PHONE, 844)], ids=["desktop", "phone"])
def test_the_first_curve_is_on_the_first_screen(page: "Page", folder: Path, tmp_path: Path, most: int) -> None:
    """All of it on a desktop, its top on a phone. The contract comes after the charts."""
    show(page, folder, "one", make_train(tmp_path / "a-run-with-a-name"))
    first = box(page, "[data-key=loss] .plot")
    assert first["y"] + (first["height"] if most == 900 else 60) < most
    heads = page.locator("h2").all_inner_texts()
    assert heads[0] == "Curves"
    assert heads[-3:] == ["Contract", "Notes and problems", "Environment"]
    show(page, folder, "four", *(make_train(tmp_path / f"run-{place}") for place in range(4)))
    assert box(page, "[data-key=loss] .plot")["y"] + 100 < most + (200 if most == 844 else 0)


@pytest.mark.parametrize("page_options", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_verdict_is_the_second_column_and_in_view(page: "Page", folder: Path) -> None:
    show(page, folder, "study", STUDY)
    assert page.locator("#study thead th").all_inner_texts()[:2] == ["arm", "verdict"]
    frame = box(page, "#study .table-box")
    for cell in page.locator("#study tbody tr > :nth-child(2)").all():
        at = cell.bounding_box()
        assert at
        assert at["x"] + at["width"] <= frame["x"] + frame["width"] + 1
    clipped = (
        "[...document.querySelectorAll('#study td, #study th')].filter(cell => cell.scrollWidth > cell.clientWidth + 1).length"
    )
    assert page.evaluate(clipped) == 0
    if page.viewport_size == DESKTOP["viewport"]:
        assert page.evaluate("(box => box.scrollWidth - box.clientWidth)(document.querySelector('#study .table-box'))") <= 0


def test_only_options_that_differ_are_listed_and_the_best_value_beside_the_last(
    page: "Page", folder: Path, tmp_path: Path
) -> None:
    one, two = make_train(tmp_path / "one", record="runs/one"), make_train(tmp_path / "two", record="runs/two", seed=1)
    for record, smoothing in ((one, 0.0), (two, 0.1)):
        (record / "config.toml").write_text(f'label_smoothing = {smoothing}\nclip_norm = 1.0\nname = "{record.name}"\n')
    rewrite(one, lambda row: row | ({"val_accuracy": 0.95} if row["kind"] == "epoch" and row["epoch"] == 2 else {}))
    show(page, folder, "differ", one, two)
    table = page.get_by_role("region", name="Where the runs differ")
    assert table.locator("tbody tr").all_inner_texts() == ["seed\t0\t1", "label smoothing\t0\t0.1"]
    assert page.locator("#differences details").get_attribute("open") is None
    assert "clip norm" in (page.locator("#differences details").text_content() or "")
    row = page.get_by_role("region", name="Results of each run").locator("tbody tr").first.inner_text()
    assert row.split("\t")[2:4] == ["0.8800", "0.9500 (2)"]
    [line] = [trace for trace in plot(page, "m-accuracy")["data"] if trace["name"].startswith("one")]
    assert line["marker"]["symbol"] == ["circle", "star", "circle"]
    best = page.evaluate("Paceline.bestOf(JSON.parse(document.getElementById('sources').textContent)[0], 'accuracy')")
    assert best == {"value": 0.95, "epoch": 2}


def test_a_diverged_run_does_not_flatten_the_others(page: "Page", folder: Path, tmp_path: Path) -> None:
    good = [make_train(tmp_path / name) for name in ("one", "two")]
    bad = make_train(tmp_path / "bad", status="diverged", accuracy=0.3)
    rewrite(bad, lambda row: row | ({"loss": 10.0 ** row["step"]} if row["kind"] == "step" and row["step"] > 20 else {}))
    show(page, folder, "diverged", *good, bad)
    found = plot(page, "loss")
    low, high = found["layout"]["yaxis"]["range"]
    assert -0.1 < low < 0.05 < 0.6 < high < 0.7  # the good runs are between 0.05 and 0.6
    [mark] = [trace for trace in found["data"] if trace["mode"] == "markers"]
    assert (mark["x"], mark["marker"]["symbol"]) == ([25], "triangle-up")
    assert mark["y"] == [pytest.approx(high)]
    assert "arrows: outside the axis" in page.locator("[data-key=loss] .hint").inner_text()
    page.locator("[data-key=loss] button", has_text="Show all values").click()
    found = plot(page, "loss")
    assert not [trace for trace in found["data"] if trace["mode"] == "markers"]
    assert found["layout"]["yaxis"]["range"][1] > 1e50
    page.locator("[data-key=loss] button", has_text="Hide far values").wait_for()
    assert page.locator("[data-key=lr] button", has_text="Show all values").count() == 0  # all fit


def test_an_arm_at_chance_does_not_flatten_the_others(page: "Page", folder: Path, tmp_path: Path) -> None:
    results = json.loads(STUDY.read_text())
    *_, lost, arm = results["study"]["arms"]
    for run in results["runs"]:
        if run["arm"] == arm:
            run["metrics"]["accuracy"] = 0.1
    results["runs"] = [run | ({"status": "failed"} if run["arm"] == lost else {}) for run in results["runs"]]
    (tmp_path / "study.json").write_text(json.dumps({**results, "mini": True}))
    show(page, folder, "chance", tmp_path)
    assert "its numbers mean nothing" in page.locator(".banner").inner_text()
    drawn = "(({data, layout}) => ({data, layout}))(document.querySelector('#study .plot'))"
    found = page.evaluate(drawn)
    assert found["layout"]["xaxis"]["range"][0] > 0.5
    [far] = [trace for trace in found["data"] if trace["uid"].startswith("far")]
    assert far["text"] == ["0.1000"]
    assert "no value" in found["layout"]["annotations"][0]["text"]
    assert "arrows: an arm outside the axis" in page.locator("#study .hint").inner_text()
    page.locator("#study button", has_text="Show all values").click()
    assert page.evaluate(drawn)["layout"]["xaxis"]["range"][0] < 0.1


def test_shares_of_a_step_the_peak_of_the_rate_and_smoothing(page: "Page", folder: Path, tmp_path: Path) -> None:
    record = make_train(tmp_path / "one", schedule="constant by epoch")
    rewrite(
        record,
        lambda row: row | ({"lr": 1 - abs(row["step"] - 25) / 100, "loss": row["step"] % 2} if row["kind"] == "step" else {}),
    )
    show(page, folder, "choices", record)
    rate = plot(page, "lr")["data"][0]
    assert rate["x"][rate["y"].index(max(rate["y"]))] == 25
    assert rate["line"]["shape"] == "vh"  # by epoch: a row's rate holds for the steps before it
    page.locator("#step").scroll_into_view_if_needed()
    page.locator("[data-key=components] button", has_text="Show %").click()
    bars = plot(page, "components")
    assert sum(trace["x"][0] for trace in bars["data"]) == pytest.approx(100)
    assert bars["layout"]["xaxis"]["title"]["text"] == "% of a step"
    during = page.evaluate("document.querySelector(`[data-key^='health '] .plot`).layout.yaxis.title.text")
    assert during == "% of a step"  # both charts at once
    page.locator("[data-key=components] summary").click()
    assert "66.7%" in page.locator("[data-key=components] tbody").inner_text()
    page.locator("[data-key=components] button", has_text="Show ms").click()
    assert plot(page, "components")["layout"]["xaxis"]["title"]["text"] == "ms per step"
    page.locator("[data-key=loss]").scroll_into_view_if_needed()
    page.get_by_role("group", name="Smoothing").get_by_role("button", name="medium").click()
    raw, line = plot(page, "loss")["data"][:2]
    assert raw["y"][:4] == [1, 0, 1, 0]
    assert raw["opacity"] < 0.5
    assert all(0.3 < y < 0.7 for y in line["y"])
    assert line["customdata"][:2] == ["1", "0"]
    assert len(plot(page, "lr")["data"]) == 1  # not measured, so not smoothed
    page.get_by_role("group", name="Smoothing").get_by_role("button", name="off").click()
    assert plot(page, "loss")["data"][0]["y"][:4] == [1, 0, 1, 0]


def test_a_failed_run_opens_with_its_error_as_text(page: "Page", folder: Path, tmp_path: Path) -> None:
    record = make_train(tmp_path / "failing", status="failed")
    result = json.loads((record / "result.json").read_text())
    error = {"why": f"ValueError: {SCRIPT}", "where": f"my_task.py, line 12\n    {SCRIPT}", "traceback": f"Traceback\n{SCRIPT}"}
    (record / "result.json").write_text(json.dumps({**result, **error}))
    show(page, folder, "failed", record)
    shown = page.locator("#overview > div > :first-child")
    assert shown.get_attribute("aria-label") == "Error"
    assert shown.locator(".why").inner_text() == f"failed ValueError: {SCRIPT}"
    assert shown.locator("pre").first.inner_text() == error["where"]
    assert not shown.locator("details pre").is_visible()
    shown.locator("summary").click()
    assert shown.locator("details pre").inner_text() == error["traceback"]
    assert SCRIPT not in page.locator("#headline").inner_text()
    show(page, folder, "failed-of-two", record, make_train(tmp_path / "good"))
    page.get_by_text("Why failing did not finish").click()
    assert f"failing: ValueError: {SCRIPT}" in page.locator(".failures").inner_text()
    assert page.evaluate("window.broken") is None
    assert page.locator("main img, main script").count() == 0


def test_runs_without_validation_and_a_missing_library(page: "Page", folder: Path, tmp_path: Path) -> None:
    record = make_train(tmp_path / "bare")
    rewrite(record, lambda row: {name: value for name, value in row.items() if not name.startswith("val_")})
    result = json.loads((record / "result.json").read_text())
    (record / "result.json").write_text(json.dumps({**result, "metrics": {}}))
    show(page, folder, "bare", record)
    assert [trace["name"] for trace in plot(page, "loss")["data"]] == ["training"]
    assert page.locator(".tiles dt").first.inner_text() == "training loss"
    assert page.locator("#no-charts").is_hidden()
    (tmp_path / "empty.js").write_text("")  # a script that loads, but is not plotly's
    page.goto(write_report([record], tmp_path / "page.html", str(tmp_path / "empty.js")).as_uri())
    page.get_by_text("plotly's script did not load from the file empty.js").wait_for(timeout=5_000)
    page.locator("[data-key=loss] summary").click()
    page.locator("[data-key=loss] details tbody tr").nth(11).wait_for()  # the numbers are there without charts


@pytest.mark.parametrize("page_options", [DESKTOP, LAPTOP], ids=["desktop", "laptop"])
def test_many_runs_with_long_names_leave_the_curves_on_the_first_screen(page: "Page", folder: Path, tmp_path: Path) -> None:
    records = [make_train(tmp_path / name, seed=seed) for seed, name in enumerate(SEEDS)]
    show(page, folder, "many", *records)
    assert page.viewport_size
    assert box(page, "[data-key=loss] .plot")["y"] + 50 < page.viewport_size["height"]
    results = page.get_by_role("region", name="Results of each run")
    heads = results.locator("thead th").all_inner_texts()
    assert heads[:2] == ["run", "status"]
    assert heads[6:] == ["images/s", "time", "steps"]  # without workers, V and global batch: they are the same for all
    assert results.evaluate("box => box.scrollWidth - box.clientWidth") <= 0
    assert results.locator("tbody tr").first.evaluate("row => row.offsetHeight") < 40  # a name has one line
    for name in (".chip", ".results"):  # the end of a name, in which it differs from the others, is never cut
        assert page.evaluate(CUT, f"{name} .two-parts > :last-child") == 0
        assert page.locator(f"{name} .two-parts > :last-child").last.inner_text().endswith("seed7")
    labels = plot(page, "components")["layout"]["yaxis"]["ticktext"]
    assert len(set(labels)) == len(SEEDS)
    assert not page.locator("#step li", has_text="of memory.").count()
    page.locator("[data-key=components] summary").click()
    assert page.locator("[data-key=components] thead th").last.inner_text() == "memory"


@pytest.mark.parametrize("page_options", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_a_tooltip_of_several_runs_fits_into_its_chart(page: "Page", folder: Path, tmp_path: Path) -> None:
    show(page, folder, "tooltip", *(make_train(tmp_path / name) for name in SEEDS[:3]))
    page.get_by_role("group", name="Smoothing").get_by_role("button", name="light").click()
    page.locator("[data-key=loss]").scroll_into_view_if_needed()
    chart = box(page, "[data-key=loss] .plot")
    page.mouse.move(chart["x"] + chart["width"] / 2, chart["y"] + 100)
    page.mouse.move(chart["x"] + chart["width"] / 2 + 3, chart["y"] + 120)
    tip = box(page, "[data-key=loss] .hoverlayer .legend")
    assert chart["x"] - 1 <= tip["x"]
    assert tip["x"] + tip["width"] <= chart["x"] + chart["width"] + 1
    assert "ed1, training: " in (page.locator("[data-key=loss] .hoverlayer").text_content() or "")


@pytest.mark.parametrize("page_options", [PHONE], ids=["phone"])
def test_a_run_that_failed_at_once_has_no_empty_tiles_and_no_missing_curves(page: "Page", folder: Path, tmp_path: Path) -> None:
    for status in ("failed", "done"):
        record = make_train(tmp_path / status, status=status)
        (record / "metrics.jsonl").write_text("")
        why = "the loss is nan; try a lower --base-lr, --schedule cosine --warmup-epochs 1 or --clip-norm 1"
        (record / "result.json").write_text(json.dumps({"status": status, "why": why}))
        show(page, folder, status, record)
        assert page.locator(".tiles").count() == 0
        if status == "failed":
            assert page.locator("#sections a").first.inner_text() == "Contract"
            assert page.locator("#notes li").all_inner_texts() == [
                "no curves: the run ended before its first metrics were recorded"
            ]
            flags = page.locator(".why .flag")
            assert flags.all_inner_texts() == ["--base-lr", "--schedule", "--warmup-epochs", "--clip-norm"]
            assert all(flag.evaluate("flag => flag.getClientRects().length") == 1 for flag in flags.all())
        else:
            assert page.locator("#sections a").first.inner_text() == "1 problem"
            page.locator("#sections a").first.click()
            assert page.locator("#notes h3").inner_text() == "Problems"


def test_a_trial_of_a_study_is_marked_beside_its_numbers(page: "Page", folder: Path, tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text(json.dumps({**json.loads(STUDY.read_text()), "mini": True}))
    show(page, folder, "trial", tmp_path)
    assert page.locator("#overview .banner").count() == 1
    show(page, folder, "trial-and-run", make_train(tmp_path / "run"), tmp_path)
    assert page.locator("#overview .banner").count() == 0
    assert page.locator("#study .banner + *").count() == 1
    assert page.locator("h2").all_inner_texts()[:2] == ["Curves", "Study"]


def test_charts_show_only_what_was_measured(page: "Page", folder: Path, tmp_path: Path) -> None:
    """No false slope where an extended run changed its schedule, no line without a lag, no component that took no time."""
    extended = make_train(tmp_path / "extended", extended="from 40 steps to 60", resumed_at=40)
    alone, fast = make_train(tmp_path / "alone", workers=1), make_train(tmp_path / "fast")
    none = {"communication": 0.0, "waiting": 0.0}
    rewrite(alone, lambda row: row | ({"lag_s": 0.0, "components_s": COMPONENTS_S | none} if row["kind"] == "health" else {}))
    rewrite(fast, lambda row: row | ({"samples_per_s": 1e6 + row["step"]} if row["kind"] in ("health", "epoch") else {}))
    rewrite(extended, lambda row: row | ({"samples_per_s": 5000.0 + row["step"]} if row["kind"] in ("health", "epoch") else {}))
    show(page, folder, "measured", alone, extended, fast)
    rates = {trace["name"]: trace for trace in plot(page, "lr")["data"]}
    assert rates["extended"]["x"][7:10] == [40, None, 45]
    assert rates["extended"]["y"][8] is None
    assert None not in rates["fast"]["x"]
    assert [trace["name"] for trace in plot(page, "lag")["data"]] == ["extended", "fast"]
    speed = plot(page, "speed")["layout"]["yaxis"]["range"]
    assert speed[0] == 0
    assert speed[1] < 1e5
    names = ["input", "compute", "communication", "waiting", "optimizer", "other"]
    assert [trace["meta"] for trace in plot(page, "components")["data"]] == names
    show(page, folder, "one-worker", alone)
    keys = page.locator("[data-key=components] .keys li").all_inner_texts()
    assert keys == ["input", "compute", "optimizer", "other"]
    assert page.locator("#step li", has_text="381 MiB of memory.").count() == 1


def test_dots_of_many_epochs_do_not_hide_their_line(page: "Page", folder: Path, tmp_path: Path) -> None:
    record = make_train(tmp_path / "long")
    rows = [
        {"kind": "epoch", "step": 20 * n, "epoch": n, "time_s": n, "val_loss": 1 / n, "val_accuracy": 0.5}
        for n in range(1, 200)
    ]
    (record / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    show(page, folder, "dots", record)
    marker = plot(page, "loss")["data"][0]["marker"]
    assert sorted(set(marker["size"])) == [3, 14]
    assert marker["line"]["width"] == 0


def test_a_growing_batch_and_its_parts_are_drawn_in_steps_beside_a_constant_one(
    page: "Page", folder: Path, tmp_path: Path
) -> None:
    paths = [make_growing(tmp_path / "growing"), make_train(tmp_path / "constant")]
    show(page, folder, "growing", *paths)

    def traces(key: str) -> list[dict[str, Any]]:
        return list(plot(page, key)["data"])

    def lines(key: str) -> list[Any]:
        return [(trace["x"], trace["y"], trace["line"]["shape"]) for trace in traces(key)]

    assert lines("batch") == [([0, 10, 60], [150, 450, 450], "hv"), ([0, 60], [256, 256], "hv")]
    assert lines("parts") == [([0, 10, 60], [1, 2, 2], "hv"), ([0, 60], [2, 2], "hv")]
    assert plot(page, "batch")["layout"]["yaxis"]["type"] == "log"
    assert page.locator("[data-key='m-global_batch']").count() == 0
    assert "150 to 450 in 2 phases" in page.locator("[data-key='runs'] tbody tr").first.inner_text()
    page.click("[data-x=epoch]")
    assert [trace["x"] for trace in traces("batch")] == [[0, 0.25, 3], [0, 3]]
    # A step is a smaller part of an epoch before the batch grew: steps 5, 10 and 15 of 20.
    assert traces("lr")[0]["x"][:4] == pytest.approx([0.125, 0.25, 0.625, 1])
    assert traces("lr")[1]["x"][:4] == pytest.approx([0.25, 0.5, 0.75, 1])
    page.click("[data-x=time_s]")
    assert traces("batch")[0]["x"] == [0, 0.5, 3]
    page.get_by_role("button", name="strong").click()  # steps are not smoothed
    assert [trace["y"] for trace in traces("batch")] == [[150, 450, 450], [256, 256]]


def test_workers_that_join_are_drawn_beside_the_parts_with_the_time_of_the_joins(
    page: "Page", folder: Path, tmp_path: Path
) -> None:
    joining, fixed = make_train(tmp_path / "joining"), make_train(tmp_path / "fixed")
    change = {"kind": "join", "step": 20, "epoch": 1, "workers": 2, "was": 1, "join_s": 4.5, "components_s": {}}
    rows = (joining / "metrics.jsonl").read_text().splitlines()
    (joining / "metrics.jsonl").write_text("\n".join([*rows[:-1], json.dumps(change), rows[-1]]) + "\n")
    show(page, folder, "joins", joining)
    tiles = page.locator("[data-key='tiles']").inner_text().splitlines()
    assert tiles[tiles.index("joining time") : tiles.index("joining time") + 3] == ["joining time", "4.5 s", "1 join"]
    assert any(line.startswith("1 to 2") for line in tiles)
    show(page, folder, "both", joining, fixed)
    found = [(trace["x"], trace["y"], trace["line"]["dash"]) for trace in plot(page, "parts")["data"]]
    assert found[:2] == [([0, 60], [2, 2], "solid"), ([0, 20, 60], [1, 2, 2], "dot")]
    assert [trace["y"] for trace in plot(page, "parts")["data"]][2:] == [[2, 2], [2, 2]]
    assert "1 to 2" in page.locator("[data-key='runs'] tbody tr").first.inner_text()
    assert "took over" not in page.locator("[data-key='many']").inner_text()


def test_a_run_at_twice_the_speed_of_a_steady_one_is_on_the_same_axis(page: "Page", folder: Path, tmp_path: Path) -> None:
    speeds = {"steady": [1000.0, 1000.5], "faster": [1000.0, 2000.0]}
    for name, (one, two) in speeds.items():
        rows = [{"kind": "epoch", "step": 20, "epoch": 1, "time_s": 1, "samples_per_s": one, "val_loss": 1.0}]
        rows.append({**rows[0], "step": 40, "epoch": 2, "time_s": 2, "samples_per_s": two})
        (make_train(tmp_path / name) / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    show(page, folder, "speeds", *(tmp_path / name for name in speeds))
    assert "outside the axis" not in page.locator("[data-key='speed']").inner_text()
    assert plot(page, "speed")["layout"]["yaxis"]["range"][1] > 2000


def test_constant_batches_need_no_chart(page: "Page", folder: Path, tmp_path: Path) -> None:
    paths = [make_train(tmp_path / "one"), make_train(tmp_path / "two", global_batch=512)]
    show(page, folder, "constant", *paths)
    assert page.locator("[data-key='batch']").count() == 0
