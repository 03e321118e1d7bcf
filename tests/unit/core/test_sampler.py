"""Law 2, for any number of samples, batch and parts: every sample once, in equal parts, in an order of (seed, epoch) alone."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.keys import key
from paceline.core.sampler import Sampler, check_divides
from paceline.errors import UsageError
from paceline.phases import Phase


@st.composite
def samplers(draw: st.DrawFn) -> Sampler:
    """Any number of virtual workers, also many more than there are machines; steps that are full, and one that is not."""
    parts = draw(st.one_of(st.integers(1, 9), st.integers(1, 64)))
    part_batch = draw(st.integers(1, 12))
    return Sampler(draw(st.integers(parts, parts + 400)), parts * part_batch, parts, draw(st.integers(0, 2**70)))


@given(samplers(), st.integers(0, 100))
def test_every_sample_exactly_once(sampler, epoch):
    order = sampler.order(epoch)
    visited = []
    for step in range(sampler.cut(epoch).steps):
        bounds = sampler.part_bounds(epoch, step)
        assert len(bounds) == sampler.parts + 1
        for start, stop in itertools.pairwise(bounds):
            visited += order[start:stop].tolist()
    assert sorted(visited) == list(range(sampler.samples))


@given(samplers())
def test_parts_of_a_step_differ_by_one_at_most_and_none_is_empty(sampler):
    for step in range(sampler.cut(0).steps):
        sizes = np.diff(sampler.part_bounds(0, step))
        assert sizes.max() - sizes.min() <= 1
        assert sizes.min() >= 1


@given(samplers())
def test_parts_cover_the_epoch_without_gaps_or_overlaps(sampler):
    """Each step's first part starts where the last part of the step before ended."""
    bounds = [sampler.part_bounds(0, step) for step in range(sampler.cut(0).steps)]
    assert bounds[0][0] == 0
    assert bounds[-1][-1] == sampler.samples
    for before, after in itertools.pairwise(bounds):
        assert before[-1] == after[0]
    assert all((np.diff(each) > 0).all() for each in bounds)
    assert [each[0] for each in bounds] == sampler.cut(0).bounds[:-1].tolist()


@given(samplers())
def test_parts_of_a_full_step_are_equal(sampler):
    for step, samples in enumerate(np.diff(sampler.cut(0).bounds)):
        if samples == sampler.global_batch:
            assert set(np.diff(sampler.part_bounds(0, step))) == {sampler.global_batch // sampler.parts}


@given(samplers(), st.integers(1, 8))
def test_runs_of_parts_make_up_the_step_for_any_number_of_workers(sampler, workers):
    """Whoever has parts i to j has the samples from where i starts to where j ends: V need not be a multiple of P."""
    cuts = [sampler.parts * rank // workers for rank in range(workers + 1)]
    order = sampler.order(0)
    for step in range(sampler.cut(0).steps):
        bounds = sampler.part_bounds(0, step)
        visited = np.concatenate([order[bounds[i] : bounds[j]] for i, j in itertools.pairwise(cuts)])
        assert (visited == order[sampler.cut(0).bounds[step] : sampler.cut(0).bounds[step + 1]]).all()


@given(samplers())
def test_no_part_is_smaller_than_half_a_full_one(sampler):
    part_batch = sampler.global_batch // sampler.parts
    if sampler.cut(0).steps == 1 or part_batch < 2:
        return
    smallest = min(np.diff(sampler.part_bounds(0, step)).min() for step in range(sampler.cut(0).steps))
    assert smallest >= part_batch // 2  # of an odd part, rounded down


@given(samplers())
def test_all_steps_but_the_last_two_are_full_and_none_is_larger(sampler):
    sizes = np.diff(sampler.cut(0).bounds)
    assert (sizes[:-2] == sampler.global_batch).all()
    if sampler.global_batch >= 2 * sampler.parts:
        assert sizes.max() <= sampler.global_batch
    assert sizes.sum() == sampler.samples


@given(samplers(), st.integers(0, 5))
def test_the_order_depends_on_seed_and_epoch_alone(sampler, epoch):
    other = Sampler(sampler.samples, 1, 1, sampler.seed)
    assert (other.order(epoch) == sampler.order(epoch)).all()


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = {tuple(Sampler(100, 10, 2, seed).order(epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    assert tuple(range(100)) not in orders


def test_the_order_is_the_same_for_ever():
    order = Sampler(10, 5, 1, seed=0).order(0).tolist()
    assert order == sorted(range(10), key=lambda sample: key(0, 0, sample))
    assert order == [0, 9, 1, 6, 3, 5, 4, 2, 8, 7]


def test_the_order_is_well_mixed():
    """Each sample is about as often in the first half as in the second, over many epochs."""
    first = np.zeros(50)
    for epoch in range(400):
        first[Sampler(50, 50, 1, seed=3).order(epoch)[:25]] += 1
    assert first.min() > 140  # 200 expected, deviation 10
    assert first.max() < 260


@pytest.mark.parametrize(
    ("samples", "batch", "parts", "steps"),
    [
        (100, 20, 4, [20, 20, 20, 20, 20]),
        (110, 20, 4, [20, 20, 20, 20, 20, 10]),
        (109, 20, 4, [20, 20, 20, 20, 15, 14]),
        (101, 20, 4, [20, 20, 20, 20, 11, 10]),
        (7, 20, 4, [7]),
        (9, 4, 4, [4, 5]),
        (10, 4, 4, [4, 6]),
        (11, 4, 4, [4, 7]),
    ],
)
def test_steps_worked_out_by_hand(samples, batch, parts, steps):
    sampler = Sampler(samples, batch, parts, seed=0)
    sizes = np.diff(sampler.cut(0).bounds).tolist()
    assert sizes == steps
    assert sampler.cut(0).steps == len(sizes)


def test_a_batch_must_divide():
    check_divides(12, 4)
    with pytest.raises(UsageError, match="a global batch of 100 does not divide into 3 equal parts: use 99 or 102"):
        check_divides(100, 3)
    with pytest.raises(UsageError, match=r"use 8$"):
        check_divides(5, 8)
    with pytest.raises(UsageError, match="does not divide"):
        Sampler(1000, 100, 3, 0)


def test_each_part_needs_a_sample():
    assert Sampler(4, 8, 4, 0).part_bounds(0, 0).tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(UsageError, match="3 training samples cannot feed 4 virtual workers"):
        Sampler(3, 8, 4, 0)


@pytest.mark.parametrize(
    ("batch", "bounds"),
    [
        (8, [0, 4, 8, 12, 16, 20]),  # from sample 14 on: 4 samples are left at the next step, half of a batch
        (9, [0, 4, 8, 12, 16, 20]),  # less than half: it begins with the next epoch
        (4, [0, 4, 8, 12, 16, 20]),
    ],
)
def test_a_phase_with_less_than_half_a_batch_left_begins_with_the_next_epoch(batch, bounds):
    sampler = Sampler(20, max(4, batch), 1, 0, phases=(Phase(0.0, 4, 1), Phase(0.7, batch, 1)))
    assert sampler.cut(0).bounds.tolist() == bounds
    assert sampler.cut(0).phases.tolist() == [0, 0, 0, 0, 0 if batch == 9 else 1]
    assert set(sampler.cut(1).phases.tolist()) == {1}


def test_an_epoch_with_two_phases_worked_out_by_hand():
    """103 samples, 16 from sample 41.2 on: the steps of 8 end at 48, and the last two steps of 16 share the tail."""
    sampler = Sampler(103, 16, 4, 0, phases=(Phase(0.0, 8, 2), Phase(0.4, 16, 4)))
    assert sampler.cut(0).bounds.tolist() == [0, 8, 16, 24, 32, 40, 48, 64, 80, 92, 103]
    assert sampler.cut(0).phases.tolist() == [0] * 6 + [1] * 4


@given(samplers(), st.integers(0, 40))
def test_the_last_full_step_is_the_one_that_none_follows(sampler, start):
    """Also before the batch changes within an epoch."""
    half = Phase(0.0, max(1, sampler.global_batch // sampler.parts // 2) * sampler.parts, sampler.parts)
    later = Phase(0.01 + start / 40, sampler.global_batch, sampler.parts)
    for each in (sampler, replace(sampler, phases=(half, later))):
        full = []
        for step in range(each.first_step(3)):
            epoch, number = each.place(step)
            phase, size = each.phase_of(step), int(np.diff(each.cut(epoch).bounds)[number])
            full.append((epoch, phase) if size == phase.global_batch else None)
        ends = [one is not None and one != after for one, after in itertools.pairwise([*full, None])]
        assert [each.is_last_full(step) for step in range(len(full))] == ends
