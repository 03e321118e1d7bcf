"""The study of growing batches: its files, and the tool that turns its runs into committed results."""

import importlib.util
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.sampler import Sampler
from paceline.phases import make_phases, parse_batch_schedule
from paceline.study.study import read_study

ROOT = Path(__file__).parents[2]
SEARCH = tomllib.loads((ROOT / "studies" / "search" / "growth_search.toml").read_text())
OPTIONS = {
    "batch_schedule": "0:512 1:8192",
    "base_lr": 0.1,
    "momentum": 0.8,
    "weight_decay": 0.002,
    "ema": 0.7,
    "optimizer": "muon",
    "global_batch": 8192,
    "virtual_workers": 64,
}
FACTORS = {name: arm for name, arm in SEARCH["arms"].items() if name.startswith("factors ")}


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tool() -> Any:
    return load("batch_growth")


def worth(options: dict[str, Any]) -> float:
    """A made-up accuracy: only two settings matter."""
    return 0.94 + 0.004 * (options["momentum"] == 0.9) - 0.002 * (options["schedule"] == "cosine")


def searched() -> dict[str, Any]:
    runs = [
        {"arm": name, "seed": seed, "options": options, "accuracy": [0.1, worth(options) + seed / 100]}
        for seed in (0, 1)
        for name, options in FACTORS.items()
    ]
    return {"common": {}, "runs": runs}


def results(accuracies: dict[str, float]) -> dict[str, Any]:
    runs = [
        {"arm": arm, "status": "done", "steps": 10 + i, "metrics": {"accuracy": accuracy}}
        for i, (arm, accuracy) in enumerate(accuracies.items())
    ]
    return {"metric": "accuracy", "runs": runs}


def test_every_factor_is_high_in_half_of_the_runs_and_independent_of_the_others():
    names = list(next(iter(FACTORS.values())))
    assert len(FACTORS) == 16
    highest = {name: max(arm[name] for arm in FACTORS.values()) for name in names}
    signs = np.array([[1 if arm[name] == highest[name] else -1 for name in names] for arm in FACTORS.values()])
    assert (signs.T @ signs == 16 * np.eye(len(names))).all()
    assert (signs.sum(0) == 0).all()


@pytest.mark.parametrize("path", ["growth.toml", "search/growth_search.toml"])
def test_growing_batches_take_at_most_200_steps(path):
    study = read_study(ROOT / "studies" / path)
    counts = {arm.name: count(arm.options) for arm in study.arms if arm.options.get("batch_schedule", "auto")[:4] != "auto"}
    assert counts.pop("sgd to 8192, 731 steps", 731) == 731
    assert counts.pop("muon to 16384, parts of 8", 203) == 203
    assert 8 <= len(counts) == sum(150 < steps <= 200 for steps in counts.values())


def count(options: Mapping[str, Any]) -> int:
    """The steps of 10 epochs of Fashion-MNIST."""
    phases = make_phases(parse_batch_schedule(options["batch_schedule"]), options["virtual_workers"], options["smallest_part"])
    sampler = Sampler(60_000, options["global_batch"], options["virtual_workers"], seed=0, phases=phases)
    return sampler.first_step(options["epochs"])


def test_effects_are_found(tool):
    found = {name: (low, high, value, error) for name, low, high, value, error in tool.effects(searched())}
    assert found["momentum"] == pytest.approx((0.8, 0.9, 0.004, 0), abs=1e-9)
    assert found["schedule"][:2] == ("linear", "cosine")
    assert found["schedule"][2] == pytest.approx(-0.002)
    assert found["base_lr"][2] == pytest.approx(0)
    assert tool.effects_table(searched()).splitlines()[2] == "| `momentum` | 0.8 | 0.9 | +0.40 ± 0.00 |"


def test_too_few_factorial_runs_are_refused(tool):
    search = searched()
    with pytest.raises(SystemExit, match="9 factorial runs are too few to tell 10 settings apart"):
        tool.effects({**search, "runs": [*search["runs"][:9], {"arm": "muon 512"}]})


def test_search_is_packed(tool, tmp_path):
    record = tmp_path / "a-seed0"
    record.mkdir()
    phase = {"kind": "phase", "step": 0, "epoch": 0.5, "global_batch": 64, "virtual_workers": 2}
    (record / "metrics.jsonl").write_text("\n".join(map(json.dumps, ({"kind": "head"}, phase))) + "\n")
    note = "the step is captured as a CUDA graph (not compiled: the run is short), in 2.5 s"
    (tmp_path / "a-seed0.log").write_text(f"x\n{note}\n")
    run = {"arm": "a", "seed": 0, "status": "done", "steps": 7, "val_accuracy": [0.5], "metrics": {"loss": 1.0}, "git": "f00"}
    run |= {"train_time_s": 1.23456, "wall_s": 4.0, "record": "elsewhere/a-seed0"}
    arms = {"a": {"options": {"epochs": 2, "ema": 0.5}}, "b": {"options": {"epochs": 2}}}
    about = {
        "when": "now",
        "command": ["paceline", "study", "--out", "x.json", "--seeds", "1"],
        "versions": {"torch": "2"},
        "devices": ["1 x GPU"],
        "machine": "m",
    }
    whole = {"study": {"task": "t", "arms": arms}, "environment": about, "runs": [run, {**run, "arm": "b", "status": "failed"}]}
    (tmp_path / "study.json").write_text(json.dumps(whole))
    packed = tool.pack_search(tmp_path)
    assert packed["common"] == {"epochs": 2}
    assert (packed["n"], packed["git"]) == (1, ["f00"])
    (one,) = packed["runs"]
    assert one["options"] == {"ema": 0.5}
    assert (one["capture_s"], one["phases"]) == (2.5, [[0.5, 64, 2]])
    assert one["notes"] == [note]
    assert "0.5000      7 steps" in tool.search_table(packed)
    kept = tool.pack_results(tmp_path)
    assert "machine" not in kept["environment"]
    assert kept["environment"]["command"] == packed["command"] == ["paceline", "study", "--seeds", "1"]
    assert "record" not in kept["runs"][0]


def test_results_of_several_commands_are_merged(tool):
    def made(*runs: tuple[str, int, float], ema: float = 0.5) -> dict[str, Any]:
        arms = {arm: {"options": {"ema": ema}} for arm, _, _ in runs}
        return {"study": {"arms": arms}, "runs": [{"arm": arm, "seed": seed, "accuracy": value} for arm, seed, value in runs]}

    merged = tool.merge_results(made(("a", 1, 0.1), ("b", 1, 0.2)), made(("a", 1, 0.3), ("a", 2, 0.4), ("c", 1, 0.5)))
    assert [(run["arm"], run["seed"], run["accuracy"]) for run in merged["runs"]] == [
        ("b", 1, 0.2),
        ("a", 1, 0.3),
        ("a", 2, 0.4),
        ("c", 1, 0.5),
    ]
    assert list(merged["study"]["arms"]) == ["a", "b", "c"]
    with pytest.raises(SystemExit, match="'a' has other options"):
        tool.merge_results(made(("a", 1, 0.1)), made(("a", 2, 0.2), ema=0.6))


def test_picture_shows_growing_and_constant_batches_and_references(tool):
    growth = results({"muon to 8192": 0.95, "muon to 16384": 0.949, "muon 512": 0.9528, "sgd 128": 0.9455, "sgd to 8192": 0.9})
    batch = results({"muon 8192": 0.9388, "muon 16384": 0.9181, "nesterov 8192": 0.828})
    lines = tool.points(growth, batch)
    assert [size for size, *_ in lines["muon to"]] == [8192, 16384]
    assert [accuracy for _, accuracy, *_ in lines["muon"]] == [0.9388, 0.9181]
    assert lines["sgd"] == [(8192, 0.828, 12, 1)]
    picture = tool.draw(growth, batch)
    shown = ("Muon, growing", "Muon, constant", "SGD, growing", "SGD, constant", "0.9528, 12 steps", "SGD, constant 128")
    for words in (*shown, "mean of at least 1 seed; numbers"):
        assert words in picture
    assert picture.count("<circle") == 6


def test_table_has_constant_and_growing_batches_side_by_side():
    tables = load("study_tables")
    arms = {f"{line} to {size}": 0.95 for line, size in tables.GROWN} | {
        "muon 512": 0.9528,
        "sgd 128": 0.9455,
        "muon 60000": 0.8,
    }
    growth = results(arms)
    named = {"muon to 8192": {"options": OPTIONS}, "muon 512": {"options": {}}}
    growth["study"] = {"reference": "muon 512", "margin": 0.003, "arms": named}
    batch = results({"muon 4096": 0.9448, "muon 8192": 0.9388, "muon 16384": 0.9181, "muon 32768": 0.9, "nesterov 8192": 0.828})
    lines = tables.growth_table(growth, batch).splitlines()
    assert lines[2] == "| Muon 512 | - | .9528 (1) | 16 | - | - | - |"
    assert lines[5].startswith("| Muon | 8,192 | .9388 (1) | 11 | .9500 (1) | 11 | -0.28 points: no verdict")
    assert lines[8].startswith("| Muon | 60,000 | .8000 (1) | 18 |")
    assert lines[9].startswith("| SGD | 8,192 | .8280 (1) | 14 |")
    assert tables.schedule_table(growth).splitlines()[2:] == [
        "| Muon to 8,192 | `0:512 1:8192` | 64 | 0.1 | 0.8 | 0.002 | 0.7 | 11 | .9500 (1) |"
    ]
