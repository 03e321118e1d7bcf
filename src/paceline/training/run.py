"""`paceline train` and `paceline.train`: here, or as N workers started from here."""

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from paceline.config import Config, make_config, to_flags
from paceline.data.sampler import check_divides
from paceline.dist.launch import INTERRUPTED, Outcome, launch, report_record
from paceline.dist.place import check_workers, read_place
from paceline.dist.world import World, world
from paceline.errors import PacelineError, UsageError
from paceline.records import Record, close_cut_short, read_result
from paceline.training import tasks
from paceline.training.build import build
from paceline.training.loop import fit
from paceline.training.observers import Observer, Printer, Recorder, Result, TensorBoard, check_tensorboard
from paceline.training.task import Task

WHERE = ("workers", "nodes", "node_id", "rendezvous", "timeout_s", "global_batch")
"""The options a launcher must know; all others wait for the task's own defaults."""


class WorkerFailed(PacelineError):
    """A worker that this process started failed; the text is the first failing worker's own."""

    def __init__(self, text: str, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def train(task: str | Task, config: Config | None = None, **options: Any) -> Result:
    """Train a task: a built-in name, a file, `module:function`, or a Task.

    Options are Config's fields, over the task's own defaults; of a whole Config, fields that are None are still the task's to
    fill. In a world that torchrun, srun or mpirun started, this process joins it; else `workers` of them are started, for
    which the task must have a name (a Task in this process's memory cannot reach another).
    """
    if config is not None:
        if options:
            raise UsageError("give a Config or options, not both")
        options = {name: value for name, value in vars(config).items() if value is not None}
    where = make_config({name: value for name, value in options.items() if name in WHERE})
    place = read_place()
    check_workers(place, where.workers)
    workers = (where.workers or 1) * where.nodes
    if place.launcher != "alone" or workers == 1:
        return _train_here(task, options)
    if isinstance(task, Task):
        raise UsageError(
            f"{workers} workers cannot be started for a Task object: give its file or module:function, or start this program"
            f" with torchrun --nproc-per-node {where.workers}"
        )
    tasks.check(task, options)
    if where.global_batch is not None:
        check_divides(where.global_batch, workers)
    return _train_there(task, options, where)


def _train_here(task: str | Task, options: Mapping[str, Any]) -> Result:
    """As one worker of whatever world this process is in."""
    if isinstance(task, Task):
        config = tasks.configure(task, options)
    else:
        task, config = tasks.resolve(task, options)
    with world(config.backend, config.timeout_s) as here:
        if config.tracker == "tensorboard":
            check_tensorboard()
        run = build(task, config, here)
        if not here.speaks:
            return fit(run, ())
        record = Record(config.runs_dir, config.name or f"{task.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        report_record(record.path.resolve())
        run = replace(run, contract=replace(run.contract, record=str(record.path)))
        return fit(run, _observers(config, task, record, here))


def _train_there(task: str, options: Mapping[str, Any], where: Config) -> Result:
    """As N workers, each running this command again; this process watches over them."""
    outcome = launch(["train", task, *to_flags(options)], where)
    if outcome.exit_code == 0:
        if outcome.record is None and where.node_id == 0:
            raise WorkerFailed("the workers ended before the run began: does the task call sys.exit?", 1)
        return Result(**read_result(outcome.record)) if outcome.record else Result(status="done", metrics={})
    with suppress(OSError, ValueError):  # a full disk must not hide what happened
        _close(outcome)
    if outcome.report is None:
        raise KeyboardInterrupt
    raise WorkerFailed(outcome.report.text, outcome.exit_code)


def _close(outcome: Outcome) -> None:
    if outcome.record is not None:
        interrupted = outcome.exit_code == INTERRUPTED
        why = "interrupted" if interrupted or outcome.report is None else outcome.report.text
        close_cut_short(outcome.record, "interrupted" if interrupted else "failed", why)


def _observers(config: Config, task: Task, record: Record, here: World) -> list[Observer]:
    # srun and mpirun may give their tasks a terminal of their own even where what they pass on goes to a file.
    terminal = sys.stdout.isatty() and here.launcher not in ("srun", "mpirun")
    observers: list[Observer] = [Recorder(record, config), Printer(task.unit, terminal)]
    if config.tracker == "tensorboard":
        observers.append(TensorBoard(str(record.path)))
    return observers
