"""Averaged weights on real workers."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from harness.processes import run_workers
from harness.training import blobs, train_in
from paceline.config import make_config
from paceline.core.sync_norm import SyncNorm
from paceline.dist.world import World
from paceline.errors import WorkersDisagree
from paceline.training.build import build
from paceline.training.loop import fit
from paceline.training.plain import make_clock, make_step
from paceline.training.validation import Averaged


def test_statistics_follow_the_epochs_augmentation_and_nothing_else() -> None:
    """Random numbers of a user's own `prepare` are those of the epoch and the chunk: the same on any number of workers."""
    (one,) = run_workers(noisy, 1)  # with one thread, as the others have
    assert run_workers(noisy, 2) == [one, one]
    assert one[0] != one[1]


def noisy(world: World) -> list[list[float]]:
    """The statistics taken in two epochs, by 1 or 2 workers that have the same weights."""

    def prepare(batch: tuple[Any, ...], samples: Tensor, epoch: int | None) -> tuple[Any, ...]:
        return batch[0] + torch.randn(batch[0].shape), *batch[1:]

    task = replace(blobs(norm=True, dropout=0.5), prepare=prepare)
    run = build(task, make_config(task.defaults, {"virtual_workers": 2, "ema": 0.9, "reduce": "exact"}), world)
    found = []
    for epoch in (0, 1):
        averaged = Averaged(run, make_step(run, make_clock(run)))
        run.parts.statistics.average(world)
        before = copy.deepcopy(run.model.state_dict())
        averaged.put_in(epoch)
        found.append(run.model[1].running_mean.tolist())
        averaged.take_out()
        assert all(tensor.equal(before[name]) for name, tensor in run.model.state_dict().items())
    return found


def synced() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), SyncNorm(8), nn.Linear(8, 3))


def several(world: World) -> list[Any]:
    """A norm over all workers, of which one would have a chunk more than the other; a wrong number in worker 1's average."""
    task = replace(blobs(samples=61, norm=True), model=synced)
    found: list[Any] = [train_in(world, task, {"global_batch": 24, "ema": 0.9})]
    task = blobs(norm=True)
    run = build(task, make_config(task.defaults, {"global_batch": 24, "ema": 0.9}), world)
    if world.rank == 1:
        run.update.ema.tensors()[0][0, 0] += 1  # type: ignore[union-attr]
    try:
        fit(run, ())
    except WorkersDisagree as error:
        found.append(str(error))
    return found


def test_a_norm_over_all_workers_and_averages_that_differ() -> None:
    results = run_workers(several, 2)
    assert len({trained.result.model_sha256 for trained, _ in results}) == 1
    for _, said in results:
        assert "after epoch 1" in said
        assert "first: ema." in said
