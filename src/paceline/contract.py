"""The contract: everything a run is about to do, worked out once, printed before the first step and kept in the record.

`contract_lines` is the only formatter. A run prints it, and the report shows it from what a record kept. Nothing here imports
torch; `training/terms.py` works the numbers out.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from inspect import signature
from typing import Any

from paceline.output import plural


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Everything that follows from the configuration, the world and the data."""

    task: str
    unit: str
    """What samples are called: images, windows."""
    model: str
    parameters: int
    data: str
    train_samples: int
    validation_samples: int
    workers: int
    virtual_workers: int
    parts: str
    """How a worker runs its parts (together or in turn) and why."""
    reduce: str
    nodes: int
    launcher: str
    devices: str
    backend: str
    precision: str
    reference_batch: int
    base_lr: float
    global_batch: int
    part_batch: int
    accumulate: int
    k: float
    lr_rule: str
    peak_lr: float
    optimizer: str
    schedule: str
    warmup: str
    steps_per_epoch: int
    epochs: int
    total_steps: int
    seed: int
    loader: str
    record: str
    epoch_samples: int = 0
    """Samples in an epoch, if they are drawn by weights; else 0, for all training samples."""
    joins: str = ""
    """With `--workers-schedule`: how many workers there are at which time."""
    phases: tuple[dict[str, Any], ...] = ()
    """With `--batch-schedule`, for each phase: start (in epochs), global_batch, virtual_workers, part_batch, steps, peak_lr (at
    the top of the schedule) and samples_per_worker (the most that a worker computes in a step). For "auto": those so far."""
    frozen: int = 0
    """Parameters that are not trained."""
    settings: str = ""
    """The values of `--set`, for the task's function."""
    sampling: str = ""
    """How an epoch's samples are chosen, unless each is used once."""
    augmentation: str = ""
    """What happens to training samples at random."""
    initialized: str = ""
    """The weights that the run starts from, if they are not random, and which of them did not match."""
    initial_sha256: str = ""
    """The SHA-256 of the file that they came from."""
    branched: str = ""
    """The record whose checkpoint the run continues from, and the options that changed."""
    resumed_at: int | None = None
    """The step that a resumed run continues from."""
    validated: bool = False
    """The epoch that ended with that step was finished, with its validation, before the checkpoint was written."""
    took_over_from: int = 0
    """How many workers there were before these took over (`--workers-schedule`)."""
    extended: str = ""
    """What changes in a resumed run that trains longer than first planned."""

    def lines(self) -> list[tuple[str, str]]:
        """(name, text) of each line to print. A resumed run prints only what may have changed, and nothing after a join."""
        lines = contract_lines(self.as_dict())
        if self.took_over_from:
            return []
        if self.resumed_at is None:
            return lines
        return [line for line in lines if line[0] in ("resumed", "extended", "workers", "device")]

    def as_dict(self) -> dict[str, Any]:
        """The fields, for the record."""
        return asdict(self)


def contract_lines(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, text) of each line, from a contract's fields.

    A record may be old, cut short or edited: a line with a missing field, or one of the wrong type, lists the fields it has.
    """
    known = {name: value for name, value in facts.items() if isinstance(value, str | int | float)}
    if phases := _phase_lines(facts):
        known["phases"] = len(phases)
        known["grows"] = phases[-1][0] == "later"
    lines = []
    for what, line in _LINES.items():
        if what == "resumed" and "resumed_at" not in known:
            continue
        fields = [name for name in signature(line).parameters if name in known]
        try:
            text = line(**{name: known[name] for name in fields})
        except (TypeError, ValueError):
            names = {name: name.replace("_", " ") for name in fields}
            text = ", ".join(f"{known[name]}" if names[name] == what else f"{names[name]} {known[name]}" for name in fields)
        if text:
            lines.append((what, text))
        if what == "global batch":
            lines += phases
    return lines


def _task(task: str, train_samples: int, validation_samples: int) -> str:
    if not validation_samples:
        return f"{task}: {plural(train_samples, 'training sample')}, no validation"
    return f"{task}: {train_samples:,} training and {plural(validation_samples, 'validation sample')}"


def _workers(workers: int, virtual_workers: int, parts: str, launcher: str, nodes: int) -> str:
    return f"P = {workers:,} (V = {plural(virtual_workers, 'part')}, {parts}), {launcher}, {plural(nodes, 'node')}"


def _global_batch(global_batch: int, virtual_workers: int, part_batch: int, accumulate: int = 1) -> str:
    micro = f", each in {accumulate:,} micro-batches" if accumulate > 1 else ""
    return f"{global_batch:,} = {plural(virtual_workers, 'part')} of {part_batch:,}{micro}"


def _phase_lines(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """One line per phase of a batch schedule; a broken one is left out."""
    lines, phases = [], facts.get("phases")
    phases = phases if isinstance(phases, list | tuple) else ()
    for number, phase in enumerate(phases, 1):
        with suppress(KeyError, TypeError, ValueError):
            text = (
                f"from epoch {phase['start']:g}: batch {phase['global_batch']:,} ="
                f" {plural(phase['virtual_workers'], 'part')} of {phase['part_batch']:,}, {plural(phase['steps'], 'step')}, lr"
                f" {phase['peak_lr']:.4g}, {plural(phase['samples_per_worker'], 'sample')} per worker"
            )
            lines.append((f"phase {number}", text))
    with suppress(KeyError, TypeError):
        if lines and max(phase["global_batch"] for phase in phases) < facts["global_batch"]:  # --batch-schedule auto
            lines.append(("later", f"doubled up to {facts['global_batch']:,} as the noise scale grows: then fewer steps"))
    return lines


def _scale(k: float, lr_rule: str, peak_lr: float) -> str:
    gain = f", times a gain from 1 to {max(1.0, k):g}" if lr_rule == "adascale" else ""
    return f"k = {k:g}, rule {lr_rule}: peak lr {peak_lr:g}{gain}"


def _steps(steps_per_epoch: int, epochs: int, total_steps: int, phases: int = 0, grows: bool = False) -> str:
    if phases:  # then epochs differ
        return f"{'at most ' if grows else ''}{total_steps:,} in total, up to {plural(epochs, 'epoch')}"
    return f"{steps_per_epoch:,} per epoch, {plural(epochs, 'epoch')}, {total_steps:,} in total"


def _device(devices: str, backend: str, precision: str, reduce: str) -> str:
    return f"{devices}, backend {backend}, {precision}, reduce {reduce}"


def _resumed(record: str, resumed_at: int, total_steps: int) -> str:
    return f"{record}, from step {resumed_at:,} of {total_steps:,}"


_LINES: dict[str, Callable[..., str]] = {
    "resumed": _resumed,
    "branched": lambda branched: f"from {branched}" if branched else "",
    "extended": lambda extended: f"{extended}",
    "task": _task,
    "settings": lambda settings: f"{settings}",
    "data": lambda data, loader: f"{data} ({loader})",
    "sampling": lambda sampling: f"{sampling}",
    "augmentation": lambda augmentation: f"{augmentation}",
    "model": lambda model, parameters, frozen=0: (
        f"{model}, {plural(parameters, 'parameter')}" + (f", {frozen:,} of them frozen" if frozen else "")
    ),
    "initialized": lambda initialized: f"from {initialized}" if initialized else "",
    "reference": lambda reference_batch, base_lr: f"batch {reference_batch:,} at lr {base_lr:g}",
    "workers": _workers,
    "joins": lambda joins="": f"{joins}",
    "global batch": _global_batch,
    "scale": _scale,
    "optimizer": lambda optimizer, schedule, warmup: f"{optimizer}, {schedule}, warm-up {warmup}",
    "steps": _steps,
    "device": _device,
    "seed": lambda seed: f"{seed}",
    "record": lambda record: f"{record}",
}
"""Each line's name, and the function that writes it: its parameters are the fields it needs."""
