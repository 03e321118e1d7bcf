"""Law 2: an epoch visits each training sample exactly once; the order depends on (seed, epoch) alone."""

from typing import Any

from torch import Tensor, nn

from harness.processes import run_workers
from harness.training import blobs, train_in
from paceline.dist.world import World
from paceline.training.task import classify

SAMPLES, EPOCHS = 103, 3


def watch(world: World, options: dict[str, Any]) -> list[list[int]]:
    """Train, and return the samples of every forward pass of this worker."""
    seen: list[list[int]] = []

    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        if model.training:
            seen.append(batch[2].tolist())
        return classify()(model, batch[:2])

    train_in(world, blobs(SAMPLES, objective=objective), {"epochs": EPOCHS, "global_batch": 24, **options})
    return seen


OPTIONS: list[dict[str, Any]] = [{}, {"accumulate": 2}, {"loader": "streaming", "loader_workers": 1}, {"seed": 1}]


def watch_all(world: World) -> list[list[list[int]]]:
    return [watch(world, options) for options in OPTIONS]


def test_each_sample_once_and_the_same_steps_on_any_number_of_workers() -> None:
    orders: dict[int, list[list[int]]] = {}
    for workers in (1, 2, 3):
        for options, seen in zip(OPTIONS, zip(*run_workers(watch_all, workers), strict=True), strict=True):
            order = [samples_of_epoch(seen, epoch, options.get("accumulate", 1)) for epoch in range(EPOCHS)]
            for samples in order:
                assert sorted(samples) == list(range(SAMPLES))
            assert order[0] != order[1] != order[2]
            assert order == orders.setdefault(options.get("seed", 0), order), "the order depends on more than seed and epoch"
    assert orders[0] != orders[1]


def samples_of_epoch(seen: tuple[list[list[int]], ...], epoch: int, micro: int) -> list[int]:
    """The epoch's samples, step after step, part after part."""
    passes = len(seen[0]) // EPOCHS
    assert {len(one) for one in seen} == {passes * EPOCHS}, "workers took different numbers of passes"
    steps = [
        [sample for one in seen for group in one[i : i + micro] for sample in group]
        for i in range(epoch * passes, (epoch + 1) * passes, micro)
    ]
    assert len({len(step) for step in steps[:-2]}) == 1, "only the last two steps may be smaller"
    return [sample for step in steps for sample in step]
