"""The loss as a function of one vector: values, gradients and Hessian-vector products."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.surfaces import cross_entropy, exact_hessian, net, points, surface_of
from harness.training import ALONE
from paceline.errors import UsageError
from paceline.sharpness.curvature import Effort, measure


def test_the_loss_is_the_mean_over_samples_and_other_weights_can_be_put_in() -> None:
    model, batches = net(), points()
    surface = surface_of(model, batches)
    losses = torch.cat([cross_entropy(model, batch) for batch in batches])
    assert surface.loss(surface.weights) == pytest.approx(float(losses.detach().mean()), rel=1e-12)
    surface.loss(surface.weights + 1)
    assert not torch.equal(torch.cat([each.flatten() for each in model.parameters()]), surface.weights)
    surface.gradient(surface.weights)
    assert torch.equal(torch.cat([each.flatten() for each in model.parameters()]), surface.weights)


def test_the_gradient_is_the_slope_of_the_loss() -> None:
    surface = surface_of(net(), points())
    loss, gradient = surface.gradient(surface.weights)
    step = 1e-5 * torch.randn(surface.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rise = (surface.loss(surface.weights + step) - surface.loss(surface.weights - step)) / 2
    assert rise == pytest.approx(float(gradient @ step), rel=1e-6)
    assert loss == surface.loss(surface.weights)


def test_products_are_those_of_the_exact_hessian() -> None:
    model, batches = net(), points()
    surface = surface_of(model, batches)
    found = surface.products(torch.eye(surface.size, dtype=torch.float64))
    torch.testing.assert_close(found, exact_hessian(surface, model, batches), rtol=1e-9, atol=1e-12)


def test_workers_share_the_batches() -> None:
    batches = points((5, 4, 3, 2))
    shares = [surface_of(net(), batches, world=replace(ALONE, rank=rank, size=3))._batches for rank in range(3)]
    assert [[count for _, count in share] for share in shares] == [[5, 2], [4], [3]]


def test_frozen_unused_and_linear_weights_are_no_obstacle() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.unused, self.frozen = nn.Linear(4, 3), nn.Linear(2, 2), nn.Parameter(torch.ones(3))
            self.bias = nn.Parameter(torch.zeros(3))  # the loss depends on it linearly
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) * self.frozen

    def loss(model: Any, batch: Any) -> Tensor:
        return cross_entropy(model, batch) + model.bias.sum()

    model, batches = Odd(), points(kind=torch.float32)
    surface = surface_of(model, batches, loss)
    assert surface.size == 15 + 6 + 3
    found = surface.products(torch.ones(1, surface.size))[0]
    bias, first, unused = found.split((3, 15, 6))
    assert bias.abs().max() == unused.abs().max() == 0
    assert first.abs().max() > 0
    linear = surface_of(model, batches, lambda m, b: m.get_parameter("bias").sum() * torch.ones(len(b[0])))
    assert linear.products(torch.ones(2, 24)).abs().max() == 0


def test_attention_has_products_although_its_fused_kernel_has_none() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(4, 12), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.inner(x.view(len(x), 1, 1, 4) + torch.arange(3.0).view(3, 1)).chunk(3, -1)
            return self.head(nn.functional.scaled_dot_product_attention(q, k, v).mean((1, 2)))

    torch.manual_seed(0)
    surface = surface_of(Attention(), points(kind=torch.float32))
    vector = torch.randn(1, surface.size, generator=torch.Generator().manual_seed(0))
    found = surface.products(vector)[0].double()
    step = 1e-3 * vector[0]
    slope = (surface.gradient(surface.weights + step)[1] - surface.gradient(surface.weights - step)[1]) / 2e-3
    assert float((found - slope).norm() / slope.norm()) < 0.02


def test_a_layer_without_second_derivatives_is_one_line() -> None:
    surface = surface_of(net(), points(), lambda m, b: torch.cdist(m(b[0]), torch.ones(1, 3, dtype=torch.float64), p=3)[:, 0])
    surface.gradient(surface.weights)
    with pytest.raises(UsageError, match=r"cannot be differentiated again.*use --measures keskar,sam"):
        surface.products(torch.ones(2, surface.size, dtype=torch.float64))


def test_a_loss_without_a_gradient_is_one_line() -> None:
    surface = surface_of(net(), points(), lambda m, b: m(b[0]).detach().sum(1))
    with pytest.raises(UsageError, match="does not depend on any trained weight"):
        surface.gradient(surface.weights)


def test_coarse_types_and_models_without_weights_are_one_line() -> None:
    with pytest.raises(UsageError, match="weights in bfloat16: sharpness needs float32"):
        surface_of(nn.Linear(2, 2).bfloat16(), [])
    with pytest.raises(UsageError, match="no trained weights"):
        surface_of(nn.Flatten(), [])


def test_products_and_eigenvalues_agree_with_curvlinops() -> None:
    """Numbers of curvlinops 3.0.1: it is not installed for tests, because it needs torchvision."""
    model, batches = net(), points()
    for number, each in enumerate(model.parameters()):  # the same with any version of torch
        each.data = torch.sin(torch.arange(each.numel(), dtype=torch.float64) + number).view(each.shape)
    batches = [(torch.cos(torch.arange(4.0 * n, dtype=torch.float64) * n).view(n, 4), torch.arange(n) % 3) for n in (7, 5, 4)]
    surface = surface_of(model, batches)
    vector = torch.cos(torch.arange(surface.size, dtype=torch.float64))
    product = surface.products(vector[None])[0]
    first = [-0.940395209, -0.138585492, 0.485647179, 0.0462954975, -0.258490246, -0.179767877]
    assert product[:6].tolist() == pytest.approx(first, rel=1e-8)
    assert float(product.norm()) == pytest.approx(3.3577938875309314, rel=1e-12)
    found = measure(surface.products, surface.weights, Effort(top=3, vectors=1, steps=64, together=1, seed=0), lambda *_: None)
    assert found.top == pytest.approx([0.911040948893917, 0.5493876379891558, 0.49328801333733824], rel=1e-9)
