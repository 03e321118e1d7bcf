"""Sharpness on 1, 2 and 3 workers: the same numbers to rounding, on every rank."""

import json
from pathlib import Path
from typing import Any

import pytest

import paceline
from harness.processes import run_workers
from paceline.core.determinism import deterministic
from paceline.dist.world import World
from paceline.sharpness.sharpness import Options, measure
from paceline.training.after import Request

TASK = """
from paceline import Arrays, Task, classify
import torch
from torch import nn

def data():
    random = torch.Generator().manual_seed(0)
    images = torch.randn(83, 1, 6, 6, generator=random)
    return Arrays((images, (images.mean((1, 2, 3)) > 0).long()))

def model():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3))

def objective(model, batch):
    values = classify()(model, batch)
    noise = 0.1 * torch.rand(len(batch[1])).to(batch[1].device)  # the same whichever worker has the batch
    return {**values, "loss": values["loss"] + noise, "weight": 1.0 + batch[1]}

def task():
    return Task(name="t", model=model, train=data, objective=objective,
                defaults={"global_batch": 20, "base_lr": 0.05, "eval_batch": 10})
"""


@pytest.fixture
def record(runs: Path) -> str:
    Path("quadratic.py").write_text(TASK)
    paceline.train("quadratic.py:task", epochs=2, name="x")
    return str((runs / "x").resolve())


def look(world: World, folder: str, record: str) -> dict[str, Any]:
    import os

    os.chdir(folder)
    options = Options(measures=("keskar", "sam", "hessian"), samples=70, top=3, vectors=6, steps=20, seed=1)
    with deterministic():
        found = measure(Request(record=record, sets=("train",), precision="fp32"), options, world)
    world.barrier()
    if world.is_main:
        os.unlink(Path(record) / "sharpness.json")  # the next workers measure again
    return {name: found[name] for name in ("loss", "keskar", "sam", "adaptive", "hessian", "samples")}


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for inner in value.values() for number in numbers(inner)]
    if isinstance(value, list):
        return [number for inner in value for number in numbers(inner)]
    return [value] if isinstance(value, int | float) else []


def test_1_2_and_3_workers_measure_the_same(record: str) -> None:
    one, *others = [run_workers(look, workers, str(Path.cwd()), record) for workers in (1, 2, 3)]
    for found in others:
        assert all(json.dumps(each) == json.dumps(found[0]) for each in found), "on every rank"
        assert numbers(found[0]) == pytest.approx(numbers(one[0]), rel=1e-4, abs=1e-6)
        assert numbers(found[0]["hessian"]["top"]) == pytest.approx(one[0]["hessian"]["top"], rel=1e-6)
        assert numbers(found[0]["keskar"]) == pytest.approx(numbers(one[0]["keskar"]), rel=1e-5)
