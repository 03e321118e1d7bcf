"""Observers of a run: the printer, the recorder, a tracker. The loop calls them on rank 0 and knows nothing else about them."""

import errno
import json
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Protocol

from torch import nn

from paceline.config import Config, make_config, names_with
from paceline.contract import Contract
from paceline.errors import RecordError, UsageError
from paceline.explanation import explain
from paceline.files import read_json
from paceline.options import Role
from paceline.output import plural, try_say, warn
from paceline.records import Record, environment
from paceline.status import Status
from paceline.toml import read_toml, to_toml
from paceline.training.layers import FarLayers
from paceline.training.monitor import describe_best
from paceline.training.progress import Pace, join_words, phase_words
from paceline.training.timing.health import describe, judge
from paceline.training.timing.profile import describe_timeline
from paceline.training.weights import write_weights

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended."""

    status: str
    """A `Status`: done, target reached, stopped early, diverged, interrupted or failed."""
    why: str = ""
    """One line; "" if the run is done."""
    where: str = ""
    """The frame of the user's own code that led to a failure: file, line and function, then the code on a second line."""
    traceback: str = ""
    """The whole traceback of a failure."""
    epochs: int = 0
    steps: int = 0
    train_time_s: float = 0.0
    samples_per_s: float = 0.0
    """Of the last epoch, over all workers."""
    metrics: Mapping[str, float]
    """Of the last validation; empty for a task without validation data."""
    best: Mapping[str, Any] = field(default_factory=dict)
    """The best epoch, if a run keeps track of it (`--monitor`, `--save-best`, `--stop-after`): epoch, step, metric, value."""
    model_sha256: str = ""
    record: str = ""

    def __repr__(self) -> str:
        """The fields that say how it ended; in a notebook, this is what a cell shows."""
        metrics = ", ".join(f"{name!r}: {value:.4g}" for name, value in self.metrics.items() if isinstance(value, int | float))
        after = f", epochs={self.epochs}, steps={self.steps}, metrics={{{metrics}}}, record={self.record!r}"
        return f"Result(status={str(self.status)!r}{f', why={self.why!r}' if self.why else ''}{after})"

    @cached_property
    def model(self) -> nn.Module:
        """The trained model, on the CPU and in evaluation mode, loaded from the record when first used (`paceline.load`)."""
        if not self.record:
            raise UsageError("this run left no record here: load its model where the record is, with paceline.load(record)")
        from paceline.training.trained import load

        return load(self.record, self.__dict__.get("_task"))

    def made_from(self, task: Any) -> "Result":
        """This result, which remembers a Task object: its record has only the Task's name."""
        if not isinstance(task, str):
            self.__dict__["_task"] = task
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Only the fields: a Task may not be picklable, and a model can be loaded again."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> "Result":
        """A result from JSON. Fields that are missing or of another type get their defaults; unknown fields are ignored."""
        kinds: dict[str, Any] = {"metrics": dict, "best": dict, "epochs": int, "steps": int}
        kinds |= {"train_time_s": int | float, "samples_per_s": int | float}
        known = [each.name for each in fields(cls)]
        kept = {name: found[name] for name in known if isinstance(found.get(name), kinds.get(name, str))}
        return cls(**{"status": Status.FAILED, "metrics": {}, **kept})


class Observer(Protocol):
    """What the loop calls during a run."""

    def start(self, contract: Contract) -> None:
        """Before the first step."""

    def say(self, text: str) -> None:
        """One line that the user should know."""

    def step(self, row: Row) -> None:
        """Every `log_every` steps, at the end of an epoch, and where the learning rate bends or jumps."""

    def layers(self, row: Row) -> None:
        """With `--watch-layers`, every N steps: each layer's gradient norm and update-to-weight ratio."""

    def validating(self, epoch: int, done: int, total: int) -> None:
        """When rank 0 starts chunk `done` (from 1) of its `total` chunks of a validation."""

    def phase(self, row: Row) -> None:
        """With a batch schedule, before the first step of each phase: its epoch, step, global batch, parts, learning rate."""

    def join(self, row: Row) -> None:
        """With a workers schedule, before the first step of workers that took over: their number, the one before, the cost."""

    def epoch(self, row: Row) -> None:
        """After each epoch's validation."""

    def health(self, row: Row) -> None:
        """From time to time: images/s, where the time of a step goes, the slowest worker, memory."""

    def timeline(self, timeline: Row) -> None:
        """Once, with `--profile`."""

    def end(self, result: Result, model: nn.Module | None) -> None:
        """Once, however the run ended; with the model if it is worth keeping."""


_FOLLOWS = ("epochs", "total_steps", "warmup")
"""Fields of a contract that follow from the length of a run."""


class Recorder:
    """Writes the record."""

    def __init__(self, record: Record, config: Config, task: str) -> None:
        self._record, self._config, self._task = record, config, task

    def start(self, contract: Contract) -> None:
        if contract.resumed_at is not None:
            old = self._read_lasting()
            new = {name: getattr(self._config, name) for name in old}
            was = {"was": old} if old != new else {}
            validated = {"validated": True} if contract.validated else {}
            self._record.resume(contract.resumed_at, {**environment(), "contract": contract.as_dict(), **was, **validated})
            self._describe(contract)
            if was:
                self._rewrite(new, contract)
            return
        try:
            self._describe(contract)
        except RecordError:
            self._record.discard()
            raise

    def _describe(self, contract: Contract) -> None:
        """Write config.toml and environment.json if they are missing: a run may have been killed before it wrote them.

        A damaged config.toml is replaced.
        """
        # Write out the options that were derived from the world, so that the recipe repeats this run anywhere.
        resolved = replace(
            self._config,
            workers=None if self._config.workers_schedule else contract.workers // contract.nodes,
            virtual_workers=contract.virtual_workers,
            global_batch=contract.global_batch,
            resume="",
        )
        try:
            read_toml(self._record.path / "config.toml", "config.toml")
        except UsageError:
            self._write_config(resolved, contract)
        if not (self._record.path / "environment.json").exists():
            about = {**environment(), "task": self._task, "contract": contract.as_dict()}
            self._record.write("environment.json", json.dumps(about, indent=2) + "\n")

    def _read_lasting(self) -> dict[str, Any]:
        """How long the record's config.toml says that the run trains; empty if it cannot be read."""
        with suppress(UsageError):
            recorded = make_config(read_toml(self._record.path / "config.toml", "config.toml"))
            return {name: getattr(recorded, name) for name in sorted(names_with(Role.LENGTH, Role.STOP))}
        return {}

    def _rewrite(self, lasting: Mapping[str, Any], contract: Contract) -> None:
        """Update config.toml and environment.json with the new length of the run. The old one is in the `resume` row."""
        old = read_toml(self._record.path / "config.toml", "config.toml")
        self._write_config(make_config({**old, **lasting}), contract)
        path = self._record.path / "environment.json"
        with suppress(OSError, ValueError, AttributeError):
            about = read_json(path)
            new = {name: value for name, value in contract.as_dict().items() if name in _FOLLOWS}
            about["contract"] = {**about.get("contract", {}), **new}
            self._record.write(path.name, json.dumps(about, indent=2) + "\n")

    def _write_config(self, config: Config, contract: Contract) -> None:
        self._record.write("config.toml", f"# paceline train {contract.task} --recipe THIS_FILE\n{to_toml(config)}")

    def say(self, text: str) -> None:
        self._record.row({"kind": "note", "text": text})

    def note(self, text: str) -> None:
        """Like `say`, but ignore failures: for other observers to report that they have stopped."""
        with suppress(RecordError):
            self.say(text)

    def step(self, row: Row) -> None:
        self._record.row({"kind": "step", **row})

    def layers(self, row: Row) -> None:
        self._record.row({"kind": "layers", **row})

    def validating(self, epoch: int, done: int, total: int) -> None:
        pass

    def phase(self, row: Row) -> None:
        self._record.row({"kind": "phase", **row})

    def join(self, row: Row) -> None:
        self._record.row({"kind": "join", **row})

    def epoch(self, row: Row) -> None:
        self._record.row({"kind": "epoch", **row})
        self._record.course_row(row)

    def health(self, row: Row) -> None:
        self._record.row({"kind": "health", **row})

    def timeline(self, timeline: Row) -> None:
        self._record.write("timeline.json", json.dumps(timeline) + "\n")

    def end(self, result: Result, model: nn.Module | None) -> None:
        try:
            if model is not None:
                write_weights(self._record.path / "model.safetensors", model)
        except BaseException as error:
            about = explain(error)
            result = replace(result, status=Status.FAILED, why=about.why, where=about.where, traceback=about.traceback)
            raise
        finally:
            self._record.finish(asdict(result))


class Printer:
    """Prints the contract, one line per epoch, and the end; on a terminal also progress within the epoch."""

    def __init__(
        self, unit: str, terminal: bool, failed: Callable[[str], None] = lambda text: None, course: bool = False
    ) -> None:
        """With `course`, the line of an epoch has the course's six fields only."""
        self._unit, self._terminal, self._course = unit, terminal, course
        self._failed, self._silent = failed, False
        """Called once, when printing fails; whether it has failed."""
        self._pace, self._workers, self._record = Pace(), 1, ""
        self._far = FarLayers("")
        self._told_s = 0.0
        """When progress of a validation was last shown."""
        self._reported: tuple[str, ...] | None = None
        self._last: tuple[str, ...] = ()
        """What slowed the run down: as last printed, and at the last look."""

    def start(self, contract: Contract) -> None:
        self._pace.start(contract)
        self._far = FarLayers(contract.optimizer)
        self._workers, self._record = contract.workers, contract.record
        if not contract.lines():
            return
        width = max(len(what) for what, _ in contract.lines())
        if self._terminal:
            from rich.console import Console
            from rich.panel import Panel
            from rich.table import Table

            table = Table.grid(padding=(0, 2))
            for what, text in contract.lines():
                table.add_row(what, text, style=None)
            console = Console(highlight=False, markup=False)
            with console.capture() as captured:  # printing itself, rich would end the process when its reader is gone
                console.print(Panel(table, title="contract", expand=False))
            self._print(captured.get(), end="")
            return
        self._print("\n".join(f"{what:>{width}}  {text}" for what, text in contract.lines()))

    def say(self, text: str) -> None:
        self._line(f"note: {text}")

    def step(self, row: Row) -> None:
        if self._terminal:
            what, done, total, left = self._pace.describe(row)
            # Not rich: its thread redraws ten times a second, which takes time from the step.
            self._show(what, done, total, f"loss {row['loss']:.4f}", f"about {left} left")

    def layers(self, row: Row) -> None:
        """Print only which layers move much faster or more slowly than the others, and are new."""
        for line in self._far.lines(row):
            self._line(f"health: {line}")

    def _show(self, what: str, done: int, total: int, *more: str) -> None:
        """Replace the progress line. On a narrow terminal leave out the bar, then what comes after it: a line must not wrap."""
        bar, count = "=" * (20 * done // total), f"{done}/{total}"
        room = shutil.get_terminal_size().columns - 1
        shorter = ["  ".join((f"{what} {count}", *more[:kept])) for kept in range(len(more), -1, -1)]
        texts = ["  ".join((f"{what} [{bar:<20}] {count}", *more)), *shorter]
        text = next((text for text in texts if len(text) <= room), texts[-1][: max(0, room)])
        self._print(f"\r{text}\x1b[K", end="")

    def validating(self, epoch: int, done: int, total: int) -> None:
        """Show how far a long validation is: twice a second on a terminal, otherwise with a line every 30 s."""
        now = time.monotonic()
        if done == 1:
            self._told_s = now
        if now - self._told_s < (0.5 if self._terminal else 30.0):
            return
        self._told_s = now
        if self._terminal:
            self._show(f"epoch {epoch} validation", done, total)
        else:
            self._line(f"epoch {epoch}: validation, {done} of {total} batches")

    def phase(self, row: Row) -> None:
        self._pace.phase(row)
        self._line(phase_words(row))

    def join(self, row: Row) -> None:
        self._line(join_words(row))

    def epoch(self, row: Row) -> None:
        self._pace.epoch(row)
        unit = self._unit.capitalize()
        words = [
            f"Epoch = {row['epoch']}",
            f"Cumulative Time = {row['time_s']:.3f}",
            f"Epoch Time = {row['epoch_time_s']:.3f}",
            f"{unit}/sec = {row['samples_per_s']:.1f}",
        ]
        if "train_loss" in row and not self._course:
            words.append(f"Training Loss = {row['train_loss']:.4f}")
        others = [name for name in row if name.startswith("val_")]
        words += [f"Validation {name[4:].replace('_', ' ').title()} = {row[name]:.4f}" for name in others]
        if "noise_scale" in row:
            words.append(f"Noise Scale = {row['noise_scale']:.0f}")
        self._line(", ".join(words))

    def health(self, row: Row) -> None:
        """Print the first look; later only problems that two looks in a row found and that are new.

        The first look reports no problem except busy cores: the first steps are not like the rest.
        """
        found, last, first = judge(row), self._last, self._reported is None
        self._last, self._reported = found, self._reported or ()
        if first or (found == last and found != self._reported):
            self._reported = tuple(trouble for trouble in found if trouble == "cores") if first else found
            self._line(f"health: {describe(row, self._unit, self._reported)}")

    def timeline(self, timeline: Row) -> None:
        about = timeline["paceline"]
        self._line(f"timeline of steps {about['steps'][0]} to {about['steps'][-1]}: {self._record}/timeline.json")
        for line in describe_timeline(about):
            self._line(line)

    def end(self, result: Result, model: nn.Module | None) -> None:
        if not Status(result.status).good:
            self._line(f"{result.status} after {plural(result.steps, 'step')}; the record so far is in {result.record}")
            return
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
        reached = f": {metrics}" if metrics else " without validation"
        length = plural(result.epochs, "epoch") if self._pace.whole else plural(result.steps, "step")
        self._line(f"{result.status}{reached} after {length}, {result.train_time_s:.1f} s of training")
        if result.best:
            self._line(describe_best(result.best))
        agree = f", all {self._workers} workers agree" if self._workers > 1 else ""
        self._line(f"model {result.model_sha256[:16]}{agree}; record in {result.record}")

    def _line(self, text: str) -> None:
        self._print(f"\r{text}\x1b[K" if self._terminal else text)

    def _print(self, text: str, end: str = "\n") -> None:
        """Print, until printing fails once. The reader of the output may go away; the run continues without it."""
        error = None if self._silent else try_say(text, end)
        if error is not None:
            self._silent = True
            if isinstance(error, OSError) and error.errno != errno.EPIPE:
                why = error.strerror or error
                warn(f"paceline: stdout cannot be written ({why}): training continues, and the record has everything")
            self._failed(
                "the output could not be printed and is left out from here on: its reader is gone, or its disk is full"
            )
