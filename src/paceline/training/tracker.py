"""Write a run to an experiment tracker (`--tracker`), by hooks on rank 0.

The library is called in a thread of its own: a server that is slow or gone does not hold up training, and an error ends the
tracker, not the run. tracker.json in the record keeps the tracker's own id of the run, so that a resumed run continues it. Its
rows are in the record, too: a resumed run sends those that the library does not have, and no row twice.
"""

import importlib.util
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from paceline.config import Config
from paceline.contract import Contract
from paceline.errors import UsageError, reason
from paceline.files import read_json, write_json
from paceline.records import parse_row, read_metrics
from paceline.status import Status
from paceline.training.hooks import Hooks, Moment, OwnHooks
from paceline.training.observers import Result

FILE = "tracker.json"
_END_S = 60.0  # how long the end of a run waits for the tracker
_TITLES = {"tensorboard": "TensorBoard", "wandb": "W&B", "mlflow": "MLflow", "trackio": "trackio"}
STEP_VALUE, EPOCH_VALUE = "train/loss", "samples_per_s"
"""A value of every step row, and one of every epoch row."""


@dataclass(frozen=True, kw_only=True)
class About:
    """What a library is told about the run when it starts."""

    project: str
    """The task's name: runs of one task belong together."""
    name: str
    """The record's name."""
    folder: Path
    """The record."""
    resumed_at: int | None
    """The step after which a resumed run continues; None for a new run."""
    contract: str
    """The contract as text."""
    params: Mapping[str, str | int | float | bool | None]
    """The options, and what the contract says."""
    known: Mapping[str, Any]
    """What tracker.json remembers of this run; empty if it is new to the tracker."""
    say: Callable[[str], None]
    """For one line that the user should know."""


class Library(Protocol):
    """A run in one tracker's library."""

    remembered: Mapping[str, Any]
    """What identifies the run, for tracker.json."""

    def last_step(self, name: str) -> int | None:
        """After a resume: the last step for which the library has this value, -1 if it has none; None if it cannot tell."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Store values under a step."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Store how the run ended, write everything out and close."""


def check_tracker(name: str) -> None:
    """Raise a UsageError if the tracker's library is not installed, before anything is loaded or written."""
    if name != "none" and importlib.util.find_spec(name) is None:
        raise UsageError(f"--tracker {name}: {_TITLES[name]} is not installed; pip install 'paceline[trackers]'")


class Tracker:
    """Passes the rows of a run to a library, in a thread. Rank 0 has one."""

    def __init__(self, config: Config, contract: Contract, folder: Path, resumes: bool, say: Callable[[str], None]) -> None:
        self._config, self._contract, self._folder = config, contract, folder
        self._resumes, self._say, self._failed = resumes, say, False
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
        self._library: Library | None = None
        self._sent: dict[str, int] = {}
        """The last step of each kind of row that the library has from before this start of the run."""
        self._step = 0
        """The last step that was logged: steps never go backwards."""

    def hooks(self) -> Hooks:
        """What the run calls."""
        return OwnHooks(on_start=self._start, on_step=self._pass_on, on_epoch=self._pass_on, on_end=self._end)

    def _start(self, moment: Moment) -> None:
        rows: list[dict[str, Any]] = []
        if self._resumes:
            with suppress(OSError):
                rows = [row for row in read_metrics(self._folder) if row["kind"] in ("step", "epoch", "health")]
        self._queue.put(partial(self._open, moment.step if self._resumes else None, _last_steps(self._folder)))
        self._queue.put(partial(self._send, rows))
        self._thread.start()

    def _pass_on(self, moment: Moment) -> None:
        if moment.rows and not self._failed:
            self._queue.put(partial(self._send, moment.rows))

    def _end(self, moment: Moment) -> None:
        if self._thread.ident is None:  # the run ended before it started
            return
        assert moment.result is not None
        self._queue.put(partial(self._finish, moment.rows, moment.result))
        self._queue.put(None)
        self._thread.join(_END_S)
        if self._thread.is_alive():
            self._say(f"the tracker is not done after {_END_S:.0f} s, and its last rows may be missing")

    def _work(self) -> None:
        """Do what was put into the queue, until the end; nothing more after an error."""
        while (work := self._queue.get()) is not None:
            try:
                if not self._failed:
                    work()
            except (Exception, SystemExit) as error:  # whatever a library raises: training goes on
                self._failed = True
                why = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                self._say(f"the tracker failed and is left out from here on: {' '.join(why.split())[:300]}")

    def _open(self, resumed_at: int | None, rows: Mapping[str, int]) -> None:
        """Open the library; `rows` has the last step of each kind of row, for a library that cannot tell."""
        from paceline.training.tracker_libraries import LIBRARIES

        name, file = self._config.tracker, self._folder / FILE
        remembered: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            remembered = read_json(file)
        known = remembered.get(name)
        about = About(
            project=self._contract.task,
            name=self._folder.name,
            folder=self._folder,
            resumed_at=resumed_at,
            contract="\n".join(f"    {what}: {text}" for what, text in self._contract.lines()),
            params=_params(self._config, self._contract),
            known=known if isinstance(known, dict) else {},
            say=self._say,
        )
        self._library = library = LIBRARIES[name](about)
        if library.remembered:
            write_json(file, {**remembered, name: library.remembered})
        if resumed_at is not None:
            has = {"step": library.last_step(STEP_VALUE), "epoch": library.last_step(EPOCH_VALUE)}
            self._sent = {kind: rows.get(kind, -1) if step is None else step for kind, step in has.items()}
            self._step = max(0, *self._sent.values())

    def _send(self, rows: Sequence[Mapping[str, Any]]) -> None:
        assert self._library is not None
        for row in rows:
            if row["kind"] in ("phase", "join", "layers"):  # the step rows have a phase's batch; layers are in the report
                continue
            kind = "epoch" if row["kind"] == "epoch" else "step"
            if row["step"] <= self._sent.get(kind, -1):
                continue
            if row["kind"] != "health":  # on a GPU that may be a few steps ahead of the metrics
                self._step = max(self._step, row["step"])
            values = _values(row)
            if values:
                self._library.log(values, self._step)

    def _finish(self, rows: Sequence[Mapping[str, Any]], result: Result) -> None:
        assert self._library is not None
        self._send(rows)
        self._library.finish(_summarize(result))


def _last_steps(folder: Path) -> dict[str, int]:
    """The last step of each kind of row in metrics.jsonl, rows that a resumed run repeats included."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for line in (folder / "metrics.jsonl").read_bytes().splitlines():
            row = parse_row(line) if line.strip() else None
            if row is not None and row["kind"] in ("step", "epoch"):
                found[row["kind"]] = max(found.get(row["kind"], -1), row["step"])
    return found


_ABOUT_ROW = ("kind", "step", "epoch", "time_s", "epoch_time_s")


def _values(row: Mapping[str, Any]) -> dict[str, float]:
    """The values of a row, under the names that they have in a tracker."""
    if row["kind"] == "health":
        return {f"step/{name}_s": value for name, value in row["components_s"].items()}
    if row["kind"] == "step":
        return {f"train/{name}": value for name, value in row.items() if name not in _ABOUT_ROW}
    found: dict[str, float] = {"epoch": row["epoch"], EPOCH_VALUE: row["samples_per_s"]}
    for name, value in row.items():
        if name.startswith("train_"):
            found[f"train/epoch_{name.removeprefix('train_')}"] = value
        elif name.startswith("val_"):
            found[f"validation/{name.removeprefix('val_')}"] = value
    return found


def _params(config: Config, contract: Contract) -> dict[str, Any]:
    """Options by their names, facts of the contract with `contract.` in front."""
    options = {field.name: getattr(config, field.name) for field in fields(config)}
    facts = {f"contract.{name}": value for name, value in contract.as_dict().items()}
    plain = (str, int, float, bool, type(None))
    return {name: value if isinstance(value, plain) else str(value) for name, value in {**options, **facts}.items()}


def _summarize(result: Result) -> dict[str, Any]:
    good = Status(result.status).good  # a run that will be resumed has no final values yet
    named = ("why", "epochs", "steps", "train_time_s", "model_sha256")
    return {
        "status": str(result.status),
        **{name: getattr(result, name) for name in named},
        **{f"final/{name}": value for name, value in result.metrics.items() if good},
        **{f"best/{name}": result.best[name] for name in ("epoch", "step", "value") if good and name in result.best},
    }
