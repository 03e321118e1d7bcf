"""NovoGrad compared with its formula and check vectors."""

import pytest
import torch
from torch import Tensor, nn

from paceline.optim import NovoGrad


def trained(weights: list[Tensor], gradients: list[list[Tensor]], groups: list[dict], **options) -> list[Tensor]:
    found = [nn.Parameter(weight.clone(memory_format=torch.preserve_format)) for weight in weights]
    optimizer = NovoGrad([{**group, "params": [found[n] for n in group["params"]]} for group in groups], **options)
    for step in gradients:
        for parameter, gradient in zip(found, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in found]


def oracle(
    weight: Tensor, gradients: list[Tensor], *, lr, betas=(0.95, 0.98), eps=1e-8, decay=0.0, averaged=False
) -> list[float]:
    """One number at a time, in Python floats."""
    w = weight.flatten().tolist()
    m, v = [0.0] * len(w), None
    for gradient in gradients:
        g = gradient.flatten().tolist()
        square = sum(x * x for x in g)
        v = square if v is None else betas[1] * v + (1 - betas[1]) * square
        for i in range(len(w)):
            d = g[i] / (v**0.5 + eps) + decay * w[i]
            m[i] = betas[0] * m[i] + (1 - betas[0] if averaged else 1) * d
            w[i] -= lr * m[i]
    return w


def test_check_vectors():
    weight = torch.tensor([3.0, 4.0], dtype=torch.float64)
    gradients = [[torch.tensor(g, dtype=torch.float64)] for g in ([0.8, -0.6], [0.0, 2.0])]
    for steps, expected in ((1, (2.99585, 4.0028)), (2, (2.991757708, 3.995547001))):
        options = {"lr": 0.1, "weight_decay": 0.01, "grad_averaging": True}
        (after,) = trained([weight], gradients[:steps], [{"params": [0]}], **options)
        assert after.tolist() == pytest.approx(expected, abs=5e-10)


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("second", [0.98, 0.0])
def test_fifty_steps_of_the_formula(averaged, second):
    source = torch.Generator().manual_seed(1)
    weights = [torch.randn(shape, generator=source, dtype=torch.float64) for shape in ((4, 3), (6,), (4, 3, 3, 3), (5,))]
    weights[2] = weights[2].contiguous(memory_format=torch.channels_last)
    gradients = [[torch.randn(w.shape, generator=source, dtype=torch.float64) for w in weights] for _ in range(50)]
    groups = [{"params": [0, 2], "weight_decay": 0.02}, {"params": [1, 3], "lr": 0.003, "betas": (0.5, second)}]
    options = {"betas": (0.95, second), "eps": 1e-3}
    found = trained(weights, gradients, groups, lr=0.01, grad_averaging=averaged, **options)
    one, other = {"lr": 0.01, "decay": 0.02, **options}, {"lr": 0.003, "eps": 1e-3, "betas": (0.5, second)}
    for number, more in enumerate((one, other, one, other)):
        expected = oracle(weights[number], [step[number] for step in gradients], averaged=averaged, **more)
        assert found[number].flatten().tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_the_first_gradient_counts_fully_and_once(zeros):
    """Also after zero gradients: a step of length lr."""
    w, g = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([30.0, -40.0], dtype=torch.float64)
    steps = [[torch.zeros_like(g)]] * zeros + [[g]]
    (after,) = trained([w], steps, [{"params": [0]}], lr=0.1)
    torch.testing.assert_close(after, w - 0.1 * g / 50)
    found = nn.Parameter(w.clone())
    optimizer = NovoGrad([found], lr=0.1)
    for (gradient,) in steps:
        found.grad = gradient
        optimizer.step()
    assert float(optimizer.state[found]["exp_avg_sq"]) == pytest.approx(2500)


def test_beta2_of_0_normalizes_each_gradient():
    w = torch.tensor([3.0, 4.0], dtype=torch.float64)
    gradients = [torch.tensor(g, dtype=torch.float64) for g in ([3.0, 4.0], [0.0, -7.0])]
    (after,) = trained([w], [[g] for g in gradients], [{"params": [0]}], lr=0.1, betas=(0.0, 0.0))
    torch.testing.assert_close(after, w - 0.1 * torch.tensor([0.6, 0.8 - 1.0], dtype=torch.float64), rtol=1e-8, atol=1e-8)


def test_one_value_per_layer():
    found = nn.Parameter(torch.ones(4, 5))
    optimizer = NovoGrad([found])
    assert optimizer.state[found]["exp_avg_sq"].shape == ()
    assert optimizer.state[found]["exp_avg"].shape == (4, 5)
