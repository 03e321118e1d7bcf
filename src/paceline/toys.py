"""Toys: two problems with two parameters, so small that every number in their pictures is exact.

The line: fit y = 10 x + 2 to noisy points by least squares. The loss is a quadratic bowl, so its minimum, its Hessian and the
path of full-batch descent are known in closed form.

Two minima: one sharp, one flat, exactly equal in depth, with one saddle between them. With r = sqrt(1 + x^2),

    u(x) = (22 x - 18 (r - 1)) / 21,    f(x, y) = u^2 + 4 / (1 + u^2) - 3 + (u'(x) y)^2

u stretches the axis: steep on the left, shallow on the right. f has its stationary points at y = 0 and u = -1, 0, 1, which are
x = -3/4 (the sharp minimum, f = 0), 0 (the saddle, f = 1) and 15/8 (the flat minimum, f = 0).

Functions of points take float64 arrays of shape (..., 2). Only numpy is needed. The verb is in `toys_verb.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.output import plural, stages

Array = NDArray[np.float64]
Setting = tuple[float, float, float]
"""Learning rate, momentum, and the standard deviation of the noise in each component of the gradient."""

EQUAL = "momentum, same lr/(1-mu)"
LINE_START, EPOCHS, BATCHES = (0.0, 0.0), 20, (100, 10, 1)
START = (-0.9, 0.3)
"""Where walks on the two minima start: beside the sharp one."""
NEAR = (-0.8, 0.05)
"""Where descent without noise starts: nearer, because a limit of stability is about small distances."""
FACTORS = (0.9, 0.99, 1.01, 1.2, 1.5, 1.8)
"""Learning rates of descent without noise, as multiples of the sharp minimum's limit."""
_FAR = 1e6  # a walk beyond this has diverged
_SETTLE_STEPS, _SETTLE_LR = 500, 0.05


# ---- The line ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LineFit:
    """Points to fit a line to. The loss of w = (slope, intercept) is the mean squared error."""

    x: Array
    y: Array

    @property
    def hessian(self) -> Array:
        """The Hessian, the same everywhere: 2 [[mean x^2, mean x], [mean x, 1]]."""
        return 2 * np.array([[np.mean(self.x**2), np.mean(self.x)], [np.mean(self.x), 1.0]])

    @property
    def minimum(self) -> Array:
        """The exact minimum, from the normal equations."""
        return np.linalg.solve(self.hessian, 2 * np.array([np.mean(self.x * self.y), np.mean(self.y)]))

    def loss(self, w: Array) -> Array:
        """The mean squared error at points w: the loss at the minimum plus the quadratic form of the Hessian."""
        best, away = self.minimum, np.asarray(w) - self.minimum
        least = np.mean((best[0] * self.x + best[1] - self.y) ** 2)
        return np.asarray(least + 0.5 * np.einsum("...i,ij,...j->...", away, self.hessian, away))

    def gradient(self, w: Array) -> Array:
        """The gradient of the loss at points w."""
        return np.asarray((np.asarray(w) - self.minimum) @ self.hessian)

    def exact_path(self, start: Sequence[float], lr: float, steps: int) -> Array:
        """The path of full-batch descent in closed form: w_t - w* = (I - lr H)^t (w_0 - w*). Shape (steps + 1, 2)."""
        values, vectors = np.linalg.eigh(self.hessian)
        along = vectors.T @ (np.asarray(start) - self.minimum)
        shrunk = (1 - lr * values) ** np.arange(steps + 1)[:, None] * along
        return np.asarray(self.minimum + shrunk @ vectors.T)


def make_line(points: int = 100, noise: float = 1.0, seed: int = 0) -> LineFit:
    """Points on y = 10 x + 2 with x uniform in [0, 1) and Gaussian noise in y."""
    random = np.random.default_rng(seed)
    x = random.random(points)
    return LineFit(x, 10 * x + 2 + noise * random.standard_normal(points))


def descend_line(
    fit: LineFit,
    lr: float,
    batch: int,
    *,
    epochs: int = EPOCHS,
    seeds: int = 1,
    seed: int = 0,
    start: Sequence[float] = LINE_START,
) -> Array:
    """Paths of SGD, one per seed: shape (steps + 1, seeds, 2). Each epoch sees every point once, in a new order.

    A batch of all points is full-batch descent. The last batch of an epoch has the points that are left.
    """
    count, random = len(fit.x), np.random.default_rng((seed, 1))
    w = np.tile(np.asarray(start, dtype=float), (seeds, 1))
    path = [w]
    for _ in range(epochs):
        order = random.permuted(np.tile(np.arange(count), (seeds, 1)), axis=1)
        for at in range(0, count, batch):
            x, y = fit.x[order[:, at : at + batch]], fit.y[order[:, at : at + batch]]
            with np.errstate(all="ignore"):  # paths that diverge
                error = w[:, :1] * x + w[:, 1:] - y
                w = w - 2 * lr * np.stack([np.mean(error * x, axis=1), np.mean(error, axis=1)], axis=1)
            path.append(w)
    return np.stack(path)


# ---- Two minima ----------------------------------------------------------------------------------------------------------


def stretch(x: Array) -> tuple[Array, Array, Array, Array]:
    """u(x) and its first three derivatives."""
    r = np.sqrt(1 + x * x)
    return (22 * x - 18 * (r - 1)) / 21, (22 - 18 * x / r) / 21, -18 / (21 * r**3), 54 * x / (21 * r**5)


def minima_loss(w: Array) -> Array:
    """The surface f at points w."""
    u, u1, *_ = stretch(w[..., 0])
    return np.asarray(u**2 + 4 / (1 + u**2) - 3 + (u1 * w[..., 1]) ** 2)


def minima_gradient(w: Array) -> Array:
    """The gradient of f at points w."""
    (u, u1, u2, _), y = stretch(w[..., 0]), w[..., 1]
    return np.stack([(2 * u - 8 * u / (1 + u * u) ** 2) * u1 + 2 * u1 * u2 * y * y, 2 * u1 * u1 * y], axis=-1)


def minima_hessian(w: Array) -> Array:
    """The Hessian of f at points w: shape (..., 2, 2)."""
    (u, u1, u2, u3), y = stretch(w[..., 0]), w[..., 1]
    first, second = 2 * u - 8 * u / (1 + u**2) ** 2, 2 - 8 / (1 + u**2) ** 2 + 32 * u**2 / (1 + u**2) ** 3
    xx, xy = second * u1**2 + first * u2 + 2 * y**2 * (u2**2 + u1 * u3), 4 * u1 * u2 * y
    return np.stack([np.stack([xx, xy], axis=-1), np.stack([xy, 2 * u1**2], axis=-1)], axis=-2)


@dataclass(frozen=True)
class Point:
    """A stationary point of a surface."""

    name: str
    x: float
    y: float
    value: float
    eigenvalues: tuple[float, float]
    """Of the Hessian, the larger first: the curvature across and along."""


def minima_points() -> tuple[Point, Point, Point]:
    """The sharp minimum, the saddle and the flat minimum, by Newton's method on the closed form."""
    return tuple(  # type: ignore[return-value]
        make_point(name, newton(minima_gradient, minima_hessian, near), minima_loss, minima_hessian)
        for name, near in (("sharp minimum", (-0.7, 0.1)), ("saddle", (0.1, 0.1)), ("flat minimum", (1.8, 0.1)))
    )


def newton(gradient: Callable[[Array], Array], hessian: Callable[[Array], Array], near: Sequence[float]) -> Array:
    """The stationary point near a point. Newton's method doubles the correct digits in each step: ten steps are plenty."""
    w = np.asarray(near, dtype=float)
    for _ in range(10):
        w = w - np.linalg.solve(hessian(w), gradient(w))
    return w


def make_point(name: str, w: Array, loss: Callable[[Array], Array], hessian: Callable[[Array], Array]) -> Point:
    """A stationary point with its value and the eigenvalues of its Hessian."""
    low, high = (float(value) for value in np.linalg.eigvalsh(hessian(w)))
    x, y = (float(value) + 0.0 for value in np.round(w, 14))
    return Point(name, x, y, float(loss(w)), (high, low))


def largest_stable_lr(eigenvalue: float, momentum: float = 0.0) -> float:
    """The learning rate above which a minimum of this curvature no longer attracts: 2 / lambda, or 2 (1 + mu) / lambda."""
    return 2 * (1 + momentum) / eigenvalue


def walk(
    settings: Sequence[Setting], *, steps: int, seeds: int = 1, seed: int = 0, every: int = 0, start: Sequence[float] = START
) -> Array:
    """SGD on the two minima for several settings and many seeds at once: one array operation per step, no loop over seeds.

    Each step: g = gradient + noise * N(0, I), b = momentum * b + g, w = w - lr * b. All settings get the same random numbers,
    so they are compared in pairs. Returns every n-th point, the start included; with every=0 only the last. Shape
    (points, settings, seeds, 2).
    """
    lr, mu, scale = np.asarray(settings, dtype=float).T[:, :, None, None]
    random, silent = np.random.default_rng(seed), not np.any(scale)
    w = np.tile(np.asarray(start, dtype=float), (len(settings), seeds, 1))
    velocity, path = np.zeros_like(w), [w]
    with np.errstate(all="ignore"):  # walks that diverge
        for step in range(1, steps + 1):
            velocity = mu * velocity + minima_gradient(w)
            if not silent:
                velocity += scale * random.standard_normal((seeds, 2))
            w = w - lr * velocity
            if every and step % every == 0:
                path.append(w)
    return np.stack(path) if every else w[None]


def basin(w: Array) -> NDArray[np.int8]:
    """Which minimum descent with small steps reaches from points w: 1 the flat one, 0 the sharp one, -1 diverged already."""
    lost = _is_lost(w)
    at = np.where(lost[..., None], 0.0, w)
    for _ in range(_SETTLE_STEPS):
        at = at - _SETTLE_LR * minima_gradient(at)
    return np.where(lost, -1, np.where(at[..., 0] > 0, 1, 0)).astype(np.int8)


def _is_lost(w: Array) -> NDArray[np.bool_]:
    return np.asarray(~(np.abs(w) < _FAR).all(axis=-1))  # nan, too


def equilibrium(temperature: float) -> float:
    """The share of time that a walk with small steps spends on the flat side, in the long run.

    With isotropic noise its density is exp(-f / T), where T = lr / (1 - momentum) * noise^2 / 2 (Mandt, Hoffman and Blei, JMLR
    18, 2017). The integral over y leaves exp(-f(x, 0) / T) / u'(x).
    """
    reach = 4 + 8 * math.sqrt(temperature)  # in u; u' is between 4/21 and 40/21
    x = np.linspace(-reach, 21 / 4 * (reach + 1), 400_001)
    u, u1, *_ = stretch(x)
    density = np.exp(-(u**2 + 4 / (1 + u**2) - 3) / temperature) / u1
    return float(density[x > 0].sum() / density.sum())


def wilson(hits: int, of: int) -> tuple[float, float]:
    """The 95% interval of a fraction (Wilson, JASA 22, 1927). It stays within 0 and 1, also for fractions of 0 and 1."""
    z2 = 1.959963984540054**2
    center, half = (hits + z2 / 2) / (of + z2), math.sqrt(z2 * (hits * (of - hits) / of + z2 / 4)) / (of + z2)
    return max(0.0, center - half), min(1.0, center + half)


def escapes(
    rates: Sequence[float], noise: float, momentum: float, *, steps: int = 2_000, seeds: int = 1_000, seed: int = 0
) -> list[dict[str, Any]]:
    """How many of the seeds end in the flat minimum: for each learning rate SGD, and momentum at two learning rates.

    At the same lr / (1 - momentum) a step of momentum has the same effect in the long run: the fair comparison. At the same lr
    its effect is 1 / (1 - momentum) times as large.
    """
    ways = (("SGD", 1.0, 0.0), (EQUAL, 1 - momentum, momentum), ("momentum, same lr", 1.0, momentum))
    asked = [(name, row_lr, row_lr * share, kept) for row_lr in rates for name, share, kept in ways]
    ends = basin(walk([(lr, kept, noise) for _, _, lr, kept in asked], steps=steps, seeds=seeds, seed=seed)[-1])
    rows = []
    for (name, row_lr, lr, kept), end in zip(asked, ends, strict=True):
        flat, lost, effective_lr = int(np.sum(end == 1)), int(np.sum(end == -1)), lr / (1 - kept)
        row = {"optimizer": name, "noise": noise, "row_lr": row_lr, "lr": lr, "momentum": kept, "effective_lr": effective_lr}
        (low, high), long_run = wilson(flat, seeds), equilibrium(effective_lr * noise**2 / 2)
        rows.append(
            {**row, "seeds": seeds, "flat": flat / seeds, "low": low, "high": high, "diverged": lost, "long_run": long_run}
        )
    return rows


def thresholds(factors: Sequence[float] = FACTORS, momentum: float = 0.0, steps: int = 5_000) -> list[dict[str, Any]]:
    """Where descent without noise ends, for multiples of the sharp minimum's largest stable learning rate.

    Below 1 the minimum attracts and above 1 it does not: each step multiplies the distance by |1 - lr * lambda|. But not to be
    attracted is not yet to leave: on this surface the walk first bounces between the walls of the sharp minimum.
    """
    sharp = minima_points()[0]
    lrs = [factor * largest_stable_lr(sharp.eigenvalues[0], momentum) for factor in factors]
    tail = walk([(lr, momentum, 0.0) for lr in lrs], steps=steps, every=1, start=NEAR)[-64:, :, 0]
    rows = []
    for factor, lr, last in zip(factors, lrs, np.swapaxes(tail, 0, 1), strict=True):
        still, end = float(np.abs(last - last[-1]).max()) < 1e-6, int(basin(last[-1]))
        if still or end < 0:
            words = {-1: "diverges", 0: "ends in the sharp minimum", 1: "ends in the flat minimum"}[end]
        else:
            words = "bounces around the sharp minimum" if last[:, 0].max() < 0 else "never settles"
        x_low, x_high = float(last[:, 0].min()), float(last[:, 0].max())
        rows.append({"factor": factor, "lr": lr, "momentum": momentum, "end": words, "x_low": x_low, "x_high": x_high})
    return rows


# ---- What the record holds ---------------------------------------------------------------------------------------------


def line_toy(lr: float, seed: int, seeds: int) -> dict[str, Any]:
    """The line as the record has it: the surface, paths of one seed, and how far from the minimum all seeds end."""
    fit = make_line(seed=seed)
    best = make_point("exact minimum", fit.minimum, fit.loss, lambda _: fit.hessian)
    paths, rows = [], []
    for batch in BATCHES:
        name = "all points" if batch == len(fit.x) else f"batch {batch}"
        found = descend_line(fit, lr, batch, seeds=min(seeds, 1_000), seed=seed)
        away = np.hypot(*(found[-1] - fit.minimum).T)
        paths.append(_path(name, found[:, 0], fit.loss, batch))
        steps, excess = len(found) - 1, float(np.mean(fit.loss(found[-1])) - best.value)
        spread = round(float(away.std(ddof=1)), 12) if len(away) > 1 else 0.0
        rows.append({"batch": batch, "steps": steps, "distance": float(away.mean()), "sd": spread, "excess": excess})
    about = f"y = 10 x + 2, 100 points, noise 1; lr {lr:g}, {EPOCHS} epochs: every path sees the same number of samples"
    facts = {"toy": "line", "title": "Line fit", "about": about, "axes": ["slope", "intercept"], "log": True}
    surface = _surface(fit.loss, (-3.0, 15.0), (-3.0, 9.0))
    return {**facts, "clock": "samples seen", **surface, "points": [vars(best)], "paths": paths, "rows": rows}


def minima_toy(rates: Sequence[float], noises: Sequence[float], momentum: float, **runs: int) -> dict[str, Any]:
    """The two minima as the record has them: the surface, one walk each, and how many of the seeds escape."""
    rows = []
    for noise in noises:
        stages.enter(f"{plural(runs['seeds'], 'seed')}, noise {noise:g}")
        rows += escapes(rates, noise, momentum, **runs)
    ways = [rows[at : at + 3] for at in range(0, len(rows), 3)]
    shown = max(ways, key=lambda three: abs(three[0]["flat"] - three[1]["flat"]))  # where SGD and momentum differ most
    lr, noise, steps = shown[0]["lr"], shown[0]["noise"], runs["steps"]
    every = max(1, steps // 400)
    settings = [*((row["lr"], row["momentum"], noise) for row in shown), (lr, 0.0, 0.0)]
    found = walk(settings, steps=steps, seed=runs["seed"], every=every)[:, :, 0]
    names = [f"SGD, lr {lr:g}", *(f"momentum, lr {row['lr']:.4g}" for row in shown[1:]), f"no noise, lr {lr:g}"]
    paths = [_path(name, found[:, place], minima_loss, every) for place, name in enumerate(names)]
    about = f"one walk each, from beside the sharp minimum, with noise {noise:g}"
    facts = {"toy": "minima", "title": "Sharp and flat minimum", "about": about, **_minima()}
    return {**facts, "paths": paths, "rows": rows}


def threshold_toy() -> dict[str, Any]:
    """Descent without noise at learning rates around the sharp minimum's limit."""
    limit = largest_stable_lr(minima_points()[0].eigenvalues[0])
    shown = (0.95, 1.05, 1.8)
    found = walk([(factor * limit, 0.0, 0.0) for factor in shown], steps=100, every=1, start=NEAR)[:, :, 0]
    paths = [_path(f"{factor:g} x limit", found[:, place], minima_loss, 1) for place, factor in enumerate(shown)]
    about = f"learning rates around the sharp minimum's limit, 2/lambda = {limit:.4g}"
    facts = {"toy": "threshold", "title": "Descent without noise", "about": about, **_minima()}
    return {**facts, "paths": paths, "rows": thresholds()}


def _minima() -> dict[str, Any]:
    points = [vars(point) for point in minima_points()]
    surface = _surface(minima_loss, (-1.7, 4.1), (-2.4, 2.4))
    return {"axes": ["x", "y"], "log": False, "most": 2.0, "clock": "steps", **surface, "points": points}


def _surface(loss: Callable[[Array], Array], across: tuple[float, float], up: tuple[float, float]) -> dict[str, Any]:
    x, y = np.linspace(*across, 79), np.linspace(*up, 61)
    return {"x": _short(x), "y": _short(y), "z": [_short(row) for row in loss(np.stack(np.meshgrid(x, y), axis=-1))]}


def _path(name: str, w: Array, loss: Callable[[Array], Array], each: int) -> dict[str, Any]:
    """A path up to where it diverges, thinned to about 400 points; `each`: what the clock counts from point to point."""
    lost = _is_lost(w)
    w = w[: int(lost.argmax())] if lost.any() else w
    kept = np.unique(np.append(np.arange(0, len(w), -(-len(w) // 400)), len(w) - 1))
    x, y = w[kept].T
    return {"name": name, "t": (kept * each).tolist(), "x": _short(x), "y": _short(y), "z": _short(loss(w[kept]))}


def _short(values: Array) -> list[float]:
    return [float(f"{value:.6g}") for value in values]
