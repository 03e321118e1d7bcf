"""Learning rates against values worked out by hand, and what holds for every shape."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import Config
from paceline.core.sampler import Sampler
from paceline.core.schedules import Schedule, make_schedule, scale_lr
from paceline.phases import Phase

SHAPES = ("constant", "linear", "cosine", "one-cycle")


def lrs(schedule: Schedule) -> list[float]:
    return [schedule.lr(step) for step in range(schedule.total_steps)]


def made(config: Config, k: float, steps_per_epoch: int, total_steps: int) -> Schedule:
    """The schedule of a run on k times the reference batch."""
    batch = round(k * config.reference_batch)
    sampler = Sampler(steps_per_epoch * batch, batch, 1, 0)
    schedule = make_schedule(replace(config, epochs=-(-total_steps // steps_per_epoch), max_steps=total_steps), sampler)
    assert (schedule.total_steps, schedule.steps_per_epoch) == (total_steps, steps_per_epoch)
    return schedule


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    shape = draw(st.sampled_from(SHAPES))
    return Schedule(
        peak_lr=draw(st.floats(1e-6, 10)),
        total_steps=draw(st.integers(1, 300)),
        steps_per_epoch=draw(st.integers(1, 60)),
        shape=shape,
        by=draw(st.sampled_from(("step", "epoch"))),
        warmup_steps=0 if shape == "one-cycle" else draw(st.integers(0, 400)),
        warmup_from=draw(st.floats(0, 1)),
        peak_at=draw(st.floats(0, 1)),
    )


def test_the_courses_warm_up():
    """4 GPUs, 5 epochs of warm-up, once per epoch, from a quarter of the lr; 7 steps per epoch."""
    config = Config(
        base_lr=0.08, lr_rule="none", schedule="constant", schedule_by="epoch", warmup_epochs=5.0, warmup_from=0.25, epochs=8
    )
    schedule = made(config, k=4, steps_per_epoch=7, total_steps=56)
    factors = [schedule.lr(7 * epoch) / 0.08 for epoch in range(8)]
    assert factors == pytest.approx([0.25, 0.40, 0.55, 0.70, 0.85, 1, 1, 1])
    for epoch in range(8):
        assert {schedule.lr(7 * epoch + step) for step in range(7)} == {schedule.lr(7 * epoch)}


def test_constant():
    assert lrs(Schedule(peak_lr=0.3, total_steps=3, steps_per_epoch=1)) == [0.3, 0.3, 0.3]


def test_linear_falls_to_one_step_above_0():
    schedule = Schedule(peak_lr=1.0, total_steps=4, steps_per_epoch=2, shape="linear")
    assert lrs(schedule) == pytest.approx([1, 0.75, 0.5, 0.25])


def test_cosine():
    schedule = Schedule(peak_lr=2.0, total_steps=4, steps_per_epoch=2, shape="cosine")
    half = math.sqrt(0.5)
    assert lrs(schedule) == pytest.approx([2, 1 + half, 1, 1 - half])


def test_one_cycle_goes_up_and_down():
    schedule = Schedule(peak_lr=1.0, total_steps=10, steps_per_epoch=5, shape="one-cycle", warmup_from=0.1, peak_at=0.2)
    assert lrs(schedule) == pytest.approx([0.1, 0.55, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])


def test_one_cycle_may_peak_at_either_end():
    falling = Schedule(peak_lr=1.0, total_steps=4, steps_per_epoch=2, shape="one-cycle", peak_at=0.0)
    assert lrs(falling) == pytest.approx([1, 0.75, 0.5, 0.25])
    rising = Schedule(peak_lr=1.0, total_steps=4, steps_per_epoch=2, shape="one-cycle", peak_at=1.0)
    assert lrs(rising) == pytest.approx([0, 0.25, 0.5, 0.75])


def test_warm_up_then_cosine():
    schedule = Schedule(peak_lr=4.0, total_steps=8, steps_per_epoch=4, shape="cosine", warmup_steps=4, warmup_from=0.25)
    half = math.sqrt(0.5)
    assert lrs(schedule) == pytest.approx([1, 1.75, 2.5, 3.25, 4, 2 + 2 * half, 2, 2 - 2 * half])


def test_by_epoch_keeps_the_lr_of_the_epochs_first_step():
    each = Schedule(peak_lr=1.0, total_steps=6, steps_per_epoch=3, shape="linear")
    once = Schedule(peak_lr=1.0, total_steps=6, steps_per_epoch=3, shape="linear", by="epoch")
    assert lrs(once) == [each.lr(0)] * 3 + [each.lr(3)] * 3


@pytest.mark.parametrize(("rule", "peak"), [("linear", 0.8), ("sqrt", 0.2), ("none", 0.05)])
def test_rules(rule, peak):
    assert scale_lr(0.05, 16, rule) == pytest.approx(peak)
    assert scale_lr(0.05, 1, rule) == pytest.approx(0.05)


def test_warm_up_starts_at_base_lr_under_the_linear_rule():
    config = Config(base_lr=0.1, schedule="cosine", warmup_epochs=2.5)
    schedule = made(config, k=8, steps_per_epoch=4, total_steps=20)
    assert schedule.lr(0) == pytest.approx(0.1)
    assert schedule.warmup_steps == 10
    assert schedule.lr(10) == pytest.approx(0.8)
    assert made(config, k=0.5, steps_per_epoch=4, total_steps=20).warmup_from == 1.0


def test_warm_up_starts_where_the_user_says():
    config = Config(base_lr=0.1, schedule="linear", warmup_steps=3, warmup_from=0.0)
    schedule = made(config, k=2, steps_per_epoch=4, total_steps=20)
    assert (schedule.lr(0), schedule.warmup_steps) == (0.0, 3)


def test_one_cycle_starts_low_whatever_k_is():
    for k in (1, 64):
        schedule = made(Config(base_lr=0.1, lr_rule="none"), k=k, steps_per_epoch=4, total_steps=20)
        assert schedule.lr(0) == pytest.approx(0.01)
        assert schedule.peak_at == Config().peak_at


@given(schedules())
def test_never_negative_and_never_above_the_peak(schedule):
    for lr in lrs(schedule):
        assert 0 <= lr <= schedule.peak_lr * (1 + 1e-12)


@given(schedules())
def test_no_jumps(schedule):
    """Each step moves by at most the steepest slope there is: warm-up meets what follows at the peak."""
    if schedule.by == "epoch":
        return
    slopes = [1 / schedule.warmup_steps if schedule.warmup_steps else 0.0]
    falling = max(1, schedule.total_steps - schedule.warmup_steps)
    peak = schedule.peak_at * schedule.total_steps
    if schedule.shape == "one-cycle":
        slopes += [1 / peak if peak else 0.0, 1 / (schedule.total_steps - peak) if peak < schedule.total_steps else 0.0]
    else:
        slopes += [{"constant": 0.0, "linear": 1 / falling, "cosine": math.pi / 2 / falling}[schedule.shape]]
    values = lrs(schedule)
    for before, after in itertools.pairwise(values):
        assert abs(after - before) <= schedule.peak_lr * (max(slopes) + 1e-9)


@given(schedules())
def test_the_end_of_warm_up_is_the_peak(schedule):
    if schedule.warmup_steps and schedule.warmup_steps < schedule.total_steps and schedule.by == "step":
        assert schedule.lr(schedule.warmup_steps) == pytest.approx(schedule.peak_lr)
        assert schedule.lr(schedule.warmup_steps - 1) <= schedule.peak_lr


@given(st.sampled_from(("linear", "cosine")), st.integers(0, 50), st.integers(1, 200))
def test_the_last_step_is_the_lowest_and_not_0(shape, warmup, falling):
    schedule = Schedule(peak_lr=1.0, total_steps=warmup + falling, steps_per_epoch=1, shape=shape, warmup_steps=warmup)
    last = schedule.lr(schedule.total_steps - 1)
    expected = 1 / falling if shape == "linear" else (1 - math.cos(math.pi / falling)) / 2
    assert last == pytest.approx(expected)
    assert last > 0


def test_the_step_schedule_falls_where_it_is_told():
    config = Config(base_lr=1.0, schedule="step", step_at="0.75,0.5", step_factor=0.1, lr_rule="none")
    found = made(config, k=1, steps_per_epoch=2, total_steps=8)
    assert [found.lr(step) for step in range(8)] == pytest.approx([1.0] * 4 + [0.1] * 2 + [0.01] * 2)


def test_the_step_schedule_falls_after_epochs_however_long_the_run_is():
    config = Config(base_lr=1.0, schedule="step", step_at="3,1", step_factor=0.1, lr_rule="none")
    for total in (8, 12):
        found = made(config, k=1, steps_per_epoch=2, total_steps=total)
        assert [found.lr(step) for step in range(8)] == pytest.approx([1.0] * 2 + [0.1] * 4 + [0.01] * 2)
        assert not found.depends_on_length
    assert made(Config(schedule="step"), k=1, steps_per_epoch=2, total_steps=8).depends_on_length
    assert not made(Config(schedule="constant"), k=1, steps_per_epoch=2, total_steps=8).depends_on_length


def test_the_step_schedule_after_warm_up():
    config = Config(base_lr=1.0, schedule="step", step_at="0.5", warmup_steps=2, warmup_from=0.0, lr_rule="none")
    found = made(config, k=1, steps_per_epoch=2, total_steps=8)
    assert [found.lr(step) for step in range(8)] == pytest.approx([0.0, 0.5, 1.0, 1.0, 0.1, 0.1, 0.1, 0.1])


def test_adascale_leaves_the_schedule_at_base_lr():
    found = made(Config(base_lr=0.1, lr_rule="adascale", schedule="constant"), k=8, steps_per_epoch=4, total_steps=8)
    assert found.lr(5) == 0.1


@pytest.mark.parametrize(
    "schedule",
    [
        Schedule(peak_lr=1.0, total_steps=282, steps_per_epoch=47, shape="one-cycle", warmup_from=0.1),
        Schedule(peak_lr=1.0, total_steps=100, steps_per_epoch=10, shape="cosine", warmup_steps=33),
        Schedule(peak_lr=1.0, total_steps=100, steps_per_epoch=10, shape="step", step_at=(0.333, 0.75), warmup_steps=4),
        Schedule(peak_lr=1.0, total_steps=99, steps_per_epoch=33, shape="step", step_at=(1.0, 2.0)),
        Schedule(peak_lr=1.0, total_steps=100, steps_per_epoch=50, shape="one-cycle", warmup_from=0.5, peak_at=0.022),
    ],
)
def test_rows_at_the_corners_and_epoch_ends_give_the_curve(schedule: Schedule) -> None:
    """A curve of every tenth step is exact to 1.5% of the peak with the corners: a bend may be between two steps."""
    total, per_epoch = schedule.total_steps, schedule.steps_per_epoch
    kept = [step for step in range(total) if step % 10 == 9 or step % per_epoch == per_epoch - 1 or step in schedule.corners()]
    assert max(schedule.lr(step) for step in kept) == max(lrs(schedule))
    for low, high in itertools.pairwise(kept):
        for step in range(low, high):
            drawn = schedule.lr(low) + (schedule.lr(high) - schedule.lr(low)) * (step - low) / (high - low)
            assert drawn == pytest.approx(schedule.lr(step), abs=0.015)
    assert len(schedule.corners()) <= 5


def test_a_constant_rate_and_the_ends_are_not_corners() -> None:
    assert not Schedule(peak_lr=1.0, total_steps=100, steps_per_epoch=10).corners()
    assert not Schedule(peak_lr=1.0, total_steps=9, steps_per_epoch=10, shape="one-cycle", peak_at=0.0).corners()
    by_epoch = Schedule(peak_lr=1.0, total_steps=56, steps_per_epoch=7, by="epoch", warmup_steps=35)
    assert not by_epoch.corners()  # every epoch's rate is in the row of its last step


# --- a batch that changes ---


def growing(*phases: tuple[float, int], samples: int = 32, **options: Any) -> Schedule:
    """Of a run whose batch changes; power 0.5 unless given."""
    largest = max(batch for _, batch in phases)
    sampler = Sampler(samples, largest, 2, 0, phases=tuple(Phase(start, batch, 2) for start, batch in phases))
    config = {"epochs": 2, "reference_batch": largest, "base_lr": 1.0, "schedule": "linear", "batch_lr_power": 0.5, **options}
    return make_schedule(Config(**config), sampler)


def test_the_shape_follows_samples_and_each_phase_has_its_factor():
    """4 steps of 8, then 2 of 16: 64 samples in all."""
    schedule, early = growing((0, 8), (1, 16)), 0.5**0.5
    assert lrs(schedule) == pytest.approx([early, early * 7 / 8, early * 6 / 8, early * 5 / 8, 4 / 8, 2 / 8])
    assert [schedule.batch_share(step) for step in range(6)] == [0.5, 0.5, 0.5, 0.5, 1, 1]


def test_a_warm_up_in_epochs_follows_samples_and_one_in_steps_counts_steps():
    """Two steps of 4, then steps of 8; half an epoch is 16 samples."""
    phases = ((0, 4), (0.25, 8))
    fixed = {"schedule": "constant", "warmup_from": 0.2, "batch_lr_power": 0.0}
    by_epochs = lrs(growing(*phases, warmup_epochs=0.5, **fixed))
    assert by_epochs[:5] == pytest.approx([0.2, 0.2 + 0.8 * 4 / 16, 0.2 + 0.8 * 8 / 16, 1, 1])
    by_steps = lrs(growing(*phases, warmup_steps=4, **fixed))
    assert by_steps[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])


def test_the_contract_can_say_how_many_steps_the_rate_rises():
    phases = ((0, 4), (0.25, 8))  # steps begin at samples 0, 4, 8, 16, 24, 32, ...
    assert growing(*phases, warmup_epochs=0.5).count_rising() == 3
    assert growing(*phases, warmup_steps=4).count_rising() == 4
    assert growing(*phases, schedule="one-cycle", peak_at=0.5).count_rising() == 5


def test_rows_are_kept_on_both_sides_of_a_change_of_the_batch():
    assert {3, 4} <= growing((0, 8), (1, 16)).corners()


def test_an_automatic_schedule_has_its_shape_over_all_epochs():
    """How many steps those have is not known before."""
    sampler = Sampler(32, 16, 2, 0, phases=(Phase(0, 8, 2),))
    config = Config(
        batch_schedule="auto:8", epochs=2, max_steps=2, base_lr=1.0, reference_batch=16, schedule="linear", batch_lr_power=0.5
    )
    assert [make_schedule(config, sampler).lr(step) for step in range(2)] == pytest.approx([0.5**0.5, 0.5**0.5 * 7 / 8])


def test_an_automatic_schedule_that_cannot_start_lower_is_the_constant_one():
    """Its only phase has the largest batch, so its time is in steps."""
    sampler = Sampler(640, 64, 2, 0)
    options = {"global_batch": 64, "epochs": 3, "base_lr": 1.0, "schedule": "linear", "warmup_epochs": 0.3}
    constant, auto = (make_schedule(Config(**options, batch_schedule=text), sampler) for text in ("", "auto"))
    assert lrs(auto) == lrs(constant)
    assert auto.count_rising() == 3


def test_by_epoch_rows_are_kept_on_both_sides_of_a_phase_within_an_epoch():
    """16 samples in 4 steps of 4, then 2 of 8: the rate changes at step 4."""
    schedule = growing((0, 4), (0.5, 8), schedule_by="epoch")
    assert schedule.lr(3) != schedule.lr(4)
    assert {3, 4} <= schedule.corners()
