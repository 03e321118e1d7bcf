"""LAMB compared with its formula, and tests for the defects of other implementations."""

import pytest
import torch
from torch import Tensor, nn

from paceline.optim import Lamb


def trained(weights: list[Tensor], gradients: list[list[Tensor]], groups: list[dict], **options) -> list[Tensor]:
    found = [nn.Parameter(weight.clone(memory_format=torch.preserve_format)) for weight in weights]
    optimizer = Lamb([{**group, "params": [found[n] for n in group["params"]]} for group in groups], **options)
    for step in gradients:
        for parameter, gradient in zip(found, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in found]


def oracle(weight: Tensor, gradients: list[Tensor], *, lr, betas=(0.9, 0.999), eps=1e-6, decay=0.0, adapt=True) -> list[float]:
    """One number at a time, in Python floats."""
    w = weight.flatten().tolist()
    m, v = [0.0] * len(w), [0.0] * len(w)
    for t, gradient in enumerate(gradients, 1):
        u = []
        for i, g in enumerate(gradient.flatten().tolist()):
            m[i] = betas[0] * m[i] + (1 - betas[0]) * g
            v[i] = betas[1] * v[i] + (1 - betas[1]) * g * g
            u.append(m[i] / (1 - betas[0] ** t) / ((v[i] / (1 - betas[1] ** t)) ** 0.5 + eps) + decay * w[i])
        size, length = sum(x * x for x in w) ** 0.5, sum(x * x for x in u) ** 0.5
        ratio = size / length if adapt and size and length else 1.0
        w = [x - lr * ratio * y for x, y in zip(w, u, strict=True)]
    return w


def test_fifty_steps_of_the_formula():
    source = torch.Generator().manual_seed(1)
    weights = [torch.randn(shape, generator=source, dtype=torch.float64) for shape in ((4, 3), (6,), (4, 3, 3, 3), (5,))]
    weights[2] = weights[2].contiguous(memory_format=torch.channels_last)
    gradients = [[torch.randn(w.shape, generator=source, dtype=torch.float64) for w in weights] for _ in range(50)]
    groups = [
        {"params": [0, 2], "weight_decay": 0.02},
        {"params": [1], "weight_decay": 0.02, "adapt": False, "lr": 0.003},
        {"params": [3], "weight_decay": 0.0, "betas": (0.0, 0.9)},
    ]
    found = trained(weights, gradients, groups, lr=0.01, eps=1e-3)
    usual = {"betas": (0.9, 0.999), "eps": 1e-3, "lr": 0.01, "decay": 0.02}
    settings = [usual, {**usual, "lr": 0.003, "adapt": False}, usual, {**usual, "decay": 0.0, "betas": (0.0, 0.9)}]
    for number, options in enumerate(settings):
        expected = oracle(weights[number], [step[number] for step in gradients], **options)
        assert found[number].flatten().tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_the_first_step_is_not_ten_times_too_large():
    """Debiased inside the ratio with decay that matters: u = sign(g) + wd w, and the step is lr |w| long."""
    w, g = torch.tensor([3.0, 4.0], dtype=torch.float64), torch.tensor([0.8, -0.6], dtype=torch.float64)
    (after,) = trained([w], [[g]], [{"params": [0]}], lr=0.1, eps=0.0, weight_decay=0.5)
    u = g.sign() + 0.5 * w
    torch.testing.assert_close(after, w - 0.1 * 5 * u / u.norm())
    (after,) = trained([w], [[g]], [{"params": [0]}], lr=0.1, eps=0.0, adapt=False)
    torch.testing.assert_close(after, w - 0.1 * g.sign())


def test_debiasing_is_accurate_in_float32():
    w, g = torch.tensor([3.0, 4.0]), torch.tensor([0.8, -0.6])
    (after,) = trained([w], [[g]], [{"params": [0]}], lr=1.0, eps=0.0, adapt=False)
    torch.testing.assert_close(after, w - g.sign(), rtol=1e-6, atol=0)  # 1 - .999 in float32 is off by 5e-5


@pytest.mark.parametrize("size", [0.5, 1000.0])
def test_norms_are_not_clamped_and_no_decay_keeps_the_ratio(size):
    w = torch.tensor([0.6 * size, 0.8 * size], dtype=torch.float64)
    (after,) = trained([w], [[torch.ones(2, dtype=torch.float64)]], [{"params": [0]}], lr=0.01)
    assert float((after - w).norm()) == pytest.approx(0.01 * size)


def test_gradients_are_not_clipped():
    """With clipping to 1 this would fail: the second, larger gradient dominates the moments."""
    w = torch.tensor([3.0, 4.0], dtype=torch.float64)
    gradients = [torch.tensor(g, dtype=torch.float64) for g in ([0.8, -0.6], [0.0, 200.0])]
    (after,) = trained([w], [[g] for g in gradients], [{"params": [0]}], lr=0.1)
    assert after.tolist() == pytest.approx(oracle(w, gradients, lr=0.1), rel=1e-9)


def test_without_adapt_it_is_adamw():
    source = torch.Generator().manual_seed(2)
    weight = torch.randn(5, 4, generator=source, dtype=torch.float64)
    gradients = [[torch.randn(5, 4, generator=source, dtype=torch.float64)] for _ in range(6)]
    (found,) = trained([weight], gradients, [{"params": [0]}], lr=0.1, weight_decay=0.01, eps=1e-8, adapt=False)
    plain = nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW([plain], lr=0.1, weight_decay=0.01)
    for (gradient,) in gradients:
        plain.grad = gradient
        optimizer.step()
    torch.testing.assert_close(found, plain.detach(), rtol=1e-10, atol=1e-10)


def test_a_zero_norm_has_a_ratio_of_one():
    w, g = torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, -2.0], dtype=torch.float64)
    (after,) = trained([w], [[g]], [{"params": [0]}], lr=0.5, eps=0.0)
    torch.testing.assert_close(after, -0.5 * g.sign())
    w = torch.ones(2, dtype=torch.float64)
    (after,) = trained([w], [[torch.zeros(2, dtype=torch.float64)]], [{"params": [0]}], lr=0.5)
    assert torch.equal(after, w)


def test_steps_are_counted_by_tensor():
    """A parameter whose first gradient comes late is debiased from its own first step."""
    one, late = (nn.Parameter(torch.tensor([3.0, 4.0], dtype=torch.float64)) for _ in range(2))
    optimizer = Lamb([one, late], lr=0.1, adapt=False, eps=0.0)
    for step in range(3):
        one.grad = torch.tensor([1.0, -1.0], dtype=torch.float64)
        late.grad = one.grad.clone() if step == 2 else None
        optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in (one, late)] == [3, 1]
    assert late.tolist() == pytest.approx([2.9, 4.1])
