"""The toys: exact where they say so, the same for the same seed, and honest about who leaves a sharp minimum."""

import numpy as np
import pytest

from paceline import toys
from paceline.toys import (
    basin,
    descend_line,
    equilibrium,
    escapes,
    largest_stable_lr,
    line_toy,
    make_line,
    minima_gradient,
    minima_hessian,
    minima_loss,
    minima_points,
    minima_toy,
    stretch,
    threshold_toy,
    thresholds,
    walk,
    wilson,
)

POINTS = np.random.default_rng(5).normal(0, 1.5, (40, 2))
H = 1e-5


def differences(function, w):
    """Central differences of a function along both coordinates, on a new last axis."""
    return np.stack([(function(w + step) - function(w - step)) / (2 * H) for step in H * np.eye(2)], axis=-1)


# ---- The line


def test_the_minimum_is_that_of_least_squares():
    fit = make_line(seed=3)
    expected, (residual,), *_ = np.linalg.lstsq(np.stack([fit.x, np.ones(100)], axis=1), fit.y, rcond=None)
    np.testing.assert_allclose(fit.minimum, expected, rtol=1e-12)
    assert fit.loss(fit.minimum) == pytest.approx(residual / 100, rel=1e-12)
    assert np.abs(fit.gradient(fit.minimum)).max() < 1e-12
    direct = np.mean((POINTS[:, :1] * fit.x + POINTS[:, 1:] - fit.y) ** 2, axis=1)
    np.testing.assert_allclose(fit.loss(POINTS), direct, rtol=1e-12)


def test_the_lines_derivatives_agree_with_differences():
    fit = make_line()
    np.testing.assert_allclose(differences(fit.loss, POINTS), fit.gradient(POINTS), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        differences(fit.gradient, POINTS), np.broadcast_to(fit.hessian, (40, 2, 2)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("lr", [0.1, 0.7, 0.8])  # the last is above the limit
def test_full_batch_descent_follows_the_closed_form(lr):
    fit = make_line(seed=1)
    path = descend_line(fit, lr, 100, epochs=30, seeds=2, seed=4)
    exact = fit.exact_path(toys.LINE_START, lr, 30)
    for seed in (0, 1):  # their orders differ, their paths do not
        np.testing.assert_allclose(path[:, seed], exact, rtol=1e-9, atol=1e-12)
    power = np.linalg.matrix_power(np.eye(2) - lr * fit.hessian, 30)
    np.testing.assert_allclose(path[-1, 0], fit.minimum + power @ (0 - fit.minimum), rtol=1e-9)


def test_paths_of_the_line_see_every_point_once_per_epoch_and_depend_on_the_seed_alone():
    fit = make_line()
    paths = {batch: descend_line(fit, 0.05, batch, epochs=3, seeds=2, seed=7) for batch in (100, 30, 1)}
    assert {batch: path.shape for batch, path in paths.items()} == {100: (4, 2, 2), 30: (13, 2, 2), 1: (301, 2, 2)}
    again = descend_line(fit, 0.05, 30, epochs=3, seeds=2, seed=7)
    np.testing.assert_array_equal(paths[30], again)
    assert not np.array_equal(paths[30][-1, 0], paths[30][-1, 1])
    assert not np.array_equal(again, descend_line(fit, 0.05, 30, epochs=3, seeds=2, seed=8))
    tiny = descend_line(
        fit, 1e-9, 1, epochs=1
    )  # so small that w stays: the sum of an epoch's steps is n times the mean gradient
    np.testing.assert_allclose((tiny[-1, 0] - tiny[0, 0]) / -1e-9, 100 * fit.gradient(np.zeros(2)), rtol=1e-5)


# ---- Two minima


def test_the_surfaces_derivatives_agree_with_differences():
    np.testing.assert_allclose(differences(minima_loss, POINTS), minima_gradient(POINTS), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(differences(minima_gradient, POINTS), minima_hessian(POINTS), rtol=1e-5, atol=1e-5)
    x = POINTS[:, 0]
    for place in range(3):
        slope = (stretch(x + H)[place] - stretch(x - H)[place]) / (2 * H)
        np.testing.assert_allclose(slope, stretch(x)[place + 1], rtol=1e-5, atol=1e-6)


def test_the_stationary_points_are_where_the_closed_form_has_them():
    sharp, saddle, flat = minima_points()
    assert [(p.x, p.y, p.value) for p in (sharp, saddle, flat)] == [(-0.75, 0, 0), (0, 0, 1), (1.875, 0, 0)]
    for point, slope, signs in ((sharp, 164 / 105, (4, 2)), (saddle, 22 / 21, (2, -6)), (flat, 104 / 357, (4, 2))):
        assert point.eigenvalues == pytest.approx([sign * slope**2 for sign in signs], rel=1e-12)
        assert np.abs(minima_gradient(np.array([point.x, point.y]))).max() < 1e-12
    side = np.linspace(-6, 12, 400)
    grid = np.stack(np.meshgrid(side, side), axis=-1)
    assert minima_loss(grid).min() >= 0  # no deeper minimum elsewhere
    np.testing.assert_allclose(minima_loss(grid), minima_loss(grid * [1, -1]))  # symmetric in y


def test_a_minimum_attracts_up_to_2_over_lambda_and_not_above():
    limit = largest_stable_lr(minima_points()[0].eigenvalues[0])
    assert limit == pytest.approx(2 / (4 * (164 / 105) ** 2))
    below, above, far = thresholds([0.995, 1.005, 1.8])
    assert below["end"] == "ends in the sharp minimum"
    assert above["end"] == "bounces around the sharp minimum"  # not attracted, but not gone
    assert above["x_high"] - above["x_low"] > 0.05
    assert far["end"] == "ends in the flat minimum"


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_with_momentum_the_limit_is_1_plus_mu_times_as_high(momentum):
    limit = largest_stable_lr(minima_points()[0].eigenvalues[0], momentum)
    rates = [(0.98 * limit, momentum, 0.0), (1.02 * limit, momentum, 0.0)]
    path = walk(rates, steps=2_000, every=1, start=(-0.75 - 1e-6, 0.0))
    away = np.abs(path[:, :, 0, 0] + 0.75)
    assert away[-1, 0] < 1e-12
    assert away[:, 1].max() > 1e-2


def test_walks_are_the_plain_rule_and_share_their_random_numbers():
    settings = [(0.05, 0.0, 1.0), (0.01, 0.9, 1.0)]
    path = walk(settings, steps=5, seeds=3, seed=2, every=1)
    assert path.shape == (6, 2, 3, 2)
    noise = np.random.default_rng(2).standard_normal((5, 3, 2))
    for place, (lr, mu, scale) in enumerate(settings):
        w, b = np.tile(toys.START, (3, 1)), np.zeros((3, 2))
        for step in range(5):
            b = mu * b + minima_gradient(w) + scale * noise[step]
            w = w - lr * b
        np.testing.assert_allclose(path[-1, place], w, rtol=1e-12)
    np.testing.assert_array_equal(walk(settings, steps=5, seeds=3, seed=2)[-1], path[-1])


def test_basins_and_walks_that_diverged():
    found = basin(np.array([[-0.75, 0.0], [1.9, 0.5], [-2.0, -2.0], [np.nan, 0.0], [1e9, 0.0]]))
    assert found.tolist() == [0, 1, 0, -1, -1]


def test_escapes_depend_on_the_seed_alone_and_momentum_escapes_less_at_the_same_effective_learning_rate():
    rows = escapes([0.1], 2.0, 0.9, steps=1_000, seeds=200, seed=1)
    assert rows == escapes([0.1], 2.0, 0.9, steps=1_000, seeds=200, seed=1)
    assert rows != escapes([0.1], 2.0, 0.9, steps=1_000, seeds=200, seed=2)
    plain, fair, same = rows
    assert plain["effective_lr"] == pytest.approx(fair["effective_lr"])
    assert same["effective_lr"] == pytest.approx(10 * plain["effective_lr"])
    assert fair["high"] < plain["low"]
    assert fair["high"] < same["low"]
    assert all(row["low"] <= row["flat"] <= row["high"] for row in rows)
    quiet = escapes([0.05], 0.2, 0.9, steps=300, seeds=50)
    assert [row["flat"] for row in quiet[:2]] == [0, 0]


@pytest.mark.parametrize(("lr", "momentum"), [(0.01, 0.0), (0.001, 0.9)])
def test_noise_acts_as_the_same_temperature_at_the_same_effective_learning_rate(lr, momentum):
    """Around a minimum the variance along an eigenvector is T / lambda, with T = lr / (1 - momentum) * noise^2 / 2."""
    ends = walk([(lr, momentum, 0.5)], steps=800, seeds=4_000, seed=3, start=(-0.75, 0.0))[-1, 0]
    temperature = 0.01 * 0.5**2 / 2
    np.testing.assert_allclose(ends.var(axis=0) * minima_points()[0].eigenvalues, temperature, rtol=0.12)


def test_small_steps_end_in_equilibrium():
    """With small steps, many walks are distributed as exp(-f / T): the flat side has more room, not a deeper minimum."""
    [row] = [row for row in escapes([0.02], 8.0, 0.0, steps=2_500, seeds=400) if row["optimizer"] == "SGD"]
    assert row["low"] < row["long_run"] < row["high"]
    assert row["long_run"] == equilibrium(0.02 * 8.0**2 / 2)
    slopes = 164 / 105, 104 / 357
    cold = slopes[0] ** 2 / (slopes[0] ** 2 + slopes[1] ** 2)  # as T goes to 0: the ratio of the areas of the two minima
    assert equilibrium(1e-3) == pytest.approx(cold, rel=1e-3)


def test_the_interval_of_a_fraction():
    assert wilson(0, 1_000) == pytest.approx((0, 0.0038268), abs=1e-7)
    assert wilson(1_000, 1_000) == pytest.approx((0.9961732, 1), abs=1e-7)
    assert wilson(5, 10) == pytest.approx((0.2365931, 0.7634069), abs=1e-7)


# ---- What the record holds


def test_the_record_has_surfaces_paths_and_rows_that_fit_together():
    made = [line_toy(0.1, 0, 3), minima_toy([0.1, 0.2], [1.0], 0.9, steps=900, seeds=4, seed=0), threshold_toy()]
    assert [toy["toy"] for toy in made] == ["line", "minima", "threshold"]
    for toy in made:
        assert (len(toy["z"]), len(toy["z"][0])) == (len(toy["y"]), len(toy["x"]))
        for path in toy["paths"]:
            assert len({len(path[name]) for name in "txyz"}) == 1
            assert path["t"] == sorted(set(path["t"]))
            assert path["t"][0] == 0
            assert len(path["t"]) <= 1_000
    line, minima, threshold = made
    assert {path["t"][-1] for path in line["paths"]} == {2_000}  # every path saw the same number of samples
    assert [row["steps"] for row in line["rows"]] == [20, 200, 2_000]
    assert len(minima["rows"]) == 6
    assert len(minima["paths"]) == 4
    assert [row["factor"] for row in threshold["rows"]] == list(toys.FACTORS)


def test_a_path_ends_where_it_diverges():
    paths = {path["name"]: path for path in line_toy(3.0, 0, 1)["paths"]}
    assert 2 <= len(paths["batch 1"]["t"]) < 400
    assert all(np.isfinite(paths["batch 1"]["z"]))
