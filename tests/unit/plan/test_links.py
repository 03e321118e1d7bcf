import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.links import Link, Timing, faster_s, fit_link, ring_s, tree_s


def link(latency_s: float, bytes_per_s: float) -> Link:
    return Link(latency_s=np.array([latency_s]), bytes_per_s=np.array([bytes_per_s]))


def test_a_ring_of_two_by_hand() -> None:
    """Two messages of half the bytes each way: 2 x 100 us and 1 MB at 1 GB/s."""
    assert ring_s(link(1e-4, 1e9), 2, 1e6)[0] == pytest.approx(2e-4 + 1e-3)


def test_a_ring_of_four_by_hand() -> None:
    assert ring_s(link(1e-4, 1e9), 4, 1e6)[0] == pytest.approx(6e-4 + 1.5e-3)


def test_a_tree_of_eight_by_hand() -> None:
    assert tree_s(link(1e-4, 1e9), 8, 1e6)[0] == pytest.approx(6e-4 + 2e-3)


def test_one_worker_needs_no_all_reduce() -> None:
    assert ring_s(link(1e-4, 1e9), 1, 1e6)[0] == tree_s(link(1e-4, 1e9), 1, 1e6)[0] == 0


def test_few_bytes_on_many_workers_go_by_tree_and_many_bytes_by_ring() -> None:
    wire = link(1e-5, 1e9)
    assert faster_s(wire, 1024, 4, trees=True)[0] == tree_s(wire, 1024, 4)[0] < ring_s(wire, 1024, 4)[0]
    assert faster_s(wire, 4, 1e9, trees=True)[0] == ring_s(wire, 4, 1e9)[0] < tree_s(wire, 4, 1e9)[0]
    assert faster_s(wire, 1024, 4, trees=False)[0] == ring_s(wire, 1024, 4)[0]


def timings(latency_s: float, bytes_per_s: float, counts: tuple[int, ...] = (2,)) -> list[Timing]:
    return [
        Timing(workers=n, bytes=size, s=float(ring_s(link(latency_s, bytes_per_s), n, size)[0]))
        for n in counts
        for size in (4, 1 << 14, 1 << 20, 1 << 24)
    ]


@given(st.floats(1e-6, 1e-2), st.floats(1e6, 1e12), st.sampled_from([(2,), (2, 3), (4,)]))
def test_a_fit_recovers_latency_and_bandwidth(latency_s: float, bytes_per_s: float, counts: tuple[int, ...]) -> None:
    found = fit_link(timings(latency_s, bytes_per_s, counts))
    assert found.latency_s == pytest.approx(latency_s, rel=1e-3)
    slowest = 2 * (1 << 24) / bytes_per_s
    if slowest > 0.01 * latency_s:  # else bandwidth does not affect any timing and cannot be found
        assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3)
    assert found.residual < 1e-3


def test_a_fit_of_noisy_timings_states_its_error() -> None:
    random = np.random.default_rng(0)
    noisy = [Timing(workers=t.workers, bytes=t.bytes, s=t.s * random.uniform(0.8, 1.2)) for t in timings(1e-4, 1e9, (2, 3, 4))]
    found = fit_link(noisy)
    assert found.latency_s == pytest.approx(1e-4, rel=0.3)
    assert found.bytes_per_s == pytest.approx(1e9, rel=0.3)
    assert 0.03 < found.residual < 0.2
    assert found.latency_spread > 0.01


def test_a_fit_states_its_worst_factor() -> None:
    """Three sizes on a line, and one that took three times as long."""
    found = fit_link([*timings(1e-4, 1e9), Timing(workers=2, bytes=1 << 20, s=3 * (2e-4 + (1 << 20) / 1e9))], near=[4])
    assert 1.5 < found.worst <= 3
    assert found.residual < math.log(found.worst)
    assert fit_link(timings(1e-4, 1e9)).worst == pytest.approx(1, abs=1e-3)


def test_sizes_near_those_of_the_buckets_weigh_more() -> None:
    """A link that passes small messages at ten times its rate, as buffers and token buckets do."""
    sizes = (4, 1 << 18, 1 << 20, 1 << 22)
    bent = [Timing(workers=2, bytes=size, s=2e-4 + size / (1e9 if size < 1e6 else 1e8)) for size in sizes]
    anywhere, there = fit_link(bent), fit_link(bent, near=[1 << 22])
    assert 1e8 < there.bytes_per_s < 1.8e8 < anywhere.bytes_per_s
    assert there.latency_s == pytest.approx(1e-4, rel=0.5)


def test_neither_latency_nor_bandwidth_is_ever_negative() -> None:
    falling = [Timing(workers=2, bytes=4, s=0.02), Timing(workers=2, bytes=1 << 20, s=0.01)]
    steep = [Timing(workers=2, bytes=1000, s=1e-6), Timing(workers=2, bytes=2000, s=1e-3)]
    assert fit_link(falling).s_per_byte == 0
    assert fit_link(falling).latency_s > 0
    assert fit_link(steep).latency_s == 0
    assert fit_link(steep).s_per_byte > 0


@pytest.mark.parametrize("few", [[], [Timing(workers=2, bytes=4, s=1e-4)], [Timing(workers=1, bytes=4, s=1e-4)] * 3])
def test_too_few_timings_cannot_be_fitted(few: list[Timing]) -> None:
    with pytest.raises(ValueError, match="two sizes"):
        fit_link(few)
