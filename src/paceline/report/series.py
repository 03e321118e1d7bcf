"""The rows of metrics.jsonl as columns of numbers, whatever state the file is in, thinned to what a screen can show.

A long run has a million rows, and its page must still open at once. So rows are read one by one into flat arrays, and a series
of more than `MOST_ROWS` is cut into bins of which every column keeps its smallest and largest value: no peak is smoothed away.
"""

import json
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.report.confined import AnyPath

MOST_ROWS = 2_000
_MOST_COLUMNS = 40
_LONGEST_NAME = 80
_AXES = ("step", "epoch", "time_s")  # they only grow: their extremes are a bin's ends
_MOST_NOTES = 200


@dataclass
class Columns:
    """Numbers by name, all of one length; nan where a row had none."""

    values: dict[str, "array[float]"] = field(default_factory=dict)
    count: int = 0
    _known: set[str] = field(default_factory=lambda: {"kind"})

    def add(self, row: Mapping[str, Any]) -> None:
        """One more row: of its fields, those that are numbers, and of `components_s` each part as `components_s.NAME`."""
        flat = row if row.keys() <= self._known else self._flatten(row)
        for name, column in self.values.items():
            value = flat.get(name)
            try:
                column.append(value if type(value) is float or type(value) is int else math.nan)
            except OverflowError:  # an integer beyond all floats
                column.append(math.nan)
        self.count += 1

    def _flatten(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The numbers of a row, with a column for each; most rows have only those that are there, and need none of this."""
        flat = {name: value for name, value in row.items() if type(value) is float or type(value) is int}
        parts = row.get("components_s")
        if type(parts) is dict:
            flat |= {f"components_s.{name}": value for name, value in parts.items() if number(value) is not None}
        for name in [name for name in flat if name not in self.values and len(name) <= _LONGEST_NAME]:
            if len(self.values) < _MOST_COLUMNS:
                self.values[name] = array("d", [math.nan]) * self.count
                self._known.add(name)
        return flat

    def drop_from(self, step: float) -> None:
        """Leave out the rows of this step and later ones."""
        steps = self.values.get("step")
        if steps is None:
            return
        kept = [index for index, value in enumerate(steps) if not value >= step]
        self.values = {name: array("d", [column[index] for index in kept]) for name, column in self.values.items()}
        self.count = len(kept)

    def last(self, name: str) -> float | None:
        """The last finite value of a column."""
        return next((value for value in reversed(self.values.get(name, array("d"))) if math.isfinite(value)), None)


@dataclass
class Metrics:
    """What a metrics.jsonl says."""

    step: Columns = field(default_factory=Columns)
    epoch: Columns = field(default_factory=Columns)
    health: Columns = field(default_factory=Columns)
    notes: list[str] = field(default_factory=list)
    resumed: dict[str, Any] | None = None
    """The last `resume` row."""
    unreadable: int = 0
    """Lines that hold no row of ours; one at the end that is still being written is not counted."""


def read_metrics_columns(path: AnyPath) -> Metrics:
    """The rows of a metrics.jsonl as `records.read_metrics` would have them: what a resumed run did again is there once."""
    found = Metrics()
    if not path.is_file():  # opening a pipe would wait for its writer
        raise FileNotFoundError(path)
    tables = {"step": found.step, "epoch": found.epoch, "health": found.health}
    for row in _rows(path, found):
        kind = row.get("kind")
        if kind in tables:
            tables[kind].add(row)
        elif kind == "note" and len(found.notes) < _MOST_NOTES:
            found.notes.append(text(row.get("text")))
        elif kind == "resume":
            _resume(found, row)
    return found


def thin(columns: Columns, most: int = MOST_ROWS) -> dict[str, list[float | int | None]]:
    """The columns as lists for JSON, of at most `most` rows: the first, the last, and each column's extremes in every bin."""
    kept: range | list[int] = range(columns.count)
    if columns.count > most:
        shown = [column for name, column in columns.values.items() if name not in _AXES]
        bins = max(1, (most - 2) // (2 * max(1, len(shown))))
        chosen = {0, columns.count - 1}
        for index in range(bins):
            low, high = columns.count * index // bins, columns.count * (index + 1) // bins
            for column in shown:
                chosen.update(_extremes(column, low, high))
        kept = sorted(chosen)
    return {name: [short(column[index]) for index in kept] for name, column in columns.values.items()}


def number(value: Any) -> float | None:
    """A finite number, or None: records write nan as text, and a foreign file may hold anything."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def short(value: float) -> float | int | None:
    """A number with the digits that a chart can show; whole ones as such."""
    if not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.7g}")


def text(value: Any, most: int = 2_000) -> str:
    """A value from a record as text for a reader: no control characters, no endless lines."""
    words = value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
    words = "".join(c if c.isprintable() else " " for c in words[: most + 1])
    return words if len(words) <= most else words[:most] + " ..."


def _rows(path: AnyPath, found: Metrics) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for line in file:
            row = _decode(line)
            if isinstance(row, dict) and isinstance(row.get("kind"), str):
                yield row
            elif line.strip() and line.endswith(b"\n"):
                found.unreadable += 1


_DECODER = json.JSONDecoder()


def _decode(line: bytes) -> Any:
    """What a line says, None where it is no JSON. `json.loads` would take 4.1 us a row, not 2.4: it looks for an encoding."""
    try:
        words = line.decode().strip()
        row, end = _DECODER.raw_decode(words)
    except (ValueError, RecursionError):
        return None
    return row if end == len(words) else None


def _resume(found: Metrics, row: dict[str, Any]) -> None:
    step = number(row.get("step"))
    found.resumed = row
    if step is None:
        return
    # A checkpoint at an epoch's last step comes before its validation: the epoch's row is said again.
    found.epoch.drop_from(step)
    for columns in (found.step, found.health):
        columns.drop_from(step + 0.5)
    contract = row.get("contract")
    workers = number(contract.get("workers")) if isinstance(contract, dict) else None
    where = f" on {workers:.0f} worker{'s' if workers != 1 else ''}" if workers is not None else ""
    found.notes.append(f"resumed from step {step:,.0f}{where}")


def _extremes(column: "array[float]", low: int, high: int) -> list[int]:
    """Where the smallest and the largest value of a bin are."""
    values = column[low:high]
    if not math.isfinite(sum(values)):  # nan has no place in an order
        finite = [value for value in values if math.isfinite(value)]
        return [low + values.index(each) for each in (min(finite), max(finite))] if finite else []
    return [low + values.index(min(values)), low + values.index(max(values))]
