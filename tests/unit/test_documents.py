"""What the documents say is what the repository holds."""

import importlib.util
import json
import re
import statistics
import tomllib
from pathlib import Path
from typing import Any

import pytest

import paceline.cli
from paceline.config import make_config

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["reduce", "checkpoint"])
def test_the_readmes_tables_are_the_committed_results(name: str) -> None:
    assert load(name).table(result(name)) in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", ["limit", "peers_cpu", "workers", "overhead_cpu", "startup", "growth"])
def test_the_speed_pages_tables_are_the_committed_results(name: str) -> None:
    bench = load(name.removesuffix("_cpu"))
    assert bench.table(result(name)).strip() in (ROOT / "docs" / "SPEED.md").read_text()


def test_what_is_said_of_the_h200_is_the_committed_result() -> None:
    found, page, readme = result("h200"), (ROOT / "docs" / "SPEED.md").read_text(), (ROOT / "README.md").read_text()
    for case, modes in found["paceline_images_per_s"].items():
        for speeds in modes.values() if case != "how" else ():
            assert f"{speeds[0]:,} and {speeds[1]:,}" in page
    for peer in ("plain DDP", "Accelerate", "Lightning"):
        assert f"{found['peers_batch_128_images_per_s'][peer]:,}" in page
        assert f"{found['peers_batch_128_images_per_s'][peer]:,}" in readme
    overhead = found["overhead_batch_128_images_per_s"]
    ratios = sorted(a / b for a, b in zip(overhead["by hand"], overhead["paceline"], strict=True))
    assert f"{ratios[2]:.3f} times the time (n = 5, {ratios[0]:.3f} to {ratios[-1]:.3f})" in page
    run = found["speedrun"]
    assert f"mean {sum(run['accuracy']) / 4:.4f}, in {min(run['from_first_step_s']):.2f} to" in page


def test_the_readmes_tally_is_the_committed_result() -> None:
    tally = result("soak")
    assert tally["kills"] == 50
    assert tally["same_hash"] is tally["same_metrics"] is tally["every_sample_once"] is True
    assert load("soak").summary(tally) in " ".join((ROOT / "README.md").read_text().split())


def test_what_the_readme_says_of_a_gpu_is_the_committed_result() -> None:
    found, readme = result("gpu_parts"), (ROOT / "README.md").read_text()
    assert all(bits["same"] for bits in found["bits"].values())
    for speed in found["speed"]["images_per_s"].values():
        assert f"{speed['median']:,.0f}" in readme
    assert f"{found['checkpoint']['median_ms']:.1f} ms" in readme


@pytest.mark.parametrize("name", ["batch", "ingredients", "workers", "course", "step", "registry"])
def test_the_optimizer_pages_tables_are_the_committed_results(name: str) -> None:
    table = load("study_tables", "tools").tables()[name]
    assert table in (ROOT / "docs" / "OPTIMIZERS.md").read_text()
    assert name != "batch" or table in (ROOT / "README.md").read_text()


def test_what_is_said_of_an_optimizers_step_is_the_committed_result() -> None:
    eager, readme = result("optimizers")["eager"]["by_optimizer"], (ROOT / "README.md").read_text()
    said = {name: f"{eager[name]['over_adamw']['median']:.2f}" for name in ("lars", "novograd", "lamb")}
    assert f"a step of LARS takes {said['lars']}, of NovoGrad {said['novograd']} and of LAMB {said['lamb']} times" in readme
    graph = result("optimizers")["graph"]["by_optimizer"]
    inside = [f"{graph[name]['over_adamw']['median']:.2f}" for name in ("lars", "novograd", "lamb")]
    assert f"{inside[0]}, {inside[1]} and {inside[2]} times within a captured step" in readme


def test_the_packaged_recipes_are_the_studys_arms() -> None:
    """What a recipe says of itself is what its arm did, and its options are the arm's."""
    study = tomllib.loads((ROOT / "studies" / "batch.toml").read_text())
    runs = json.loads((ROOT / "studies" / "results" / "batch.json").read_text())["runs"]
    for batch in (128, 1024, 4096, 8192, 16384):
        text = (ROOT / "recipes" / f"batch-{batch}.toml").read_text()
        accuracies = [run["metrics"]["accuracy"] for run in runs if run["arm"] == f"muon {batch}"]
        assert f"{statistics.mean(accuracies):.4f} in 10 epochs (n = {len(accuracies)}" in text
        assert make_config({**study["options"], **study["arms"][f"muon {batch}"]}) == make_config(
            tomllib.loads(text), {"checkpoint_every": "0"}
        )


@pytest.fixture(autouse=True)
def benches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benches import what they have in common from their own folder."""
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


def test_links_between_documents_lead_somewhere() -> None:
    for document in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")):
        for link in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert link.startswith("https://") or (document.parent / link).exists(), f"{document.name}: {link}"


def test_every_flag_the_readme_names_exists() -> None:
    verbs = ("train", "scale", "report", "board", "plan", "advise", "study", "rehearse", "data")
    known = {option for verb in verbs for option in _options(verb)}
    scripts = "".join(path.read_text() for path in (ROOT / "fashion_mnist.py", *ROOT.glob("bench/*.py")))
    foreign = {"--nproc-per-node", "--ntasks-per-node", "--requeue"}
    for flag in set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", (ROOT / "README.md").read_text())) - foreign:
        assert flag in known or f'"{flag}"' in scripts, flag


def _options(verb: str) -> set[str]:
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        paceline.cli.run([verb, "--help"])
    return set(re.findall(r"--[a-z][a-z0-9-]+", out.getvalue()))


def test_the_readmes_scaling_is_the_committed_result() -> None:
    from paceline.scale.verdict import table, verdict

    found, readme = result("scale_16_cores"), (ROOT / "README.md").read_text()
    assert table(found) in readme
    assert found["verdict"] == verdict(found)
    assert verdict(found) in readme


@pytest.mark.parametrize("name", ["timing", "timing_gpu"])
def test_what_the_readme_says_of_the_clocks_cost_is_the_committed_result(name: str) -> None:
    readme = (ROOT / "README.md").read_text()
    for model, row in result(name)["by_model"].items():
        ratio = row["ratio"]
        assert f"{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f}) times the time for {model}" in readme, model
