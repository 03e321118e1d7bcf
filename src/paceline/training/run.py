"""`paceline.train`, which `paceline train` calls: in this process, or in workers started from it; new, or from a checkpoint."""

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config import Config, make_config, merge_options, names_with
from paceline.core.deal import check_parts
from paceline.core.sampler import check_divides
from paceline.dist.launch import INTERRUPTED, STOPPED, Outcome, WorkerFailed, launch
from paceline.dist.messages import read_handover, send_record_path
from paceline.dist.place import check_workers, read_place
from paceline.dist.restarts import newest_checkpoint
from paceline.dist.watch import Watch
from paceline.dist.world import World, world
from paceline.errors import PacelineError, Stopped, UsageError
from paceline.explanation import Explanation
from paceline.flags import to_flags
from paceline.joins import most_workers
from paceline.loading import load_rest
from paceline.options import Role
from paceline.output import is_terminal, plural, stages, warn
from paceline.records import Record, close_cut_short, count_odd_lines, discard_unbegun, read_result
from paceline.status import Status
from paceline.training import pickled_task, tasks
from paceline.training.build import Run, build
from paceline.training.checkpoint.file import copy_latest
from paceline.training.checkpoint.keeper import FOLDER, REFUSED, Keeper, check_branch, check_unchanged
from paceline.training.earlier import Earlier, find_earlier, other_task, task_name
from paceline.training.joining import Arrival, first_workers, settle_schedule
from paceline.training.loop import fit
from paceline.training.observers import Observer, Printer, Recorder, Result
from paceline.training.task import Task
from paceline.training.tracker import Tracker, check_tracker

_BEST = "best.safetensors"
_AFTER_WATCH_S = 10.0
"""How much later than the watch the backend gives up on a silent worker: the watch can say which worker hangs, and where."""


def train(task: str | Task, config: Config | None = None, **options: Any) -> Result:
    """Train a task: a built-in name, a file, `module:function`, or a Task.

    Options are the fields of Config, given one by one or as a Config. They override the task's defaults; options that are not
    given, of a Config too, stay as the task or else Config has them. A process that torchrun, srun or mpirun started joins
    their world. Otherwise `workers` processes are started. A Task object, such as one from a notebook, is sent to them with
    cloudpickle (`pip install 'paceline[notebook]'`).
    """
    if config is not None:
        if not isinstance(config, Config):
            raise UsageError(f"the second argument is {config!r}, not a Config: give options by name, as in workers=2")
        if options:
            raise UsageError("a Config and options are both given: put the options into the Config")
        options = {name: value for name, value in vars(config).items() if name in config.given}
    with _only_run():
        return run_task(task, options).made_from(task)


@contextmanager
def _only_run() -> Iterator[None]:
    """Refuse a second run at once: torch's process group and the environment of workers belong to the whole process."""
    if not _running.acquire(blocking=False):
        raise UsageError("another run is in progress in this process: wait until it has ended, or use another process")
    try:
        yield
    finally:
        _running.release()


_running = threading.Lock()


def run_task(task: str | Task, options: dict[str, Any]) -> Result:
    """Train a task with these options. `paceline train` calls this; a program calls `train`."""
    place = read_place()
    task, options = pickled_task.receive(task), merge_options(options)
    launched = _launch_config(options)
    check_workers(place, launched.workers, launched.workers_schedule)
    earlier = None
    if place.launcher == "alone":
        if launched.resume or launched.branch_from:
            earlier = find_earlier(task, launched, place, options)
            if earlier.result is not None:
                return Result.read(earlier.result)
            options = {**merge_options(earlier.options, options), "resume": earlier.record}
            options |= {"branch_from": earlier.branch} if earlier.branch else {}
            launched = _launch_config(options)
        if launched.workers_schedule:
            options = {**options, "workers_schedule": settle_schedule(options, launched)}
            launched = _launch_config(options)
        if _needs_launcher(launched):
            return _train_in_workers(task, options, launched, _count_first(options, launched, earlier))
    load_rest()
    handover = read_handover()
    arrival = Arrival(handover) if handover is not None else None
    stages.enter("meeting the other workers" if place.size > 1 else "preparing the run")
    with world(launched.backend, launched.timeout_s + _AFTER_WATCH_S) as here:
        if arrival is not None:
            arrival.reach("start")
        if here.is_main and earlier is None:
            earlier = find_earlier(task, launched, place, options, restarted=here.read_restart_note())
        earlier = Earlier(**here.broadcast(earlier and vars(earlier)))
        if earlier.result is not None:
            return Result.read(earlier.result)
        if earlier.branch:
            options = {**options, "branch_from": earlier.branch}
        if earlier.options.get("precision") and options.get("precision") == "auto":
            options = {**options, "precision": earlier.options["precision"]}  # what auto chose when the run started
        stages.enter("loading the task")
        made, config = tasks.resolve(task, merge_options(earlier.options, options))
        if earlier.task and made.name != earlier.task:
            raise other_task(earlier.record, earlier.task, made.name)
        if earlier.record or not earlier.branch:
            check_unchanged(earlier.options, config)
        else:
            check_branch(earlier.options, config)
        check_tracker(config.tracker)
        with build(made, config, here, earlier.initial()) as run, Watch(here.rank, config.timeout_s, config.grace_s) as watch:
            earlier.check_initial(config, run.initial)
            run, observers, keeper = _open_record(run, made, task_name(task), earlier)
            if arrival is not None:
                arrival.reach("build")
            try:
                return fit(run, observers, keeper, watch, arrival)
            except UsageError:
                if here.is_main and not earlier.record:
                    discard_unbegun(Path(run.contract.record))
                raise


def _launch_config(options: Mapping[str, Any]) -> Config:
    """The options that are needed before the task, with its own defaults, is known."""
    return make_config({name: value for name, value in options.items() if name in names_with(Role.LAUNCH)})


def _needs_launcher(config: Config) -> bool:
    """Whether to start workers instead of training in this process. Raises a UsageError if parts and workers do not fit."""
    workers = (config.workers or most_workers(config.workers_schedule) or 1) * config.nodes
    parts = config.virtual_workers or workers
    check_parts(parts, workers)
    if config.global_batch is not None:
        check_divides(config.global_batch, parts)
    return workers > 1 or bool(config.max_restarts) or bool(config.workers_schedule)


def _count_first(options: Mapping[str, Any], launched: Config, earlier: Earlier | None) -> int:
    """How many workers to start at first."""
    if not launched.workers_schedule:
        return launched.workers or 1
    source = (earlier.record or earlier.branch) if earlier is not None else ""
    return first_workers(options, launched, Path(source) / FOLDER if source else None)


def _open_record(run: Run, task: Task, task_name: str, earlier: Earlier) -> tuple[Run, list[Observer], Keeper]:
    """Open the record on rank 0 and announce it to all workers: the run with its record, its observers and its checkpoints.

    Collective: call on every rank. Only rank 0 observes.
    """
    here, config = run.world, run.config
    if not here.is_main:
        path = Path(here.broadcast(None))
        if here.local_rank == 0:
            send_record_path(path)  # the launcher of each node may have to restart from it
        run = replace(run, contract=replace(run.contract, record=str(path)))  # hooks may want to know it
        return run, [], Keeper(run, resumes=bool(earlier.record), branches=bool(earlier.branch))
    name = config.name or f"{task.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    lost = bool(earlier.record) and not (Path(earlier.record) / "metrics.jsonl").exists()
    record = Record.reopen(Path(earlier.record)) if earlier.record else Record(config.runs_dir, name)
    if earlier.branch and not earlier.record:
        _begin_branch(record, Path(earlier.branch))
    path = record.path.resolve()
    send_record_path(Path(here.broadcast(str(path))))
    here.write_restart_note(str(path))
    odd, metrics = count_odd_lines(record.path), record.path / "metrics.jsonl"
    notes = [f"{metrics} is missing: the rows before this resume are lost"] if lost else []
    notes += [f"{plural(odd, 'line')} of {metrics} cannot be read and {'is' if odd == 1 else 'are'} left out"] if odd else []
    run = replace(run, contract=replace(run.contract, record=str(record.path)), notes=(*notes, *run.notes))
    observers = _make_observers(config, task, task_name, record, here)

    def say_to_all(text: str) -> None:
        for observer in observers:
            with suppress(PacelineError):  # the writer of checkpoints calls this, possibly because the disk is full
                observer.say(text)

    if config.tracker != "none":
        tracker = Tracker(config, run.contract, record.path, bool(earlier.record), say_to_all)
        run = replace(run, hooks=(*run.hooks, tracker.hooks()))
    return run, observers, Keeper(run, record.path / FOLDER, say_to_all, bool(earlier.record), bool(earlier.branch))


def _warn_damaged(text: str) -> None:
    warn(f"paceline: {text}")


def _begin_branch(record: Record, source: Path) -> None:
    """Copy the checkpoint that a branch continues from into its own record: it does not need the other one again."""
    try:
        if not copy_latest(source / FOLDER, record.path / FOLDER, _warn_damaged):
            raise UsageError(f"--branch-from: no checkpoint of {source} can be read; --init-from starts from its weights only")
        if (source / _BEST).is_file():  # the checkpoint says which epoch was best so far
            with record.replacing(_BEST) as path:
                shutil.copyfile(source / _BEST, path)
    except BaseException:
        record.discard()
        raise


def _train_in_workers(task: str | Task, options: Mapping[str, Any], config: Config, workers: int) -> Result:
    """Start workers, each of which runs this command again, and wait for them."""
    if isinstance(task, Task):
        tasks.resolve(task, options)  # report a mistake before any worker starts
    else:
        tasks.check(task, options)
    stages.enter(f"starting {plural(workers, 'worker')}")
    stages.hand_over()  # to worker 0
    flags = to_flags(options)
    if isinstance(task, Task):
        command = ["train", pickled_task.spell(task), *flags]
        outcome = launch(command, config, lambda folder: pickled_task.send(task, folder), workers)
    else:
        outcome = launch(["train", task, *flags], config, workers=workers)
    if outcome.exit_code == 0:
        if outcome.record is None and config.node_id == 0:
            raise WorkerFailed(Explanation("the workers ended before the run began"), 1)
        return Result.read(read_result(outcome.record)) if outcome.record else Result(status=Status.DONE, metrics={})
    if config.node_id == 0:  # rank 0 wrote the record on this node
        with suppress(OSError, ValueError):  # a full disk must not hide what happened
            _close_record(outcome)
    if outcome.failure is None:
        raise _stopped(outcome)
    raise WorkerFailed(outcome.failure.explain(outcome.record), outcome.exit_code)


def _stopped(outcome: Outcome) -> Stopped:
    """The error for a launch that was asked to stop: what rank 0 recorded, or that it could not."""
    why, text = outcome.why, ""
    with suppress(PacelineError):
        recorded = outcome.record is not None and outcome.record.exists()
        found = Result.read(read_result(outcome.record)).why if outcome.record and recorded else ""
        text = found if recorded else f"stopped by {why} before the run began"
    return Stopped(text or f"stopped by {why}", why)


def _close_record(outcome: Outcome) -> None:
    """Write how the run ended, unless it only refused to resume: then the record keeps its old result."""
    refused = outcome.failure is not None and outcome.failure.text.startswith(REFUSED)
    if outcome.record is not None and not refused:
        stopped = outcome.exit_code in (INTERRUPTED, STOPPED)
        step = newest_checkpoint(outcome.record)  # workers may have just started, after others or in a resumed run
        continues = f"its last checkpoint, after step {step:,}, is complete: the same command with --resume continues"
        late = Explanation(f"stopped; {continues}" if step >= 0 else "stopped before a checkpoint could be written")
        about = outcome.failure.explain() if outcome.failure is not None else late
        status = Status.INTERRUPTED if stopped else Status.FAILED
        close_cut_short(outcome.record, status, about.why, about.where, about.traceback)


def _make_observers(config: Config, task: Task, task_name: str, record: Record, here: World) -> list[Observer]:
    # srun and mpirun may give each worker a terminal even if their own output goes to a file.
    terminal = is_terminal(sys.stdout) and here.launcher not in ("srun", "mpirun")
    recorder = Recorder(record, config, task_name)
    printer = Printer(task.unit, terminal, recorder.note, course=os.environ.get("PACELINE_EPOCH_LINE") == "course")
    return [recorder, printer]
