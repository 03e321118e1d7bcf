"""`paceline scale` in one world: windows of steps to measure speed, windows of timed steps, then all-reduces by themselves.

Everything here is collective: call on every rank.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from paceline.core.deal import Pass
from paceline.core.determinism import deterministic
from paceline.dist.world import World, world
from paceline.errors import UsageError
from paceline.loading import load_rest
from paceline.output import say
from paceline.records import COMPONENTS
from paceline.scale.scale import summarize
from paceline.training import tasks
from paceline.training.build import Run, build
from paceline.training.capture.captured import capture
from paceline.training.local import with_local_steps
from paceline.training.meter import Meter
from paceline.training.plain import make_clock, make_step
from paceline.training.timing.clock import Split, Timed, split_steps

_WARM_UP = 15  # steps: DDP rebuilds its buckets after the first and measures ten
_LINK_BYTES = (4, 1 << 14, 1 << 18, 1 << 20, 1 << 22)
_LINK_ROUNDS = 15


def measure_here(task_name: str, options: Mapping[str, Any], how: Mapping[str, Any]) -> dict[str, Any] | None:
    """Measure in this process's world; rank 0 returns the measurements."""
    load_rest()
    with world(options.get("backend", "auto"), float(options.get("timeout_s", 600.0))) as here:
        task, config = tasks.resolve(task_name, options)
        if config.batch_schedule and here.is_main:  # a task's defaults may have one
            say("the task's own batch schedule is left out: all steps have the same batch")
        config = replace(config, batch_schedule="")
        with deterministic(config.reduce == "exact"):
            found = measure(lambda profile: build(task, replace(config, profile=profile), here), how)
        return {**found, "unit": task.unit} if here.is_main else None


def measure(make: Callable[[bool], Run], how: Mapping[str, Any]) -> dict[str, Any]:
    """Measure a run's entry in scale.json: its count and its links. Collective: call on every rank.

    `make(profile)` builds the run twice: first as it trains, for the speed; then with every time stamp and DDP's buckets, for
    the components of a step. The first is closed before the second is built, because a device may not have memory for both.
    """
    with make(False) as run:
        if not _full_steps(run):
            raise UsageError(
                f"an epoch of {run.contract.train_samples:,} samples has no full step of {run.sampler.global_batch:,}: use a"
                " smaller batch, or more data"
            )
        here, batch = run.world, run.sampler.global_batch
        work, steps = _begin(run, how)
        speeds = [steps * batch / work.window(steps) for _ in range(how["windows"])]
        work.close()
    del run, work
    with make(True) as run:
        work, steps = _begin(run, how)
        timed = [step for _ in range(how["windows"]) for step in work.timed(max(5, steps // 2))]
        split, buckets = split_steps(timed, here), _describe_buckets(timed)
        links = _measure_links(here, _gradient_bytes(run)) if here.size > 1 else []
        work.close()
    return {"count": _describe(run, split, {**summarize(speeds), "buckets": buckets}, links), "links": links}


def _full_steps(run: Run) -> int:
    """The steps of an epoch with a whole global batch. They come first."""
    return int((np.diff(run.sampler.cut(0).bounds) == run.sampler.global_batch).sum())


def _begin(run: Run, how: Mapping[str, Any]) -> tuple["_Work", int]:
    """Warm up; returns the run's steps and the number of steps per window. Collective: call on every rank."""
    work = _Work(run)
    work.window(_WARM_UP)
    step_s = work.window(_WARM_UP) / _WARM_UP
    return work, int(run.world.broadcast(max(5, round(how["window_s"] / step_s))))


def _ignore(text: str) -> None:
    """What a training run would print."""


class _Work:
    """An endless series of training steps. Only full steps: all have the same size."""

    def __init__(self, run: Run) -> None:
        self._run, self._meter, self._steps = run, Meter(run.world), self._endless()
        self._clock = make_clock(run)
        step = make_step(run, self._clock)
        captured = capture(run, step, 0, _ignore)
        self._executor = with_local_steps(step, captured, run.local_from, run.config.local_steps, _ignore)
        self._clock.switch(False)
        run.model.train()

    def window(self, steps: int) -> float:
        """The time that n steps take on all workers. Collective: call on every rank."""
        self._run.world.barrier()
        begin = time.perf_counter()
        for _ in range(steps):
            next(self._steps)
        self._wait()
        self._run.world.barrier()
        return time.perf_counter() - begin

    def timed(self, steps: int) -> list[Timed]:
        """Time each of n steps. On a GPU, wait for each: a graph's time stamps are overwritten by its next replay."""
        clock, found = self._clock, []
        self._run.world.barrier()
        clock.switch(True)
        for _ in range(steps):
            next(self._steps)
            if self._run.world.device.type == "cuda":
                clock.end()
                found += clock.take()
        clock.end()
        clock.switch(False)
        return found + clock.take()

    def close(self) -> None:
        """Release the graphs: NCCL does not end while a graph lives that holds some of its work."""
        self._steps.close()
        del self._executor

    def _wait(self) -> None:
        for _ in self._meter.flush():
            pass
        if self._run.world.device.type == "cuda":
            torch.cuda.synchronize()

    def _endless(self) -> Generator[None]:
        run, number = self._run, 0
        for epoch in itertools.count():
            steps = run.steps(epoch, range(_full_steps(run)))
            passes = [(step.number, item) for step in steps for item in step.passes]
            inputs = run.train.inputs([item.samples for _, item in passes], epoch, partial(self._seed, passes))
            for step in steps:
                # The schedule starts over at its end: only speed matters here.
                step = replace(step, number=number % run.update.schedule.total_steps)
                for _ in self._meter.push(number, self._executor(step, inputs)):  # as training does: it takes time too
                    pass
                number += 1
                yield

    def _seed(self, passes: Sequence[tuple[int, Pass]], i: int) -> None:
        self._run.parts.seed(*passes[i])


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
    named_s = {name: float(value) for name, value in zip(COMPONENTS, components_s, strict=True)}
    return {"rank": rank, "step_s": float(step_s), "components_s": named_s, "memory_bytes": int(memory_bytes)}


def _gradient_bytes(run: Run) -> int:
    return sum(parameter.nbytes for parameter in run.model.parameters() if parameter.requires_grad)


def _describe_buckets(timed: Sequence[Timed]) -> list[dict[str, Any]]:
    """When each of DDP's buckets is ready, from the start of the last backward pass: medians over this worker's steps."""
    rows = []
    for step in timed:
        spans = [(begin, end) for stage, begin, end in step.spans() if stage == "backward"]
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
    """The median time of all-reduces of several sizes with nothing else running. Collective: call on every rank."""
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
