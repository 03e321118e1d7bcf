"""`paceline.Parts` on one worker; tests/ranks/test_own_loop.py has several."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.core.determinism import deterministic
from paceline.errors import UsageError

X = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(50) % 3


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Exact mode sets flags of the process."""
    with deterministic():
        yield


def parts(model: nn.Module | None = None, **options: Any) -> paceline.Parts:
    return paceline.Parts(model or nn.Linear(4, 3), **{"samples": 50, "global_batch": 12, "virtual_workers": 4, **options})


def losses(model: nn.Module, samples: Tensor) -> Tensor:
    return F.cross_entropy(model(X[samples]), Y[samples], reduction="none")


@pytest.mark.parametrize("options", [{}, {"reduce": "exact"}, {"accumulate": 2}, {"virtual_workers": 1}])
def test_an_epochs_gradients_are_those_of_its_samples(options: dict[str, Any]) -> None:
    model = nn.Linear(4, 3)
    seen = []
    for step in parts(model, **options).epoch(0):
        samples = []
        for part in step:
            samples += part.samples.tolist()
            part.backward(losses(model, part.samples), number=part.samples)
        metrics = step.reduce()
        assert len(samples) == step.samples
        expected = torch.autograd.grad(losses(model, torch.tensor(samples)).mean(), list(model.parameters()))
        for parameter, grad in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, grad)
        assert metrics["loss"].item() == pytest.approx(losses(model, torch.tensor(samples)).mean().item(), rel=1e-5)
        assert metrics["number"].item() == pytest.approx(sum(samples) / len(samples), rel=1e-5)
        model.zero_grad()
        seen += samples
    assert sorted(seen) == list(range(50))


def test_steps_are_numbered_over_the_run() -> None:
    team = parts()
    assert [step.number for epoch in (0, 1) for step in team.epoch(epoch)] == list(range(2 * team.steps_per_epoch))
    assert [step.number for step in team.epoch(1, start=2)] == list(range(team.steps_per_epoch + 2, 2 * team.steps_per_epoch))


def test_each_part_is_seeded_by_step_and_part() -> None:
    def drawn(seed: int) -> list[float]:
        team, found = parts(seed=seed), []
        for step in team.epoch(0):
            for part in step:
                found.append(torch.rand(1).item())
                part.backward(losses(team.model, part.samples))
            step.reduce()
        return found

    first = drawn(0)
    assert len(set(first)) == len(first), "no two parts draw the same"
    assert drawn(1) != first
    assert drawn(0) == first


def test_every_part_has_batch_norm_statistics_of_its_own() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    team = parts(model, samples=12)
    means = []
    (step,) = team.epoch(0)
    for part in step:
        part.backward(losses(model, part.samples))
        means.append(0.1 * X[part.samples].mean(0))
        torch.testing.assert_close(model[0].running_mean, means[-1])
    step.reduce()
    team.average_statistics()
    torch.testing.assert_close(model[0].running_mean, torch.stack(means).mean(0))


def test_evaluation_uses_the_mean_statistics_and_leaves_the_model_training() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    team = parts(model, samples=48)
    for step in team.epoch(0):
        for part in step:
            part.backward(losses(model, part.samples))
        step.reduce()
        model.zero_grad()
    found = team.evaluate(50, lambda samples: {"loss": losses(model, samples)}, batch=7)
    assert model.training
    model.eval()
    assert found["loss"] == pytest.approx(losses(model, torch.arange(50)).mean().item(), rel=1e-5)


def test_the_noise_scale_is_measured() -> None:
    model = nn.Linear(4, 3)
    team = parts(model, measure_noise=True)
    for step in team.epoch(0):
        for part in step:
            part.backward(losses(model, part.samples))
        step.reduce()
        model.zero_grad()
    assert team.noise_scale > 0
    assert not math.isnan(team.noise_scale)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"reduce": "exakt"}, 'reduce is \'exakt\': it must be "fast" or "exact"'),
        ({"global_batch": 10}, "10 does not divide into 4 equal parts"),
        ({"samples": 3}, "3 training samples"),
        ({"at_once": 2, "model": nn.Sequential(nn.LazyBatchNorm1d(), nn.Linear(4, 3))}, "at_once is 2"),
        ({"reduce": "exact", "model": nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3))}, "over all workers"),
    ],
)
def test_what_cannot_be_is_one_line(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as found:
        parts(**options)
    assert "\n" not in str(found.value)


def test_other_mistakes_are_one_line() -> None:
    team = parts()
    with pytest.raises(UsageError, match=r"Parts\.loader"):
        next(team.epoch(0, DataLoader(TensorDataset(X, Y))))
    with pytest.raises(UsageError, match="measure_noise=True"):
        _ = team.noise_scale
    first, second = list(next(team.epoch(0)))[:2]
    first.backward(losses(team.model, first.samples), accuracy=torch.zeros(3))
    with pytest.raises(UsageError, match="one part reported loss, another loss, accuracy"):
        second.backward(losses(team.model, second.samples))


def test_a_part_without_backward_and_a_second_reduce_are_refused() -> None:
    team = parts()
    step = next(team.epoch(0))
    for part in step:
        if part.item.parts[0] != 2:
            part.backward(losses(team.model, part.samples))
    with pytest.raises(UsageError, match="step 0: 3 of this worker's 4 parts called backward before reduce"):
        step.reduce()
    step = next(team.epoch(0))
    for part in step:
        part.backward(losses(team.model, part.samples))
    step.reduce()
    with pytest.raises(UsageError, match="step 0 is reduced already"):
        step.reduce()
