"""Statistics against published tables and scipy, and verdicts in cases with a known answer."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special, stats

from paceline.spread import compare, deviation, half_width, incomplete_beta, mean, median, seeds_needed, t_probability
from paceline.spread import t_quantile as quantile


@pytest.mark.parametrize(
    ("probability", "freedom", "t"),
    [  # NIST/SEMATECH e-Handbook 1.3.6.7.2 and Abramowitz and Stegun 26.10, six places where they are published
        (0.95, 1, 6.313752),
        (0.95, 2, 2.919986),
        (0.95, 3, 2.353363),
        (0.95, 4, 2.131847),
        (0.95, 5, 2.015048),
        (0.95, 10, 1.812461),
        (0.95, 30, 1.697261),
        (0.95, 100, 1.660234),
        (0.975, 4, 2.776445),
        (0.975, 30, 2.042272),
        (0.99, 8, 2.896459),
        (0.995, 5, 4.032143),
        (0.95, 10_000, 1.645006),
    ],
)
def test_t_matches_published_tables(probability, freedom, t):
    assert quantile(probability, freedom) == pytest.approx(t, abs=6e-7)
    assert quantile(1 - probability, freedom) == pytest.approx(-t, abs=6e-7)
    assert t_probability(quantile(probability, freedom), freedom) == pytest.approx(probability, abs=1e-12)


def test_t_with_one_and_two_degrees_of_freedom_has_a_closed_form():
    for t in (-3.0, -0.2, 0.0, 0.5, 40.0):
        assert t_probability(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-14)
        assert t_probability(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-14)


FREEDOMS = (0.5, 1, 1.3, 2, 2.7, 4, 7.5, 30, 100, 1e3, 1e5)


@pytest.mark.parametrize("freedom", FREEDOMS)
def test_t_matches_scipy(freedom):
    for probability in (1e-4, 0.01, 0.05, 0.3, 0.5, 0.6, 0.9, 0.95, 0.975, 0.99, 0.9999):
        assert quantile(probability, freedom) == pytest.approx(stats.t.ppf(probability, freedom), rel=1e-9, abs=1e-12)
    for t in (-50, -3, -1, -1e-6, 0, 0.3, 1, 2, 8, 1e4):
        assert t_probability(t, freedom) == pytest.approx(stats.t.cdf(t, freedom), abs=1e-10)


@pytest.mark.parametrize("a", [0.05, 0.5, 1, 2.5, 10, 100, 5e4])
def test_the_incomplete_beta_matches_scipy(a):
    for b in (0.05, 0.5, 1, 2.5, 10, 100):
        for x in (0, 1e-9, 1e-3, 0.1, 0.5, 0.9, 0.999, 1 - 1e-9, 1):
            assert incomplete_beta(a, b, x) == pytest.approx(special.betainc(a, b, x), abs=1e-10)


VALUES = st.lists(st.floats(0, 1).map(lambda value: round(value, 4)), min_size=2, max_size=12)


@pytest.mark.filterwarnings("ignore:Precision loss:RuntimeWarning")  # scipy's, for nearly equal values
@settings(max_examples=200, deadline=None)
@given(VALUES, VALUES, st.sampled_from([0.005, 0.025, 0.05, 0.1]))
def test_mean_deviation_median_and_welchs_interval_match_scipy(values, reference, alpha):
    assert mean(values) == pytest.approx(stats.tmean(values), rel=1e-12)
    assert deviation(values) == pytest.approx(stats.tstd(values), rel=1e-9, abs=1e-12)
    assert median(values) == pytest.approx(stats.scoreatpercentile(values, 50), rel=1e-12)
    if len({*values}) > 1 or len({*reference}) > 1:  # scipy has no interval for constant samples
        low, high = stats.ttest_ind(values, reference, equal_var=False).confidence_interval(1 - 2 * alpha)
        assert half_width(values, reference, alpha) == pytest.approx((high - low) / 2, rel=1e-8)


def test_the_incomplete_beta_where_it_is_a_polynomial():
    for x in (0.0, 0.1, 0.5, 0.93, 1.0):
        assert incomplete_beta(1, 1, x) == pytest.approx(x, abs=1e-14)
        assert incomplete_beta(2, 3, x) == pytest.approx(6 * x**2 - 8 * x**3 + 3 * x**4, abs=1e-14)


@pytest.mark.parametrize(("probability", "freedom"), [(0, 3), (1, 3), (0.5, 0)])
def test_a_quantile_that_does_not_exist_is_an_error(probability, freedom):
    with pytest.raises(ValueError, match="no quantile"):
        quantile(probability, freedom)


def test_mean_deviation_and_median():
    assert mean([0.1] * 10) == 0.1
    assert deviation([2, 4, 4, 4, 5, 5, 7, 9]) == pytest.approx(math.sqrt(32 / 7))
    assert deviation([3.0]) == 0
    assert (median([3, 1, 2]), median([4, 1, 2, 3])) == (2, 2.5)


def test_welchs_interval_of_a_worked_example():
    """Two samples of unequal spread: variances 4/3 and 100/3, n 3 each; df = (4/9 + 100/9)^2 / ((4/9)^2/2 + (100/9)^2/2)."""
    one, other = [9, 10, 11.0], [5, 10, 15.0]
    freedom = (1 / 3 + 25 / 3) ** 2 / ((1 / 3) ** 2 / 2 + (25 / 3) ** 2 / 2)
    assert half_width(one, other) == pytest.approx(quantile(0.95, freedom) * math.sqrt(26 / 3))


NEAR = [0.940, 0.941, 0.942]  # sd 0.001: the half-width of two such arms is 0.00174


def moved(by: float, spread: float = 1.0) -> list[float]:
    return [0.941 + by + spread * (value - 0.941) for value in NEAR]


@pytest.mark.parametrize(
    ("by", "spread", "verdict"),
    [
        (0.0, 1, "equal"),
        (0.0032, 1, "equal"),  # also above 0, but within the margin
        (0.0034, 1, "better"),
        (0.03, 1, "better"),
        (0.003, 4, "no worse"),
        (-0.0032, 1, "equal"),
        (-0.0034, 1, "undecided"),
        (-0.0066, 1, "undecided"),
        (-0.0068, 1, "worse"),
        (0.0, 20, "undecided"),
    ],
)
def test_verdicts_at_a_margin(by, spread, verdict):
    found = compare(moved(by, spread), NEAR, 0.005)
    assert found.verdict == verdict, found
    assert found.difference == pytest.approx(by)
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.difference < found.high
    turned = compare([-value for value in moved(by, spread)], [-value for value in NEAR], 0.005, lower_is_better=True)
    assert turned.verdict == verdict
    assert turned.difference == pytest.approx(-by)
    assert ("seeds needed" in found.why) == (verdict == "undecided")


def test_arms_without_spread():
    assert compare([0.9, 0.9], [0.9, 0.9], 0.005).verdict == "equal"
    assert compare([0.8, 0.8], [0.9, 0.9], 0.005).words() == "no verdict (all seeds of each arm gave the same value)"


def test_more_seeds_than_there_are_is_suggested():
    """Two seeds per arm, one arm with little spread: Welch's degrees of freedom are few, so the interval is wide."""
    found = compare([0.25, 0.45], [0.705, 0.717], 0.005)
    assert found.verdict == "undecided"
    assert seeds_needed([0.25, 0.45], [0.705, 0.717], abs(found.difference + 0.005)) >= 3


def test_one_seed_or_none_gives_no_verdict():
    assert compare([0.9], [0.9, 0.91], 0.005).words() == "no verdict (one seed)"
    assert compare([], [0.9, 0.91], 0.005).words() == "no verdict (no run ended)"
    assert compare([0.9], [0.8], 0.005).low is None


def test_the_suggested_seeds_are_enough_and_one_less_is_not():
    one, gap = moved(-0.0034), 0.0016
    needed = seeds_needed(one, NEAR, gap)
    assert needed is not None
    assert quantile(0.95, 2 * needed - 2) * math.sqrt(2e-6 / needed) < gap
    assert quantile(0.95, 2 * needed - 4) * math.sqrt(2e-6 / (needed - 1)) >= gap
    assert seeds_needed(one, NEAR, 1e-9) is None
    assert "more than 100 seeds" in compare([0.93, 0.94], [0.935, 0.945], 0.00501).words()
