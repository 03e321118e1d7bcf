"""Law 4: every validation sample counts once, for every number of workers: nothing padded, nothing dropped."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness.processes import run_workers
from harness.training import Trained, blobs, first_two, train_in
from paceline.data.loaders import Arrays
from paceline.dist.world import World
from paceline.training.task import Task, classify


def numbers(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Metrics that are the sample's own number: their mean tells who was counted."""
    inputs, sample = batch
    loss = model(inputs).squeeze(1) * 0 + 1.0
    return {"loss": loss, "number": sample.float(), "square": sample.float() ** 2}


def validate(world: World, samples: int, options: dict[str, Any]) -> Trained:
    data = Arrays((torch.ones(samples, 1), torch.arange(samples)))
    task = Task(name="n", model=lambda: nn.Linear(1, 1), train=lambda: data, validation=lambda: data, objective=numbers)
    return train_in(world, task, {"epochs": 1, "max_steps": 1, "global_batch": 6, "base_lr": 1e-9, **options})


CASES = ((97, 10), (12, 100), (30, 10))
"""(samples, chunk): a short last chunk, fewer chunks than workers, chunks that fit."""


def validate_all(world: World) -> list[Trained]:
    cases = [validate(world, samples, {"eval_batch": chunk}) for samples, chunk in CASES]
    frozen = {"epochs": 1, "max_steps": 1, "base_lr": 1e-30, "momentum": 0.0}
    return [*cases, train_in(world, blobs(validation=77), frozen)]


def test_every_sample_counts_once_on_any_number_of_workers() -> None:
    untrained = set()
    for workers in (1, 2, 3):
        for *cases, frozen in run_workers(validate_all, workers):
            for (samples, _), result in zip(CASES, cases, strict=True):
                row = result.watcher.epochs[0]
                assert row["val_number"] == sum(range(samples)) / samples
                assert row["val_square"] == sum(n * n for n in range(samples)) / samples
            untrained.add((frozen.watcher.epochs[0]["val_loss"], frozen.watcher.epochs[0]["val_accuracy"]))
    assert len(untrained) == 1, "one and the same model must get the same numbers bit for bit, whoever counts"


def drawing(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Draws random numbers in validation, as a variational autoencoder does: from every generator there is."""
    noise = torch.randn(batch[0].shape) + float(np.random.rand()) + random.random()
    values: dict[str, Tensor] = first_two(classify())(model, (batch[0] + 0.3 * noise, *batch[1:]))
    return {**values, "drawn": noise[:, 0]}


def validate_drawing(world: World) -> Trained:
    options = {"epochs": 6, "virtual_workers": 3, "reduce": "exact", "target_accuracy": 0.8}
    return train_in(world, blobs(validation=77, objective=drawing), options)


def test_random_numbers_of_a_validation_do_not_depend_on_the_number_of_workers() -> None:
    (alone,) = run_workers(validate_drawing, 1)
    losses = [row["val_loss"] for row in alone.watcher.epochs]
    drawn = [row["val_drawn"] for row in alone.watcher.epochs]
    assert len(set(drawn)) == len(drawn) > 1, "an epoch draws its own numbers"
    for workers in (2, 3):
        for other in run_workers(validate_drawing, workers):
            assert [row["val_loss"] for row in other.watcher.epochs] == losses
            assert other.result.model_sha256 == alone.result.model_sha256, "another epoch reached the target"
