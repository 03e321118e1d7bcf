"""Eigenvalues, trace and spectral density of a matrix that is known by its products only: Lanczos with several vectors.

Random vectors z have entries +-1. Each z' H z estimates the trace (Hutchinson). The first few vectors also start a Lanczos run:

- its tridiagonal matrix is a quadrature rule for z' f(H) z, which estimates the density of the eigenvalues (stochastic Lanczos
  quadrature: Ghorbani et al. 2019);
- its largest eigenvalues converge to those of H.

Runs go in lockstep, because the products of a pass share the graph of the gradient. Coefficients are in float64. Vectors have
the type of the weights, and are made orthogonal to all earlier ones twice: otherwise copies of converged eigenvalues appear.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from paceline.core.keys import key, keys_torch

Products = Callable[[Tensor], Tensor]
"""The matrix times each row. Collective: call on every rank, with the same rows."""

RUNS = 4
"""Lanczos runs."""
_VECTORS = 0x5A4E  # keeps these random numbers apart from others
_BREAKDOWN = 1e-6
"""Relative to the largest coefficient: below it, a remainder consists of float32's rounding errors."""
_POINTS = 300
_WIDTH = 0.01
"""Standard deviation of the Gaussians that broaden the density, as a share of the spectrum's range."""
NEAR = 0.01
"""Eigenvalues up to this share of the largest magnitude count as near zero."""


@dataclass(frozen=True)
class Spectrum:
    """What is known of a symmetric matrix."""

    top: list[float]
    """The largest eigenvalues, the largest first."""
    residuals: list[float]
    """|Hv - lv| for each of them: an eigenvalue is within this distance of l."""
    trace: float
    trace_error: float | None
    """Standard error of the trace; None for a single vector."""
    x: list[float]
    y: list[float]
    """The density of the eigenvalues on a grid; its integral is 1."""
    near_zero: float
    """Share of the eigenvalues within `NEAR` of zero."""
    direction: Tensor
    """The vector of the largest eigenvalue, of length 1."""


@dataclass(frozen=True)
class _Rule:
    """One run's tridiagonal matrix, solved."""

    nodes: np.ndarray
    vectors: np.ndarray
    remainder: float
    """The coefficient that couples the last vector to the next one."""

    @property
    def shares(self) -> np.ndarray:
        """Each node's weight in the quadrature."""
        return np.asarray(self.vectors[0] ** 2)

    @property
    def mean(self) -> float:
        """z' H z of the run's first vector, of length 1."""
        return float(self.shares @ self.nodes)

    def bound(self, count: int) -> float:
        """The largest residual of the top eigenvalues, if there were no rounding; infinite if there are fewer of them."""
        return float(np.max(np.abs(self.remainder * self.vectors[-1, -count:]))) if len(self.nodes) >= count else np.inf


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much to compute, and how much memory that may take."""

    top: int
    """How many of the largest eigenvalues."""
    vectors: int
    """Random vectors for the trace; the first `RUNS` of them start a Lanczos run."""
    steps: int
    """Products in each run."""
    together: int
    """Vectors in one pass."""
    seed: int

    @property
    def products(self) -> int:
        """Products in all."""
        return self.vectors + min(self.vectors, RUNS) * (self.steps - 1) + self.top


def measure(products: Products, like: Tensor, effort: Effort, tell: Callable[[int, int], None]) -> Spectrum:
    """The spectrum of a symmetric matrix. Collective: call on every rank.

    `like` has the length, the type and the device of the vectors. `tell` gets the number of products done, and of all.
    """
    effort = replace(effort, steps=min(effort.steps, len(like)), top=min(effort.top, effort.steps, len(like)))
    runs, done = min(effort.vectors, RUNS), 0
    rules: list[_Rule] = []
    squares: list[float] = []
    """z' H z for each vector."""
    best: tuple[float, Tensor] | None = None
    for first in range(0, runs, effort.together):
        starts = _starts(like, effort.seed, range(first, min(first + effort.together, runs)))
        basis, found = lanczos(products, starts, effort.steps, _after(done, effort.products, tell))
        done += len(starts) * effort.steps
        for vectors, rule in zip(basis, found, strict=True):
            rules.append(rule)
            squares.append(rule.mean * len(like))
            if best is None or rule.bound(effort.top) < best[0]:
                best = rule.bound(effort.top), _combine(vectors, rule, effort.top)
        del basis, vectors
    for first in range(runs, effort.vectors, effort.together):
        starts = _starts(like, effort.seed, range(first, min(first + effort.together, effort.vectors)))
        squares += (products(starts).double() * starts.double()).sum(1).tolist()
        done += len(starts)
        tell(done, effort.products)
    assert best is not None
    values, residuals, direction = _refine(products, best[1])
    x, y, near_zero = density(rules)
    error = float(np.std(squares, ddof=1) / np.sqrt(len(squares))) if len(squares) > 1 else None
    return Spectrum(values, residuals, float(np.mean(squares)), error, x, y, near_zero, direction)


def _after(before: int, total: int, tell: Callable[[int, int], None]) -> Callable[[int], None]:
    return lambda done: tell(before + done, total)


def _starts(like: Tensor, seed: int, numbers: range) -> Tensor:
    return torch.stack([rademacher(like, seed, number) for number in numbers])


def rademacher(like: Tensor, seed: int, number: int) -> Tensor:
    """A vector of random signs that follows from (seed, number) alone, with the length, type and device of another."""
    keys = keys_torch(key(seed, _VECTORS, number), torch.arange(len(like), device=like.device))
    return ((keys & 1) * 2 - 1).to(like.dtype)


def lanczos(products: Products, starts: Tensor, steps: int, tell: Callable[[int], None]) -> tuple[Tensor, list[_Rule]]:
    """One Lanczos run of `steps` products from each row: the runs' orthonormal vectors, and their tridiagonal matrices.

    A run that has found an invariant subspace ends early: its further vectors are zeros, so that all workers still take part
    in the same products.
    """
    runs, size = starts.shape
    basis = starts.new_zeros(runs, steps, size)
    diagonal = torch.zeros(runs, steps, dtype=torch.float64, device=starts.device)
    off = torch.zeros_like(diagonal)
    vector = starts / _norm(starts).to(starts.dtype)
    for j in range(steps):
        basis[:, j] = vector
        rest = products(vector)
        diagonal[:, j] = (rest.double() * vector.double()).sum(1)
        for _ in range(2):
            known = basis[:, : j + 1]
            rest = rest - torch.bmm(torch.bmm(known, rest[:, :, None]).transpose(1, 2), known)[:, 0]
        norm = _norm(rest)
        scale = torch.maximum(diagonal[:, : j + 1].abs().amax(1), off.amax(1))[:, None]
        off[:, j] = torch.where(norm > _BREAKDOWN * scale, norm, 0.0)[:, 0]
        vector = torch.where(off[:, j, None] > 0, rest / norm.to(rest.dtype), 0.0)
        tell((j + 1) * runs)
    return basis, [_solve(a, b) for a, b in zip(diagonal.cpu().numpy(), off.cpu().numpy(), strict=True)]


def density(rules: list[_Rule]) -> tuple[list[float], list[float], float]:
    """The density of the eigenvalues on a grid, with integral 1, and the share of them near zero."""
    nodes, shares = np.concatenate([rule.nodes for rule in rules]), np.concatenate([rule.shares for rule in rules])
    low, high, largest = float(nodes.min()), float(nodes.max()), float(np.abs(nodes).max())
    width = _WIDTH * max(high - low, 1e-3 * largest) or _WIDTH
    x = np.linspace(low - 4 * width, high + 4 * width, _POINTS)
    y = (shares * np.exp(-0.5 * ((x[:, None] - nodes) / width) ** 2)).sum(1)
    area = (y[1:] + y[:-1]).sum() / 2 * (x[1] - x[0])
    near_zero = shares[np.abs(nodes) <= NEAR * largest].sum() / shares.sum()
    return x.tolist(), (y / area).tolist(), float(near_zero)


def _solve(diagonal: np.ndarray, off: np.ndarray) -> _Rule:
    length = int(np.argmax(off == 0)) + 1 if (off == 0).any() else len(off)
    matrix = np.diag(diagonal[:length]) + np.diag(off[: length - 1], 1) + np.diag(off[: length - 1], -1)
    nodes, vectors = np.linalg.eigh(matrix)
    return _Rule(nodes, vectors, float(off[length - 1]))


def _combine(basis: Tensor, rule: _Rule, top: int) -> Tensor:
    """The vectors of the top eigenvalues, the largest first."""
    chosen = torch.as_tensor(rule.vectors[:, ::-1][:, :top].T.copy(), dtype=basis.dtype, device=basis.device)
    found = chosen @ basis[: chosen.shape[1]]
    return found / _norm(found).to(found.dtype)


def _refine(products: Products, vectors: Tensor) -> tuple[list[float], list[float], Tensor]:
    """The Rayleigh quotient of each vector, how far it is from being an eigenvector, and the vector of the largest."""
    found = products(vectors).double()
    values = (found * vectors.double()).sum(1)
    residuals = (found - values[:, None] * vectors.double()).norm(dim=1)
    order = torch.argsort(values, descending=True)
    return values[order].tolist(), residuals[order].tolist(), vectors[order[0]]


def _norm(rows: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float64)
    return norms
