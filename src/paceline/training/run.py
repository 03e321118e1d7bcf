"""`paceline train` and `paceline.train`: here, or as N workers started from here; from the start, or from a checkpoint."""

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config import Config, make_config, to_flags
from paceline.core.sampler import check_divides
from paceline.dist.launch import INTERRUPTED, STOPPED, Outcome, launch
from paceline.dist.messages import send_record_path
from paceline.dist.place import Place, check_workers, read_place
from paceline.dist.watch import Watch
from paceline.dist.world import World, world
from paceline.errors import PacelineError, RecordError, Stopped, UsageError
from paceline.loading import load_rest
from paceline.output import is_terminal, say
from paceline.records import Record, close_cut_short, count_odd_lines, find_unfinished, read_result
from paceline.toml import read_recipe, read_toml
from paceline.training import tasks
from paceline.training.build import Run, build
from paceline.training.checkpoint.keeper import FOLDER, REFUSED, Keeper, check_options
from paceline.training.contract import check_parts
from paceline.training.loop import fit
from paceline.training.observers import Observer, Printer, Recorder, Result, TensorBoard, check_tensorboard
from paceline.training.task import Task

WHERE = (
    *("workers", "nodes", "node_id", "rendezvous", "backend", "timeout_s", "max_restarts", "min_workers", "grace_s"),
    *("virtual_workers", "global_batch", "runs_dir", "name", "resume"),
)
"""The options a launcher must know; all others wait for the task's own defaults."""

_NOT_RESUMED = ("nodes", "node_id", "rendezvous", "backend", "max_restarts", "min_workers", "runs_dir", "name", "resume")
"""Options that a resumed run does not take from the record it goes on with."""

_AFTER_WATCH_S = 10.0
"""The backend gives up on a silent worker so much later than the watch, which can say who hangs and where."""


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
    place = read_place()
    where = _where(options)
    check_workers(place, where.workers)
    if place.launcher != "alone":
        return _train_here(task, options, place)
    told = None
    if where.resume:
        told = _what_to_resume(task, where, place)
        if "ended" in told:
            return Result.read(told["ended"])
        options = {**told["options"], **options, "resume": told["record"]}
        where = _where(options)
    workers = (where.workers or 1) * where.nodes
    check_parts(where.virtual_workers or workers, workers)
    if where.global_batch is not None:
        check_divides(where.global_batch, where.virtual_workers or workers)
    if workers == 1 and not where.max_restarts:
        return _train_here(task, options, place, told)
    if isinstance(task, Task):
        raise UsageError(
            f"{workers} worker(s) cannot be started for a Task object: give its file or module:function, or start this program"
            f" with torchrun --nproc-per-node {where.workers or 1}"
        )
    tasks.check(task, options)
    return _train_there(task, options, where)


def find_record(task: str | Task, config: Config) -> Path | None:
    """The record `--resume` means, or None where there is none to go on with."""
    runs = Path(config.runs_dir)
    if config.resume == "auto":
        if config.name:
            return runs / config.name if _is_record(runs / config.name) else None
        found, busy = find_unfinished(runs, _spelled(task))
        for path in busy:
            say(f"note: {path} is left alone: another run is writing to it")
        return found
    for path in (Path(config.resume), runs / config.resume):
        if _is_record(path):
            return path
    raise UsageError(f"--resume {config.resume}: there is no record of that name, here or in {runs}")


def _is_record(path: Path) -> bool:
    return any((path / name).exists() for name in ("metrics.jsonl", FOLDER, "config.toml"))


def _where(options: Mapping[str, Any]) -> Config:
    return make_config({name: value for name, value in options.items() if name in WHERE})


def _note(text: str, place: Place) -> None:
    if place.launcher != "paceline":  # there the launcher said it before it started the workers
        say(f"note: {text}")


def _ended(record: Path, place: Place) -> Result | None:
    """The result of a record that came to its end; None for one that can go on."""
    if not (record / "result.json").exists():
        return None
    try:
        found = Result.read(read_result(record))
    except RecordError as error:
        _note(f"{error}; the run goes on from its last checkpoint", place)
        return None
    if found.status == "diverged":
        raise UsageError(f"--resume: {record} diverged, and would do so again: start a new run with other options")
    if found.status not in ("done", "target reached"):
        return None
    if not (record / "model.safetensors").exists():
        if not any((record / FOLDER).glob("step-*.safetensors")):
            raise UsageError(
                f"--resume: {record} is done, but its model.safetensors is gone and it has no checkpoint to make it from again:"
                f" start a new run with --recipe {record / 'config.toml'}"
            )
        _note(f"{record} is done, but its model.safetensors is gone: the run goes on from its last checkpoint", place)
        return None
    say(f"{record} is already done: model {found.model_sha256[:16]}")
    return found


def _recorded(record: Path, place: Place) -> dict[str, Any]:
    """The options of a record: what a resumed run does unless it is told otherwise."""
    config = record / "config.toml"
    if not config.exists():
        return {}
    try:
        read_toml(config, str(config))
    except UsageError as error:
        _note(f"{error}; give the options that the run was started with", place)
        return {}
    taken = _NOT_RESUMED if place.launcher == "alone" else (*_NOT_RESUMED, "workers")
    return {name: value for name, value in read_recipe(str(config)).items() if name not in taken}


def _train_here(task: str | Task, options: Mapping[str, Any], place: Place, told: Mapping[str, Any] | None = None) -> Result:
    """As one worker of whatever world this process is in. `told` is what to resume, if this process has looked already."""
    given = _spelled(task)
    where = _where(options)
    load_rest()
    with world(where.backend, where.timeout_s + _AFTER_WATCH_S) as here:
        told = here.broadcast((told or _what_to_resume(task, where, place, here.read_restart_note())) if here.is_main else None)
        if "ended" in told:
            return Result.read(told["ended"])
        if told["options"].get("precision") and options.get("precision") == "auto":
            options = {**options, "precision": told["options"]["precision"]}  # what auto came to when the record was begun
        options = {**told["options"], **options}
        if isinstance(task, Task):
            config = tasks.configure(task, options)
        else:
            task, config = tasks.resolve(task, options)
        check_options(told["options"], config)
        if config.tracker == "tensorboard":
            check_tensorboard()
        record = Path(told["record"]) if told["record"] else None
        with build(task, config, here) as run, Watch(here.rank, config.timeout_s, config.grace_s) as watch:
            if here.is_main:
                return _speak(run, task, given, record, watch)
            path = Path(here.broadcast(None))
            if here.local_rank == 0:
                send_record_path(path)  # every node's launcher may have to start again from it
            return fit(run, (), Keeper(run, resumes=record is not None), watch)


def _what_to_resume(task: str | Task, where: Config, place: Place, begun: str = "") -> dict[str, Any]:
    """The record to go on with and its options; or how it ended, where there is nothing to do. For rank 0: the others need not
    reach the folder. `begun` is the record that was begun before torchrun started its workers again.
    """
    if not begun and not where.resume:
        return {"record": "", "options": {}}
    record = Path(begun) if begun else find_record(task, where)
    if record is None:
        say(f"nothing to resume in {where.runs_dir}: starting a new run")
        return {"record": "", "options": {}}
    ended = _ended(record, place)
    return {"ended": vars(ended)} if ended is not None else {"record": str(record), "options": _recorded(record, place)}


def _spelled(task: str | Task) -> str:
    """How a record names its task: a file's path in one spelling."""
    name = task.name if isinstance(task, Task) else task
    return os.path.normpath(name) if ".py" in name else name


def _speak(run: Run, task: Task, given: str, old: Path | None, watch: Watch) -> Result:
    """As rank 0, which prints and writes the record."""
    config = run.config
    name = config.name or f"{task.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    lost = old is not None and not (old / "metrics.jsonl").exists()
    record = Record.reopen(old) if old is not None else Record(config.runs_dir, name)
    send_record_path(Path(run.world.broadcast(str(record.path.resolve()))))
    run.world.write_restart_note(str(record.path.resolve()))
    odd = count_odd_lines(record.path)
    metrics = record.path / "metrics.jsonl"
    notes = [f"{metrics} is missing: the rows before this resume are lost"] if lost else []
    notes += [f"{odd} line(s) of {metrics} cannot be read and are left out"] if odd else []
    run = replace(run, contract=replace(run.contract, record=str(record.path)), notes=(*notes, *run.notes))
    observers = _observers(config, task, given, record, run.world)

    def tell(text: str) -> None:
        for observer in observers:
            with suppress(PacelineError):  # said by the writer of checkpoints, perhaps because the disk is full
                observer.say(text)

    return fit(run, observers, Keeper(run, record.path / FOLDER, tell, old is not None), watch)


def _train_there(task: str, options: Mapping[str, Any], where: Config) -> Result:
    """As N workers, each running this command again; this process watches over them."""
    outcome = launch(["train", task, *to_flags(options)], where)
    if outcome.exit_code == 0:
        if outcome.record is None and where.node_id == 0:
            raise WorkerFailed("the workers ended before the run began", 1)
        return Result.read(read_result(outcome.record)) if outcome.record else Result(status="done", metrics={})
    if where.node_id == 0:  # where rank 0 wrote it
        with suppress(OSError, ValueError):  # a full disk must not hide what happened
            _close(outcome)
    if outcome.failure is None:
        raise _stopped(outcome)
    raise WorkerFailed(outcome.failure.text, outcome.exit_code)


def _stopped(outcome: Outcome) -> Stopped:
    """What rank 0 said when it stopped as it was asked to, or that it could not."""
    why, text = outcome.why, ""
    with suppress(PacelineError):
        began = outcome.record is not None and outcome.record.exists()
        found = Result.read(read_result(outcome.record)).why if outcome.record and began else ""
        text = found if began else f"stopped by {why} before the run began"
    return Stopped(text or f"stopped by {why}", why)


def _close(outcome: Outcome) -> None:
    refused = outcome.failure is not None and outcome.failure.text.startswith(REFUSED)  # the record says what it said
    if outcome.record is not None and not refused:
        stopped = outcome.exit_code in (INTERRUPTED, STOPPED)
        why = (
            outcome.failure.text.partition("\nTraceback ")[0]
            if outcome.failure is not None
            else "stopped before a checkpoint could be written"
        )
        close_cut_short(outcome.record, "interrupted" if stopped else "failed", why)


def _observers(config: Config, task: Task, given: str, record: Record, here: World) -> list[Observer]:
    # srun and mpirun may give their tasks a terminal of their own even where what they pass on goes to a file.
    terminal = is_terminal(sys.stdout) and here.launcher not in ("srun", "mpirun")
    recorder = Recorder(record, config, given)
    printer = Printer(task.unit, terminal, recorder.note)
    observers: list[Observer] = [recorder, printer]

    def lost(text: str) -> None:
        recorder.note(text)
        printer.say(text)  # the tracker's last writes come after the record is finished

    if config.tracker == "tensorboard":
        observers.append(TensorBoard(str(record.path), lost))
    return observers
