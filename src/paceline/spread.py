"""How far runs that differ only in their seed lie apart, and whether two ways to train end at the same place.

Two arms are compared by Welch's t on their runs' final values (Welch, Biometrika 34, 1947: the arms may spread differently).
"Equal" is shown, not assumed from a lack of difference: two one-sided tests at 0.05 each (Schuirmann, J. Pharmacokin. Biopharm.
15, 1987), which is the same as the 90% interval of the difference lying within the margin. Student's t comes from the
regularised incomplete beta function (DLMF 8.17.22), because scipy is no dependency. Nothing here imports torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALPHA = 0.05
"""Of each of the two one-sided tests."""

MOST_SEEDS = 100
"""More are not suggested."""

LEGEND = (
    "equal: the interval lies within the margin; better: above 0; no worse: above minus the margin; worse: below minus the"
    " margin, or a run diverged; undecided: more seeds are needed"
)
"""The verdicts in a sentence, for the foot of a table."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An arm against the reference: the difference of means, its 90% interval, and what follows at a margin."""

    difference: float | None = None
    """Arm minus reference; None where one of them has no value."""
    low: float | None = None
    high: float | None = None
    verdict: str
    """equal, better, no worse, worse, undecided or no verdict."""
    why: str = ""
    """What stands in the way of a verdict, or how many seeds an undecided one needs."""

    def words(self) -> str:
        """The verdict with its reason."""
        return f"{self.verdict} ({self.why})" if self.why else self.verdict


def mean(values: Sequence[float]) -> float:
    """The mean, summed without rounding."""
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """The sample standard deviation (n - 1); 0 for a single value."""
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle."""
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def compare(
    values: Sequence[float], reference: Sequence[float], margin: float, *, lower_is_better: bool = False, alpha: float = ALPHA
) -> Comparison:
    """What final values say about an arm and the reference, in this order:

    equal      the interval of the difference lies wholly within (-margin, margin);
    better     it lies wholly above 0;
    no worse   it lies wholly above -margin;
    worse      it lies wholly below -margin;
    undecided  it holds -margin: `why` says how many seeds an arm would need at this spread.

    "Above" is towards better: where a lower value is better, the difference is turned round for the verdict alone.
    """
    if not values or not reference:
        return Comparison(verdict="no verdict", why="no run ended")
    difference = mean(values) - mean(reference)
    if len(values) < 2 or len(reference) < 2:
        return Comparison(difference=difference, verdict="no verdict", why="one seed")
    half = half_width(values, reference, alpha)
    if half == 0 and difference != 0:
        return Comparison(difference=difference, verdict="no verdict", why="the seeds of both do not differ")
    low, high = difference - half, difference + half
    bad, good = (-high, -low) if lower_is_better else (low, high)
    why = ""
    if -margin < bad and good < margin:
        verdict = "equal"
    elif bad > 0:
        verdict = "better"
    elif bad > -margin:
        verdict = "no worse"
    elif good < -margin:
        verdict = "worse"
    else:
        gain = -difference if lower_is_better else difference
        verdict, why = "undecided", seeds_words(seeds_needed(values, reference, abs(gain + margin), alpha))
    return Comparison(difference=difference, low=low, high=high, verdict=verdict, why=why)


def half_width(values: Sequence[float], reference: Sequence[float], alpha: float = ALPHA) -> float:
    """Half of the (1 - 2 alpha) interval of the difference of two means, by Welch; 0 where nothing spreads."""
    parts = [deviation(each) ** 2 / len(each) for each in (values, reference)]
    total = sum(parts)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(part**2 / (len(each) - 1) for part, each in zip(parts, (values, reference), strict=True))
    return t_quantile(1 - alpha, freedom) * math.sqrt(total)


def seeds_needed(values: Sequence[float], reference: Sequence[float], gap: float, alpha: float = ALPHA) -> int | None:
    """Seeds an arm at which the interval's half would be less than the gap, if means and spreads stay; None: over 100."""
    variances = [deviation(each) ** 2 for each in (values, reference)]
    spread, balance = sum(variances), sum(variance**2 for variance in variances)
    for n in range(2, MOST_SEEDS + 1):
        freedom = spread**2 * (n - 1) / balance if balance else n - 1
        if t_quantile(1 - alpha, freedom) * math.sqrt(spread / n) < gap:
            return n
    return None


def seeds_words(needed: int | None) -> str:
    """How many seeds, for a reader."""
    return f"more than {MOST_SEEDS} seeds needed" if needed is None else f"about {needed} seeds needed"


def t_probability(t: float, freedom: float) -> float:
    """P(T <= t) of Student's t."""
    tail = incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t)) / 2
    return 1 - tail if t > 0 else tail


def t_quantile(probability: float, freedom: float) -> float:
    """The t with P(T <= t) = probability, by bisection to the last bits of a float."""
    if not 0 < probability < 1 or freedom <= 0:
        raise ValueError(f"no quantile {probability} of Student's t with {freedom} degrees of freedom")
    if probability < 0.5:
        return -t_quantile(1 - probability, freedom)
    low, high = 0.0, 1.0
    while t_probability(high, freedom) < probability:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_probability(middle, freedom) < probability else (low, middle)
    return high


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22, Lentz's method)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # there the fraction converges fast for the other tail
        return 1 - incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    tiny = 1e-300
    c, d = 1.0, 1 / _away_from_0(1 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 1000):
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _away_from_0(1 + factor * d, tiny)
            c = _away_from_0(1 + factor / c, tiny)
            change = c * d
            fraction *= change
        if abs(change - 1) < 1e-15:
            break
    return front * fraction


def _away_from_0(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny
