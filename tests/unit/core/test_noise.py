"""The noise scale from parts: the published formulas, no bias, and the same numbers however parts are spread."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from harness.training import blobs, train_in
from paceline.config import make_config
from paceline.core.noise import Noise, adascale_gain, noise_scale
from paceline.errors import UsageError
from paceline.training.build import build
from paceline.training.loop import fit
from unit.core.test_deal import ALONE

OPTIONS = {"virtual_workers": 4, "global_batch": 24, "measure_noise": True, "max_steps": 1, "epochs": 1, "weight_decay": 0.0}


def made(parameters: list[nn.Parameter], units: list[int], part_batch: int) -> Noise:
    noise = Noise(parameters, sum(units), "cpu")
    noise.enter(units, part_batch, part_batch * sum(units))
    return noise


def fed(noise: Noise, parameters: list[nn.Parameter], units: list[torch.Tensor], weights: list[float]) -> list[float]:
    """Give a step's units, summed up as in gradient accumulation, and end with their weighted mean."""
    noise.start()
    total = torch.zeros_like(units[0])
    for part, (unit, weight) in enumerate(zip(units, weights, strict=True)):
        total = total + weight * unit
        for parameter, piece in zip(parameters, total.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = piece.view_as(parameter).clone()
        noise.take(part, weight, sums=True)
    noise.finish(ALONE)
    return noise.state.tolist()


def test_the_published_formulas():
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(5))]
    units = [torch.randn(11, dtype=torch.float64).float() for _ in range(4)]
    size, count = 6, 4
    variance, square = fed(made(parameters, [1] * 4, size), parameters, units, [0.25] * 4)
    mean_square = sum(float(unit.square().sum()) for unit in units) / count
    whole = float((sum(units) / count).square().sum())
    assert square / 0.05 == pytest.approx((count * whole - mean_square) / (count - 1), rel=1e-5)
    assert variance / 0.05 == pytest.approx((mean_square - whole) * size * count / (count - 1), rel=1e-5)


@pytest.mark.parametrize("units", [[1, 1], [1, 1, 1, 1], [3, 2], [3, 1, 1]])
def test_no_bias_whatever_the_sizes_of_units(units):
    """Many steps of known gradient and noise: smoothed numerator and denominator come out as they went in."""
    torch.manual_seed(1)
    truth, deviation, size = torch.full((50,), 0.3), 2.0, 4
    parameters = [nn.Parameter(torch.zeros(50))]
    noise = made(parameters, units, size)
    seen, weights = torch.zeros(2, dtype=torch.float64), [count / sum(units) for count in units]
    for _ in range(600):
        gradients = [truth + torch.randn(50) * deviation / math.sqrt(count * size) for count in units]
        before = noise.state.clone()
        fed(noise, parameters, gradients, weights)
        seen += (noise.state - 0.95 * before) / 0.05
    variance, square = (seen / 600).tolist()
    assert variance == pytest.approx(50 * deviation**2, rel=0.06)
    assert square == pytest.approx(50 * 0.09, rel=0.25)


def test_one_part_has_nothing_to_compare():
    task = blobs()
    with pytest.raises(UsageError, match="--virtual-workers 2 or more"):
        build(task, make_config(task.defaults, {"measure_noise": True}), ALONE)
    with pytest.raises(UsageError, match="leaves one gradient per step"):
        build(task, make_config(task.defaults, {**OPTIONS, "parts_at_once": 4}), ALONE)


def test_gain():
    def gain(variance: float, square: float) -> float:
        return float(adascale_gain(torch.tensor((variance, square)), 1024, 128))

    assert gain(1e9, 1e-9) == pytest.approx(8)  # all noise: the linear rule
    assert gain(0.0, 1.0) == pytest.approx(1)  # none: nothing to gain
    assert gain(128.0, 1.0) == pytest.approx((1 + 1) / (1 / 8 + 1))
    noise = made([nn.Parameter(torch.zeros(2))], [1, 1], 512)
    noise.state.copy_(torch.tensor([128.0, 1.0]))
    assert float(noise.gain(128)) == pytest.approx(gain(128.0, 1.0))
    noise.state.copy_(torch.tensor([128.0, -1.0]))  # a square below zero counts as none
    assert float(noise.gain(128)) == pytest.approx(8)
    assert noise_scale(3.0, -1.0) == math.inf


def test_adascale_multiplies_the_learning_rate_by_the_gain():
    """Plain SGD: the step's length is the gain times that of rule none."""
    task, options = blobs(), {**OPTIONS, "reference_batch": 12, "optimizer": "sgd", "momentum": 0.0, "schedule": "constant"}

    def moved(rule: str) -> tuple[torch.Tensor, dict[str, Any]]:
        before = build(task, make_config(task.defaults, {**options, "lr_rule": rule}), ALONE).model.state_dict()
        trained = train_in(ALONE, task, {**options, "lr_rule": rule})
        return torch.cat(
            [(torch.from_numpy(trained.weights[n]) - t).flatten() for n, t in before.items()]
        ), trained.watcher.steps[0]

    plain, _ = moved("none")
    scaled, row = moved("adascale")
    assert 1 < row["gain"] < 2
    assert row["lr"] == pytest.approx(0.05 * row["gain"])
    torch.testing.assert_close(scaled, plain * row["gain"], rtol=1e-3, atol=1e-7)


def test_a_learning_rate_in_a_tensor_gains_as_much():
    """As on a GPU, where a captured step reads it."""
    task, options = blobs(), {**OPTIONS, "reference_batch": 12, "lr_rule": "adascale", "max_steps": 3}
    plain = train_in(ALONE, task, options)
    run = build(task, make_config(task.defaults, {"log_every": 1, **options}), ALONE)
    run.update.lrs = {key: torch.zeros(()) for key in run.update.rates.keys}
    fit(run, [])
    for name, tensor in run.model.state_dict().items():
        torch.testing.assert_close(tensor, torch.from_numpy(plain.weights[name]), rtol=1e-5, atol=1e-7)
