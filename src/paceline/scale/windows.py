"""One world's side of `paceline scale`: train in windows, first for the speed and then with every step timed; then all-reduces
by themselves. Every worker does the same."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from paceline.core.carrier import Meter
from paceline.core.determinism import same_bits
from paceline.core.parts import Pass
from paceline.dist.world import World, world
from paceline.errors import UsageError
from paceline.loading import load_rest
from paceline.records import COMPONENTS
from paceline.scale.scale import summarise
from paceline.training import tasks
from paceline.training.build import Run, build
from paceline.training.capture import prepare as fast
from paceline.training.timing.clock import Split, Timed, split_steps

_WARM_UP = 15  # steps: DDP lays its buckets out anew after the first and measures ten
_LINK_BYTES = (4, 1 << 14, 1 << 18, 1 << 20, 1 << 22)
_LINK_ROUNDS = 15


def measure_here(task_name: str, options: Mapping[str, Any], how: Mapping[str, Any]) -> dict[str, Any] | None:
    """Measure in the world that this process is in; what was found, on rank 0."""
    load_rest()
    with world(options.get("backend", "auto"), float(options.get("timeout_s", 600.0))) as here:
        task, config = tasks.resolve(task_name, options)
        with same_bits(config):
            found = measure(lambda profile: build(task, replace(config, profile=profile), here), how)
        return {**found, "unit": task.unit} if here.is_main else None


def measure(make: Callable[[bool], Run], how: Mapping[str, Any]) -> dict[str, Any]:
    """The count and the links of a run, as scale.json has them. Every worker reaches this.

    `make(profile)` builds it: once as it trains, for the speed, and once more with stamps wherever there can be any and a look
    at DDP's buckets, for the parts. Both would not fit a device that one fills.
    """
    with make(False) as run:
        if not run.sampler.full_steps:
            raise UsageError(
                f"an epoch of {run.contract.train_samples:,} samples has no full step of {run.sampler.global_batch:,}: use a"
                " smaller batch, or more data"
            )
        here, batch = run.world, run.sampler.global_batch
        work, steps = _begin(run, how)
        speeds = [steps * batch / work.window(steps) for _ in range(how["windows"])]
        run.step.captured = None  # NCCL does not end while a graph lives that holds some of its work
    del run, work
    with make(True) as run:
        work, steps = _begin(run, how)
        timed = [step for _ in range(how["windows"]) for step in work.timed(max(5, steps // 2))]
        split, buckets = split_steps(timed, here), _describe_buckets(timed)
        links = _measure_links(here, _gradient_bytes(run)) if here.size > 1 else []
        run.step.captured = None
    return {"count": _describe(run, split, {**summarise(speeds), "buckets": buckets}, links), "links": links}


def _begin(run: Run, how: Mapping[str, Any]) -> tuple["_Work", int]:
    """The run's steps, warmed up, and how many of them make a window."""
    fast.prepare(run, 0)
    work = _Work(run)
    run.step.model.train()
    run.step.clock.on = False
    work.window(_WARM_UP)
    step_s = work.window(_WARM_UP) / _WARM_UP
    return work, int(run.world.broadcast(max(5, round(how["window_s"] / step_s))))


class _Work:
    """Steps to train, one after the other, full ones alone: those of one size."""

    def __init__(self, run: Run) -> None:
        self._run, self._meter, self._steps = run, Meter(run.world), self._endless()

    def window(self, steps: int) -> float:
        """How long so many steps take, all workers together."""
        self._run.world.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            next(self._steps)
        self._wait()
        self._run.world.barrier()
        return time.perf_counter() - begin

    def timed(self, steps: int) -> list[Timed]:
        """So many steps, each timed. On a GPU each is waited for, because a graph's stamps last until its next replay."""
        clock, found = self._run.step.clock, []
        self._run.world.barrier()
        clock.on = True
        for _ in range(steps):
            next(self._steps)
            if self._run.world.device.type == "cuda":
                clock.end()
                found += clock.take()
        clock.end()
        clock.on = False
        return found + clock.take()

    def _wait(self) -> None:
        for _ in self._meter.flush():
            pass
        if self._run.world.device.type == "cuda":
            torch.cuda.synchronize()

    def _endless(self) -> Iterator[None]:
        run, number = self._run, 0
        for epoch in itertools.count():
            plan = run.plan(epoch, range(run.sampler.full_steps))
            flat = [(number + i, item) for i, passes in enumerate(plan) for item in passes]
            inputs = run.train.inputs([item.samples for _, item in flat], epoch, partial(self._seed, flat))
            for passes in plan:
                # After the schedule's end it begins anew: what is measured is speed.
                values = run.step(number % run.step.schedule.total_steps, inputs, passes, run.sampler.global_batch)
                for _ in self._meter.push(number, values):  # read as in training, which waits for them
                    pass
                number += 1
                yield

    def _seed(self, flat: Sequence[tuple[int, Pass]], i: int) -> None:
        self._run.seed(*flat[i])


def _describe(run: Run, split: Split, about: Mapping[str, Any], links: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    here, sampler, gradient_bytes = run.world, run.sampler, _gradient_bytes(run)
    alone = [link["s"] for link in links if link["bytes"] == gradient_bytes]
    workers = zip(split.step_s, split.components_s, split.memory_bytes, strict=True)
    return {
        "workers": here.size,
        "nodes": here.nodes,
        "virtual_workers": sampler.parts,
        "global_batch": sampler.global_batch,
        "threads": torch.get_num_threads() if here.device.type == "cpu" else None,
        "contract": run.contract.as_dict(),
        **about,
        "step_s": float(split.step_s.mean()),
        "components_s": split.means(),
        "by_worker": [_describe_worker(rank, *worker) for rank, worker in enumerate(workers)],
        "forward_s": split.forward_s,
        "backward_s": split.backward_s,
        "compute_spread_s": split.compute_spread_s,
        "steps": split.steps,
        "gradient_bytes": gradient_bytes,
        "reduce_s": alone[0] if alone else 0.0,
    }


def _describe_worker(rank: int, step_s: float, components_s: Any, memory_bytes: float) -> dict[str, Any]:
    parts = {name: float(value) for name, value in zip(COMPONENTS, components_s, strict=True)}
    return {"rank": rank, "step_s": float(step_s), "components_s": parts, "memory_bytes": int(memory_bytes)}


def _gradient_bytes(run: Run) -> int:
    return sum(parameter.nbytes for parameter in run.step.model.parameters() if parameter.requires_grad)


def _describe_buckets(timed: Sequence[Timed]) -> list[dict[str, Any]]:
    """When DDP has each bucket ready, after the last backward pass began: medians of this worker's steps."""
    rows = []
    for step in timed:
        spans = [(begin, end) for phase, begin, end in step.spans() if phase == "backward"]
        if spans and step.buckets:
            begin, end = spans[-1][0], step.ready if step.ready is not None else spans[-1][1]
            rows.append([(bucket["bytes"], bucket["ready"] - begin, end - begin) for bucket in step.buckets])
    count = len(rows[-1]) if rows else 0
    rows = [row for row in rows if len(row) == count]
    described = []
    for i in range(count):
        ready_s, backward_s = (statistics.median(row[i][place] for row in rows) for place in (1, 2))
        described.append({"bytes": rows[-1][i][0], "ready_s": ready_s, "ready": min(1.0, ready_s / backward_s)})
    return described


def _measure_links(here: World, gradient_bytes: int) -> list[dict[str, Any]]:
    """How long all-reduces of some sizes take with nothing else going on: medians. Every worker reaches this."""
    found = []
    for size in sorted({*_LINK_BYTES, gradient_bytes}):
        tensor, times = torch.zeros(max(1, size // 4), device=here.device), []
        for _ in range(_LINK_ROUNDS + 2):
            here.barrier()
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            if here.device.type == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        found.append({"workers": here.size, "bytes": size, "s": statistics.median(times[2:]), "n": _LINK_ROUNDS})
    return found
