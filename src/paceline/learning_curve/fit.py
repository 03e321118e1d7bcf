"""Fit error against data size, err(m) = a m^b + c with a > 0, b < 0 and c >= 0 (Hestness et al., arXiv:1712.00409, 2017).

For a given b the fit is linear in a and c, so the best pair is a formula, and b is searched on a grid that is refined twice: no
start values, no local minima, and all bootstrap draws are fitted at once. Weighted least squares of relative residuals: errors
span a factor of ten over the sizes, and their spread grows with them. A size's weight is the variance of its mean, from the
spread of its seeds, which few seeds give only roughly: it is averaged with that of all sizes.

Intervals are 90%, by a parametric bootstrap: errors are drawn around the fit with the spread of the seeds, or, for one seed,
that of the residuals. The spread is an estimate itself, so it is drawn, too (as in Student's t).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.spread import incomplete_beta

Array = np.ndarray
LEAST_SIZES = 3
"""As many as there are parameters."""
DRAWS = 1000
_PRIOR = 4.0
"""How many degrees of freedom the spread over all sizes counts when it is averaged with a size's own."""
STEEPEST, _FLATTEST = -2.5, -0.01
_NEAR_CHANCE = 0.8
_ALPHA = 0.05
"""Beyond each end of an interval."""


class NoFitError(ValueError):
    """The errors do not determine a fit; the message says why."""


@dataclass(frozen=True)
class Point:
    """The errors of all seeds at one data size."""

    samples: int
    errors: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.errors))


@dataclass(frozen=True)
class Interval:
    """An estimate and its 90% interval; the ends are nan if nothing is known about the spread."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Fit:
    """A fitted curve, and bootstrap draws of its parameters."""

    a: float
    b: float
    c: float
    draws: Array
    """Rows of (a, b, c); empty without a measure of the spread."""
    noise: Array
    """For each draw, how far a single run may be from the curve, as a fraction of the error."""
    smallest: float
    """The smallest mean error in the fit."""
    scattered: bool
    """The means are further from the curve than the spread of the seeds explains."""

    def parameter(self, name: str) -> Interval:
        """a, b or c with its interval."""
        return self._interval(getattr(self, name), self.draws[:, "abc".index(name)])

    @property
    def floor_known(self) -> bool:
        """Whether the errors tell c from 0."""
        return bool(self.parameter("c").low > 0.01 * self.smallest)

    def at(self, samples: float) -> float:
        """The error on the curve."""
        return float(self.a * float(samples) ** self.b + self.c)

    def band(self, samples: float) -> Interval:
        """The curve at this size."""
        return self._interval(self.at(samples), self._curves(samples))

    def predict(self, samples: float, seeds: int) -> Interval:
        """The mean error of this many seeds at this size."""
        return self._interval(self.at(samples), self._curves(samples) * (1 + self.noise / np.sqrt(seeds)))

    def needed(self, target: float) -> Interval:
        """How many samples the curve needs to come down to this error; infinity if it never does."""
        rows = self.draws if len(self.draws) else np.zeros((0, 3))
        return self._interval(float(_solve(np.array([[self.a, self.b, self.c]]), target)[0]), _solve(rows, target))

    def _curves(self, samples: float) -> Array:
        a, b, c = self.draws.T
        return np.asarray(a * float(samples) ** b + c)

    @staticmethod
    def _interval(value: float, draws: Array) -> Interval:
        if not len(draws):
            return Interval(value, np.nan, np.nan)
        low, high = np.quantile(draws, (_ALPHA, 1 - _ALPHA), method="nearest")  # of infinities, too
        return Interval(value, float(low), float(high))


def fit(points: Sequence[Point], *, seed: int = 0, draws: int = DRAWS) -> Fit:
    """Fit a, b and c. Raises NoFitError if there are too few sizes, or if the error does not fall with more data."""
    points = sorted((point for point in points if point.mean > 0), key=lambda point: point.samples)
    if len(points) < LEAST_SIZES:
        raise NoFitError(f"three parameters need {LEAST_SIZES} sizes with an error above 0, and there are {len(points)}")
    m, y = (np.array([getattr(point, name) for point in points], float) for name in ("samples", "mean"))
    counts = np.array([len(point.errors) for point in points], float)
    variances, freedom = _variances(points)
    scales = np.sqrt(variances / counts)  # of the means, as a fraction of them
    found = _fit_rows(m, y[None], 1 / (y * scales) ** 2)[0]
    found = _fit_rows(m, y[None], 1 / (_curve(found, m) * scales) ** 2)[0]  # a low error must not weigh more for being low
    expected = _curve(found, m)
    if found[0] <= 0 or expected[0] - expected[-1] <= 1e-9 * expected[0]:
        raise NoFitError("the error does not fall with more data")
    misfit = float(np.sum(((y / expected - 1) / scales) ** 2))
    rest = len(points) - 3
    scattered = bool(freedom and rest and _exceeds(misfit / rest, rest, freedom))
    a, b, c = map(float, found)
    if freedom + rest == 0:
        return Fit(a, b, c, np.zeros((0, 3)), np.zeros(0), float(y.min()), False)
    factor = misfit / rest if scattered else (freedom + misfit) / (freedom + rest)
    random = np.random.default_rng(seed)
    spread = np.sqrt(factor * (freedom + rest) / random.chisquare(freedom + rest, (draws, 1)))
    drawn = expected * np.maximum(1 + scales * spread * random.standard_normal((draws, len(m))), 0.01)
    rows = _fit_rows(m, drawn, 1 / (expected * scales) ** 2)
    last = spread[:, 0] * np.sqrt(variances[-1]) * random.standard_normal(draws)
    return Fit(a, b, c, rows, last, float(y.min()), scattered)


def drop_near_chance(points: Sequence[Point], chance: float | None) -> dict[int, str]:
    """The smallest sizes that are still near chance, where the curve is flat and no power law yet: size -> why.

    They are near chance if their error is at least 80% of chance, or if the error falls less than half as fast from there to
    the next size as it does later, and the difference is more than three standard errors. A power law plus a constant falls
    fastest at its beginning, in logarithms.
    """
    points = sorted((point for point in points if point.mean > 0), key=lambda point: point.samples)
    found: dict[int, str] = {}
    for point in points:
        if chance is None or point.mean < _NEAR_CHANCE * chance:
            break
        found[point.samples] = f"error {point.mean:.4f} is near chance, {chance:.4f}"
    points = [point for point in points if point.samples not in found]
    if len(points) <= LEAST_SIZES:
        return found
    m, y = (np.log([getattr(point, name) for point in points]) for name in ("samples", "mean"))
    variances, freedom = _variances(points)
    scales = np.sqrt(variances / [len(point.errors) for point in points]) if freedom else np.zeros(len(points))
    slopes, errors = np.diff(y) / np.diff(m), np.hypot(scales[1:], scales[:-1]) / np.diff(m)
    steepest = int(np.argmin(slopes[: len(points) - LEAST_SIZES + 1]))
    for place in reversed(range(steepest)):
        gap = slopes[place] - slopes[steepest]
        if slopes[place] > slopes[steepest] / 2 and gap > 3 * np.hypot(errors[place], errors[steepest]):
            why = "the error falls less than half as fast there as at the next sizes"
            return found | {point.samples: why for point in points[: place + 1]}
    return found


def _variances(points: Sequence[Point]) -> tuple[Array, int]:
    """The relative variance of one run at each size, and the degrees of freedom behind it (0: unknown, all 1)."""
    owns = np.array([np.var(point.errors, ddof=1) / point.mean**2 if len(point.errors) > 1 else 0.0 for point in points])
    free = np.array([len(point.errors) - 1 for point in points])
    pooled = float(np.sum(owns * free) / max(1, free.sum()))
    if pooled <= 0:
        return np.ones(len(points)), 0
    return (_PRIOR * pooled + free * owns) / (_PRIOR + free), int(free.sum())


def _fit_rows(m: Array, rows: Array, weights: Array) -> Array:
    """For each row of errors, the a, b and c with the least weighted squares."""
    log_m, center = np.log(m), float(np.mean(np.log(m)))
    grid = np.linspace(STEEPEST, _FLATTEST, 60)[None].repeat(len(rows), axis=0)
    each = np.arange(len(rows))
    for _ in range(3):
        x = np.exp(grid[:, :, None] * (log_m - center))
        a, c, squares = _best_pairs(x, rows, weights)
        best = np.argmin(squares, axis=1)
        b, step = grid[each, best], grid[0, 1] - grid[0, 0]
        a, c = a[each, best], c[each, best]
        grid = np.clip(b[:, None] + step * np.linspace(-1, 1, 25), STEEPEST, _FLATTEST)
    return np.stack([a * np.exp(-b * center), b, c], axis=1)


def _best_pairs(x: Array, y: Array, weights: Array) -> tuple[Array, Array, Array]:
    """For rows of errors and grids of x: the a and c, at least 0, with the least weighted squares of y - a x - c; the squares.

    The squares are summed from the same five moments as a and c, which takes a third of the time.
    """
    s, sx, sxx = weights.sum(), x @ weights, (x * x) @ weights
    sy, sxy, syy = (y @ weights)[:, None], (x @ (weights * y)[:, :, None])[..., 0], ((y * y) @ weights)[:, None]
    a = (s * sxy - sx * sy) / (s * sxx - sx * sx)
    a = np.where(a * sx > sy, sxy / sxx, a)  # c would be negative
    c = np.where(a < 0, sy / s, np.maximum((sy - a * sx) / s, 0))
    a = np.maximum(a, 0)
    return a, c, syy - 2 * (a * sxy + c * sy) + a * a * sxx + 2 * a * c * sx + s * c * c


def _curve(row: Array, m: Array) -> Array:
    a, b, c = row
    return np.asarray(a * m**b + c)


def _solve(rows: Array, target: float) -> Array:
    a, b, c = rows.T
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where((target > c) & (a > 0), ((target - c) / a) ** (1 / b), np.inf)


def _exceeds(ratio: float, above: int, below: int) -> bool:
    """Whether a ratio of variances with these degrees of freedom is larger than chance explains, at 0.05 (an F test)."""
    return incomplete_beta(above / 2, below / 2, above * ratio / (above * ratio + below)) > 1 - _ALPHA
