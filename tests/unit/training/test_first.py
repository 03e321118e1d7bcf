"""What the first passes of a run refuse, and what they say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.processes import run_workers
from harness.training import ALONE, blobs, train_in
from paceline.dist.world import World
from paceline.errors import UsageError
from paceline.training.task import Task, classify

ONE = {"epochs": 1, "max_steps": 2}


def task_of(model: Any, **fields: Any) -> Task:
    task = blobs()
    defaults = {**task.defaults, **fields.pop("defaults", {})}
    return replace(task, model=model, defaults=defaults, **fields)


def detached(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {"loss": nn.functional.cross_entropy(model(batch[0]).detach(), batch[1], reduction="none")}


@torch.no_grad()
def without_gradients(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {"loss": nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")}


@pytest.mark.parametrize("objective", [detached, without_gradients])
@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_a_model_that_cannot_learn_is_refused(objective: Any, mode: str) -> None:
    with pytest.raises(UsageError, match="does not depend on any trainable parameter"):
        train_in(ALONE, blobs(objective=objective), {**ONE, "reduce": mode})


class Counting(nn.Module):
    """Keeps a number in a plain attribute."""

    def __init__(self, caches: bool = False) -> None:
        super().__init__()
        self.linear, self.k, self.caches = nn.Linear(5, 3), 0, caches

    def forward(self, inputs: Tensor) -> Tensor:
        self.k = 7 if self.caches else self.k + 1
        return self.linear(inputs)


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_state_in_a_plain_attribute_is_told(mode: str) -> None:
    options = {**ONE, "reduce": mode, "virtual_workers": 2, "parts_at_once": 1}
    (note,) = train_in(ALONE, task_of(Counting), options).watcher.notes
    assert "the forward pass changes the model.k, a plain attribute" in note
    assert train_in(ALONE, task_of(lambda: Counting(caches=True)), options).watcher.notes == [], "filled once: a cache"
    assert train_in(ALONE, task_of(Counting), ONE).watcher.notes == [], "one part: nothing depends on the number of workers"


def mixed(batch: tuple[Tensor, ...], samples: Tensor, epoch: int | None) -> tuple[Any, ...]:
    """Every sample gets something of its neighbor."""
    return (batch[0] + 0.5 * batch[0].roll(1, 0), *batch[1:]) if epoch is not None else batch


def noisy(batch: tuple[Tensor, ...], samples: Tensor, epoch: int | None) -> tuple[Any, ...]:
    """One number for the whole batch: seeded alike, a part alone gets what two together get."""
    return batch[0] + float(np.random.rand()) * (epoch is not None), *batch[1:]


def doubled(batch: tuple[Tensor, ...], samples: Tensor, epoch: int | None) -> tuple[Any, ...]:
    return batch[0] * 2, *batch[1:]


def prepared(world: World) -> dict[str, Any]:
    found = {}
    for prepare in (mixed, noisy, doubled):
        task = replace(blobs(), prepare=prepare)
        options = {**ONE, "virtual_workers": 4, "global_batch": 24, "base_lr": 0.01}
        found[prepare.__name__] = train_in(world, task, options)
    asked = train_in(world, replace(blobs(), prepare=mixed), {**options, "parts_at_once": 2})
    return {**found, "asked": asked.watcher.notes}


def test_a_prepare_that_mixes_samples_keeps_to_its_part() -> None:
    (alone,), pair = run_workers(prepared, 1), run_workers(prepared, 2)
    for case in ("mixed", "noisy", "doubled"):
        for worker in pair:
            for name, weights in alone[case].weights.items():
                torch.testing.assert_close(torch.tensor(worker[case].weights[name]), torch.tensor(weights), msg=case)
    (note,) = alone["asked"]
    assert "--parts-at-once 2: the task's prepare looks across the samples of a batch, so the model depends on" in note


class Shared(nn.Module):
    """Has a buffer whose elements are one number in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("scale", torch.full((1,), 2.0).expand(5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs * self.scale)


def shared(world: World, folder: Path) -> Any:
    options = {**ONE, "reduce": "exact", "virtual_workers": 2, "checkpoint_every": "1"}
    train_in(world, task_of(Shared), {**ONE, "virtual_workers": 2})
    train_in(world, task_of(Shared), options, folder)
    return train_in(world, task_of(Shared), options, folder, resumes=True).weights["scale"].tolist()


def test_a_buffer_whose_elements_share_memory_trains_and_resumes(tmp_path: Path) -> None:
    assert run_workers(shared, 2, tmp_path) == [[2.0] * 5] * 2


class Synced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.SyncBatchNorm(8), nn.Linear(8, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)


def synced(world: World) -> Any:
    return train_in(world, task_of(Synced), {**ONE, "virtual_workers": 2, "base_lr": 0.01})


def test_torchs_own_sync_batch_norm_trains_on_cpus() -> None:
    (alone,) = run_workers(synced, 1)
    for worker in run_workers(synced, 2):
        for name, weights in alone.weights.items():
            torch.testing.assert_close(torch.tensor(worker.weights[name]), torch.tensor(weights), msg=name)


def test_a_sync_batch_norm_that_has_no_stand_in_is_refused() -> None:
    with pytest.raises(UsageError, match="runs on GPUs only"):
        train_in(ALONE, task_of(lambda: nn.Sequential(nn.Linear(5, 3), nn.SyncBatchNorm(3, affine=False))), ONE)


def by_mode(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Other metrics in training than in validation."""
    values = classify()(model, batch[:2])
    return {"loss": values["loss"], "margin": values["accuracy"]} if model.training else values


def test_training_and_validation_may_report_different_metrics() -> None:
    trained = train_in(ALONE, blobs(objective=by_mode), ONE)
    assert "margin" in trained.watcher.steps[0]
    assert "accuracy" not in trained.watcher.steps[0]
    assert "val_accuracy" in trained.watcher.epochs[0]
    assert "val_margin" not in trained.watcher.epochs[0]
    assert set(trained.result.metrics) == {"loss", "accuracy"}


def changing(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    values = classify()(model, batch[:2])
    if not model.training and int(batch[2][0]) > 0:
        values["extra"] = values["loss"]
    return values


def test_metrics_that_change_within_a_validation_are_refused() -> None:
    with pytest.raises(UsageError, match="must report the same metrics"):
        train_in(ALONE, blobs(objective=changing), ONE)
