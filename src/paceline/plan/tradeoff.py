"""The noise scale of a run, and the tradeoff between steps and examples that follows from it.

With a noise scale N, a run at global batch B needs S = Smin (1 + N / B) steps and E = S B = Emin (1 + B / N) examples, where
Emin = N Smin. Hence (S / Smin - 1)(E / Emin - 1) = 1 (McCandlish et al. 2018, arXiv:1812.06162, eq. 2.11; the critical batch
Emin / Smin is taken to be the noise scale). So from B to 2 B the steps fall to (1 + N / 2B) / (1 + N / B): by nearly half while
B is far below N, by a quarter at B = N, hardly at all beyond. The rule is about the number of steps, not about accuracy: it
assumes a well-tuned learning rate at every batch. `paceline rehearse` measures what really happens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.spread import median

MOST_NOISE = 1e12
"""A noise scale above this many samples is treated as this many."""


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """A noise scale in samples, with its spread over the run."""

    scale: float
    low: float
    """Lower quartile over the second half of the run."""
    high: float
    rows: int


def read_noise_scale(rows: Sequence[Mapping[str, Any]]) -> NoiseScale | None:
    """The noise scale of a record's rows: the median over the second half of the run, and its quartiles.

    Rows hold ratios of smoothed numbers (core/noise.py). The noise scale grows during training; most of the steps worth
    saving are in the second half. Epoch rows repeat the last step row's value and are used only if there are no others.
    """
    for kind in ("step", "epoch"):
        found = [row["noise_scale"] for row in rows if row.get("kind") == kind and is_noise_scale(row.get("noise_scale"))]
        if found:
            return noise_scale_of(found[len(found) // 2 :])
    return None


def is_noise_scale(value: Any) -> bool:
    """Whether this is a noise scale: a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def noise_scale_of(values: Sequence[float]) -> NoiseScale:
    """The median of some values and their quartiles."""
    ordered = sorted(float(min(each, MOST_NOISE)) for each in values)
    return NoiseScale(scale=median(ordered), low=_quantile(ordered, 0.25), high=_quantile(ordered, 0.75), rows=len(ordered))


def given_noise_scale(scale: float) -> NoiseScale:
    """A noise scale given by the user, without a range."""
    return NoiseScale(scale=scale, low=scale, high=scale, rows=0)


def steps_ratio(noise: float, batch: float, reference: float) -> float:
    """Steps at a global batch, relative to steps at the reference batch."""
    return (1 + noise / batch) / (1 + noise / reference)


def examples_ratio(noise: float, batch: float, reference: float) -> float:
    """Examples at a global batch, relative to examples at the reference batch."""
    return steps_ratio(noise, batch, reference) * batch / reference


def saved_by_doubling(noise: float, batch: float) -> float:
    """The share of the steps that doubling the batch saves."""
    return 1 - steps_ratio(noise, 2 * batch, batch)


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
