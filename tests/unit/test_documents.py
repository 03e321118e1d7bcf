"""README and docs/ agree with the repository: tables and numbers with committed results, flags, links, names."""

import difflib
import importlib.util
import json
import re
import statistics
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import paceline
import paceline.cli
from paceline.config import make_config
from paceline.errors import UsageError
from paceline.phases import make_phases, parse_batch_schedule
from paceline.training.grouping import choose_grouping

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))
FLAG = r"(?<![\w-])--[a-z][a-z0-9-]+"


TABLES = {
    "reduce": "exact",
    "checkpoint": "recovery",
    "joins": "launchers",
    "data_feed": "data",
    "memory": "precision",
    **dict.fromkeys(("limit", "peers_cpu", "workers", "overhead_cpu", "shared_cores", "startup", "growth"), "speed"),
}
"""Committed result -> the page that shows its table."""


@pytest.mark.parametrize("name", TABLES)
def test_tables_show_the_committed_results(name: str) -> None:
    bench = load(name.removesuffix("_cpu"))
    assert bench.table(result(name)).strip() in page(TABLES[name])


def test_h200_numbers_are_the_committed_result() -> None:
    found, speed, readme = result("h200"), page("speed"), squeeze((ROOT / "README.md").read_text())
    for case, modes in found["paceline_images_per_s"].items():
        for speeds in modes.values() if case != "how" else ():
            assert f"{speeds[0]:,} and {speeds[1]:,}" in speed
    for peer in ("plain DDP", "Accelerate", "Lightning"):
        images_per_s = f"{found['peers_batch_128_images_per_s'][peer]:,}"
        assert f"{peer} {images_per_s}" in squeeze(speed)
        assert f"{peer} {images_per_s}" in readme
    overhead = found["overhead_batch_128_images_per_s"]
    ratios = sorted(a / b for a, b in zip(overhead["by hand"], overhead["paceline"], strict=True))
    spread = f"n = 5, {ratios[0]:.3f} to {ratios[-1]:.3f}"
    assert f"{ratios[2]:.3f} times the time ({spread})" in squeeze(speed)
    assert f"{ratios[2]:.3f} times its time, {spread}" in readme
    assert f"Paceline {statistics.median(overhead['paceline']):,}" in readme
    run = found["speedrun"]
    assert f"mean {sum(run['accuracy']) / 4:.4f}, in {min(run['from_first_step_s']):.2f} to" in speed


def test_soak_tally_is_the_committed_result() -> None:
    tally = result("soak")
    assert tally["kills"] == 50
    assert tally["same_hash"] is tally["same_metrics"] is tally["every_sample_once"] is True
    assert load("soak").summary(tally) in squeeze(page("recovery"))


def test_gpu_numbers_are_the_committed_result() -> None:
    found = result("gpu_parts")
    assert all(bits["same"] for bits in found["bits"].values())
    for speed in found["speed"]["images_per_s"].values():
        assert f"{speed['median']:,.0f}" in page("exact")
    assert f"{found['checkpoint']['median_ms']:.1f} ms" in page("recovery")


@pytest.mark.parametrize(
    "name", ["growth", "schedules", "effects", "power", "batch", "ingredients", "workers", "course", "step", "registry"]
)
def test_optimizer_tables_show_the_committed_results(name: str) -> None:
    table = load("study_tables", "tools").tables()[name]
    assert table in page("optimizers")


def test_readme_shows_the_committed_results_of_growing_batches() -> None:
    assert load("study_tables", "tools").tables()["headline"] in (ROOT / "README.md").read_text()


def test_the_predicted_time_of_a_growing_batch_is_the_committed_result() -> None:
    found = result("plan_growth")
    row, times = found["plan"]["rows"][-1], found["reference"]
    assert row["workers"] == 64
    fast, low, high = (f"{row[key]:.1f}" for key in ("times_as_fast", "times_as_fast_low", "times_as_fast_high"))
    readme, optimizers = squeeze((ROOT / "README.md").read_text()), squeeze(page("optimizers"))
    assert f"predicts {row['time_s']:.2f} s of training. That is {fast} times as fast [{low} to {high}]" in readme
    assert f"took {times['median']:.1f} s (n = {times['n']})" in readme
    spans = [f"{1e3 * row[key]:.0f}" for key in ("time_s", "time_low_s", "time_high_s")]
    assert f"predicts {spans[0]} ms of training ({spans[1]} to {spans[2]} ms, 90%)" in optimizers
    assert f"{fast} times as fast ({low} to {high})" in optimizers
    compiled = statistics.median(result("h200")["overhead_batch_128_images_per_s"]["paceline"])
    ratio = 10 * 60_000 / compiled / row["time_s"]  # of the same number of epochs
    assert f"about {ratio:.0f} times as fast as compiled SGD" in readme
    assert f"({compiled:,} images/s, " in optimizers
    assert f"64 workers would be about {ratio:.0f} times as fast" in optimizers
    returns = found["plan"]["returns"]
    assert f"returns stop at {returns['stop_at']} workers: 64 save {returns['saved']:.0%} of their time" in optimizers
    one = found["one_worker"]["runs"]["64 parts, 16 at once"]
    assert f"reached {one['accuracy']:.4f}".replace("0.", ".") + f" in {one['train_time_s']:.1f} s of training" in readme


def test_optimizer_step_ratios_are_the_committed_result() -> None:
    said = squeeze(page("batches"))
    eager = result("optimizers")["eager"]["by_optimizer"]
    alone = {name: f"{eager[name]['over_adamw']['median']:.2f}" for name in ("lars", "novograd", "lamb")}
    assert f"a step of LARS takes {alone['lars']}, of NovoGrad {alone['novograd']} and of LAMB {alone['lamb']} times" in said
    graph = result("optimizers")["graph"]["by_optimizer"]
    inside = [f"{graph[name]['over_adamw']['median']:.2f}" for name in ("lars", "novograd", "lamb")]
    assert f"{inside[0]}, {inside[1]} and {inside[2]} times within a captured step" in said


def test_packaged_recipes_are_the_studys_arms() -> None:
    """The comment in a recipe states what its arm reached, and its options are the arm's."""
    small, large = {128: "muon 128", 1024: "muon 1024"}, {b: f"muon to {b}" for b in (4096, 8192, 16384, 32768)}
    for name, arms in (("batch", small), ("growth", large)):
        study = tomllib.loads((ROOT / "studies" / f"{name}.toml").read_text())
        runs = json.loads((ROOT / "studies" / "results" / f"{name}.json").read_text())["runs"]
        for batch, arm in arms.items():
            text = (ROOT / "recipes" / f"batch-{batch}.toml").read_text()
            accuracies = [run["metrics"]["accuracy"] for run in runs if run["arm"] == arm]
            assert f"{statistics.mean(accuracies):.4f} in 10 epochs (n = {len(accuracies)}" in text
            assert make_config({**study["options"], **study["arms"][arm]}) == make_config(
                tomllib.loads(text), {"checkpoint_every": "0"}
            )


@pytest.mark.parametrize("batch", [4096, 8192, 16384, 32768])
def test_a_growing_recipe_has_work_for_64_workers_in_both_modes(batch: int) -> None:
    text = (ROOT / "recipes" / f"batch-{batch}.toml").read_text()
    found = make_config(tomllib.loads(text))
    parts = {phase.parts for phase in make_phases(parse_batch_schedule(found.batch_schedule), 64, found.smallest_part)}
    assert (found.virtual_workers, parts) == (64, {64})
    net = nn.BatchNorm2d(1)
    assert f"One worker passes up to {choose_grouping(net, found, 64, 1).at_once * batch // 64:,} samples at once" in text
    exact = replace(found, reduce="exact")
    assert choose_grouping(net, exact, 64, 4).at_once == 16
    with pytest.raises(UsageError, match="use at most 4 workers"):
        choose_grouping(net, exact, 64, 5)
    assert choose_grouping(net, replace(exact, parts_at_once=1), 64, 64).at_once == 1


@pytest.fixture(autouse=True)
def benches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benches import shared code from their own folder."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))


def load(name: str, folder: str = "bench") -> Any:
    """A bench or a tool as a module."""
    spec = importlib.util.spec_from_file_location(f"{folder}_{name}", ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    return bench


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())
    return found


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def squeeze(text: str) -> str:
    """The text in one line, so that a sentence is found however it is wrapped."""
    return " ".join(text.split())


def test_links_between_documents_exist() -> None:
    for document in DOCUMENTS:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
            assert link.startswith("https://") or (document.parent / link).exists(), f"{document.name}: {link}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_flag_exists(document: Path, known_flags: set[str]) -> None:
    foreign = {"--nproc-per-node", "--ntasks-per-node", "--requeue", "--lr", "--batch-size", "--gpus", "--num-workers"}
    assert set(re.findall(FLAG, document.read_text())) - foreign <= known_flags


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    """Flags of all verbs, of the benches and tools, and of the course's script."""
    scripts = (
        ROOT / "fashion_mnist.py",
        *(path for folder in ("bench", "tools", "examples/mnist") for path in ROOT.glob(f"{folder}/*.py")),
    )
    defined = {flag for path in scripts for flag in re.findall(r'"(--[a-z][a-z0-9-]+)"', path.read_text())}
    _, verbs = paceline.cli.make_parser(paceline.cli.VERBS)
    return defined.union(*(parser._option_string_actions for parser in verbs.values()))


def test_scaling_is_the_committed_result() -> None:
    from paceline.scale.verdict import table, verdict

    found = result("scale_16_cores")
    assert table(found) in page("scale")
    assert found["verdict"] == verdict(found)
    assert verdict(found) in page("scale")


@pytest.mark.parametrize("name", ["timing", "timing_gpu"])
def test_cost_of_the_clock_is_the_committed_result(name: str) -> None:
    said = squeeze(page("records"))
    for model, row in result(name)["by_model"].items():
        ratio = row["ratio"]
        assert f"{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f}) times the time for {model}" in said, model


def test_cost_of_the_noise_scale_is_the_committed_result() -> None:
    said = squeeze(page("batches"))
    for model, row in result("timing_noise")["by_model"].items():
        ratio = row["ratio"]
        assert f"{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f}) times the time for {model}" in said, model


def test_the_cost_of_a_join_is_the_committed_result() -> None:
    said, found = page("launchers"), result("joins")
    for name in ("1 to 2 workers", "2 to 1 workers"):
        times = [found[name]["total_s"], *found[name]["components_s"].values()]
        cells = [f"{each['median']:.2f} ({each['min']:.2f} to {each['max']:.2f})" for each in times]
        assert f"| {name} | {found[name]['n']} | {' | '.join(cells)} |" in said
    one = found["1 to 2 workers"]
    words = "A join from 1 to 2 workers took {median:.1f} s ({min:.1f} to {max:.1f} s, ".format(**one["total_s"])
    assert f"{words}n = {one['n']})" in squeeze(page("batches"))


def test_the_learning_curve_is_the_committed_result() -> None:
    from paceline.learning_curve.outcome import make_outcome, words

    results, said = json.loads((ROOT / "studies" / "results" / "learning-curve.json").read_text()), page("learning-curve")
    found = results["learning_curve"]
    shown = said.split("<!-- learning-curve: begin -->")[1].split("<!-- learning-curve: end -->")[0]
    assert [line.strip() for line in shown.strip().splitlines()] == [line.strip() for line in words(found).splitlines()]
    sizes = [row["samples"] for row in found["sizes"]]
    again = make_outcome(results, sizes, chance=found["chance"], target=found["target"]["error"])
    assert again["said"] == found["said"], "the committed fit is what this version fits"
    assert " ".join(results["environment"]["command"]) in said


def test_the_steps_of_small_sizes_are_the_committed_result() -> None:
    said = page("learning-curve")
    for model, rows in result("learning_curve_steps")["models"].items():
        for samples in {row["samples"] for row in rows if row["rule"] != "same epochs"}:
            cells = [
                f"{row['best']['mean']:.4f} ± {row['best']['sd']:.4f} ({row['steps']:,} steps)"
                for row in rows
                if row["samples"] == samples
            ]
            assert f"| {model} | {samples:,} | {' | '.join(cells)} |" in said


def test_readme_and_laws_page_name_the_same_laws() -> None:
    names = [re.findall(r"^\d\. \*\*(.+?)\.\*\*", text, re.M) for text in ((ROOT / "README.md").read_text(), page("laws"))]
    assert names[0] == names[1]
    assert len(names[0]) == len(list((ROOT / "tests" / "laws").glob("test_law[0-9]_*.py")))


def test_api_page_has_every_public_name() -> None:
    assert sorted(re.findall(r"^::: paceline\.(\w+)$", page("api"), re.M)) == paceline.__all__


def test_site_has_every_page() -> None:
    pages = set(re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert pages == {path.name for path in ROOT.glob("docs/*.md")} | {"ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"}


def test_readme_task_is_the_task_pages() -> None:
    assert python_block((ROOT / "README.md").read_text(), "def task") in page("tasks")


def python_block(text: str, word: str) -> str:
    return next(block for block in re.findall(r"```python\n(.*?)```", text, re.S) if word in block)


def test_own_loop_diff_is_that_of_the_examples() -> None:
    """The code alone: without the examples' docstrings."""
    texts = [(ROOT / "examples" / name).read_text().split('"""', 2)[2] for name in ("plain_ddp.py", "own_loop.py")]
    lines = difflib.unified_diff(*(text.splitlines() for text in texts), lineterm="", n=1)
    hunks = [" ..." if line.startswith("@@") else line for line in lines][3:]  # without file names and the first hunk's header
    diff = "\n".join(["```diff", *hunks, "```"])
    for text in ((ROOT / "README.md").read_text(), page("own-loop")):
        assert f"<!-- own-loop diff: begin -->\n{diff}\n<!-- own-loop diff: end -->" in text


def test_the_gallery_is_made_of_the_committed_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "tools" / "gallery.py")
    assert spec is not None
    assert spec.loader is not None
    gallery = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gallery)
    text = (ROOT / "docs" / "gallery.md").read_text()
    assert text == gallery.page(), "run make gallery"
    pictures = set(re.findall(r"\]\((img/gallery/[^)]+)\)", text))
    assert pictures == {f"img/gallery/{path.name}" for path in (ROOT / "docs" / "img" / "gallery").iterdir()}


def test_the_page_about_surfaces_has_the_benchs_numbers() -> None:
    text = (ROOT / "docs" / "landscape.md").read_text()
    found = json.loads((ROOT / "bench" / "results" / "landscape.json").read_text())
    for name, digits in (("paceline", 1), ("loss-landscapes", 1), ("loader", 0)):
        of = found["seconds"][name]
        bounds = f"{of['min']:.{digits}f} to {of['max']:.{digits}f}, n = {of['n']}" if of["n"] > 1 else f"n = {of['n']}"
        times = f"| {found['times_faster_than'][name]:.1f} |" if name != "paceline" else ""
        assert re.search(rf"{of['median']:.{digits}f} \({re.escape(bounds)}\) {re.escape(times)}", text), name
    found = json.loads((ROOT / "bench" / "results" / "landscape_cpu.json").read_text())
    of, times = found["seconds"]["paceline"], found["times_faster_than"]
    assert f"took {of['median']:.1f} s ({of['min']:.1f} to {of['max']:.1f}, n = {of['n']})" in text
    assert f"loss-landscapes took {times['loss-landscapes']:.1f} times as long" in text
    assert f"the loop with a loader pass per point {times['loader']:.1f} times" in text
