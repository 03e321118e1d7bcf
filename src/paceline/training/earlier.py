"""The record that `--resume` continues: which one, with which options, and whether there is anything left to do."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline.config import Config, check_options, make_config, names_with
from paceline.core.sampler import Sampler
from paceline.dist.place import Place
from paceline.dist.restarts import newest_checkpoint
from paceline.errors import RecordError, UsageError
from paceline.files import read_json
from paceline.options import Role
from paceline.output import plural, say
from paceline.phases import Phase
from paceline.records import find_unfinished, read_result
from paceline.status import Status
from paceline.toml import read_recipe, read_toml
from paceline.training import tasks
from paceline.training.checkpoint.keeper import FOLDER, check_given
from paceline.training.observers import Result
from paceline.training.task import Task
from paceline.training.weight_files import Initial
from paceline.values import flag


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """The record that `--resume` continues or `--branch-from` branches, if there is one."""

    record: str = ""
    """Its folder; empty for a new run."""
    task: str = ""
    """The name of the task that it trains, if it says so."""
    options: dict[str, Any] = field(default_factory=dict)
    """Those of its options that a resumed run takes over unless they are given again."""
    result: dict[str, Any] | None = None
    """How it ended, if there is nothing left to do."""
    branch: str = ""
    """The folder of the record whose checkpoint the run began with (`--branch-from`)."""
    has_checkpoint: bool = False
    """Whether there is a checkpoint to continue from."""
    initialized: str = ""
    """What the contract says about the weights that it started from (`--init-from`)."""
    initial_sha256: str = ""

    def initial(self) -> Initial | None:
        """The weights that the run once started from, if it goes on from a checkpoint and does not need them again."""
        if not (self.has_checkpoint and self.initial_sha256):
            return None
        return Initial(about=self.initialized, sha256=self.initial_sha256, read=False)

    def check_initial(self, config: Config, found: Initial) -> None:
        """Raise a UsageError if a run without a checkpoint would start over from other weights than before."""
        if self.record and self.initial_sha256 and found.sha256 != self.initial_sha256:
            raise UsageError(f"--init-from {config.init_from}: the file has changed since the run began: start a new run")


def find_earlier(task: str | Task, config: Config, place: Place, options: Mapping[str, Any], restarted: str = "") -> Earlier:
    """What to continue. Rank 0 calls this: other ranks may have no access to the folder.

    `restarted` is the record of this run if torchrun has restarted its workers.
    """
    record = Path(restarted) if restarted else find_resumable(task, config) if config.resume else None
    if record is None:
        if config.resume:
            say(f"nothing to resume in {config.runs_dir}: starting a new run")
        return _find_branch(task, config, place, options) if config.branch_from else Earlier()
    trained = _check_task(record, task)
    result = _read_finished(record, place, options)
    if result is not None:
        return Earlier(result=vars(result))
    recorded = _recorded_options(record, place)
    branch = str(recorded.get("branch_from", ""))
    if config.branch_from and branch and _resolve(config.branch_from, config) != Path(branch):
        raise UsageError(f"--resume: {record} is a branch of {branch}, not of {config.branch_from}: leave --branch-from out")
    return Earlier(record=str(record), task=trained, options=recorded, branch=branch, **_start_of(record))


def _find_branch(task: str | Task, config: Config, place: Place, options: Mapping[str, Any]) -> Earlier:
    """The record that `--branch-from` means: a new run takes its options and its last checkpoint."""
    if options.get("init_from") and place.launcher != "paceline":  # our launcher passes on the options of the record, too
        raise UsageError("--init-from and --branch-from are both given: each says which weights to start from; choose one")
    record = _resolve(config.branch_from, config)
    if not _is_record(record):
        raise UsageError(f"--branch-from {config.branch_from}: no record of that name, neither here nor in {config.runs_dir}")
    trained = _check_task(record, task, "--branch-from")
    if newest_checkpoint(record) < 0:
        raise UsageError(
            f"--branch-from: {record} kept no checkpoint to continue from; --init-from {record} starts from its weights only"
        )
    return Earlier(task=trained, options=_recorded_options(record, place), branch=str(record), **_start_of(record))


def _resolve(name: str, config: Config) -> Path:
    """The folder of a record, given by its folder or name; the same text wherever the command is run."""
    return next((path for path in (Path(name), Path(config.runs_dir) / name) if _is_record(path)), Path(name)).resolve()


def _start_of(record: Path) -> dict[str, Any]:
    """Whether a record has a checkpoint, and the weights that its run started from."""
    contract = _read_about(record).get("contract")
    said = contract if isinstance(contract, dict) else {}
    texts = {name: str(said.get(name) or "") for name in ("initialized", "initial_sha256")}
    return {"has_checkpoint": newest_checkpoint(record) >= 0, **texts}


def find_resumable(task: str | Task, config: Config) -> Path | None:
    """The record that `--resume` means, or None if there is no record to continue."""
    runs = Path(config.runs_dir)
    if config.resume == "auto":
        if config.name:
            return runs / config.name if _is_record(runs / config.name) else None
        found, busy = find_unfinished(runs, task_name(task))
        for path in busy:
            say(f"note: {path} is skipped: another run is writing to it")
        return found
    for path in (Path(config.resume), runs / config.resume):
        if _is_record(path):
            return path
    raise UsageError(f"--resume {config.resume}: no record of that name, neither here nor in {runs}")


def _is_record(path: Path) -> bool:
    return any((path / name).exists() for name in ("metrics.jsonl", FOLDER, "config.toml"))


def _check_task(record: Path, task: str | Task, asked: str = "--resume") -> str:
    """The name of the task that a record trains; empty if it does not say. Raises a UsageError if a built-in task differs.

    A user's own task has to be loaded before its name is known.
    """
    about = _read_about(record)
    contract = about.get("contract")
    name = str(contract.get("task") or "") if isinstance(contract, dict) else ""
    recorded, given = str(about.get("task") or ""), task_name(task)
    known = recorded in tasks.built_in() or (isinstance(task, str) and given in tasks.built_in())
    if recorded and recorded != given and known:
        raise other_task(str(record), recorded, given, asked)
    return name


def other_task(record: str, trained: str, given: str, asked: str = "--resume") -> UsageError:
    """The error for a record of another task."""
    return UsageError(f"{asked}: {record} is a record of task {trained}, not {given}: give that task, or another record")


def _read_about(record: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        return read_json(record / "environment.json")
    return {}


def _read_finished(record: Path, place: Place, options: Mapping[str, Any]) -> Result | None:
    """The result of a finished record; None if the run can continue, or these options extend it."""
    if not (record / "result.json").exists():
        return None
    try:
        found = Result.read(read_result(record))
    except RecordError as error:
        _say_note(f"{error}; the run continues from its last checkpoint", place)
        return None
    if found.status == Status.DIVERGED:
        raise UsageError(f"--resume: {record} diverged and would diverge again: start a new run with other options")
    if not Status(found.status).good:
        return None
    checkpoint = newest_checkpoint(record)
    if _is_extended(record, found, options):
        if checkpoint < 0:
            raise UsageError(f"--resume: {record} is done and kept no checkpoint to continue from: {_again(record)}")
        if checkpoint < found.steps:
            _say_note(
                f"the last checkpoint of {record} is from step {checkpoint:,}, and the run ended at step {found.steps:,}: the"
                " steps between are trained again",
                place,
            )
        return None
    if not (record / "model.safetensors").exists():
        if checkpoint < 0:
            raise UsageError(
                f"--resume: {record} is done, but its model.safetensors is missing and there is no checkpoint to make it from:"
                f" {_again(record)}"
            )
        _say_note(f"{record} is done, but its model.safetensors is missing: continuing from its last checkpoint", place)
        return None
    _check_same(_read_config(record), check_options(options))
    say(f"{record} is already done: model {found.model_sha256[:16]}; {_how_to_extend(record, found)}")
    return found


def _check_same(recorded: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise a UsageError if a given option differs from that of a finished record. `recorded` is empty if it cannot be read."""
    known = {field.name for field in fields(Config)}
    old = make_config({name: value for name, value in recorded.items() if name in known})
    new = make_config(vars(old), given)  # options in any spelling, as a run would have them
    source = {"branch_from": str(_resolve(new.branch_from, new))} if new.branch_from else {}
    if recorded:
        check_given(vars(old), {**{name: getattr(new, name) for name in given}, **source})


def _is_extended(record: Path, found: Result, options: Mapping[str, Any]) -> bool:
    """Whether these options extend a finished run. Raises a UsageError if they ask for less than it has trained.

    A run that ended at its target needs another target; otherwise it would end again at once.
    """
    old, new = _lengths(record, {}), _lengths(record, options)
    total = _count_steps(record, found, old, new)
    longer = [name for name in ("epochs", "max_steps") if getattr(new, name) != getattr(old, name)]
    asked = " ".join(f"{flag(name)} {getattr(new, name)}" for name in longer)
    if asked and total < found.steps:
        trained = f"{plural(found.epochs, 'epoch')}, {plural(found.steps, 'step')}"
        raise UsageError(f"{asked}: {record} has already trained {trained}: give more to extend it, or start a new run")
    if found.status == Status.STOPPED_EARLY:
        if asked and not _waits_longer(old, new):
            raise UsageError(f"{asked}: {record} stopped early: {_how_to_extend(record, found)}")
        return _waits_longer(old, new) and total > found.steps
    if found.status != Status.TARGET_REACHED:
        return bool(asked) and total > found.steps
    accuracy = found.metrics.get("accuracy", 0.0)
    aims_higher = not new.target_accuracy or new.target_accuracy > accuracy or new.patience > old.patience
    if asked and not aims_higher:
        raise UsageError(f"{asked}: {record} ended at its target: {_how_to_extend(record, found)}")
    return new != old and aims_higher and total > found.steps


def _waits_longer(old: Config, new: Config) -> bool:
    """Whether a run that stopped early would continue with the new options."""
    other = (new.monitor, new.mode) != (old.monitor, old.mode)
    return not new.stop_after or new.stop_after > old.stop_after or other


def _how_to_extend(record: Path, found: Result) -> str:
    options = _lengths(record, {})
    if found.status == Status.TARGET_REACHED:
        return f"to extend it, give a higher --target-accuracy than {found.metrics.get('accuracy', 0.0):.4f}, or 0 for none"
    if found.status == Status.STOPPED_EARLY:
        return f"to extend it, give --stop-after above {options.stop_after}, or 0 to train to the end"
    by_steps = options.max_steps and found.steps >= options.max_steps
    limit = f"--max-steps above {options.max_steps}" if by_steps else f"--epochs above {options.epochs}"
    return f"to extend it, give {limit}"


def _lengths(record: Path, options: Mapping[str, Any]) -> Config:
    """The options that decide when a run ends, from the record's config.toml unless they are given."""
    names = names_with(Role.LENGTH, Role.STOP)
    contract = _read_about(record).get("contract")
    recorded = _read_config(record)
    if not recorded and isinstance(contract, dict) and "epochs" in contract:
        recorded = {"epochs": contract["epochs"]}
    return Config(**check_options({name: value for name, value in {**recorded, **options}.items() if name in names}))


def _read_config(record: Path) -> dict[str, Any]:
    """The options of a record; empty if its config.toml cannot be read."""
    with suppress(UsageError):
        return read_toml(record / "config.toml", "config.toml")
    return {}


def _count_steps(record: Path, found: Result, old: Config, new: Config) -> int:
    """The steps of a finished run with these options: from the contract or, if that is missing, from what the run did."""
    about = _read_about(record).get("contract")
    contract = about if isinstance(about, dict) else {}
    said = contract.get("steps_per_epoch")
    steps_per_epoch = said if isinstance(said, int) and said > 0 else max(1, -(-found.steps // max(1, found.epochs)))
    total = new.epochs * steps_per_epoch
    if contract.get("phases"):
        with suppress(KeyError, TypeError, ValueError, UsageError):
            total = _count_steps_of_phases(contract, found, old, new)
    return min(total, new.max_steps or total)


def _count_steps_of_phases(contract: Mapping[str, Any], found: Result, old: Config, new: Config) -> int:
    """The same for a run with a batch schedule, whose epochs differ in steps."""
    phases = tuple(Phase(each["start"], each["global_batch"], each["virtual_workers"]) for each in contract["phases"])
    largest = contract["global_batch"]
    samples = contract.get("epoch_samples") or contract["train_samples"]
    sampler = Sampler(samples, largest, contract["virtual_workers"], 0, phases=phases)
    if max(phase.global_batch for phase in phases) == largest:
        return sampler.first_step(new.epochs)
    # --batch-schedule auto: the contract has only its first phases. One step more than it trained means: there is more to do.
    ended_early = bool(old.max_steps) and found.steps >= old.max_steps
    return found.steps + (new.epochs > old.epochs or ended_early)


def _again(record: Path) -> str:
    return f"start a new run with --recipe {record / 'config.toml'}"


def _recorded_options(record: Path, place: Place) -> dict[str, Any]:
    """The options of a record that a resumed run takes over."""
    config = record / "config.toml"
    if not config.exists():
        return {}
    try:
        read_toml(config, str(config))
    except UsageError as error:
        _say_note(f"{error}; give the options that the run was started with", place)
        return {}
    left_out = names_with(Role.START).union(() if place.launcher == "alone" else ("workers", "workers_schedule"))
    return {name: value for name, value in read_recipe(str(config)).items() if name not in left_out}


def _say_note(text: str, place: Place) -> None:
    if place.launcher != "paceline":  # otherwise the launcher has already printed it
        say(f"note: {text}")


def task_name(task: str | Task) -> str:
    """The task as a record names it, with one spelling for each file."""
    name = task.name if isinstance(task, Task) else task
    return os.path.normpath(name) if ".py" in name else name
