"""From the losses of a learning-rate range test to one learning rate. Nothing here imports torch.

The range test is from Smith 2017 (arXiv:1506.01186). Losses of single steps are noisy, so they are smoothed by an exponential
moving average whose start is corrected, as Adam corrects its moments.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

SMOOTHING = 0.9
DIVISOR = 2.0
"""The average lags behind the losses, so at its lowest point the learning rate is already too large."""
_SKIPPED = 5
"""Steps at the start in which the average is still noisy."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One step of the test."""

    step: int
    """From 1."""
    lr: float
    loss: float
    """The loss before this step's update: it shows the effect of the earlier learning rates."""
    smoothed: float


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What a curve recommends."""

    lr: float
    """The recommended peak learning rate, at the global batch of the test."""
    minimum_lr: float
    """Where the smoothed loss is lowest."""
    steepest_lr: float
    """Where it falls fastest per decade of the learning rate."""
    warning: str = ""


RULE = "half of the learning rate with the lowest smoothed loss"


class Smoother:
    """The moving average, step by step, and whether the loss has exploded."""

    def __init__(self) -> None:
        self._sum, self._weight = 0.0, 0.0
        self._first = self._best = math.inf
        self._count = 0

    def add(self, loss: float) -> float:
        """The average after this step."""
        self._sum = SMOOTHING * self._sum + (1 - SMOOTHING) * loss
        self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)
        value = self._sum / self._weight
        self._count += 1
        if self._count <= _SKIPPED:
            self._first = value
        self._best = min(self._best, value)
        return value

    def has_exploded(self, value: float) -> bool:
        """Whether the average is above its start by more than it fell before, and by at least half of the start."""
        if not math.isfinite(value):
            return True
        fallen = max(self._first - self._best, 0.5 * abs(self._first))
        return self._count > _SKIPPED and value > self._first + fallen


def recommend(points: Sequence[Point], exploded: bool) -> Advice | None:
    """The recommendation; None if the loss never fell by 10% of its start."""
    usable = points[_SKIPPED:]
    if len(usable) < 2:
        return None
    first, lowest = usable[0], min(usable, key=lambda point: point.smoothed)
    if first.smoothed - lowest.smoothed < 0.1 * abs(first.smoothed):
        return None
    falling = [point for point in usable if point.step <= lowest.step]
    steepest = max(pairwise(falling), key=lambda pair: _fall(*pair))[1]
    warning = ""
    if not exploded and lowest.step > points[-1].step - max(2, len(points) // 20):
        warning = "the loss was still falling at the end: a larger --to would show where it stops"
    return Advice(lr=lowest.lr / DIVISOR, minimum_lr=lowest.lr, steepest_lr=steepest.lr, warning=warning)


def _fall(one: Point, other: Point) -> float:
    """How much the smoothed loss falls per decade of the learning rate."""
    return (one.smoothed - other.smoothed) / math.log10(other.lr / one.lr)
