"""The loop on several workers: weighting, divergence, data that differs."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.processes import run_workers
from harness.training import Trained, blobs, train_in
from paceline.data.loaders import Arrays
from paceline.dist.world import World
from paceline.errors import Diverged, WorkersDisagree
from paceline.training.task import Task, classify
from unit.training.test_loop import PLAIN, alone


def plain_sgd(steps: list[list[int]], samples: int) -> dict[str, Any]:
    """The same training written out by hand: the reference for weighting."""
    task = blobs(samples)
    data = task.train()
    assert isinstance(data, Arrays)
    assert task.model is not None
    trained = alone(blobs(samples), epochs=1, max_steps=1, base_lr=1e-30, momentum=0.0, weight_decay=0.0)
    model = task.model()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in trained.weights.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in steps:
        inputs, labels, _ = (tensor[step] for tensor in data.tensors)
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def several(world: World) -> list[Trained]:
    """An epoch whose tail does not divide, in one go and in micro-batches."""
    return [train_in(world, blobs(31), {**PLAIN, "accumulate": accumulate}) for accumulate in (1, 2)]


def test_every_sample_of_a_step_weighs_the_same_on_any_number_of_workers() -> None:
    from paceline.core.sampler import Sampler

    sampler = Sampler(31, 12, 3, 0)
    order, bounds = sampler.order(0).tolist(), sampler.cut(0).bounds.tolist()
    assert np.diff(bounds).tolist() == [12, 12, 7]
    expected = plain_sgd([order[a:b] for a, b in itertools.pairwise(bounds)], 31)
    for workers in (1, 3):
        for once, micro in run_workers(several, workers):
            for name, weights in expected.items():
                np.testing.assert_allclose(once.weights[name], weights, rtol=1e-5, atol=1e-6)
                np.testing.assert_allclose(micro.weights[name], weights, rtol=1e-5, atol=1e-6)
            assert once.watcher.steps[0]["loss"] == pytest.approx(micro.watcher.steps[0]["loss"], rel=1e-5)


def diverge(world: World) -> tuple[str, list[Any]]:
    """Worker 1's loss alone becomes infinite, at its fourth step."""
    passes = 0

    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        nonlocal passes
        passes += 1
        values = classify()(model, batch[:2])
        if world.rank == 1 and passes == 4:
            values["loss"] = values["loss"] * float("inf")
        return values

    try:
        train_in(world, blobs(objective=objective), {"epochs": 1})
    except Diverged as error:
        return str(error), [passes]
    return "it went on", [passes]


def test_a_loss_that_is_not_finite_on_one_worker_ends_all_at_the_same_step() -> None:
    (first, passes), (second, others) = run_workers(diverge, 2)
    assert first == second
    assert "at step 4 (epoch 1)" in first
    assert "global batch 12" in first
    assert passes == others
    assert passes[0] <= 6, "it ends at once"


def different(world: World, kind: str) -> str:
    """Data that is not the same everywhere: made without a seed of its own, of another length, of other values."""

    def data() -> Arrays:
        length = 24 + 6 * world.rank if kind == "length" else 24
        shift = world.rank if kind == "values" else 0
        return Arrays((torch.randn(length, 5) + shift, torch.zeros(length, dtype=torch.long)))

    fields = {**vars(blobs()), "train": data, "validation": data, "objective": classify()}
    try:
        train_in(world, Task(**fields), {"epochs": 1})
    except WorkersDisagree as error:
        return str(error)
    return "the same data"


def all_different(world: World) -> list[str]:
    return [different(world, kind) for kind in ("random", "length", "values")]


def test_workers_with_different_data_are_told() -> None:
    for unseeded, length, values in run_workers(all_different, 2):
        assert unseeded == "the same data", "what a task draws at random follows from the run's seed"
        assert "about the training data" in length
        assert "first: samples" in length
        assert "array 0" in values
