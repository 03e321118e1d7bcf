"""A task's own optimizer and schedule in exact mode: one model on 1, 2 and 3 workers, killed and resumed or not."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.optim import Adadelta, Adam, Optimizer, RMSprop
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from harness.processes import paceline, run_workers
from harness.training import ALONE, Trained, blobs, train_in
from paceline.dist.world import World
from paceline.records import read_metrics, read_result
from paceline.training.task import Task

MAKE: dict[str, Callable[[Any], Optimizer]] = {
    "RMSprop": lambda model: RMSprop(model.parameters(), lr=0.01, momentum=0.5),
    "Adadelta": lambda model: Adadelta(model.parameters(), lr=1.0),
    "layers": lambda model: Adam([{"params": layer.parameters(), "lr": 0.01 / (i + 1)} for i, layer in enumerate(model)]),
}
CASES = {
    "RMSprop": lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.7),
    "Adadelta": lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9),
    "layers": lambda step, steps: 1 - step / steps,
}
OPTIONS = {"virtual_workers": 4, "global_batch": 24, "reference_batch": 12, "reduce": "exact", "epochs": 3}


def task(name: str) -> Task:
    return blobs(dropout=0.2, optimizer=lambda model, config: MAKE[name](model), schedule=CASES[name])


def train_all(world: World) -> dict[str, Trained]:
    return {name: train_in(world, task(name), OPTIONS) for name in CASES}


def test_one_model_on_any_number_of_workers() -> None:
    alone = train_all(ALONE)
    for workers in (2, 3):
        for found in run_workers(train_all, workers):
            for name, trained in found.items():
                assert trained.result.model_sha256 == alone[name].result.model_sha256, name
                assert [row["lr"] for row in trained.watcher.steps] == [row["lr"] for row in alone[name].watcher.steps]
    assert len({trained.result.model_sha256 for trained in alone.values()}) == len(CASES)


FILE = """
import os
import signal

import torch
from torch.optim import Adadelta
from torch.optim.lr_scheduler import StepLR

from paceline import Arrays, Task, classify


def task() -> Task:
    x = torch.randn(96, 5, generator=torch.Generator().manual_seed(0))
    data, measure, calls = Arrays((x, (x.sum(1) > 0).long())), classify(), 0

    def objective(model, batch):
        nonlocal calls
        calls += model.training
        if calls == int(os.environ.get("DIE_AT", "0")):
            os.kill(os.getpid(), signal.SIGKILL)
        return measure(model, batch)

    return Task(
        name="mine",
        model=lambda: torch.nn.Linear(5, 2),
        train=data,
        validation=data,
        objective=objective,
        optimizer=lambda model, config: Adadelta(model.parameters(), lr=1.0),
        schedule=lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.7),
        defaults={"reference_batch": 16, "virtual_workers": 2, "global_batch": 16, "epochs": 4},
    )
"""


def test_killed_and_resumed_on_the_command_line(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FILE)
    flags = ["--reduce", "exact", "--checkpoint-every", "1", "--log-every", "1"]
    done = paceline("train", "mine.py", "--name", "calm", *flags)
    assert done.returncode == 0, done.stderr
    text = " ".join(done.stdout.split())
    assert "Adadelta (the task's own) at lr 1, StepLR (the task's own) once per epoch, warm-up none" in text
    assert "reference batch 16 at lr 1" in text
    done = paceline("train", "mine.py", "--name", "x", *flags, env={"DIE_AT": "21"})  # two parts per step: in the second epoch
    assert done.returncode != 0
    done = paceline("train", "mine.py", "--resume", "x", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert re.search(r"from step (8|9|10) of 24", done.stdout), done.stdout
    calm, resumed = (read_result(tmp_path / "runs" / name) for name in ("calm", "x"))
    assert resumed["model_sha256"] == calm["model_sha256"]
    lrs = [[row["lr"] for row in read_metrics(tmp_path / "runs" / name) if row["kind"] == "step"] for name in ("calm", "x")]
    assert lrs[0] == lrs[1]
    assert sorted({round(lr, 6) for lr in lrs[0]}, reverse=True) == [1.0, 0.7, 0.49, 0.343]
    done = paceline("train", "mine.py", "--name", "flag", "--optimizer", "sgd", "--epochs", "1", "--base-lr", "0.1")
    assert "--optimizer sgd replaces the task's own optimizer" in done.stdout
