"""Sharpness-aware steps against the formula, and gradient noise that everybody shares."""

import math

import pytest
import torch
from torch import nn

from harness.training import blobs, train_in
from paceline.config import make_config
from paceline.errors import UsageError
from paceline.training.build import build
from paceline.training.gradients import Jitter, Sam
from unit.core.test_deal import ALONE


def test_sam_takes_the_gradient_uphill_and_comes_back():
    torch.manual_seed(0)
    weights = nn.Parameter(torch.randn(5, dtype=torch.float64))
    unused = nn.Parameter(torch.ones(2))
    curve = torch.diag(torch.arange(1.0, 6.0, dtype=torch.float64))
    before = weights.detach().clone()
    sam = Sam([weights, unused], 0.1)
    sam.climb(weights @ curve @ weights)
    gradient = 2 * curve @ before
    torch.testing.assert_close(weights.detach(), before + 0.1 * gradient / gradient.norm())
    assert weights.grad is None
    (weights @ curve @ weights).backward()
    sam.descend()
    assert torch.equal(weights.detach(), before)
    torch.testing.assert_close(weights.grad, 2 * curve @ (before + 0.1 * gradient / gradient.norm()))


def test_a_sharpness_aware_step_of_parts():
    """One plain step of two parts: each climbs by its own gradient, the mean of what they find there is the step; batch norm
    keeps the statistics of the weights themselves."""
    options = {"virtual_workers": 2, "sam_rho": 0.5, "momentum": 0.0, "weight_decay": 0.0, "max_steps": 1, "epochs": 1}
    options |= {"schedule": "constant", "base_lr": 0.1}
    task = blobs(norm=True)
    run = build(task, make_config(task.defaults, options), ALONE)
    model, data, order = run.model, task.train(), run.sampler.order(0)[:12]
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    total = [torch.zeros_like(p) for p in model.parameters()]
    means = []
    for part in (order[:6], order[6:]):
        batch = tuple(tensor[torch.from_numpy(part.copy())] for tensor in data.tensors)
        model.load_state_dict(start)
        grads = torch.autograd.grad(task.objective(model, batch)["loss"].mean(), list(model.parameters()))
        means.append(model.state_dict()["1.running_mean"].clone())
        norm = torch.cat([grad.flatten() for grad in grads]).norm()
        with torch.no_grad():
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter += 0.5 * grad / norm
        uphill = torch.autograd.grad(task.objective(model, batch)["loss"].mean(), list(model.parameters()))
        total = [a + b / 2 for a, b in zip(total, uphill, strict=True)]
    trained = train_in(ALONE, task, options)
    for (name, _), step in zip(model.named_parameters(), total, strict=True):
        torch.testing.assert_close(torch.from_numpy(trained.weights[name]), start[name] - 0.1 * step, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(torch.from_numpy(trained.weights["1.running_mean"]), sum(means) / 2)
    assert trained.weights["1.num_batches_tracked"] == 1


def test_every_sharpness_aware_step_counts_once_for_batch_norm():
    trained = train_in(ALONE, blobs(norm=True), {"sam_rho": 0.5, "max_steps": 3, "epochs": 1})
    assert trained.weights["1.num_batches_tracked"] == 3


def test_sam_runs_parts_in_turn():
    task = blobs()
    with pytest.raises(UsageError, match="every part climbs on its own"):
        build(task, make_config(task.defaults, {"virtual_workers": 4, "parts_at_once": 2, "sam_rho": 0.1}), ALONE)
    run = build(task, make_config(task.defaults, {"virtual_workers": 4, "sam_rho": 0.1}), ALONE)
    assert {len(group) for group in run.parts.groups} == {1}


def drawn(step: int, seed: int = 3) -> torch.Tensor:
    parameters = [nn.Parameter(torch.zeros(300, 200)), nn.Parameter(torch.zeros(40_000)), nn.Parameter(torch.zeros(3))]
    jitter = Jitter(parameters, 0.3, seed)
    for parameter in parameters[:2]:
        parameter.grad = torch.zeros_like(parameter)
    jitter.begin(step)
    jitter.add()
    assert parameters[2].grad is None
    return torch.cat([parameter.grad.flatten() for parameter in parameters[:2]])


def test_gradient_noise_is_normal_of_the_right_size():
    for step in (0, 99):
        noise = drawn(step)
        deviation = math.sqrt(0.3 / (1 + step) ** 0.55)
        assert float(noise.std()) == pytest.approx(deviation, rel=0.01)
        assert abs(float(noise.mean())) < 0.02 * deviation
        inside = (noise.abs() < deviation).float().mean()
        assert float(inside) == pytest.approx(0.6827, abs=0.005)


def test_gradient_noise_follows_seed_and_step():
    assert torch.equal(drawn(5), drawn(5))
    assert not torch.equal(drawn(5), drawn(6))
    assert not torch.equal(drawn(5), drawn(5, seed=4))
    first = drawn(5)
    assert not torch.equal(first[:40_000], first[60_000:])  # each weight has its own


def test_gradient_noise_in_training():
    plain = train_in(ALONE, blobs(), {"max_steps": 1, "epochs": 1, "momentum": 0.0, "schedule": "constant", "base_lr": 0.1})
    noisy = train_in(
        *(ALONE, blobs()),
        {"max_steps": 1, "epochs": 1, "momentum": 0.0, "schedule": "constant", "base_lr": 0.1, "gradient_noise": 1.0},
    )
    moved = torch.cat([torch.from_numpy(noisy.weights[n] - plain.weights[n]).flatten() for n in plain.weights])
    assert float(moved.std()) == pytest.approx(0.1, rel=0.3)


def test_micro_batches_would_climb_by_themselves():
    with pytest.raises(UsageError, match="--sam-rho cannot be combined with --accumulate"):
        make_config({"sam_rho": 0.1, "accumulate": 2})
