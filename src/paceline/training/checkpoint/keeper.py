"""What goes into a run's checkpoint, when one is written, and how a run continues from it on any number of workers (law 5).

A step's samples, augmentation, dropout and learning rate follow from (seed, epoch, step) alone. So a checkpoint holds weights,
their averages, optimizer state, the parts' batch-norm statistics and a few numbers about progress. A resumed run continues in
the middle of an epoch; nothing is repeated or skipped.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.config import Config, names_with
from paceline.core.schedules import count_steps
from paceline.dist.tensors import broadcast_tensors
from paceline.dist.world import World
from paceline.errors import UsageError
from paceline.options import Role
from paceline.output import plural
from paceline.phases import Phase, is_auto
from paceline.training.build import Run
from paceline.training.checkpoint.file import CheckpointError, Writer, load_latest
from paceline.training.joining import spot_at
from paceline.training.local import first_local_step
from paceline.training.meter import EpochMeans, Rows
from paceline.training.observers import Result
from paceline.training.own import describe_kind
from paceline.training.plain_state import plain_value
from paceline.training.snapshots import FOLDER as SNAPSHOTS
from paceline.training.snapshots import Snapshots
from paceline.values import flag, parse_every

FOLDER = "checkpoints"
REFUSED = "cannot resume"


@dataclass
class Progress:
    """How far a run has come."""

    result: Result
    epoch: int = 0
    step: int = 0
    train_time_s: float = 0.0
    """Of the epochs before this one."""
    epoch_time_s: float = 0.0
    hits: int = 0
    """Epochs in a row that reached the target."""
    target: float | None = None
    """The accuracy that these hits reached; None in older checkpoints."""
    first_loss: float | None = None
    """Of the run's first step."""
    last_loss: float | None = None
    """Of the last step."""
    rows: Rows = field(default_factory=Rows)
    means: EpochMeans = field(default_factory=EpochMeans)

    def aim(self, target: float) -> None:
        """Count hits of this target accuracy. Hits of a different target are dropped."""
        self.hits = self.hits if self.target in (None, target) else 0
        self.target = target


class Keeper:
    """Writes this run's checkpoints when they are due. Every worker has one; rank 0's has the folder."""

    def __init__(
        self,
        run: Run,
        folder: Path | None = None,
        say: Callable[[str], None] = lambda text: None,
        resumes: bool = False,
        branches: bool = False,
    ) -> None:
        self._run, self._identity = run, identity(run)
        self.resumes, self._branches = resumes, branches
        """Whether the run goes on with a record, from its newest checkpoint if it has one; or begins with a checkpoint of
        another record."""
        self.branched = ""
        """Which record the restored run continues from, and what changed, if its checkpoint is from another record."""
        self.extended = ""
        """What changes if the restored run was planned to be shorter."""
        self._saved_step: int | None = None
        self._steps, self._seconds = parse_every(run.config.checkpoint_every)
        self.on = bool(self._steps or self._seconds)
        self._folder, self._say = folder, say
        self._writer: Writer | None = None  # made when there is something to write
        self.snapshots = Snapshots(run, folder.parent / SNAPSHOTS if folder is not None else None, say)
        self._last_s = time.monotonic()

    def requests(self) -> bool:
        """Whether, by rank 0's clock, a checkpoint is due: the request travels with the step's metrics."""
        return self._folder is not None and 0 < self._seconds <= time.monotonic() - self._last_s

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after this many steps. The same on all workers."""
        return bool(self._steps) and step % self._steps == 0

    def save_last(self, progress: Progress) -> bool:
        """Take the checkpoint from which a finished run can be extended; False if it exists already or is not wanted.

        Collective: call on every rank.
        """
        due = self.on and self._saved_step != progress.step
        if due:
            self.save(progress)
        return due

    def save(self, progress: Progress) -> None:
        """Take a checkpoint; rank 0 writes it in the background. Collective: call on every rank."""
        self._saved_step = progress.step
        tensors, facts = _collect(self._run, progress)
        facts["identity"] = self._identity
        self._last_s = time.monotonic()
        if self._folder is None:
            return
        self.snapshots.wait()  # a run that is resumed from this checkpoint does not write them again
        try:
            self._writer = self._writer or Writer(self._folder, self._run.config.keep, self._say)
        except CheckpointError as error:
            self._say(f"no checkpoint at step {progress.step}: {error}; training goes on")
            return
        self._writer.save(progress.step, tensors, facts)

    def wait(self) -> bool:
        """Wait until the last checkpoint is on disk; False if it could not be written, or this worker writes none."""
        return self._writer is not None and self._writer.wait()

    def close(self) -> None:
        """End the writers after their current files."""
        self.snapshots.wait()
        if self._writer is not None:
            self._writer.close()

    def restore(self) -> Progress | None:
        """Load rank 0's newest good checkpoint on every worker; None if not found. Collective: call on every rank."""
        if not (self.resumes or self._branches):
            return None
        checkpoint = None if self._folder is None else load_latest(self._folder, self._say)
        run, world = self._run, self._run.world
        facts = world.broadcast(checkpoint.facts if checkpoint else None)
        if facts is None:
            if not run.initial.read or run.config.branch_from:  # it would start over from other weights than it began with
                raise UsageError(f"{run.contract.record}: no checkpoint can be read to continue from: start a new run")
            return None
        if "phases" in facts and is_auto(run.config.batch_schedule):
            run.set_phases(tuple(Phase(*each) for each in facts["phases"]))
        self._check(facts)
        if facts["place"] != _place(world) and self._run.config.reduce == "exact":
            self._say(f"the checkpoint was made by {facts['place']}, this is {_place(world)}: bits may differ from here on")
        tensors = broadcast_tensors(checkpoint.tensors if checkpoint else {}, world)
        lacking = [name for name in run.kept() if name not in tensors]
        if lacking:
            raise UsageError(
                f"--branch-from: the options need {lacking[0]}, which the checkpoint does not have: leave out what was turned"
                " on (--ema, --measure-noise, --lr-rule adascale), or start a new run with --init-from"
            )
        with torch.no_grad():
            for name, tensor in run.model.state_dict().items():
                if f"model.{name}" in tensors:
                    tensor.copy_(tensors[f"model.{name}"])
            for name, tensor in run.kept().items():
                tensor.copy_(tensors[name])
        run.parts.switch(run.sampler.phase_of(max(0, facts["progress"]["step"] - 1)))
        run.parts.statistics.scatter(tensors["parts.values"], tensors["parts.counts"])
        optimizer, state = run.update.optimizer, _optimizer_state(tensors, facts["optimizer"])
        _lay_out_like_weights(state, optimizer)
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        run.update.restore(facts.get("update", {}))  # older checkpoints have none
        progress = facts["progress"]
        rows, means = Rows(**progress["rows"]), EpochMeans(**progress.get("means", {}))  # older checkpoints have no means
        return Progress(**{**progress, "result": Result.read(progress["result"]), "rows": rows, "means": means})

    def _check(self, facts: Mapping[str, Any]) -> None:
        """Check that this run can continue from a checkpoint with these facts, and say what changes."""
        run, old, step = self._run, facts["identity"], facts["progress"]["step"]
        source = run.config.branch_from
        if source and old["options"].get("branch_from") != source:  # it was copied from there
            self.branched = describe_branch(old, self._identity, run, step)
            return
        _check_identity(old, self._identity)
        self.extended = describe_extension(old["options"], run, step)


def _collect(run: Run, progress: Progress) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of a run as tensors and plain facts. Collective: call on every rank."""
    model, optimizer, statistics = run.model, run.update.optimizer, run.parts.statistics
    values, counts = statistics.gather(run.world)
    by_part = statistics.names(model)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items() if name not in by_part}
    tensors |= {"parts.values": values, "parts.counts": counts, **run.kept()}
    plain: dict[str, Any] = {}
    for number, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{number}.{name}"] = value
            else:
                plain[f"{number}.{name}"] = plain_value(value, "the optimizer's state", name)
    facts = {
        "optimizer": plain,
        "update": run.update.facts(),
        "progress": dataclasses.asdict(progress),
        "place": _place(run.world),
        "spot": dataclasses.asdict(spot_at(run.sampler, progress.step)),
        **({"phases": [astuple(phase) for phase in run.sampler.phases]} if is_auto(run.config.batch_schedule) else {}),
    }
    return tensors, facts


def _optimizer_state(tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    state: dict[int, dict[str, Any]] = {}
    found = {name.removeprefix("optimizer."): value for name, value in tensors.items() if name.startswith("optimizer.")}
    for name, value in {**found, **plain}.items():
        number, _, key = name.partition(".")
        state.setdefault(int(number), {})[key] = value
    return state


def _lay_out_like_weights(states: dict[int, dict[str, Any]], optimizer: Optimizer) -> None:
    """Files do not store layouts; fused optimizers need a weight's state in the weight's own layout."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, state in states.items():
        for name, value in state.items():
            like = parameters[number]
            if isinstance(value, Tensor) and value.shape == like.shape and value.stride() != like.stride():
                state[name] = torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value)


def identity(run: Run) -> dict[str, Any]:
    """What identifies a run: everything that its weights depend on."""
    resolved = {"virtual_workers": run.sampler.parts, "global_batch": run.sampler.global_batch}
    shapes = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in run.model.state_dict().items()}
    return {
        "task": run.contract.task,
        "options": {**_options(run.config), **resolved},
        "data": run.data_sha256,
        "model": hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()[:16],
        **({"optimizer": describe_kind(run.update.optimizer)} if run.update.is_own else {}),
        "initial": run.initial.sha256,
    }


def check_unchanged(old: Mapping[str, Any], config: Config) -> None:
    """Raise a UsageError if a resumed run has other options than its record and its weights depend on them."""
    _refuse(_changed(old, {name: value for name, value in _options(config).items() if name in old}))


def check_given(old: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise a UsageError if one of these options differs from those of a finished record, and its weights depend on it."""
    fixed = names_with(Role.MODEL) - names_with(Role.STOP)
    asked = {name: value for name, value in given.items() if name in fixed and (name, value) != ("precision", "auto")}
    _refuse(_changed(old, asked))


def describe_extension(old: Mapping[str, Any], run: Run, at: int) -> str:
    """What changes if a run that continues at this step was planned to be shorter; empty if it was not.

    Raises a UsageError if it would become shorter (its learning rates may be those of the longer run), or longer only because
    its options are lost and the defaults apply.
    """
    old = {**{name: getattr(Config, name) for name in names_with(Role.LENGTH)}, **old}
    schedule, config = run.update.schedule, run.config
    before, now = count_steps(run.sampler, old["epochs"], old["max_steps"]), schedule.total_steps
    if now < before or (now > before and not config.given & names_with(Role.LENGTH)):
        differ = [name for name in ("epochs", "max_steps") if old[name] != getattr(config, name)]
        words = [f"{flag(name)} was {old[name]}, is {getattr(config, name)}" for name in differ]
        _refuse(words, "A run can only become longer")
    if now == before:
        return ""
    said = f"from {plural(before, 'step')} to {now:,} ({plural(config.epochs, 'epoch')})"
    if config.local_steps:
        then = first_local_step(config.local_steps, config.local_after, dataclasses.replace(schedule, total_steps=before))
        said += f"; local steps begin after step {run.local_from} (was {then}), and the averaging at step {before} stays"
    if run.update.rates.fixed_length:
        _refuse([f"{run.update.rates.fixed_length}, {plural(before, 'step')}"], "A run with it cannot become longer")
    if not schedule.depends_on_length:
        return f"{said}; the learning rate does not depend on the length of the run"
    if schedule.shape == "own":
        return f"{said}; from here on the task's own schedule is that of the new length"
    earlier = dataclasses.replace(
        schedule, total_steps=before, samples=schedule.samples and old["epochs"] * run.sampler.samples
    )
    old_lr = earlier.lr(at)
    return (
        f"{said}; from here on the {schedule.shape} schedule is that of the new length: lr {schedule.lr(at):.4g} in the next"
        f" step (was {old_lr:.4g})"
    )


def check_branch(old: Mapping[str, Any], config: Config) -> None:
    """Raise a UsageError if a branch has other options than its record, and the state in the checkpoint does not fit them."""
    fixed = names_with(Role.STATE)
    _refuse_branch(_changed(old, {name: value for name, value in vars(config).items() if name in fixed and name in old}))


def describe_branch(old: Mapping[str, Any], new: Mapping[str, Any], run: Run, at: int) -> str:
    """Where a branch begins and which options changed. Raises a UsageError if the checkpoint does not fit this run."""
    fixed = {name: value for name, value in new["options"].items() if name in names_with(Role.STATE)}
    differs = [*_differences(old, new), *_changed(old["options"], fixed)]
    seeds = old["options"].get("seed"), new["options"]["seed"]
    if seeds[0] != seeds[1] and run.sampler.place(at)[1]:
        differs.append(f"--seed was {seeds[0]}, is {seeds[1]}, and step {at:,} is in the middle of an epoch")
    _refuse_branch(differs)
    total, source = run.update.schedule.total_steps, run.config.branch_from
    if total <= at:
        raise UsageError(
            f"--branch-from: {source} has trained {plural(at, 'step')} and this run has {total:,}: nothing is left to train;"
            " give more --epochs"
        )
    names = names_with(Role.MODEL) - names_with(Role.STATE) - {"branch_from", "init_from"}
    before = {**{name: getattr(Config, name) for name in names}, **old["options"]}
    changed = [
        f"{flag(name)} was {_said(before[name])}, is {_said(getattr(run.config, name))}"
        for name in vars(run.config)
        if name in names and before[name] != getattr(run.config, name)
    ]
    return f"{source}, after step {at:,}; {'; '.join(changed) or 'no option that the model depends on is changed'}"


def _options(config: Config) -> dict[str, Any]:
    """The options that the weights depend on."""
    roles = (Role.MODEL,) if config.reduce == "fast" else (Role.MODEL, Role.ROUNDING)
    options = {name: value for name, value in vars(config).items() if name in names_with(*roles)}
    return {**options, **({"fast": "auto"} if options.get("fast") == "on" else {})}  # the same bits in exact mode


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    # Options that older records do not name had these values.
    old = {**{field.name: field.default for field in dataclasses.fields(Config)}, "fast": "off", **old}
    compared = {name: value for name, value in new.items() if name not in names_with(Role.LENGTH)}  # `describe_extension`
    return [
        f"{flag(name)} was {_said(old.get(name))}, is {_said(value)}"
        for name, value in compared.items()
        if old.get(name) != value
    ]


def _said(value: Any) -> str:
    """An option's value, as it could be given."""
    return "not given" if value in (None, "") else f'"{value}"' if isinstance(value, str) and " " in value else f"{value}"


def _check_identity(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise a UsageError that lists the differences."""
    _refuse([*_changed(old["options"], new["options"]), *_differences(old, new)])


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs besides the options."""
    differs = [f"the task was {old['task']}, is {new['task']}"] if old["task"] != new["task"] else []
    if old["data"] != new["data"]:
        differs.append("the training or validation data is not the same")
    if old["model"] != new["model"] and old["options"].get("model") == new["options"].get("model"):
        differs.append("the model's parameters have other names or shapes")
    if old.get("optimizer", new.get("optimizer")) != new.get("optimizer", old.get("optimizer")):
        differs.append(f"the task's optimizer was {old['optimizer']}, is {new['optimizer']}")
    return differs


def _refuse_branch(differs: list[str]) -> None:
    if differs:
        raise UsageError(
            f"--branch-from: a branch cannot change this: {'; '.join(differs)}. For a new run from its weights, use --init-from"
        )


def _refuse(differs: list[str], rule: str = "") -> None:
    if differs:
        rule = f"{rule}: start" if rule else "Start"
        raise UsageError(f"{REFUSED}: {'; '.join(differs)}. {rule} a new run, or give the options of the old one")


def _place(world: World) -> str:
    kind = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    return f"torch {torch.__version__.partition('+')[0]} on {kind}"
