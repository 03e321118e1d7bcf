"""The model compared with numbers worked out by hand, and properties that always hold."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.plan.cluster import Cluster, Range, Wire, from_fit
from paceline.plan.draws import bars, draw
from paceline.plan.lag import expected_lag
from paceline.plan.links import crowd, fit_link
from paceline.plan.measured import Bucket, Measured, Point, Run, read_measured
from paceline.plan.model import Mode, Model, all_reduce_s, make_model

OWN = {"input": 0.001, "compute": 0.03, "communication": 0.0, "waiting": 0.0, "optimizer": 0.002, "other": 0.001}


def point(workers: int = 1, *, spread: float = 0.0, samples: int = 128, **components: float) -> Point:
    found = {**OWN, **components}
    return Point(
        workers=workers,
        nodes=1,
        global_batch=samples * workers,
        samples_per_s=samples * workers / sum(found.values()),
        spread=0.01,
        components_s=found,
        forward_s=found["compute"] / 3,
        backward_s=found["compute"] * 2 / 3,
        compute_spread_s=spread,
        reduce_s=0.0,
    )


def measured(*points: Point, buckets: tuple[tuple[float, float], ...] = ((1e6, 1.0),), cores: int | None = None) -> Measured:
    return Measured(
        record="made",
        task="made",
        unit="images",
        points=points or (point(),),
        gradient_bytes=int(sum(size for size, _ in buckets)),
        buckets=tuple(Bucket(bytes=size, ready=ready) for size, ready in buckets),
        links=(),
        cores=cores,
        threads=1,
        backend="gloo",
        run=Run(steps=100, global_batch=128, train_samples=12_800, about="made"),
        noise=None,
        assumed=(),
    )


def exactly(value: float) -> Range:
    return Range(typical=value, low=value, high=value)


def wire(latency_s: float, bytes_per_s: float) -> Wire:
    return Wire(latency_s=exactly(latency_s), bytes_per_s=exactly(bytes_per_s))


def boxes(latency_s: float = 0.0, bytes_per_s: float = 1e9, **change: Any) -> Cluster:
    """One worker per node, rings only."""
    made = Cluster(name="made", workers_per_node=1, trees=False, inter=wire(latency_s, bytes_per_s))
    return replace(made, **change)


def model(found: Measured, cluster: Cluster, mode: Mode = "weak", speed: float = 1.0) -> Model:
    return make_model(found, cluster, draw(found, cluster, None), mode=mode, speed=speed)


def components(found: Measured, cluster: Cluster, workers: int, mode: Mode = "weak", speed: float = 1.0) -> dict[str, float]:
    return {name: float(part[0]) for name, part in model(found, cluster, mode, speed).step(workers).components_s.items()}


def test_two_workers_one_bucket_and_no_overlap_by_hand() -> None:
    """1 MB over 1 GB/s and 2 x 100 us, after the backward pass."""
    assert components(measured(), boxes(1e-4), 2)["communication"] == pytest.approx(1.2e-3)
    step = model(measured(), boxes(1e-4)).step(2)
    assert step.step_s[0] == pytest.approx(0.034 + 1.2e-3)
    assert step.samples_per_s[0] == pytest.approx(256 / 0.0352)


def test_what_fits_behind_the_backward_pass_is_hidden() -> None:
    """The bucket is ready halfway through 20 ms, so 1.2 ms fit."""
    assert components(measured(buckets=((1e6, 0.5),)), boxes(1e-4), 2)["communication"] == 0


def test_a_bucket_waits_for_the_one_before() -> None:
    """Two buckets of 15 MB, 15 ms each: the first from 2 to 17 ms, the second to 32, 12 after the backward pass."""
    found = measured(buckets=((15e6, 0.1), (15e6, 0.5)))
    assert components(found, boxes(), 2)["communication"] == pytest.approx(0.012)


def test_latency_alone_grows_with_the_ring() -> None:
    found, cluster = measured(buckets=((4, 1.0),)), boxes(1e-4, 1e15)
    assert components(found, cluster, 64)["communication"] == pytest.approx(126e-4)
    assert components(found, replace(cluster, trees=True), 64)["communication"] == pytest.approx(12e-4)


def test_trees_are_between_nodes_only() -> None:
    """Within a node NCCL's tree is a chain: 8 workers take 14 latencies; 8 nodes take 6 more network latencies."""
    cluster = Cluster(name="made", workers_per_node=8, intra=wire(1e-6, 1e15), inter=wire(1e-5, 1e15))
    draws = draw(measured(), cluster, None)
    assert all_reduce_s(cluster, draws, 8, 4)[0] == pytest.approx(14e-6)
    assert all_reduce_s(cluster, draws, 64, 4)[0] == pytest.approx(14e-6 + 6e-5)
    assert all_reduce_s(replace(cluster, trees=False), draws, 64, 4)[0] == pytest.approx(14e-6 + 14e-5)


def test_two_nodes_of_two_by_hand() -> None:
    """Within the node 2 (g - 1) / g bytes at 10 GB/s, between nodes 2 (m - 1) / m at 1 GB/s: 0.1 + 1 ms, plus latencies."""
    cluster = Cluster(name="made", workers_per_node=2, trees=False, intra=wire(1e-6, 1e10), inter=wire(1e-5, 1e9))
    draws = draw(measured(), cluster, None)
    assert all_reduce_s(cluster, draws, 4, 1e6)[0] == pytest.approx(1e-4 + 2e-6 + 1e-3 + 2e-5)
    assert all_reduce_s(cluster, draws, 2, 1e6)[0] == pytest.approx(1e-4 + 2e-6)
    assert cluster.nodes(3) == 2


def test_waiting_is_for_the_slowest_of_all() -> None:
    found = measured(point(spread=0.002))
    assert components(found, boxes(), 4)["waiting"] == pytest.approx(0.002 * expected_lag(4))
    assert components(found, boxes(), 1)["waiting"] == 0


def test_measured_waiting_is_preferred_to_the_spread_of_one_worker() -> None:
    found = measured(point(spread=0.002), point(2, waiting=0.0005))
    assert components(found, boxes(), 2)["waiting"] == pytest.approx(0.0005)


@pytest.mark.parametrize(("workers", "slots", "times"), [(1, 2, 1), (2, 2, 1), (3, 2, 1.5), (4, 2, 2), (5, None, 1)])
def test_workers_share_cores_fairly(workers: int, slots: int | None, times: float) -> None:
    assert crowd(workers, slots) == times


def test_workers_beyond_the_cores_slow_down() -> None:
    cluster = Cluster(name="made", workers_per_node=8, cores_per_node=2, trees=False, intra=wire(0, 1e15))
    assert components(measured(), cluster, 4)["compute"] == pytest.approx(0.06)
    assert components(measured(), cluster, 3)["compute"] == pytest.approx(0.045)
    assert components(measured(), replace(cluster, cores_per_node=8), 4)["compute"] == pytest.approx(0.03)


def test_sharing_cores_in_the_measurement_is_not_counted_twice() -> None:
    """Four workers shared two cores, 60 ms each. Four there do the same, eight take 120 ms; with enough cores, 30."""
    found = measured(point(), point(4, compute=0.06), buckets=(), cores=2)
    cluster = Cluster(name="made", workers_per_node=8, cores_per_node=2, trees=False, intra=wire(0, 1e15))
    for there in (cluster, replace(cluster, here=True)):
        assert components(found, there, 4)["compute"] == pytest.approx(0.06)
        assert components(found, there, 8)["compute"] == pytest.approx(0.12)
    assert components(found, replace(cluster, cores_per_node=8), 4)["compute"] == pytest.approx(0.03)
    assert components(found, replace(cluster, cores_per_node=None), 4)["compute"] == pytest.approx(0.03)


def test_strong_scaling_starts_from_a_worker_that_shared_no_cores() -> None:
    """Strong scaling starts from one worker's step, however many workers shared cores in the other counts."""
    found = measured(point(), point(4, compute=0.06), buckets=(), cores=2)
    cluster = Cluster(name="made", workers_per_node=8, cores_per_node=2, trees=False, intra=wire(0, 1e15))
    assert components(found, cluster, 4, "strong")["compute"] == pytest.approx(0.03 / 4 * 2)


def test_nodes_that_are_one_machine_share_its_cores() -> None:
    found = measured(point(), replace(point(2), nodes=2), buckets=(), cores=2)
    apart = boxes(cores_per_node=2, here=True)
    assert components(found, apart, 4)["compute"] == pytest.approx(0.03)
    assert components(found, replace(apart, one_machine=True), 4)["compute"] == pytest.approx(0.06)
    assert components(found, replace(apart, one_machine=True, here=False), 4)["compute"] == pytest.approx(0.06)


def test_several_nodes_of_one_core_are_not_faster() -> None:
    found = measured(point(), replace(point(2), nodes=2), buckets=(), cores=1)
    assert components(found, boxes(cores_per_node=1, here=True), 4)["compute"] == pytest.approx(0.03)


def test_the_spread_of_compute_is_in_the_error_bars() -> None:
    found = replace(measured(replace(point(spread=0.01), spread=0.0), buckets=()))
    waiting = model(found, boxes()).step(16).components_s["waiting"]
    assert waiting[1:].max() == pytest.approx(1.5 * waiting[0], rel=0.02)
    assert waiting[1:].min() == pytest.approx(waiting[0] / 1.5, rel=0.02)


def test_the_uncertainty_of_a_fit_is_in_the_error_bars() -> None:
    """Speed and link do not vary, which leaves the residual of the fit: 10% on every all-reduce."""
    found = measured(replace(point(), spread=0.0))
    sure, loose = (replace(boxes(1e-4), inter=replace(wire(1e-4, 1e9), level=level)) for level in (0.0, 0.1))
    assert np.ptp(model(found, sure).step(4).reduce_s) == 0
    spread = model(found, loose).step(4).reduce_s
    assert spread[1:].std() / spread[0] == pytest.approx(0.1, rel=0.1)


def test_a_factor_on_all_reduces_that_hits_the_limit_says_so() -> None:
    here = boxes(1e-4, here=True)
    fine, beyond = (measured(point(), replace(point(2, communication=s), nodes=2)) for s in (2.4e-3, 0.1))
    assert not model(fine, here).interference_at_limit()
    assert model(fine, here).interference is not None
    assert model(beyond, here).interference_at_limit()
    assert not model(fine, boxes(1e-4)).interference_at_limit()


def test_a_link_carried_by_cores_slows_down_with_them() -> None:
    cluster = Cluster(name="made", workers_per_node=8, trees=False, intra=wire(0, 1e9))
    free, shared = (components(measured(), each, 4)["communication"] for each in (cluster, replace(cluster, link_cores=2)))
    assert shared == pytest.approx(2 * free)
    between = Cluster(name="made", workers_per_node=4, trees=False, intra=wire(0, 1e15), inter=wire(0, 1e9))
    free, shared = (components(measured(), each, 8)["communication"] for each in (between, replace(between, link_cores=2)))
    assert shared == pytest.approx(free, rel=1e-4), "the network is no core's"


def test_a_faster_device_divides_a_workers_own_time() -> None:
    slow, fast = (components(measured(), boxes(), 2, speed=speed) for speed in (1.0, 2.0))
    assert fast["compute"] == pytest.approx(slow["compute"] / 2)
    assert fast["communication"] == pytest.approx(slow["communication"])


def test_strong_scaling_divides_the_samples_and_keeps_the_rest() -> None:
    found = components(measured(buckets=()), boxes(), 4, "strong")
    assert found["compute"] == pytest.approx(0.03 / 4)
    assert found["input"] == pytest.approx(0.001 / 4)
    assert (found["optimizer"], found["other"]) == (pytest.approx(0.002), pytest.approx(0.001))


def test_shared_cores_are_not_counted_twice_in_strong_scaling() -> None:
    """Two cores: 100, 50 and 50 ms with 1, 2 and 4 workers. A quarter of the batch takes 25 ms, twice that on shared cores."""
    found = measured(
        point(compute=0.1), point(2, samples=64, compute=0.05), point(4, samples=32, compute=0.05), buckets=(), cores=2
    )
    cluster = Cluster(name="made", workers_per_node=64, cores_per_node=2, trees=False, intra=wire(0, 1e15))
    for there in (cluster, replace(cluster, here=True)):
        predicted = [components(found, there, workers, "strong")["compute"] for workers in (1, 2, 4, 8)]
        assert predicted == pytest.approx([0.1, 0.05, 0.05, 0.05])
    apart = boxes(cores_per_node=2)
    assert components(found, apart, 4, "strong")["compute"] == pytest.approx(0.025), "on nodes of their own nobody takes turns"


def test_a_base_that_shared_cores_is_faster_on_nodes_with_enough_cores() -> None:
    """Four workers shared two cores, 60 ms each. Alone on a node, one takes 30."""
    found = measured(point(4, compute=0.06), buckets=(), cores=2)
    modes: tuple[Mode, ...] = ("weak", "strong")
    for mode in modes:
        assert components(found, boxes(cores_per_node=2), 4, mode)["compute"] == pytest.approx(0.03), mode


def test_the_slowest_worker_of_a_fixed_batch_has_the_larger_share() -> None:
    """128 samples: of 3 workers one has 43, of 100 some have 2."""
    for workers, samples in ((3, 43), (100, 2), (128, 1)):
        found = components(measured(buckets=()), boxes(), workers, "strong")
        assert found["compute"] == pytest.approx(0.03 * samples / 128)
        assert found["input"] == pytest.approx(0.001 * samples / 128)
    uneven = measured(replace(point(3, samples=43), global_batch=128), buckets=())
    assert components(uneven, boxes(), 3, "strong")["compute"] == pytest.approx(0.03), "as it was measured"
    line = measured(point(compute=0.128), replace(point(3, samples=43, compute=0.043), global_batch=128), buckets=())
    assert components(line, boxes(), 3, "strong")["compute"] == pytest.approx(0.043)


def test_strong_scaling_ends_at_the_measured_floor() -> None:
    """20 ms for 128 samples and 12 for 64: 4 ms do not depend on the samples."""
    found = measured(point(compute=0.02), point(2, samples=64, compute=0.012), buckets=())
    assert components(found, boxes(), 1, "strong")["compute"] == pytest.approx(0.02)
    assert components(found, boxes(), 128, "strong")["compute"] == pytest.approx(0.004 + 0.016 / 128)


def test_a_worker_is_interpolated_between_measured_counts() -> None:
    found = measured(point(), point(4, compute=0.06), buckets=())
    here = replace(boxes(), here=True)
    assert components(found, here, 1)["compute"] == pytest.approx(0.03)
    assert components(found, here, 2)["compute"] == pytest.approx(0.04)
    assert components(found, here, 64)["compute"] == pytest.approx(0.06)


def test_the_machine_of_the_record_reproduces_its_measurements(make_scale: Callable[..., Path]) -> None:
    """Also if all-reduces took twice as long in training as without."""
    folder = make_scale(counts=(1, 2), ready=(0.5, 1.0))
    found = read_measured(folder)
    slower = replace(found.points[1], components_s={**found.points[1].components_s, "communication": 0.009})
    slower = replace(slower, samples_per_s=256 / sum(slower.components_s.values()))
    found = replace(found, points=(found.points[0], slower))
    cluster = from_fit(fit_link(found.links), cores=None, trees=False)
    predicted = model(found, cluster)
    assert predicted.interference is not None
    assert predicted.interference[0] > 1.5
    assert predicted.step(2).samples_per_s[0] == pytest.approx(slower.samples_per_s, rel=1e-6)
    assert predicted.step(2).components_s["communication"] == pytest.approx(0.009, rel=1e-3)  # in every draw


def test_a_fit_on_two_predicts_four_of_a_machine_that_follows_the_model(make_scale: Callable[..., Path]) -> None:
    whole = read_measured(make_scale("whole", counts=(1, 2, 3, 4, 8), ready=(0.3, 0.6, 1.0)))
    found = read_measured(make_scale("first", counts=(1, 2), ready=(0.3, 0.6, 1.0)))
    cluster = from_fit(fit_link(found.links), cores=None, trees=False)
    for truth in whole.points:
        assert model(found, cluster).step(truth.workers).samples_per_s[0] == pytest.approx(truth.samples_per_s, rel=1e-3)


sizes = st.floats(1e3, 1e9)
counts = st.sampled_from([1, 2, 3, 5, 8, 64, 1000, 4096])


@given(sizes, st.floats(0.0, 1.0), st.floats(1e6, 1e12), st.floats(1.0, 100.0), counts, st.booleans())
def test_more_bandwidth_is_never_slower(size: float, ready: float, rate: float, more: float, workers: int, trees: bool) -> None:
    found = measured(buckets=((size / 3, ready / 2), (size, ready)))
    slow, fast = (model(found, boxes(1e-5, each, trees=trees)).step(workers).step_s[0] for each in (rate, rate * more))
    assert fast <= slow * (1 + 1e-12)


@given(sizes, st.floats(0.0, 1.0), st.floats(0, 1e-2), st.floats(0, 0.01), counts, st.sampled_from(["weak", "strong"]))
def test_efficiency_is_never_above_one(size: float, ready: float, lat: float, spread: float, workers: int, mode: Mode) -> None:
    predicted = model(measured(point(spread=spread, samples=4096), buckets=((size, ready),)), boxes(lat), mode)
    one, many = (predicted.step(each).samples_per_s for each in (1, workers))
    assert (many / (workers * one) <= 1 + 1e-9).all()


@given(st.floats(1e-5, 10), st.floats(0, 1), st.floats(0, 1), st.sampled_from(["weak", "strong"]))
def test_one_worker_is_as_fast_as_it_was_measured(compute: float, optimizer: float, other: float, mode: Mode) -> None:
    found = point(compute=compute, optimizer=optimizer, other=other)
    step = model(measured(found), boxes(), mode).step(1)
    assert step.samples_per_s[0] == pytest.approx(found.samples_per_s)


def test_the_components_add_up_and_the_bars_include_the_prediction() -> None:
    loose = replace(boxes(), inter=Wire(latency_s=exactly(1e-4), bytes_per_s=Range(typical=1e9, low=5e8, high=1.2e9)))
    predicted = model(measured(point(spread=0.001)), loose).step(16)
    assert predicted.step_s[0] == pytest.approx(sum(part[0] for part in predicted.components_s.values()))
    nominal, low, high = bars(predicted.samples_per_s)
    assert low < nominal < high
    again = model(measured(point(spread=0.001)), loose).step(16)
    assert np.array_equal(again.step_s, predicted.step_s)  # the same draws each time
