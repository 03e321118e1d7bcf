"""The noise scale measured in training, on 1, 2 and 3 workers."""

from typing import Any

import pytest
import torch

from harness.processes import paceline, run_workers
from harness.training import ALONE, blobs, train_in
from paceline.config import make_config
from paceline.core.sampler import Sampler
from paceline.dist.world import World
from paceline.records import read_metrics
from paceline.training.build import build
from unit.core.test_noise import OPTIONS


def expected(units: list[range]) -> float:
    """The first step's noise scale by plain autograd."""
    task = blobs()
    run = build(task, make_config(task.defaults, OPTIONS), ALONE)
    model, data = run.model, task.train()
    sampler = Sampler(103, 24, 4, 0)
    order, bounds = sampler.order(0), sampler.part_bounds(0, 0)
    found = []
    for unit in units:
        samples = torch.from_numpy(order[bounds[unit[0]] : bounds[unit[-1] + 1]].copy())
        loss = task.objective(model, tuple(tensor[samples] for tensor in data.tensors))["loss"].mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        found.append((len(samples), torch.cat([grad.flatten() for grad in grads]).double()))
    mean_square = sum(float(grad.square().sum()) for _, grad in found) / len(found)
    whole = float((sum(size * grad for size, grad in found) / 24).square().sum())
    variance = (mean_square - whole) / (sum(1 / size for size, _ in found) / len(found) - 1 / 24)
    return variance / (whole - variance / 24)


def measured(world: World, options: dict[str, Any]) -> float:
    return train_in(world, blobs(), {**OPTIONS, **options}).watcher.steps[0]["noise_scale"]


SINGLE, HALVES = [range(i, i + 1) for i in range(4)], [range(2), range(2, 4)]


@pytest.mark.parametrize(
    ("workers", "options", "units"),
    [
        (1, {}, HALVES),
        (1, {"parts_at_once": 1}, SINGLE),
        (1, {"parts_at_once": 1, "accumulate": 2}, SINGLE),
        (1, {"reduce": "exact"}, SINGLE),
        (2, {}, HALVES),
        (2, {"parts_at_once": 1}, SINGLE),
        (2, {"reduce": "exact"}, SINGLE),
        (3, {}, [range(1), range(1, 2), range(2, 4)]),
    ],
)
def test_measured_in_training(workers, options, units):
    """In every way parts can be spread, the first step's noise scale is that of plain autograd."""
    wanted = expected(units)
    for found in run_workers(measured, workers, options) if workers > 1 else [measured(ALONE, options)]:
        assert found == pytest.approx(wanted, rel=1e-3)


def test_the_record_and_the_epoch_line_have_it(runs):
    done = paceline(
        *("train", "fashion-mnist-mini", "--measure-noise", "--virtual-workers", "4", "--epochs", "1", "--name", "noisy"),
        *("--model", "linear", "--train-samples", "1024", "--reference-batch", "32"),
    )
    assert done.returncode == 0, done.stderr
    assert "Noise Scale = " in done.stdout
    rows = read_metrics(runs / "noisy")
    assert all(float(row["noise_scale"]) > 0 for row in rows if row["kind"] in ("step", "epoch"))
    assert not any("gradient_variance" in row for row in rows)
