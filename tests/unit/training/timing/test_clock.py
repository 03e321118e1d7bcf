"""Stamps to parts, on numbers worked out by hand."""

import pytest
import torch
from torch import nn

from harness.training import ALONE, blobs, train_in
from paceline.records import COMPONENTS
from paceline.training.timing.clock import Clock, Timed, _own_components, fill_up, split_steps


def _timed(*laps: tuple[str, float], ready: float | None = None, end: float) -> Timed:
    return Timed(0, list(laps), ready, [], end)


def test_what_follows_the_last_gradient_is_exposed() -> None:
    laps = [("other", 0.0), ("data", 1.0), ("forward", 3.0), ("backward", 6.0), ("update", 16.0), ("other", 18.0)]
    assert _own_components(_timed(*laps, ready=12.0, end=19.0)) == [2, 3, 6, 4, 2, 2, 12]


def test_without_averaging_the_backward_pass_is_compute() -> None:
    laps = [("other", 0.0), ("data", 1.0), ("forward", 3.0), ("backward", 6.0), ("update", 16.0)]
    assert _own_components(_timed(*laps, end=18.0)) == [2, 3, 10, 0, 2, 1, 0]


def test_several_passes_and_an_exact_sum() -> None:
    """Only what comes after the last backward pass is averaging; a gradient of an earlier pass ends nothing."""
    laps = [("data", 0.0), ("forward", 1.0), ("backward", 3.0), ("data", 6.0), ("forward", 7.0), ("backward", 9.0)]
    timed = _timed(*laps, ("reduce", 12.0), ("update", 17.0), ready=5.0, end=18.0)
    assert _own_components(timed) == [2, 4, 6, 5, 1, 0, 12]


def test_one_workers_steps() -> None:
    steps = [_timed(("data", t), ("forward", t + 1), ("backward", t + 2), end=t + 4) for t in (0.0, 4.0)]
    found = split_steps(steps, ALONE)
    assert found.means() == {**dict.fromkeys(COMPONENTS, 0.0), "input": 1.0, "compute": 3.0}
    assert found.step_s.tolist() == [4.0]
    assert found.slowest() == (None, 0.0)
    assert (found.forward_s, found.backward_s, found.steps) == (1.0, 2.0, 2)


def test_parts_fill_a_step_of_another_length() -> None:
    parts = {**dict.fromkeys(COMPONENTS, 1.0), "other": 4.0}
    assert fill_up(parts, 12.0)["other"] == 7.0
    assert sum(fill_up(parts, 12.0).values()) == 12.0
    assert fill_up(parts, 2.5) == {**dict.fromkeys(COMPONENTS, 0.5), "other": 0.0}
    assert fill_up(dict.fromkeys(COMPONENTS, 0.0), 2.0)["other"] == 2.0


def test_the_last_gradient_is_stamped_within_the_backward_pass() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    clock = Clock(ALONE, net[0].weight)
    for step in range(2):
        clock.begin(step)
        clock.enter("backward")
        net(torch.ones(1, 2)).sum().backward()
        clock.end()
        (timed,) = clock.take()
        (span,) = [span for span in timed.spans() if span[0] == "backward"]
        assert span[1] <= timed.ready <= span[2]


def test_a_clock_that_is_off_keeps_nothing() -> None:
    clock = Clock(ALONE)
    clock.switch(False)
    clock.begin(0)
    clock.enter("forward")
    clock.end()
    assert clock.take() == []


def test_it_forgets_what_nobody_took() -> None:
    clock = Clock(ALONE)
    for step in range(1500):
        clock.begin(step)
    clock.end()
    taken = clock.take()
    assert [timed.step for timed in taken] == list(range(500, 1500))


def test_training_by_part_and_averaged_weights_are_timed_too() -> None:
    for options in ({"local_steps": 2, "virtual_workers": 2}, {"ema": 0.9}, {"reduce": "exact"}):
        rows = train_in(ALONE, blobs(), {**options, "check_every": 4}).watcher.healths
        assert rows
        for row in rows:
            assert sum(row["components_s"].values()) == pytest.approx(row["step_s"])
            assert row["components_s"]["compute"] > 0
            assert row["components_s"]["optimizer"] > 0
            assert row["slowest"] is None
