"""Faults are put into real workers, one after the other, and the part of the step that each belongs to must grow."""

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.processes import run_workers
from harness.training import blobs, first_two, train_in
from paceline.config import make_config
from paceline.core import engine as engine_module
from paceline.core.carrier import PAYLOAD
from paceline.data.loaders import Arrays
from paceline.dist.world import World
from paceline.records import COMPONENTS
from paceline.scale import windows
from paceline.training.build import Run, build
from paceline.training.task import Task, classify

_DELAY_S = 0.03
_HOW = {"windows": 3, "window_s": 0.05}
_SLOW_WORKER = ("slow worker", "exact, slow worker", "local steps, slow worker", "exact local steps, slow worker")
_SLOW_WORKER += ("noise, slow worker",)
_FAULTS = ("none", "slow loader", "slow link", "slow optimizer", *_SLOW_WORKER)


def _measure_all(world: World) -> dict[str, Any]:
    torch.set_num_threads(1)
    return {fault: _measure(world, fault) for fault in _FAULTS}


def _measure(world: World, fault: str) -> dict[str, Any]:
    plain = first_two(classify())

    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        if fault.endswith("slow worker") and world.rank == 1:
            time.sleep(_DELAY_S)
        values: dict[str, Tensor] = plain(model, batch)
        return values

    def prepare(batch: tuple[Tensor, ...], samples: Tensor, epoch: int | None) -> tuple[Tensor, ...]:
        if fault == "slow loader":
            time.sleep(_DELAY_S)
        return batch

    task = blobs(objective=objective, prepare=prepare)
    options = {"reduce": "exact" if "exact" in fault else "fast"}
    if "local" in fault:
        options |= {"local_steps": 1, "local_after": 0.0}
    if "noise" in fault:
        options |= {"measure_noise": True}

    def make(profile: bool) -> Run:
        run = build(task, make_config(task.defaults, {**options, "profile": profile}), world)
        if fault == "slow optimizer":
            inner = run.update.optimizer.step
            run.update.optimizer.step = lambda: (time.sleep(_DELAY_S), inner())  # type: ignore[method-assign]
        return run

    with _slow_link() if fault == "slow link" else _nothing():
        return windows.measure(make, _HOW)["count"]  # type: ignore[no-any-return]


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _slow_link() -> Iterator[None]:
    """Every bucket's average arrives late, on both workers alike."""
    average = engine_module.allreduce_hook

    def late(group: Any, bucket: Any) -> Any:
        def wait(done: Any) -> Tensor:
            time.sleep(_DELAY_S)
            return done.value()  # type: ignore[no-any-return]

        return average(group, bucket).then(wait)

    engine_module.allreduce_hook = late
    try:
        yield
    finally:
        engine_module.allreduce_hook = average


@pytest.fixture(scope="module")
def counts() -> dict[str, Any]:
    """As rank 0 tells it; every worker has the same."""
    first, _ = run_workers(_measure_all, 2)
    return first  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("fault", "part"), [("slow loader", "input"), ("slow link", "communication"), ("slow optimizer", "optimizer")]
)
def test_a_fault_shows_in_its_own_part(counts: dict[str, Any], fault: str, part: str) -> None:
    found, before = counts[fault]["components_s"], counts["none"]["components_s"]
    grown = {name: found[name] - before[name] for name in COMPONENTS}
    assert max(grown, key=lambda name: grown[name]) == part
    assert grown[part] > 0.8 * _DELAY_S
    assert found[part] > 0.5 * counts[fault]["step_s"]


@pytest.mark.parametrize("fault", _SLOW_WORKER)
def test_a_slow_worker_computes_while_the_other_waits(counts: dict[str, Any], fault: str) -> None:
    waits, slow = (worker["components_s"] for worker in counts[fault]["by_worker"])
    assert max(waits, key=lambda name: waits[name]) == "waiting"
    assert max(slow, key=lambda name: slow[name]) == "compute"
    assert waits["waiting"] > 0.8 * _DELAY_S
    assert slow["waiting"] < 0.2 * _DELAY_S


@pytest.mark.parametrize("fault", _FAULTS)
def test_parts_add_up_to_the_step(counts: dict[str, Any], fault: str) -> None:
    for worker in counts[fault]["by_worker"]:
        assert sum(worker["components_s"].values()) == pytest.approx(worker["step_s"])
        assert all(value >= 0 for value in worker["components_s"].values())
    assert sum(counts[fault]["components_s"].values()) == pytest.approx(counts[fault]["step_s"])
    assert counts[fault]["forward_s"] + counts[fault]["backward_s"] == pytest.approx(counts[fault]["components_s"]["compute"])


def _train_with_idle_worker(world: World) -> dict[str, tuple[list[dict[str, Any]], list[str]]]:
    """One part per step and two workers: worker 1 has none. Each of the other's passes takes a while."""
    torch.set_num_threads(1)
    plain = first_two(classify())

    def slow(model: nn.Module, batch: tuple[Tensor, ...]) -> Any:
        time.sleep(_DELAY_S)
        return plain(model, batch)

    options = {"batch_schedule": "0:4 1:8", "virtual_workers": 2, "smallest_part": 4, "epochs": 2, "global_batch": None}
    watchers = {
        reduce: train_in(world, blobs(objective=slow), {**options, "reduce": reduce}).watcher for reduce in ("fast", "exact")
    }
    return {reduce: (watcher.healths, watcher.notes) for reduce, watcher in watchers.items()}


def test_an_idle_worker_waits_and_does_not_count_as_computing_nothing() -> None:
    told, _ = run_workers(_train_with_idle_worker, 2)
    for healths, notes in told.values():
        alone, both = healths[0], healths[-1]
        assert any(note.startswith("2 workers are at most 1.3 times as fast as one") for note in notes), notes
        assert alone["components_s"]["compute"] > 0.8 * _DELAY_S, "not half of it, as a mean with the idle worker would be"
        assert alone["components_s"]["waiting"] < 0.2 * _DELAY_S
        assert (alone["slowest"], alone["lag_s"] > 0.8 * _DELAY_S) == (0, True), "the other waits meanwhile"
        assert (alone["uneven"], alone["samples_per_worker"]) == (True, 4)
        assert (both["uneven"], both["samples_per_worker"]) == (False, 4)
        assert both["components_s"]["compute"] > 0.8 * _DELAY_S


def _deep() -> Task:
    """Four matrices of a megabyte: DDP's first bucket closes at one."""

    def points(count: int) -> Arrays:
        return Arrays((torch.randn(count, 512), torch.arange(count) % 3))

    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512, bias=False), nn.ReLU())]
    return Task(
        name="deep",
        model=lambda: nn.Sequential(*layers, nn.Linear(512, 3)),
        train=lambda: points(64),
        validation=lambda: points(8),
        objective=classify(),
        defaults={"global_batch": 8, "reference_batch": 8, "epochs": 3, "check_every": 5},
    )


def _profile(world: World) -> tuple[Any, Any, int]:
    torch.set_num_threads(1)
    trained = train_in(world, _deep(), {"profile": True})
    return trained.watcher.timelines, trained.watcher.healths, sum(array.nbytes for array in trained.weights.values())


def test_a_timeline_has_every_worker_and_every_bucket() -> None:
    results = run_workers(_profile, 2)
    ((timeline,), healths, nbytes), (others, _, _) = results
    assert others == [], "rank 0 alone tells"
    about = timeline["paceline"]
    assert (about["workers"], about["steps"]) == (2, [11, 12, 13, 14, 15])
    buckets = about["buckets"]
    assert len(buckets) >= 2
    ours = (PAYLOAD + 6) * 4  # the metrics, and a flag for each of six parameters
    assert sum(bucket["bytes"] for bucket in buckets) == nbytes + ours, "all gradients once"
    names = [name for bucket in buckets for name in bucket["parameters"]]
    assert sorted(names) == sorted(["(metrics)", *(f"{i}.weight" for i in (0, 2, 4, 6, 8)), "8.bias"])
    assert names.index("8.weight") < names.index("0.weight"), "the last layer's gradients are ready first"
    assert [bucket["ready_s"] for bucket in buckets] == sorted(bucket["ready_s"] for bucket in buckets)
    assert all(0 <= bucket["hidden_s"] <= bucket["took_s"] for bucket in buckets)

    events = [event for event in timeline["traceEvents"] if event["ph"] == "X"]
    for rank in (0, 1):
        for step in about["steps"]:
            mine = [event for event in events if (event["pid"], event["args"]["step"]) == (rank, step)]
            computed = [event for event in mine if "bucket" not in event["args"]]
            assert {"input", "forward", "backward", "optimizer"} <= {event["name"] for event in computed}
            waits = {event["name"] for event in computed} & {"waiting", "communication"}
            assert waits, "one worker at least has to wait for the other, and both for the average"
            assert [event["args"].get("bucket") for event in mine[len(computed) :]] == list(range(len(buckets)))
            assert len({event["tid"] for event in mine}) == 1 + len(buckets)
            for before, after in itertools.pairwise(computed):
                assert before["ts"] + before["dur"] <= after["ts"] + 1e-6, "one line does one thing at a time"
    assert all(event["dur"] > 0 for event in events)

    assert [row["step"] for row in healths] == [5, 8, 15, 16, 24], "the first check, the timeline, and every epoch"
    for row in healths:
        assert sum(row["components_s"].values()) == pytest.approx(row["step_s"])
        assert row["slowest"] in (0, 1)
        assert row["memory_bytes"] > 0
        assert row["gradient_bytes"] == nbytes


def _profile_local(world: World) -> list[Any]:
    plain = first_two(classify())

    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        if world.rank == 1:
            time.sleep(_DELAY_S)
        values: dict[str, Tensor] = plain(model, batch)
        return values

    torch.set_num_threads(1)
    task = blobs(objective=objective)
    return train_in(world, task, {"profile": True, "local_steps": 2, "local_after": 0.0, "epochs": 1}).watcher.timelines


def test_local_steps_wait_where_they_meet() -> None:
    """Not in their backward passes, where DDP would average: the faster worker waits, and then both communicate."""
    (timeline,), _ = run_workers(_profile_local, 2)
    spent: dict[str, float] = defaultdict(float)
    for event in timeline["traceEvents"]:
        if event["ph"] == "X" and event["pid"] == 0:
            spent[event["name"]] += event["dur"] / 1e6
    assert spent["waiting"] > 0.8 * _DELAY_S * len(timeline["paceline"]["steps"])
    assert spent["communication"] < 0.5 * spent["waiting"]
