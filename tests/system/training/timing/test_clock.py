"""Clocks of several workers are aligned and gathered."""

import time
from typing import Any
from unittest import mock

from harness.processes import run_workers
from harness.training import ALONE
from paceline.dist.world import World
from paceline.training.timing import clock as timing
from paceline.training.timing.clock import Clock, split_steps
from unit.training.timing.test_clock import _timed


def _two_workers(world: World) -> list[float]:
    """Worker 1 is ready 3 s after worker 0, and averaging takes 2 s from then on."""
    ready = 5.0 + 3.0 * world.rank
    steps = [_timed(("forward", 0.0), ("backward", 2.0), ("update", 10.0), ready=ready, end=11.0)]
    found = split_steps(steps, world)
    return [*found.components_s.flatten().tolist(), *(float(value or 0) for value in found.slowest())]


def test_waiting_ends_when_the_last_worker_is_ready() -> None:
    expected = [[0, 5, 2, 3, 1, 0], [0, 8, 2, 0, 1, 0]]  # input, compute, communication, waiting, optimizer, other
    for found in run_workers(_two_workers, 2):
        assert found == [*expected[0], *expected[1], 1.0, 3.0]


def _two_machines(world: World) -> tuple[float, float]:
    """Worker 1's clock is an hour ahead, on another machine and then on the same."""
    ahead = 3600.0 * world.rank
    clock, real = Clock(world), time.perf_counter
    with mock.patch.object(timing.time, "perf_counter", side_effect=lambda: real() + ahead):
        with mock.patch.object(timing, "_machine", lambda rank: rank):
            apart = timing._offset_s(world)
            clock.begin(0)
            clock.end()
            (timed,) = clock.take()
        return apart, timed.end - real()


def test_clocks_of_two_machines_are_aligned() -> None:
    (none, first), (hour, second) = run_workers(_two_machines, 2)
    assert none == 0.0
    assert abs(hour - 3600) < 5
    assert abs(first) < 5
    assert abs(second) < 5, "its stamps are on rank 0's clock"


def _gather(world: World) -> list[Any]:
    return world.gather({"rank": world.rank, "text": "é" * 100 * world.rank})


def test_rank_0_gets_what_every_worker_has() -> None:
    first, second = run_workers(_gather, 2)
    assert first == [{"rank": 0, "text": ""}, {"rank": 1, "text": "é" * 100}]
    assert second == []
    assert ALONE.gather([1]) == [[1]]
