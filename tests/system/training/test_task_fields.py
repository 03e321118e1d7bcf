"""Mistakes in a task on several workers: all of them have the same error, and none waits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn
from torch.utils.data import DataLoader

from harness.processes import paceline, run_workers
from harness.training import blobs, train_in
from paceline.dist.world import World
from paceline.errors import UsageError
from paceline.training.task import Task, classify


def only_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {"loss": classify()(model, batch[:2])["loss"]}


def mistakes() -> dict[str, Task]:
    """A task per mistake, and a word of the error."""
    data = blobs().train
    assert callable(data)
    return {
        "DataLoader": replace(blobs(), train=lambda: DataLoader(data())),
        "returned None": replace(blobs(), validation=lambda: None),
        "is empty": blobs(validation=0),
        "returned None: it must return an nn.Module": replace(blobs(), model=lambda: None),
        "are frozen": replace(blobs(), model=lambda: nn.Linear(5, 3).requires_grad_(False)),
        "layer is lazy": replace(blobs(), model=lambda: nn.LazyLinear(3)),
        "must return a dict": blobs(objective=lambda model, batch: None),
        "no 'accuracy'": blobs(objective=only_loss),
    }


def find_mistakes(world: World) -> list[str]:
    found = []
    for task in mistakes().values():
        with pytest.raises(UsageError) as caught:
            train_in(world, task, {"target_accuracy": 0.5})
        found.append(str(caught.value))
    return found


def test_all_workers_have_the_same_error() -> None:
    first, second = run_workers(find_mistakes, 2)
    assert first == second
    for words, text in zip(mistakes(), first, strict=True):
        assert words in text


def train_without_validation(world: World) -> dict[str, Any]:
    task = replace(blobs(96, norm=True), validation=None)
    return train_in(world, task, {"reduce": "exact", "virtual_workers": 3}).weights


def test_a_run_without_validation_is_the_same_anywhere() -> None:
    results = [weights for workers in (1, 2) for weights in run_workers(train_without_validation, workers)]
    assert all(np.array_equal(results[0][name], each[name]) for each in results for name in each)


UNEVEN = """
import torch
from torch import nn
from torch.utils.data import Dataset
from paceline import Task, classify

class Uneven(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.zeros(4 if i == 7 else 5), i % 3

def task():
    return Task(name="uneven", model=lambda: nn.Linear(5, 3), train=Uneven, objective=classify(), defaults={"global_batch": 64})
"""


def test_samples_that_do_not_stack_are_one_line_from_a_loader_process(runs: Path) -> None:
    Path("uneven.py").write_text(UNEVEN)
    done = paceline("train", "uneven.py", "--workers", "2", "--loader-workers", "1")
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("paceline: samples "), done.stderr
    assert done.stderr.endswith("or give a function that makes a batch: Task(collate=...)\n"), done.stderr
