"""The spread of runs that differ only in their seed, and whether two ways to train reach the same result.

Two arms are compared by Welch's t on the final values of their runs (Welch, Biometrika 34, 1947: the arms may have different
variances). "Equal" must be shown, not assumed because no difference was found: two one-sided tests at 0.05 each (Schuirmann,
J. Pharmacokin. Biopharm. 15, 1987), which is the same as the 90% interval of the difference lying within the margin. Student's
t is computed from the regularized incomplete beta function (DLMF 8.17.22), because scipy would be a heavy dependency for two
functions; the tests compare with it. Nothing here imports torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALPHA = 0.05
"""The level of each of the two one-sided tests."""

MOST_SEEDS = 100
"""The most seeds that are suggested."""

LEGEND = (
    "equal: the interval lies within the margin; better: above 0; no worse: above minus the margin; worse: below minus the"
    " margin, or a run diverged; undecided: more seeds are needed"
)
"""What the verdicts mean, to print below a table of values of which more is better."""
LOSS_LEGEND = LEGEND.replace("above 0", "below 0").replace("above minus the margin", "below the margin")
LOSS_LEGEND = LOSS_LEGEND.replace("below minus the margin, or", "above the margin, or")
"""The same for values of which less is better."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """An arm against the reference: the difference of means, its 90% interval, and the verdict at a margin."""

    difference: float | None = None
    """Arm minus reference; None where one of them has no value."""
    low: float | None = None
    high: float | None = None
    verdict: str
    """equal, better, no worse, worse, undecided or no verdict."""
    why: str = ""
    """Why there is no verdict, or how many seeds an undecided one needs."""

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
    center = mean(values)
    return math.sqrt(math.fsum((value - center) ** 2 for value in values) / (len(values) - 1))


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two in the middle."""
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def compare(
    values: Sequence[float], reference: Sequence[float], margin: float, *, lower_is_better: bool = False, alpha: float = ALPHA
) -> Comparison:
    """Compare the final values of an arm with those of the reference. The first verdict that holds is returned:

    equal      the interval of the difference lies entirely within (-margin, margin);
    better     it lies entirely above 0;
    no worse   it lies entirely above -margin;
    worse      it lies entirely below -margin;
    undecided  it contains -margin: `why` says how many seeds per arm would be needed at this spread.

    "Above" means better: if lower values are better, the sign of the difference is flipped, for the verdict only.
    """
    if not values or not reference:
        return Comparison(verdict="no verdict", why="no run ended")
    difference = mean(values) - mean(reference)
    if len(values) < 2 or len(reference) < 2:
        return Comparison(difference=difference, verdict="no verdict", why="one seed")
    half = half_width(values, reference, alpha)
    if half == 0 and difference != 0:
        return Comparison(difference=difference, verdict="no verdict", why="all seeds of each arm gave the same value")
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
    """Half the width of the (1 - 2 alpha) interval of the difference of two means, by Welch; 0 if both variances are 0."""
    squares = [deviation(each) ** 2 / len(each) for each in (values, reference)]  # of the standard errors
    total = sum(squares)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(square**2 / (len(each) - 1) for square, each in zip(squares, (values, reference), strict=True))
    return t_quantile(1 - alpha, freedom) * math.sqrt(total)


def seeds_needed(values: Sequence[float], reference: Sequence[float], gap: float, alpha: float = ALPHA) -> int | None:
    """The number of seeds per arm at which the half-width would be below the gap, at these variances; None if over 100."""
    variances = [deviation(each) ** 2 for each in (values, reference)]
    spread, balance = sum(variances), sum(variance**2 for variance in variances)
    for n in range(2, MOST_SEEDS + 1):
        freedom = spread**2 * (n - 1) / balance if balance else n - 1
        if t_quantile(1 - alpha, freedom) * math.sqrt(spread / n) < gap:
            return n
    return None


def seeds_words(needed: int | None) -> str:
    """`seeds_needed` in words."""
    return f"more than {MOST_SEEDS} seeds needed" if needed is None else f"about {needed} seeds needed"


def t_probability(t: float, freedom: float) -> float:
    """P(T <= t) of Student's t."""
    if t * t < freedom:  # near 0 the tail's argument would round to 1
        return 0.5 + math.copysign(incomplete_beta(0.5, freedom / 2, t * t / (freedom + t * t)) / 2, t)
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
    """The regularized incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22, Lentz's method)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast for the other tail
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
