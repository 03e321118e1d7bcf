"""What of a run goes into a checkpoint, when one is written, and how a run comes back from it on any number of workers (law 5).

A step's samples, augmentation, dropout and learning rate follow from (seed, epoch, step) alone. So weights, their averages,
optimizer state, the parts' batch-norm statistics and a few numbers of progress are all there is to keep, and resuming goes on
in the middle of an epoch with nothing repeated and nothing skipped.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from paceline.config import Config
from paceline.dist.world import World
from paceline.errors import UsageError
from paceline.training.build import Run
from paceline.training.checkpoint.file import CheckpointError, Writer, load_latest
from paceline.training.observers import Result, Rows
from paceline.values import flag, parse_every

FOLDER = "checkpoints"
REFUSED = "cannot resume"
_PLACE = (
    *("workers", "nodes", "node_id", "rendezvous", "backend", "timeout_s", "max_restarts", "min_workers", "grace_s"),
    *("data_dir", "loader", "loader_workers", "target_accuracy", "patience", "check_every", "log_every", "tracker"),
    *("profile", "runs_dir", "name", "resume", "checkpoint_every", "keep"),
)
"""Options that may differ when a run is resumed: where and how it runs, not what it computes."""


@dataclass
class Progress:
    """Where a run stands."""

    result: Result
    epoch: int = 0
    step: int = 0
    train_time_s: float = 0.0
    """Of the epochs before this one."""
    epoch_time_s: float = 0.0
    hits: int = 0
    """Epochs in a row that reached the target."""
    first_loss: float | None = None
    """Of the run's first step; of the first after a resume, if an older Paceline wrote the checkpoint."""
    last_loss: float | None = None
    """Of the last step."""
    rows: Rows = field(default_factory=Rows)


class Keeper:
    """Writes this run's checkpoints when they are due. Every worker has one; rank 0's has the folder."""

    def __init__(
        self, run: Run, folder: Path | None = None, say: Callable[[str], None] = lambda text: None, resumes: bool = False
    ) -> None:
        self._run, self._identity = run, identity(run)
        self.resumes = resumes
        """Whether the run goes on with a record, from its newest checkpoint if it has one."""
        self._steps, self._seconds = parse_every(run.config.checkpoint_every)
        self.on = bool(self._steps or self._seconds)
        self._folder, self._say = folder, say
        self._writer: Writer | None = None  # made when there is something to write
        self._last_s = time.monotonic()

    def wishes(self) -> bool:
        """Whether, by rank 0's clock, it is time: a wish that travels with the step's metrics."""
        return self._folder is not None and 0 < self._seconds <= time.monotonic() - self._last_s

    def due(self, step: int) -> bool:
        """Whether one is due after so many steps. All workers find the same."""
        return bool(self._steps) and step % self._steps == 0

    def save(self, progress: Progress) -> None:
        """Take a checkpoint; rank 0 writes it in the background. Every worker reaches this."""
        tensors, facts = _capture(self._run, progress)
        facts["identity"] = self._identity
        self._last_s = time.monotonic()
        if self._folder is None:
            return
        try:
            self._writer = self._writer or Writer(self._folder, self._run.config.keep, self._say)
        except CheckpointError as error:
            self._say(f"no checkpoint at step {progress.step}: {error}; training goes on")
            return
        self._writer.save(progress.step, tensors, facts)

    def wait(self) -> bool:
        """Until the last checkpoint is on disk; False where it could not be written, or this worker writes none."""
        return self._writer is not None and self._writer.wait()

    def close(self) -> None:
        """End the writer, after what it has in hand."""
        if self._writer is not None:
            self._writer.close()

    def restore(self) -> Progress | None:
        """Put every worker where rank 0's newest good checkpoint says; None where there is none. Every worker reaches this."""
        if not self.resumes:
            return None
        checkpoint = None if self._folder is None else load_latest(self._folder, self._say)
        world, step = self._run.world, self._run.step
        facts = world.broadcast(checkpoint.facts if checkpoint else None)
        if facts is None:
            return None
        _check_identity(facts["identity"], self._identity)
        if facts["place"] != _place(world) and self._run.config.reduce == "exact":
            self._say(f"the checkpoint was made by {facts['place']}, this is {_place(world)}: from here on bits may differ")
        tensors = _broadcast(checkpoint.tensors if checkpoint else {}, world)
        with torch.no_grad():
            for name, tensor in step.model.state_dict().items():
                if f"model.{name}" in tensors:
                    tensor.copy_(tensors[f"model.{name}"])
            for name, tensor in step.kept().items():
                tensor.copy_(tensors[name])
        step.metrics = tuple(facts["metrics"])  # a run may resume just before a validation
        step.statistics.scatter(tensors["parts.values"], tensors["parts.counts"])
        state = _optimizer_state(tensors, facts["optimizer"])
        _lay_out_like_weights(state, step.optimizer)
        step.optimizer.load_state_dict({"state": state, "param_groups": step.optimizer.state_dict()["param_groups"]})
        progress = facts["progress"]
        return Progress(**{**progress, "result": Result.read(progress["result"]), "rows": Rows(**progress["rows"])})


def _capture(run: Run, progress: Progress) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of a run as tensors and plain facts. Every worker reaches this."""
    model, optimizer, statistics = run.step.model, run.step.optimizer, run.step.statistics
    values, counts = statistics.gather(run.world)
    parted = statistics.names(model)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items() if name not in parted}
    tensors |= {"parts.values": values, "parts.counts": counts, **run.step.kept()}
    plain: dict[str, Any] = {}
    for number, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{number}.{name}"] = value
            else:
                plain[f"{number}.{name}"] = value
    facts = {
        "optimizer": plain,
        "metrics": run.step.metrics,
        "progress": {**vars(progress), "result": dataclasses.asdict(progress.result), "rows": vars(progress.rows)},
        "place": _place(run.world),
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
    """A file knows no layout; fused optimizers need a weight's state in the weight's own."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, state in states.items():
        for name, value in state.items():
            like = parameters[number]
            if isinstance(value, Tensor) and value.shape == like.shape and value.stride() != like.stride():
                state[name] = torch.empty_like(like, dtype=value.dtype, device=value.device).copy_(value)


def identity(run: Run) -> dict[str, Any]:
    """What makes a run this run: everything that its weights depend on."""
    resolved = {"virtual_workers": run.sampler.parts, "global_batch": run.sampler.global_batch}
    shapes = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in run.step.model.state_dict().items()}
    return {
        "task": run.contract.task,
        "options": {**_options(run.config), **resolved},
        "data": run.data_sha256,
        "model": hashlib.sha256(json.dumps(shapes, sort_keys=True).encode()).hexdigest()[:16],
    }


def check_options(old: Mapping[str, Any], config: Config) -> None:
    """A UsageError where a run would go on with a record whose options were others."""
    _refuse(_changed(old, {name: value for name, value in _options(config).items() if name in old}))


def _options(config: Config) -> dict[str, Any]:
    """The options that the weights depend on."""
    indifferent = (*_PLACE, "parts_at_once", "fast") if config.reduce == "fast" else _PLACE
    options = {name: value for name, value in vars(config).items() if name not in indifferent}
    return {**options, **({"fast": "auto"} if options.get("fast") == "on" else {})}  # the same bits in exact mode


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    # What records from before there was such an option were made with.
    old = {**{field.name: field.default for field in dataclasses.fields(Config)}, "fast": "off", **old}
    return [f"{flag(name)} was {old.get(name)}, is {value}" for name, value in new.items() if old.get(name) != value]


def _check_identity(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """A UsageError that lists what is not as it was."""
    differs = _changed(old["options"], new["options"])
    if old["task"] != new["task"]:
        differs.insert(0, f"the task was {old['task']}, is {new['task']}")
    if old["data"] != new["data"]:
        differs.append("the training or validation data is not the same")
    if old["model"] != new["model"] and not any(text.startswith("--model ") for text in differs):
        differs.append("the model's parameters have other names or shapes")
    _refuse(differs)


def _refuse(differs: list[str]) -> None:
    if differs:
        raise UsageError(f"{REFUSED}: {'; '.join(differs)}. Start a new run, or give the options of the old one")


def _place(world: World) -> str:
    kind = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    return f"torch {torch.__version__.partition('+')[0]} on {kind}"


def _broadcast(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Rank 0's tensors on every worker: the record's folder need not be within everybody's reach."""
    if world.size == 1:
        return dict(tensors)
    described = world.broadcast([[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()])
    received = {}
    for name, dtype, shape in described:
        kind = getattr(torch, dtype)
        tensor = tensors[name].to(world.device) if name in tensors else torch.empty(shape, dtype=kind, device=world.device)
        dist.broadcast(tensor, 0)
        received[name] = tensor.cpu()  # where a checkpoint's tensors are: an optimizer's own count of steps must stay there
    return received
