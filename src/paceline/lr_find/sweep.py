"""The sweep of `paceline lr-find`: the steps of a run, with a learning rate that grows from step to step.

Everything here is collective: call on every rank.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from paceline.core.deal import Pass
from paceline.core.determinism import deterministic
from paceline.core.parts import Step
from paceline.data.loaders import Inputs
from paceline.dist.world import world
from paceline.errors import UsageError
from paceline.loading import load_rest
from paceline.lr_find.rule import Point, Smoother
from paceline.phases import check_largest, largest_batch, parse_batch_schedule
from paceline.training import tasks
from paceline.training.build import Run, build
from paceline.training.meter import Meter
from paceline.training.own import OWN
from paceline.training.plain import make_clock, make_step
from paceline.training.update import Update


def sweep_here(task_name: str, options: Mapping[str, Any], first: float, last: float, steps: int) -> dict[str, Any] | None:
    """Run the test in this process's world; rank 0 returns the curve."""
    load_rest()
    with world(options.get("backend", "auto"), float(options.get("timeout_s", 600.0))) as here:
        task, config = tasks.resolve(task_name, options)
        if getattr(task, "schedule", None) is not None:
            task = replace(task, schedule=None)
        config = replace(config, schedule="constant", schedule_by="step", warmup_epochs=0.0, warmup_steps=0)
        config = replace(config, local_steps=0, ema=0.0, max_steps=0)
        pairs = parse_batch_schedule(config.batch_schedule)
        check_largest(pairs, config.global_batch)
        kept = ("batch_schedule", "batch_lr_power") if config.batch_schedule else ()
        grows = {name: getattr(config, name) for name in kept}
        # All steps have the largest batch: a run's peak learning rate is the one there.
        config = replace(config, batch_schedule="", global_batch=largest_batch(pairs) or config.global_batch)
        with deterministic(config.reduce == "exact"), build(task, config, here) as run:
            points, exploded = sweep(run, first, last, steps)
        found = {"points": points, "exploded": exploded, "contract": run.contract.as_dict(), "own": config.optimizer == OWN}
        return {**found, "grows": grows} if here.is_main else None


def sweep(run: Run, first: float, last: float, steps: int) -> tuple[list[Point], bool]:
    """The curve, and whether the loss exploded. All workers get the same."""
    step, meter, smoother = make_step(run, make_clock(run)), Meter(run.world), Smoother()
    lrs = [first * (last / first) ** (i / (steps - 1)) for i in range(steps)]
    points: list[Point] = []

    def take(arrived: Iterator[tuple[int, list[float]]]) -> bool:
        """Add steps to the curve, up to the one in which the loss explodes."""
        for number, values in arrived:
            smoothed = smoother.add(values[0])
            points.append(Point(step=number + 1, lr=lrs[number], loss=values[0], smoothed=smoothed))
            if smoother.has_exploded(smoothed):
                return True
        return False

    def train() -> Iterator[tuple[int, Tensor]]:
        for given, inputs in itertools.islice(_endless(run), steps):
            step.begin(given.number)
            set_lr(run.update, lrs[given.number])
            yield given.number, step.run(given, inputs)

    run.model.train()
    exploded = any(take(meter.push(number, values)) for number, values in train()) or take(meter.flush())
    return points, exploded


def set_lr(update: Update, lr: float) -> None:
    """Give the first parameter group this learning rate; the rates of the others keep their ratio to it."""
    now = float(update.optimizer.param_groups[0]["lr"])
    if now == 0:
        raise UsageError(
            "the first parameter group of the task's optimizer has lr 0: lr-find sets its rate and keeps the ratio of the"
            " others to it, so put a group that trains first"
        )
    factor = lr / now
    for tensor in update.lrs.values():
        tensor.mul_(factor)
    for group in () if update.lrs else update.optimizer.param_groups:
        group["lr"] *= factor


def _endless(run: Run) -> Iterator[tuple[Step, Iterator[Inputs]]]:
    """The steps of one epoch after the other, with their inputs."""
    for epoch in itertools.count():
        steps = run.steps(epoch, range(run.sampler.cut(epoch).steps))
        passes = [(step.number, item) for step in steps for item in step.passes]
        inputs = run.train.inputs([item.samples for _, item in passes], epoch, partial(_seed, run, passes))
        for step in steps:
            yield step, inputs


def _seed(run: Run, passes: Sequence[tuple[int, Pass]], i: int) -> None:
    run.parts.seed(*passes[i])
