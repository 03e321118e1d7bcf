"""Lanczos, trace and density against matrices with known eigenvalues."""

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.surfaces import exact_hessian, net, points, surface_of
from paceline.sharpness.curvature import Effort, Products, density, lanczos, measure, rademacher


def matrix(values: Tensor) -> Tensor:
    """A symmetric matrix with these eigenvalues."""
    random = torch.Generator().manual_seed(5)
    basis, _ = torch.linalg.qr(torch.randn(len(values), len(values), generator=random, dtype=torch.float64))
    return basis @ torch.diag(values.double()) @ basis.T


def by(known: Tensor) -> Products:
    return lambda rows: (rows.double() @ known).to(rows.dtype)


def effort(top: int = 3, vectors: int = 4, steps: int = 40, together: int = 4, seed: int = 0) -> Effort:
    return Effort(top=top, vectors=vectors, steps=steps, together=together, seed=seed)


def quiet(done: int, total: int) -> None: ...


def test_the_largest_eigenvalues_of_a_spectrum_like_a_nets() -> None:
    values = torch.cat((torch.tensor([30.0, 20.0, 19.5, 4.0, -3.0]), torch.linspace(-0.1, 0.2, 395)))
    found = measure(by(matrix(values)), torch.zeros(400), effort(top=4), quiet)
    assert found.top == pytest.approx([30, 20, 19.5, 4], rel=1e-5)
    assert max(found.residuals) < 1e-3
    assert found.trace == pytest.approx(float(values.sum()), abs=4 * (found.trace_error or 0))
    assert found.near_zero == pytest.approx(395 / 400, abs=0.02)


def test_a_residual_bounds_the_error_before_convergence() -> None:
    values = torch.linspace(-1, 1, 300) ** 3
    found = measure(by(matrix(values)), torch.zeros(300), effort(steps=8), quiet)
    assert max(found.residuals) > 1e-3, "not converged"
    for value, residual in zip(found.top, found.residuals, strict=True):
        assert float((values - value).abs().min()) <= residual + 1e-6


def test_the_exact_hessian_of_a_net() -> None:
    model, batches = net(), points()
    surface = surface_of(model, batches)
    exact = exact_hessian(surface, model, batches)
    values = torch.linalg.eigvalsh(exact).flip(0)
    found = measure(surface.products, surface.weights, effort(top=5, vectors=100, together=20), quiet)
    assert found.top == pytest.approx(values[:5].tolist(), rel=1e-6)
    assert found.trace_error is not None
    assert abs(found.trace - float(values.sum())) < 4 * found.trace_error
    assert found.trace_error < 0.2 * float(values.sum())


def test_the_standard_error_is_that_of_many_estimates() -> None:
    known = matrix(torch.linspace(0, 1, 50) ** 4)
    found = [measure(by(known), torch.zeros(50), effort(top=1, vectors=16, steps=2, seed=seed), quiet) for seed in range(60)]
    spread = float(np.std([each.trace for each in found], ddof=1))
    assert np.mean([each.trace_error for each in found]) == pytest.approx(spread, rel=0.25)


def test_the_density_is_the_broadened_histogram() -> None:
    values = torch.cat((torch.linspace(-1, 0.5, 150), torch.tensor([3.0, 6.0, 10.0])))
    starts = torch.stack([rademacher(torch.zeros(153), 0, i) for i in range(100)])
    _, rules = lanczos(by(matrix(values)), starts, 60, lambda done: None)
    x, y, _ = map(np.asarray, density(rules))
    assert len(x) in range(200, 401)
    width = 0.01 * 11
    exact = np.exp(-0.5 * ((x[:, None] - values.numpy()) / width) ** 2).sum(1) / (153 * width * np.sqrt(2 * np.pi))
    step = x[1] - x[0]
    assert np.trapezoid(y, x) == pytest.approx(1, abs=1e-6)
    assert np.abs(y - exact).sum() * step < 0.1


@pytest.mark.parametrize("values", [[2.0] * 6, [5.0, 5.0, 1.0, 0.0, 0.0, 0.0], [0.0] * 6, [-3.0, -2.0, -1.0, -1.0, -1.0, -1.0]])
def test_few_different_eigenvalues_end_a_run_early(values: list[float]) -> None:
    """A Krylov space is no larger: what follows would be rounding errors."""
    found = measure(by(matrix(torch.tensor(values))), torch.zeros(6), effort(top=3), quiet)
    different = sorted(set(values), reverse=True)[:3]
    assert found.top == pytest.approx(different, abs=1e-5)
    assert abs(found.trace - sum(values)) <= 4 * (found.trace_error or 0.0) + 1e-5
    assert np.isfinite(found.y).all()


def test_a_single_weight_and_a_single_vector() -> None:
    found = measure(by(torch.tensor([[7.0]], dtype=torch.float64)), torch.zeros(1), effort(vectors=1), quiet)
    assert (found.top, found.trace, found.trace_error) == ([7.0], 7.0, None)


def test_memory_for_fewer_vectors_at_a_time_changes_nothing_but_the_passes() -> None:
    known, like = matrix(torch.linspace(0, 3, 80)), torch.zeros(80)
    told: list[tuple[int, int]] = []
    one = measure(by(known), like, effort(vectors=7, steps=10, together=1), lambda done, total: told.append((done, total)))
    four = measure(by(known), like, effort(vectors=7, steps=10), quiet)
    assert one.top == pytest.approx(four.top, rel=1e-5)
    assert one.trace == pytest.approx(four.trace, rel=1e-6)
    assert told == sorted(told)
    assert told[-1] == (43, 46), "the last three are the check of the top eigenvalues"


def test_signs_follow_from_the_seed_and_the_number_alone() -> None:
    one, two = rademacher(torch.zeros(1000), 0, 0), rademacher(torch.zeros(1000), 0, 1)
    assert set(one.tolist()) == {-1.0, 1.0}
    assert torch.equal(one, rademacher(torch.zeros(1000), 0, 0))
    assert abs(float(one @ two)) < 100
    assert abs(float(one.sum())) < 100
    assert not torch.equal(one, rademacher(torch.zeros(1000), 1, 0))
