"""LARS compared with its formula and check vectors."""

import pytest
import torch
from torch import Tensor, nn

from paceline.optim import Lars


def trained(weights: list[Tensor], gradients: list[list[Tensor]], groups: list[dict], **options) -> list[Tensor]:
    found = [nn.Parameter(weight.clone(memory_format=torch.preserve_format)) for weight in weights]
    optimizer = Lars([{**group, "params": [found[n] for n in group["params"]]} for group in groups], **options)
    for step in gradients:
        for parameter, gradient in zip(found, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in found]


def oracle(weight: Tensor, gradients: list[Tensor], *, lr, mu, decay, eta, eps=0.0, nesterov=False, adapt=True) -> list[float]:
    """One number at a time, in Python floats."""
    w, b = weight.flatten().tolist(), [0.0] * weight.numel()
    for gradient in gradients:
        g = gradient.flatten().tolist()
        size, slope = sum(x * x for x in w) ** 0.5, sum(x * x for x in g) ** 0.5
        r = eta * size / (slope + decay * size + eps) if adapt and size and slope else 1.0
        for i in range(len(w)):
            d = r * (g[i] + decay * w[i])
            b[i] = mu * b[i] + d
            w[i] -= lr * (d + mu * b[i] if nesterov else b[i])
    return w


def test_check_vectors():
    weight = torch.tensor([3.0, 4.0], dtype=torch.float64)
    gradients = [[torch.tensor(g, dtype=torch.float64)] for g in ([0.8, -0.6], [0.0, 2.0])]
    for steps, expected in ((1, (2.999604762, 4.000266667)), (2, (2.999241732, 4.000009107))):
        (after,) = trained([weight], gradients[:steps], [{"params": [0]}], lr=0.1, weight_decay=0.01)
        assert after.tolist() == pytest.approx(expected, abs=5e-10)


@pytest.mark.parametrize("nesterov", [False, True])
def test_fifty_steps_of_the_formula(nesterov):
    source = torch.Generator().manual_seed(1)
    weights = [torch.randn(shape, generator=source, dtype=torch.float64) for shape in ((4, 3), (6,), (4, 3, 3, 3), (5,))]
    weights[2] = weights[2].contiguous(memory_format=torch.channels_last)
    gradients = [[torch.randn(w.shape, generator=source, dtype=torch.float64) for w in weights] for _ in range(50)]
    groups = [
        {"params": [0, 2], "weight_decay": 0.02},
        {"params": [1], "weight_decay": 0.02, "adapt": False, "lr": 0.003},
        {"params": [3], "weight_decay": 0.0, "momentum": 0.5},
    ]
    found = trained(weights, gradients, groups, lr=0.4, trust_coefficient=0.05, eps=1e-3, nesterov=nesterov)
    settings = [(0.4, 0.9, 0.02, True), (0.003, 0.9, 0.02, False), (0.4, 0.9, 0.02, True), (0.4, 0.5, 0.0, True)]
    for number, (lr, mu, decay, adapt) in enumerate(settings):
        more = {"eta": 0.05, "eps": 1e-3, "nesterov": nesterov, "adapt": adapt}
        expected = oracle(weights[number], [step[number] for step in gradients], lr=lr, mu=mu, decay=decay, **more)
        assert found[number].flatten().tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_no_weight_decay_keeps_the_ratio():
    weight, gradient = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([0.0, 2.0], dtype=torch.float64)
    (after,) = trained([weight], [[gradient]], [{"params": [0]}], lr=1.0, trust_coefficient=0.1)
    assert after.tolist() == pytest.approx([3.0, 4.0 - 0.1 * 5])  # a tenth of |w| = 5, whatever |g| is


def test_without_adapt_it_is_sgd():
    source = torch.Generator().manual_seed(2)
    weight = torch.randn(5, 4, generator=source, dtype=torch.float64)
    gradients = [[torch.randn(5, 4, generator=source, dtype=torch.float64)] for _ in range(6)]
    (found,) = trained([weight], gradients, [{"params": [0]}], lr=0.1, weight_decay=0.01, adapt=False)
    plain = nn.Parameter(weight.clone())
    optimizer = torch.optim.SGD([plain], lr=0.1, momentum=0.9, weight_decay=0.01)
    for (gradient,) in gradients:
        plain.grad = gradient
        optimizer.step()
    torch.testing.assert_close(found, plain.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("weight", "gradient"), [((0.0, 0.0), (1.0, 2.0)), ((1.0, 2.0), (0.0, 0.0))])
def test_a_zero_norm_has_a_ratio_of_one(weight, gradient):
    w, g = torch.tensor(weight, dtype=torch.float64), torch.tensor(gradient, dtype=torch.float64)
    (after,) = trained([w], [[g]], [{"params": [0]}], lr=0.5, weight_decay=0.1)
    torch.testing.assert_close(after, w - 0.5 * (g + 0.1 * w))
