"""What the first passes refuse or accept, on real workers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.processes import run_workers
from harness.training import blobs, train_in
from paceline.dist.world import World
from paceline.errors import WorkersDisagree
from paceline.training.task import classify
from unit.training.test_task_checks import ONE, task_of


class Averaging(nn.Module):
    """Keeps a mean of what it has seen in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen.lerp_(inputs.detach().mean(0), 0.1)
        return self.linear(inputs - self.seen)


def averaging(world: World) -> tuple[list[str], str]:
    options = {**ONE, "virtual_workers": 2, "parts_at_once": 1}
    try:
        return train_in(world, task_of(Averaging), options).watcher.notes, ""
    except WorkersDisagree as error:
        return [], str(error)


def test_a_buffer_that_forward_changes_is_told_or_refused_in_the_first_step() -> None:
    ((notes, _),) = run_workers(averaging, 1)
    assert "the forward pass changes the buffer seen, which does not belong to a batch norm" in notes[0]
    for _, error in run_workers(averaging, 2):
        assert "after the first step: 1 of 3 tensors differ (first: seen)" in error
        assert "register such a buffer with persistent=False" in error


def named_by_rank(world: World) -> list[dict[str, Any]]:
    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        values = classify()(model, batch[:2])
        extras = [("one", torch.ones(len(batch[0]))), ("two", torch.full((len(batch[0]),), 2.0))]
        return {**dict(extras[:: 1 - 2 * world.rank]), "loss": values["loss"]}

    return train_in(world, blobs(objective=objective), {**ONE, "virtual_workers": 2}).watcher.steps


def test_metrics_keep_their_names_whatever_order_a_worker_reports_them_in() -> None:
    for steps in run_workers(named_by_rank, 2):
        assert [(row["one"], row["two"]) for row in steps] == [(1.0, 2.0)] * len(steps)


def other_names(world: World) -> str:
    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        values = classify()(model, batch[:2])
        return {"loss": values["loss"], f"of {world.rank}": values["accuracy"]}

    with pytest.raises(WorkersDisagree) as caught:
        train_in(world, blobs(objective=objective), {**ONE, "virtual_workers": 2})
    return str(caught.value)


def test_workers_that_report_different_metrics_are_refused() -> None:
    assert all("workers disagree about the metrics" in said for said in run_workers(other_names, 2))


def freezing(world: World) -> Any:
    """A layer is frozen from the second step on."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.last(self.first(inputs))

    def objective(model: Any, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        values = classify()(model, batch[:2])
        if model.training and model.first.weight.grad is None:
            model.first.requires_grad_(bool(values["loss"].mean() > 1e9) or not hasattr(model, "begun"))
            model.begun = True
        return values

    options = {"epochs": 1, "max_steps": 4, "virtual_workers": 2, "parts_at_once": 1, "weight_decay": 0.1}
    return train_in(world, task_of(Frozen, objective=objective), options).weights


def test_a_layer_that_is_frozen_during_training_stays_as_it_is() -> None:
    one, two = run_workers(freezing, 2)
    for name, weights in one.items():
        np.testing.assert_array_equal(weights, two[name])


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
