"""Observers of a run: the printer, the recorder, a tracker. The loop calls them on rank 0 and knows nothing else about them."""

import errno
import importlib.util
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Protocol, cast

from torch import nn

from paceline.config import Config
from paceline.contract import Contract
from paceline.errors import PacelineError, RecordError, UsageError
from paceline.output import try_say, warn
from paceline.records import Record, environment
from paceline.status import Status
from paceline.toml import read_toml, to_toml
from paceline.training.timing.health import describe, judge
from paceline.training.timing.profile import describe_timeline

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended."""

    status: str
    """A `Status`: done, target reached, diverged, interrupted or failed."""
    why: str = ""
    epochs: int = 0
    steps: int = 0
    train_time_s: float = 0.0
    samples_per_s: float = 0.0
    """Of the last epoch, over all workers."""
    metrics: Mapping[str, float]
    """Of the last validation."""
    model_sha256: str = ""
    record: str = ""

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> "Result":
        """A result from JSON. Fields that are missing or of another type get their defaults; unknown fields are ignored."""
        kinds = {"metrics": dict, "epochs": int, "steps": int, "train_time_s": int | float, "samples_per_s": int | float}
        known = [each.name for each in fields(cls)]
        kept = {name: found[name] for name in known if isinstance(found.get(name), cast(Any, kinds.get(name, str)))}
        return cls(**{"status": Status.FAILED, "metrics": {}, **kept})


@dataclass
class Rows:
    """Means over the steps since the last row."""

    sums: dict[str, float] = field(default_factory=dict)
    count: int = 0

    def add(self, metrics: Mapping[str, float], every: int, last: bool) -> Row | None:
        """Add a step. Returns a row after `every` steps, or now if `last`: at an epoch's end, or where the schedule bends."""
        self.sums = {name: self.sums.get(name, 0.0) + value for name, value in metrics.items()}
        self.count += 1
        if self.count < every and not last:
            return None
        means = {name: total / self.count for name, total in self.sums.items()}
        self.sums, self.count = {}, 0
        return means


class Observer(Protocol):
    """What the loop calls during a run."""

    def start(self, contract: Contract) -> None:
        """Before the first step."""

    def say(self, text: str) -> None:
        """One line that the user should know."""

    def step(self, row: Row) -> None:
        """Every `log_every` steps, at the end of an epoch, and where the learning rate bends or jumps."""

    def epoch(self, row: Row) -> None:
        """After each epoch's validation."""

    def health(self, row: Row) -> None:
        """From time to time: images/s, where the time of a step goes, the slowest worker, memory."""

    def timeline(self, timeline: Row) -> None:
        """Once, with `--profile`."""

    def end(self, result: Result, model: nn.Module | None) -> None:
        """Once, however the run ended; with the model if it is worth keeping."""


class Recorder:
    """Writes the record."""

    def __init__(self, record: Record, config: Config, task: str) -> None:
        self._record, self._config, self._task = record, config, task

    def start(self, contract: Contract) -> None:
        if contract.resumed_at is not None:
            self._record.resume(contract.resumed_at, {**environment(), "contract": contract.as_dict()})
            self._describe(contract)
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
            workers=contract.workers // contract.nodes,
            virtual_workers=contract.virtual_workers,
            global_batch=contract.global_batch,
            resume="",
        )
        try:
            read_toml(self._record.path / "config.toml", "config.toml")
        except UsageError:
            self._record.write("config.toml", f"# paceline train {contract.task} --recipe THIS_FILE\n{to_toml(resolved)}")
        if not (self._record.path / "environment.json").exists():
            about = {**environment(), "task": self._task, "contract": contract.as_dict()}
            self._record.write("environment.json", json.dumps(about, indent=2) + "\n")

    def say(self, text: str) -> None:
        self._record.row({"kind": "note", "text": text})

    def note(self, text: str) -> None:
        """Like `say`, but ignore failures: for other observers to report that they have stopped."""
        with suppress(RecordError):
            self.say(text)

    def step(self, row: Row) -> None:
        self._record.row({"kind": "step", **row})

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
                self._save(model)
        except BaseException as error:
            result = replace(result, status=Status.FAILED, why=str(error) or type(error).__name__)
            raise
        finally:
            self._record.finish(asdict(result))

    def _save(self, model: nn.Module) -> None:
        from safetensors.torch import save_file, save_model

        target = self._record.path / "model.safetensors"
        try:
            with self._record.replacing(target.name) as path:
                try:
                    save_model(model, str(path))
                except RuntimeError:  # views that share memory which none of them covers: save a copy of each
                    save_file({name: t.clone().contiguous() for name, t in model.state_dict().items()}, str(path))
        except PacelineError:
            raise
        except Exception as error:  # a full disk is a SafetensorError, not an OSError; unsupported kinds of tensors; ...
            why = " ".join(str(error).split()) or type(error).__name__
            raise RecordError(f"cannot write {target}: {why}; free some space or choose another --runs-dir") from error


class Printer:
    """Prints the contract, one line per epoch, and the end; on a terminal also progress within the epoch."""

    def __init__(self, unit: str, terminal: bool, failed: Callable[[str], None] = lambda text: None) -> None:
        self._unit, self._terminal = unit, terminal
        self._failed, self._silent = failed, False
        """Called once, when printing fails; whether it has failed."""
        self._total = self._per_epoch = self._workers = 1
        self._record = ""
        self._reported: tuple[str, ...] | None = None
        self._last: tuple[str, ...] = ()
        """What slowed the run down: as last printed, and at the last look."""

    def start(self, contract: Contract) -> None:
        self._total, self._per_epoch, self._workers = contract.total_steps, contract.steps_per_epoch, contract.workers
        self._record = contract.record
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
        if not self._terminal:
            return
        done, step = row["step"], row["step"] % self._per_epoch or self._per_epoch
        left = row["time_s"] / done * (self._total - done)
        # Not rich: its thread redraws ten times a second, which takes time from the step.
        bar = "=" * (20 * step // self._per_epoch)
        text = f"epoch {row['epoch']} [{bar:<20}] {step}/{self._per_epoch}  loss {row['loss']:.4f}  about {left:.0f} s left"
        self._print(f"\r{text}\x1b[K", end="")

    def epoch(self, row: Row) -> None:
        unit = self._unit.capitalize()
        words = [
            f"Epoch = {row['epoch']}",
            f"Cumulative Time = {row['time_s']:.3f}",
            f"Epoch Time = {row['epoch_time_s']:.3f}",
            f"{unit}/sec = {row['samples_per_s']:.1f}",
            f"Validation Loss = {row['val_loss']:.4f}",
        ]
        others = [name for name in row if name.startswith("val_") and name != "val_loss"]
        words += [f"Validation {name[4:].replace('_', ' ').title()} = {row[name]:.4f}" for name in others]
        if "noise_scale" in row:
            words.append(f"Noise Scale = {row['noise_scale']:.0f}")
        self._line(", ".join(words))

    def health(self, row: Row) -> None:
        """Print the first look, without its problems; later only problems that two looks in a row found and that are new."""
        found, last, first = judge(row), self._last, self._reported is None
        self._last, self._reported = found, self._reported or ()
        if first or (found == last and found != self._reported):
            self._reported = () if first else found
            self._line(f"health: {describe(row, self._unit, self._reported)}")

    def timeline(self, timeline: Row) -> None:
        about = timeline["paceline"]
        self._line(f"timeline of steps {about['steps'][0]} to {about['steps'][-1]}: {self._record}/timeline.json")
        for line in describe_timeline(about):
            self._line(line)

    def end(self, result: Result, model: nn.Module | None) -> None:
        if result.status not in (Status.DONE, Status.TARGET_REACHED):
            self._line(f"{result.status} after {result.steps} steps; the record so far is in {result.record}")
            return
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in result.metrics.items())
        self._line(f"{result.status}: {metrics} after {result.epochs} epochs, {result.train_time_s:.1f} s of training")
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


def check_tensorboard() -> None:
    """Raise a UsageError if TensorBoard is not installed, before anything is loaded or written."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError("--tracker tensorboard: TensorBoard is not installed; pip install 'paceline[trackers]'")


class TensorBoard:
    """Writes to TensorBoard, in the record's folder. A full disk ends the tracker, not the run."""

    def __init__(self, folder: str, failed: Callable[[str], None] = lambda text: None) -> None:
        self._folder, self._failed, self._writer = folder, failed, cast(Any, None)

    def start(self, contract: Contract) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run repeats some steps: purge_step hides the old points from the first of these on.
        repeated = None if contract.resumed_at is None else contract.resumed_at + 1
        try:
            self._writer = SummaryWriter(self._folder, purge_step=repeated)
        except OSError as error:
            self._give_up(error)
        lines = "\n".join(f"    {what}: {text}" for what, text in contract.lines())
        self._try(lambda writer: writer.add_text("contract", lines))

    def say(self, text: str) -> None:
        pass

    def step(self, row: Row) -> None:
        self._add({f"train/{name}": row[name] for name in ("loss", "lr")}, row["step"])

    def epoch(self, row: Row) -> None:
        shown = {name: value for name, value in row.items() if name.startswith("val_") or name == "samples_per_s"}
        self._add({name.replace("val_", "validation/"): value for name, value in shown.items()}, row["step"])

    def health(self, row: Row) -> None:
        self._add({f"step/{name}_s": value for name, value in row["components_s"].items()}, row["step"])

    def timeline(self, timeline: Row) -> None:
        pass

    def end(self, result: Result, model: nn.Module | None) -> None:
        self._try(lambda writer: writer.close())

    def _add(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._try(lambda writer, name=name, value=value: writer.add_scalar(name, value, step))

    def _try(self, write: Callable[..., Any]) -> None:
        """Write, unless writing has failed before."""
        try:
            if self._writer is not None:
                write(self._writer)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._writer = None
        self._failed(f"the tracker cannot be written and is left out from here on: {error.strerror or error}")
