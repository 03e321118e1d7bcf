"""From losses to a recommended learning rate."""

import math

import pytest

from paceline.lr_find.rule import DIVISOR, Point, Smoother, recommend


def curve(losses: list[float]) -> tuple[list[Point], bool]:
    """The points of a test with these losses, from 1e-5 up by a tenth of a decade per step, and whether it exploded."""
    smoother, points = Smoother(), []
    for i, loss in enumerate(losses):
        smoothed = smoother.add(loss)
        points.append(Point(step=i + 1, lr=10 ** (-5 + i / 10), loss=loss, smoothed=smoothed))
        if smoother.has_exploded(smoothed):
            return points, True
    return points, False


FALLING = [2.3] * 15 + [2.3 - 0.1 * i for i in range(16)]
"""Flat, then down to 0.8 at a learning rate of 0.01."""


def test_the_average_starts_at_the_first_loss_and_follows() -> None:
    smoother = Smoother()
    assert smoother.add(3.0) == pytest.approx(3.0)
    assert smoother.add(1.0) == pytest.approx((0.9 * 3.0 + 1.0) / 1.9)
    for _ in range(100):
        last = smoother.add(1.0)
    assert last == pytest.approx(1.0, abs=1e-3)


def test_the_recommendation_is_half_of_where_the_smoothed_loss_is_lowest() -> None:
    points, exploded = curve([*FALLING, *[0.8 * 1.6**i for i in range(1, 30)]])
    assert exploded
    assert points[-1].smoothed < 20, "it went on long after the explosion"
    advice = recommend(points, exploded)
    assert advice is not None
    lowest = min(points, key=lambda point: point.smoothed)
    assert advice.minimum_lr == lowest.lr
    assert advice.lr == lowest.lr / DIVISOR
    assert 1e-4 < advice.steepest_lr < advice.minimum_lr
    assert advice.warning == ""


def test_nan_and_infinity_are_explosions() -> None:
    for bad in (math.nan, math.inf):
        points, exploded = curve([*FALLING, bad, 1.0])
        assert exploded
        assert len(points) == len(FALLING) + 1
        assert recommend(points, exploded) is not None


def test_negative_losses_work_too() -> None:
    points, exploded = curve([loss - 10 for loss in FALLING] + [-9.0, -5.0, 0.0, 10.0, 50.0])
    assert exploded
    advice = recommend(points, exploded)
    assert advice is not None
    assert 1e-3 < advice.minimum_lr < 0.1


def test_a_flat_curve_has_no_recommendation_and_one_that_still_falls_a_warning() -> None:
    assert recommend(*curve([2.3, 2.2, 2.4] * 20)) is None
    assert recommend(*curve([2.3] * 3)) is None
    advice = recommend(*curve(FALLING))
    assert advice is not None
    assert advice.warning.startswith("the loss was still falling at the end: a larger --to")
