import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.lag import expected_lag
from paceline.plan.tradeoff import examples_ratio, read_noise_scale, saved_by_doubling, steps_ratio

positive = st.floats(1, 1e7)


@given(positive, positive)
def test_steps_and_examples_follow_the_tradeoff(noise: float, batch: float) -> None:
    """(S / Smin - 1)(E / Emin - 1) = 1, with Smin the steps at an infinite batch and Emin the examples at a tiny one."""
    least_steps = steps_ratio(noise, 1e30, batch)
    least_examples = noise * least_steps * 1 / batch  # Emin = N Smin, relative to the examples at `batch`
    assert (1 / least_steps - 1) * (1 / least_examples - 1) == pytest.approx(1, rel=1e-6)


@given(positive, positive, positive)
def test_a_larger_batch_never_takes_more_steps_nor_fewer_examples(noise: float, one: float, other: float) -> None:
    small, large = sorted((one, other))
    assert steps_ratio(noise, large, small) <= 1 + 1e-12
    assert examples_ratio(noise, large, small) >= 1 - 1e-12


def test_what_doubling_saves_by_hand() -> None:
    assert saved_by_doubling(1000, 1000) == pytest.approx(0.25)
    assert saved_by_doubling(1000, 1e-6) == pytest.approx(0.5)
    assert saved_by_doubling(1000, 4000) == pytest.approx(0.1)


def test_the_noise_scale_is_the_median_of_the_second_half() -> None:
    rows = [{"kind": "step", "noise_scale": value} for value in (1, 1, 1, 1, 100, 200, 300, 400)]
    found = read_noise_scale([{"kind": "note", "text": "x"}, *rows, {"kind": "epoch", "noise_scale": 9e9}])
    assert found is not None
    assert (found.low, found.scale, found.high, found.rows) == (175, 250, 325, 4)


def test_values_that_are_not_numbers_are_left_out() -> None:
    rows = [{"kind": "step", "noise_scale": value} for value in ("inf", "nan", None, -1.0, 0, True, 50.0)]
    found = read_noise_scale(rows)
    assert found is not None
    assert found.scale == 50
    assert read_noise_scale(rows[:-1]) is None


def test_an_infinite_noise_scale_is_a_large_one() -> None:
    found = read_noise_scale([{"kind": "step", "noise_scale": value} for value in (50.0, 10**400, 1e300)])
    assert found is not None
    assert found.scale == 1e12


def test_epoch_rows_are_used_if_there_are_no_others() -> None:
    found = read_noise_scale([{"kind": "epoch", "noise_scale": 7.0}])
    assert found is not None
    assert found.scale == 7


ROOT = 1 / math.sqrt(math.pi)


@pytest.mark.parametrize(("workers", "deviations"), [(1, 0.0), (2, ROOT), (3, 1.5 * ROOT), (10, 1.53875), (1000, 3.24144)])
def test_the_slowest_of_some_workers(workers: int, deviations: float) -> None:
    """Known values: 1 / sqrt(pi), 3 / (2 sqrt(pi)), and others from tables."""
    assert expected_lag(workers) == pytest.approx(deviations, abs=1e-4)
