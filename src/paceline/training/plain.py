"""The plain step of a run and its clock. Captured steps, scaling runs and `lr-find` start from these."""

from collections.abc import Callable
from typing import Any

from paceline.dist.watch import Watch
from paceline.training.build import Run
from paceline.training.step import TrainStep
from paceline.training.task_checks import TaskChecks
from paceline.training.task_step import TaskStep
from paceline.training.timing.clock import Clock


def make_step(
    run: Run, clock: Clock, watch: Watch | None = None, say: Callable[[str], None] = lambda text: None, number: int = 0
) -> TrainStep:
    """The plain step of a run that starts at step `number`."""
    checks = TaskChecks(run.parts, run.forward, say)
    mark = watch.mark if watch else lambda number, stage: None
    given: dict[str, Any] = {"clock": clock, "checks": checks, "mark": mark, "sam": run.sam(), "number": number}
    if run.task.step is not None:
        return TaskStep(run.task.step, run.parts, run.forward, run.update, **given)
    return TrainStep(run.parts, run.forward, run.update, **given)


def make_clock(run: Run) -> Clock:
    """The clock of a run's steps. Call it once per run: it hooks into DDP."""
    engine = run.parts.engine
    clock = Clock(run.world, engine.carrier.cargo if engine.averages else None, run.config.profile)
    if engine.noise is not None or run.config.profile:
        engine.hook_buckets(lambda bucket, average: clock.average(bucket, average, compared=engine.compares))
    return clock
