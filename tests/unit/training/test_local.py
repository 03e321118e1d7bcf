"""Parts that train by themselves: against the same written out by hand, and what has to wait until they are averaged."""

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.training import Trained, blobs, train_in
from paceline.config import make_config
from paceline.core.sync_norm import SyncNorm
from paceline.data.loaders import Arrays
from paceline.dist.world import world
from paceline.errors import Stopped, UsageError
from paceline.training.build import build
from paceline.training.checkpoint.keeper import Keeper
from paceline.training.loop import fit
from paceline.training.task import Task

FOUR = {"virtual_workers": 4, "global_batch": 24, "local_steps": 3}


PLAIN = {"momentum": 0.0, "nesterov": False, "schedule": "constant", "epochs": 2}


def alone(task: Task, **options: Any) -> Trained:
    with world() as here:
        return train_in(here, task, options)


def assert_close(one: Trained, other: Trained) -> None:
    for name, weights in one.weights.items():
        np.testing.assert_allclose(other.weights[name], weights, rtol=2e-3, atol=5e-5, err_msg=name)
    for mine, theirs in zip(one.watcher.steps, other.watcher.steps, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert mine["accuracy"] == pytest.approx(theirs["accuracy"], rel=1e-4)


def test_averaged_every_step_it_is_plain_sgd() -> None:
    """Where parts are equal, the mean of their steps is the step of their mean: 96 samples are four full steps."""
    task = blobs(96)
    usual = alone(task, **{**FOUR, **PLAIN, "local_steps": 0})
    local = alone(task, **{**FOUR, **PLAIN, "local_steps": 1, "local_after": 0.25})
    assert_close(usual, local)
    assert usual.result.model_sha256 != local.result.model_sha256, "no step was local"


@pytest.mark.parametrize(
    "options",
    [
        {"nesterov": True},
        {"optimizer": "adamw", "base_lr": 0.01},
        {"clip_norm": 0.3, "accumulate": 3},
        {"fast": "off"},  # state comes into being with the first step
        {"reduce": "exact", "optimizer": "adamw", "base_lr": 0.01},
    ],
)
def test_each_part_trains_by_itself(options: dict[str, Any]) -> None:
    """Against four nets with an optimizer each, from the first step on: 5 steps per epoch, averaged after 3, 5, 6, 9 and 10."""
    task = blobs(103)
    options = {**FOUR, "local_after": 0.0, "schedule": "constant", **options}
    found = alone(task, **options)
    nets, losses = by_hand(task, options)
    for name, expected in nets[0].state_dict().items():
        np.testing.assert_allclose(found.weights[name], expected.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)
    assert [row["loss"] for row in found.watcher.steps] == pytest.approx(losses, rel=1e-4)


def by_hand(task: Task, options: dict[str, Any]) -> tuple[list[nn.Module], list[float]]:
    with world() as here:
        run = build(task, make_config(task.defaults, options), here)
        config, sampler, nets = run.config, run.sampler, [copy.deepcopy(run.model) for _ in range(4)]
        optimizers = []
        for net in nets:
            groups = [
                {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": config.weight_decay},
                {"params": [p for p in net.parameters() if p.ndim == 1], "weight_decay": 0.0},
            ]
            if config.optimizer == "adamw":
                optimizers.append(torch.optim.AdamW(groups, lr=run.update.schedule.peak_lr))
            else:
                optimizers.append(torch.optim.SGD(groups, run.update.schedule.peak_lr, 0.9, nesterov=True))
    data, losses = task.train(), []
    assert isinstance(data, Arrays)
    for step in range(sampler.first_step(2)):
        epoch, number = sampler.place(step)
        order, bounds, total = sampler.order(epoch), sampler.part_bounds(epoch, number), 0.0
        for part, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            samples = order[bounds[part] : bounds[part + 1]].tolist()
            inputs, labels, _ = (tensor[samples] for tensor in data.tensors)
            loss = nn.functional.cross_entropy(net(inputs), labels)
            loss.backward()
            if config.clip_norm:
                nn.utils.clip_grad_norm_(net.parameters(), config.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item() * len(labels)
        losses.append(total / (bounds[-1] - bounds[0]))
        if (step + 1) % 3 == 0 or number == sampler.cut(epoch).steps - 1:
            average(nets, optimizers)
    return nets, losses


@torch.no_grad()
def average(nets: list[nn.Module], optimizers: list[Any]) -> None:
    columns = list(zip(*(net.parameters() for net in nets), strict=True))
    for parameters in list(columns):
        states = [optimizer.state[p] for p, optimizer in zip(parameters, optimizers, strict=True)]
        columns += [tuple(state[name] for state in states) for name in states[0]]
    for column in columns:
        mean = torch.stack([tensor.detach() for tensor in column]).mean(0)
        for tensor in column:
            tensor.copy_(mean)


def test_how_parts_ran_before_makes_no_difference() -> None:
    """Together in one pass until parts go their own ways; each keeps its own statistics throughout."""
    options = {**FOUR, "local_after": 0.3, "epochs": 2, "base_lr": 0.02}
    together, in_turn = (alone(blobs(norm=True), parts_at_once=count, **options) for count in (0, 1))
    assert_close(together, in_turn)
    assert together.weights["1.num_batches_tracked"] == 10
    assert together.watcher.notes == ["after step 3 each of the 4 parts trains by itself, averaged every 3 steps."]


def test_averages_of_weights_move_with_the_parts_mean() -> None:
    """As if each averaging were the three steps that led to it."""
    options = {**FOUR, **PLAIN, "local_after": 0.0, "epochs": 1, "max_steps": 3}
    start = alone(blobs(96), **{**options, "base_lr": 1e-30})
    plain, averaged = alone(blobs(96), **options), alone(blobs(96), ema=0.9, **options)
    decay = min(0.9, 3 / 12) ** 3
    for name, end in plain.weights.items():
        expected = start.weights[name] * decay + end * (1 - decay)
        np.testing.assert_allclose(averaged.weights[name], expected, rtol=1e-4, atol=1e-6)


def kept_at(folder: Path) -> list[int]:
    return sorted(int(path.stem.partition("-")[2]) for path in folder.iterdir())


def test_checkpoints_wait_for_an_averaging(tmp_path: Path) -> None:
    """Due every two steps. Local from step 4 of 20 on, averaged after 5 (an epoch's end), 7, 10, 13, 15, 16, 19 and 20."""
    with world() as here:
        options = {**FOUR, "local_after": 0.2, "epochs": 4, "checkpoint_every": "2", "keep": 100}
        train_in(here, blobs(), options, tmp_path)
    assert kept_at(tmp_path) == [2, 4, 7, 10, 13, 15, 16, 19, 20]


def test_a_wish_to_stop_waits_for_an_averaging(tmp_path: Path) -> None:
    task = blobs()
    watch = SimpleNamespace(stop="", why_stop=lambda: "SIGTERM")
    watch.mark = lambda step, stage: setattr(watch, "stop", "SIGTERM" if step >= 8 else "")
    with world() as here:
        run = build(task, make_config(task.defaults, {**FOUR, "local_after": 0.2, "epochs": 4, "checkpoint_every": "50"}), here)
        with pytest.raises(Stopped, match="after step 10; a checkpoint was written"):
            fit(run, (), Keeper(run, tmp_path), watch)  # type: ignore[arg-type]
    assert kept_at(tmp_path) == [10]


class Spies(nn.Module):
    """Remembers how many samples it was given."""

    seen: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = nn.Linear(5, 3), []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.append(len(x))
        return self.linear(x)


def test_every_pass_is_of_one_part() -> None:
    task = replace(blobs(48), model=Spies)
    options = make_config(task.defaults, {**FOUR, "local_after": 0.5, "epochs": 2})
    with world() as here:
        run = build(task, options, here)
        fit(run, ())
    # The first is a trial before the first step, the second the look at one part beside the others.
    assert run.model.seen == [6, 6, 24, 24] + [6] * 8


def test_what_cannot_be() -> None:
    with pytest.raises(UsageError, match="--local-steps needs at least two virtual workers"):
        alone(blobs(), local_steps=2)
    synced = replace(blobs(), model=lambda: nn.Sequential(nn.Linear(5, 8), SyncNorm(8), nn.Linear(8, 3)))
    with pytest.raises(UsageError, match="takes its statistics over all workers"):
        alone(synced, **FOUR)
