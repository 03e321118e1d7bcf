"""Law 3: augmentation, dropout and noise are keyed by (seed, epoch or step, sample or part), never by rank or history."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from harness.processes import run_workers
from harness.training import blobs, train_in
from paceline.data.augment import Images
from paceline.data.loaders import Arrays
from paceline.dist.world import World
from paceline.training.task import Task, classify

COUNT = 50


class Noisy(Dataset[tuple[Tensor, int, int]]):
    """A user's Dataset that draws from every generator there is."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[Tensor, int, int]:
        noise = torch.tensor([float(torch.rand(())), float(np.random.rand()), random.random()])
        return noise.expand(1, 4, 3), index % 10, index


def images() -> Arrays:
    pixels = torch.randint(0, 256, (COUNT, 1, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Arrays((pixels, torch.arange(COUNT) % 10, torch.arange(COUNT)))


def watch_inputs(world: World, streaming: bool, options: dict[str, Any]) -> dict[tuple[int, int], list[float]]:
    """(epoch, sample) -> what the model saw of it."""
    passes: list[tuple[list[int], Tensor]] = []

    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        inputs, labels, numbers = batch
        if model.training:
            passes.append((numbers.tolist(), inputs))
        return classify()(model, (inputs, labels))

    data = Noisy if streaming else images
    task = Task(
        name="watched",
        model=lambda: _net(streaming),
        train=data,
        validation=data,
        objective=objective,
        prepare=None if streaming else Images(crop=2, flip=True, erase=0.5, seed=3),
    )
    options = {"global_batch": 12, "epochs": 2, "base_lr": 0.01, "momentum": 0.0, "loader_workers": 1, **options}
    train_in(world, task, options)
    return {
        (i // (len(passes) // 2), sample): pixels.flatten().tolist()
        for i, (samples, images) in enumerate(passes)
        for sample, pixels in zip(samples, images, strict=True)
    }


def _net(streaming: bool) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(12 if streaming else 144, 10))


def watch_both(world: World, options: dict[str, Any]) -> list[dict[tuple[int, int], list[float]]]:
    return [watch_inputs(world, streaming, options) for streaming in (False, True)]


def test_a_sample_looks_the_same_whoever_trains_on_it() -> None:
    (alone,) = run_workers(watch_both, 1, {})
    for seen in alone:
        assert len(seen) == 2 * COUNT
        assert seen[0, 0] != seen[1, 0], "augmentation must change from epoch to epoch"
    for workers, options in ((2, {}), (3, {"global_batch": 6, "loader_workers": 0})):
        for one, several in zip(alone, zip(*run_workers(watch_both, workers, options), strict=True), strict=True):
            together: dict[Any, Any] = {}
            for seen in several:
                together |= seen
            assert together == one


def watch_dropout(world: World, spoiled: bool) -> list[list[float]]:
    """The dropout masks of this worker's steps; a spoiled worker has drawn other numbers in between."""
    masks: list[list[float]] = []

    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        if model.training:
            masks.append(nn.functional.dropout(torch.ones(16), 0.5).tolist())
            if spoiled and world.rank == 1:
                torch.rand(17)
        return classify()(model, batch[:2])

    train_in(world, blobs(objective=objective), {"epochs": 1})
    return masks


def test_dropout_follows_step_and_part() -> None:
    first, second = run_workers(watch_dropout, 2, False)
    assert all(mine != theirs for mine, theirs in zip(first, second, strict=True)), "two parts drew the same numbers"
    assert len({tuple(mask) for mask in first}) == len(first), "two steps drew the same numbers"
    assert run_workers(watch_dropout, 2, True) == [first, second], "numbers drawn elsewhere changed a part's own"
