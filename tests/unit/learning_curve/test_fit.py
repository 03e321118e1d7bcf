"""The fit of a learning curve: known curves are found, intervals hold at their rate, and what cannot be fitted says so."""

import math

import numpy as np
import pytest

from paceline.learning_curve.fit import NoFitError, Point, drop_near_chance, fit

SIZES = tuple(1875 * 2**power for power in range(6))


def curve(a: float, b: float, c: float, sizes: tuple[int, ...] = SIZES, noise: float = 0.0, seeds: int = 3, draw: int = 0):
    random = np.random.default_rng(draw)
    return [Point(m, tuple((a * m**b + c) * (1 + noise * random.standard_normal(seeds)))) for m in sizes]


@pytest.mark.parametrize("true", [(8, -0.5, 0.05), (3, -0.3, 0.0), (400, -1.2, 0.02), (1.1, -0.08, 0.0)])
def test_an_exact_curve_is_found(true):
    found = fit(curve(*true))
    assert (found.a, found.b, found.c) == pytest.approx(true, rel=0.02, abs=2e-3)
    assert found.at(10**6) == pytest.approx(true[0] * 10 ** (6 * true[1]) + true[2], rel=1e-3)


@pytest.mark.parametrize(
    ("true", "noise", "seeds"), [((8, -0.5, 0.05), 0.03, 3), ((8, -0.5, 0.05), 0.02, 1)], ids=["3 seeds", "1 seed"]
)
def test_90_percent_intervals_hold_about_90_percent_of_the_time(true, noise, seeds):
    held = dict.fromkeys((*"abc", "at twice the data", "at the largest size, from a quarter"), 0)
    for draw in range(200):
        points = curve(*true, noise=noise, seeds=seeds, draw=draw)
        found = fit(points, seed=draw, draws=100)
        held_out = fit(points[:4], seed=draw, draws=100).predict(SIZES[-1], seeds)
        there, twice = found.predict(2 * SIZES[-1], seeds), curve(*true, (2 * SIZES[-1],), noise, seeds, 1000 + draw)[0].mean
        for name, value in zip("abc", true, strict=True):
            held[name] += found.parameter(name).low <= value <= found.parameter(name).high
        held["at twice the data"] += there.low <= twice <= there.high
        held["at the largest size, from a quarter"] += held_out.low <= points[-1].mean <= held_out.high
    rates = {name: count / 200 for name, count in held.items()}
    assert all(0.82 <= rate <= 0.97 for rate in rates.values()), rates


def test_sizes_that_do_not_show_a_floor_say_so():
    assert fit(curve(8, -0.5, 0.08, noise=0.01)).floor_known
    short = fit(curve(3, -0.35, 0.01, SIZES[:4], noise=0.05))
    assert not short.floor_known
    assert short.parameter("c").low == pytest.approx(0, abs=1e-3)


def test_the_samples_for_an_error():
    found = fit(curve(8, -0.5, 0.05, noise=0.01))
    needed = found.needed(0.06)
    assert needed.low < 640_000 < needed.high
    assert found.at(needed.value) == pytest.approx(0.06)
    assert found.needed(0.01).value == math.inf


def test_one_seed_and_three_sizes_have_a_fit_without_intervals():
    found = fit(curve(8, -0.5, 0.05, SIZES[:3], seeds=1))
    assert found.at(SIZES[0]) == pytest.approx(8 / SIZES[0] ** 0.5 + 0.05, rel=1e-3)
    assert math.isnan(found.parameter("b").low)
    assert math.isnan(found.predict(1e5, 1).high)
    assert not found.floor_known


def test_means_that_scatter_more_than_their_seeds_widen_the_intervals():
    smooth = [Point(p.samples, (p.mean * 0.999, p.mean, p.mean * 1.001)) for p in curve(8, -0.5, 0.05)]
    bumpy = [Point(p.samples, tuple(e * (1.1 if i % 2 else 0.9) for e in p.errors)) for i, p in enumerate(smooth)]
    assert not fit(smooth).scattered
    assert fit(bumpy).scattered
    widths = [found.high - found.low for found in (fit(smooth).predict(1e5, 3), fit(bumpy).predict(1e5, 3))]
    assert widths[1] > 10 * widths[0]


@pytest.mark.parametrize(
    ("points", "why"),
    [
        ([], "need 3 sizes with an error above 0, and there are 0"),
        ([Point(10, (0.5,)), Point(20, (0.4,))], "and there are 2"),
        ([Point(10, (0.5,)), Point(20, (0.4,)), Point(40, (0.0,))], "and there are 2"),
        ([Point(m, (0.3, 0.3)) for m in (10, 20, 40, 80)], "does not fall"),
        ([Point(m, (0.01 * m,)) for m in (10, 20, 40, 80)], "does not fall"),
    ],
)
def test_what_cannot_be_fitted_says_why(points, why):
    with pytest.raises(NoFitError, match=why):
        fit(points)


def test_sizes_near_chance_are_left_out():
    flat = [Point(100, (0.89, 0.9, 0.9)), Point(200, (0.85, 0.84, 0.86)), *curve(8, -0.5, 0.02, (400, 800, 1600, 3200), 0.01)]
    assert list(drop_near_chance(flat, 0.9)) == [100, 200]
    assert "near chance" in drop_near_chance(flat, 0.9)[100]
    assert list(drop_near_chance(flat, None)) == [100], "the error hardly falls up to the next size"
    assert not drop_near_chance(curve(8, -0.5, 0.05, noise=0.02), 0.9)
    assert not drop_near_chance([Point(m, (0.9,)) for m in (10, 20, 40)], None)
    everything = drop_near_chance([Point(m, (0.9,)) for m in (10, 20, 40)], 0.9)
    assert list(everything) == [10, 20, 40]


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.08])
def test_a_power_law_is_rarely_taken_for_chance(noise):
    dropped = sum(bool(drop_near_chance(curve(3, -0.35, 0.02, noise=noise, draw=draw), None)) for draw in range(100))
    assert dropped <= 8


def test_a_curve_that_would_need_a_negative_floor_is_the_best_pure_power_law():
    m, y = np.array([100.0, 200, 400, 800]), np.array([0.5, 0.45, 0.35, 0.2])
    found = fit([Point(int(size), (error,)) for size, error in zip(m, y, strict=True)])
    assert found.c == 0
    weights = 1 / (found.a * m**found.b) ** 2

    def squares(b: float) -> float:
        x = m**b
        return float(np.sum(weights * (y - x * np.sum(weights * x * y) / np.sum(weights * x * x)) ** 2))

    best = min(np.linspace(-2, -0.02, 500), key=squares)
    assert found.b == pytest.approx(best, abs=0.008)
