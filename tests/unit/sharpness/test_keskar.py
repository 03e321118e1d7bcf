"""Keskar's sharpness where the maximum in the box is known."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.surfaces import net, points, surface_of
from paceline.core.keys import key
from paceline.sharpness import keskar
from paceline.sharpness.keskar import SUBSPACE, full, normal, sharpness, subspace
from paceline.sharpness.surface import Surface


class Vector(nn.Module):
    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(values)


def quadratic(weights: Tensor, curvature: Tensor, center: Tensor) -> Surface:
    """f(w) = sum of curvature (w - center)^2 / 2."""
    return surface_of(
        Vector(weights.clone()),
        [(torch.zeros(1),)],
        lambda m, b: (curvature * (m.w - center) ** 2).sum()[None] / 2,  # type: ignore[operator]
    )


def quiet(done: int, total: int) -> None: ...


def largest(surface: Surface, space: keskar.Space, epsilon: float) -> float | None:
    return sharpness(surface, space, epsilon, surface.gradient(surface.weights), quiet)


@pytest.mark.parametrize("epsilon", [1e-3, 5e-4])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e4])
def test_a_separable_quadratic_is_largest_in_a_corner_of_the_box(epsilon: float, scale: float) -> None:
    """However flat or steep: the optimizer's own tolerances are absolute."""
    random = torch.Generator().manual_seed(0)
    weights, center = torch.randn(2, 200, generator=random, dtype=torch.float64)
    curvature = scale * torch.logspace(-2, 1, 200, dtype=torch.float64)
    surface = quadratic(weights, curvature, center)
    loss, reach = surface.loss(weights), epsilon * (weights.abs() + 1)
    corner = float((curvature * ((weights - center).abs() + reach) ** 2).sum() / 2)
    assert largest(surface, full(surface.weights), epsilon) == pytest.approx(100 * (corner - loss) / (1 + loss), rel=1e-6)


def test_a_linear_loss_in_a_subspace_is_largest_in_a_corner_of_the_box() -> None:
    slope = torch.randn(200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    weights = torch.randn(200, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    surface = surface_of(Vector(weights.clone()), [(torch.zeros(1),)], lambda m, b: (m.w * slope).sum()[None])  # type: ignore[operator]
    space = subspace(surface.weights, seed=0)
    matrix = torch.stack([normal(200, key(0, keskar._COLUMNS, i), torch.device("cpu")) for i in range(SUBSPACE)]).double()
    inverse = np.linalg.pinv(matrix.T.numpy()) @ weights.numpy()
    np.testing.assert_allclose(space.center.numpy(), np.abs(inverse), rtol=1e-6)
    loss = float(weights @ slope)
    rise = float((matrix @ slope).abs() @ (1e-3 * (torch.from_numpy(np.abs(inverse)) + 1)))
    assert largest(surface, space, 1e-3) == pytest.approx(100 * rise / (1 + loss), rel=1e-6)


def test_fewer_weights_than_columns_have_a_pseudo_inverse_too() -> None:
    weights = torch.tensor([1.0, -2.0, 0.5])
    space = subspace(weights, seed=3)
    matrix = torch.stack([normal(3, key(3, keskar._COLUMNS, i), torch.device("cpu")) for i in range(SUBSPACE)])
    expected = np.abs(np.linalg.pinv(matrix.T.double().numpy()) @ weights.double().numpy())
    np.testing.assert_allclose(space.center.numpy(), expected, rtol=1e-5)


def test_every_point_is_in_the_box(monkeypatch: pytest.MonkeyPatch) -> None:
    surface = surface_of(net(), points())
    start, asked = surface.gradient(surface.weights), list[Tensor]()
    gradient = surface.gradient

    def watched(weights: Tensor) -> tuple[float, Tensor]:
        asked.append(weights - surface.weights)
        return gradient(weights)

    monkeypatch.setattr(surface, "gradient", watched)
    value = sharpness(surface, full(surface.weights), 1e-3, start, quiet)
    assert asked
    assert all(bool((each.abs() <= 1e-3 * (surface.weights.abs() + 1) * (1 + 1e-9)).all()) for each in asked)
    best = max(gradient(surface.weights + each)[0] for each in asked)
    assert value == pytest.approx(100 * (best - start[0]) / (1 + start[0]), rel=1e-9)
    corners = 1e-3 * (surface.weights.abs() + 1) * torch.sign(torch.randn(300, surface.size, dtype=torch.float64))
    assert best >= max(surface.loss(surface.weights + each) for each in corners), "no random corner is higher"


def test_a_loss_that_overflows_in_the_box_has_no_sharpness() -> None:
    surface = surface_of(Vector(torch.zeros(3)), [(torch.zeros(1),)], lambda m, b: torch.exp(1e6 * m.w).sum()[None])  # type: ignore[operator]
    assert largest(surface, full(surface.weights), 1e-3) is None


def test_a_flat_loss_has_sharpness_zero() -> None:
    surface = quadratic(torch.ones(5), torch.zeros(5), torch.zeros(5))
    assert largest(surface, full(surface.weights), 1e-3) == 0


def test_columns_are_standard_normal_and_follow_from_the_seed() -> None:
    one, two = (normal(100_000, key(0, keskar._COLUMNS, i), torch.device("cpu")).double() for i in (0, 1))
    assert float(one.mean()) == pytest.approx(0, abs=0.015)
    assert float(one.std()) == pytest.approx(1, abs=0.01)
    assert float((one**4).mean()) == pytest.approx(3, abs=0.1)
    assert abs(float(one @ two)) / 100_000 < 0.015
    assert bool(one.isfinite().all())
