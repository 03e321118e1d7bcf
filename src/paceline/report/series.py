"""The rows of metrics.jsonl as columns of numbers, thinned to what a screen can show. The file may be damaged.

A long run has a million rows, and its page must still open at once. So rows are read one by one into flat arrays. A series of
more than `MOST_ROWS` rows is cut into bins, and each bin keeps the smallest and largest value of every column: no peak is lost.
"""

import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.output import plural
from paceline.records import is_repeated, parse_row
from paceline.report.confined import AnyPath

MOST_ROWS = 2_000
_MOST_COLUMNS = 40
_LONGEST_NAME = 80
_AXES = ("step", "epoch", "time_s")  # these only grow, so their extremes are the ends of a bin
_MOST_NOTES = 200
_MOST_PHASES = 1_000
_MOST_LAYERS, _MOST_LAYER_ROWS = 400, 500
_MOST_JOINS = 1_000
_OF_LAYERS = ("update_ratio", "gradient_norm")
_OF_A_PHASE = ("step", "epoch", "global_batch", "virtual_workers")
_OF_A_JOIN = ("step", "epoch", "workers", "was", "join_s")


@dataclass
class Columns:
    """Columns of numbers by name, all of the same length; nan where a row has no number."""

    values: dict[str, "array[float]"] = field(default_factory=dict)
    count: int = 0
    _known: set[str] = field(default_factory=lambda: {"kind"})

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row: its fields that are numbers, and each component of `components_s` as `components_s.NAME`."""
        flat = row if row.keys() <= self._known else self._flatten(row)
        for name, column in self.values.items():
            value = flat.get(name)
            try:
                column.append(value if type(value) is float or type(value) is int else math.nan)
            except OverflowError:  # an integer too large for a float
                column.append(math.nan)
        self.count += 1

    def _flatten(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The numbers of a row, after adding columns for new names. Most rows have no new names and skip this."""
        flat = {name: value for name, value in row.items() if type(value) is float or type(value) is int}
        components = row.get("components_s")
        if type(components) is dict:
            flat |= {f"components_s.{name}": value for name, value in components.items() if number(value) is not None}
        for name in [name for name in flat if name not in self.values and len(name) <= _LONGEST_NAME]:
            if len(self.values) < _MOST_COLUMNS:
                self.values[name] = array("d", [math.nan]) * self.count
                self._known.add(name)
        return flat

    def drop_repeated(self, kind: str, resumed_at: float, validated: bool) -> None:
        """Leave out the rows of this kind that a run resumed at a step writes again."""
        steps = self.values.get("step")
        if steps is None:
            return
        kept = [index for index, step in enumerate(steps) if not is_repeated(kind, step, resumed_at, validated)]
        self.values = {name: array("d", [column[index] for index in kept]) for name, column in self.values.items()}
        self.count = len(kept)

    def last(self, name: str) -> float | None:
        """The last finite value of a column."""
        return next((value for value in reversed(self.values.get(name, array("d"))) if math.isfinite(value)), None)


@dataclass
class LayerRows:
    """The rows of kind "layers" (`--watch-layers`), all or every n-th: n doubles when there are twice as many as are shown."""

    names: list[str] = field(default_factory=list)
    count: int = 0
    """Layers of the model: `names` has at most `_MOST_LAYERS` of them, evenly spread."""
    _kept: list[int] = field(default_factory=list)
    _rows: list[tuple[dict[str, float | None], dict[str, "array[float]"]]] = field(default_factory=list)
    _seen: int = 0
    _every: int = 1

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row; one that does not fit the first is left out."""
        lists = [each for name in ("names", *_OF_LAYERS) if isinstance(each := row.get(name), list)]
        if len(lists) < 3 or not lists[0] or len({len(each) for each in lists}) > 1 or number(row.get("step")) is None:
            return
        names, *columns = lists
        if not self.names:
            self.count = len(names)
            self._kept = _spread(len(names), _MOST_LAYERS)
            self.names = [text(names[index], 200) for index in self._kept]
        if len(names) != self.count:
            return
        self._seen += 1
        if (self._seen - 1) % self._every:
            return
        values = {
            name: array("d", (_or_nan(each[index]) for index in self._kept))
            for name, each in zip(_OF_LAYERS, columns, strict=True)
        }
        self._rows.append(({name: number(row.get(name)) for name in _AXES}, values))
        if len(self._rows) >= 2 * _MOST_LAYER_ROWS:
            self._rows, self._every = self._rows[::2], 2 * self._every

    def drop_after(self, step: float) -> None:
        """Leave out the rows that a run resumed at this step writes again."""
        self._rows = [row for row in self._rows if (row[0]["step"] or 0) <= step]

    def view(self) -> dict[str, Any] | None:
        """The table for the page, one line per layer; None without rows."""
        rows = [self._rows[index] for index in _spread(len(self._rows), _MOST_LAYER_ROWS)]
        if not rows:
            return None
        table = {
            name: [[_rounded(values[name][line]) for _, values in rows] for line in range(len(self.names))]
            for name in _OF_LAYERS
        }
        places = {name: [place[name] for place, _ in rows] for name in _AXES}
        return {"names": self.names, "count": self.count, **places, **table}


@dataclass
class Metrics:
    """The contents of a metrics.jsonl."""

    step: Columns = field(default_factory=Columns)
    epoch: Columns = field(default_factory=Columns)
    health: Columns = field(default_factory=Columns)
    layers: LayerRows = field(default_factory=LayerRows)
    phases: list[dict[str, float]] = field(default_factory=list)
    """The phases of a batch schedule so far: the steps and epochs before each, its global batch and its parts."""
    joins: list[dict[str, float]] = field(default_factory=list)
    """The changes of the number of workers: the steps and epochs before each, the workers after and before it, its seconds."""
    notes: list[str] = field(default_factory=list)
    resumed: dict[str, Any] | None = None
    """The last `resume` row."""
    unreadable: int = 0
    """Lines that are not valid rows; a last line that is still being written is not counted."""


def read_metrics_columns(path: AnyPath, end: int | None = None) -> Metrics:
    """The rows that `records.read_metrics` would return, as columns; only those before byte `end`, if it is given."""
    found = Metrics()
    if not path.is_file():  # opening a pipe would wait for its writer
        raise FileNotFoundError(path)
    tables = {"step": found.step, "epoch": found.epoch, "health": found.health}
    for row in _rows(path, found, end):
        kind = row["kind"]
        if kind in tables:
            tables[kind].add(row)
        elif kind == "layers":
            found.layers.add(row)
        elif kind == "phase" and len(found.phases) < _MOST_PHASES:
            found.phases += phase_of(row)
        elif kind == "note" and len(found.notes) < _MOST_NOTES:
            found.notes.append(text(row.get("text")))
        elif kind == "resume":
            found.resumed = row
            found.notes.append(_resume_note(row))
            for name, columns in tables.items():
                columns.drop_repeated(name, row["step"], row.get("validated") is True)
            found.layers.drop_after(row["step"])
            found.phases = [phase for phase in found.phases if not is_repeated("phase", phase["step"], row["step"])]
            found.joins = [join for join in found.joins if not is_repeated("join", join["step"], row["step"])]
        elif kind == "join" and len(found.joins) < _MOST_JOINS:
            found.joins += _join_of(row)
            if found.notes and found.resumed and found.notes[-1] == _resume_note(found.resumed):
                found.notes[-1] = _join_note(row) or found.notes[-1]  # it says more
    return found


def _join_of(row: Mapping[str, Any]) -> list[dict[str, float]]:
    """The numbers of a join, in a list; an empty one if one of them is missing or cannot be drawn."""
    found = {name: value for name in _OF_A_JOIN if (value := number(row.get(name))) is not None and value >= 0}
    return [found] if len(found) == len(_OF_A_JOIN) and min(found["workers"], found["was"]) >= 1 else []


def phase_of(row: Mapping[str, Any]) -> list[dict[str, float]]:
    """The numbers of a phase, in a list; an empty one if one of them is missing or cannot be drawn.

    `total_steps` is in a row, not in a contract: with an automatic schedule, the length of a run changes with each phase.
    """
    total = number(row.get("total_steps"))
    found = {name: value for name in _OF_A_PHASE if (value := number(row.get(name))) is not None and value >= 0}
    usable = len(found) == len(_OF_A_PHASE) and min(found["global_batch"], found["virtual_workers"]) >= 1
    return [found | ({} if total is None else {"total_steps": total})] if usable else []


def planned_phases(facts: Mapping[str, Any]) -> list[dict[str, float]]:
    """The phases in a contract: of a given schedule all, of an automatic one those up to where the run was started."""
    found: list[dict[str, float]] = []
    step, listed = 0.0, facts.get("phases")
    for each in listed if isinstance(listed, list) else []:
        about = each if isinstance(each, dict) else {}
        found += phase_of({**about, "step": step, "epoch": about.get("start")})
        step += number(about.get("steps")) or 0.0
    return found


def phases_so_far(metrics: Metrics, planned: Sequence[dict[str, float]], steps: float | None) -> list[dict[str, float]]:
    """The phases that began. A run that branched off within a phase has no row of it: then the contract has it."""
    first = metrics.phases[0]["step"] if metrics.phases else steps or metrics.step.last("step") or 0.0
    return [phase for phase in planned if phase["step"] < first] + metrics.phases


def thin(columns: Columns, most: int = MOST_ROWS) -> dict[str, list[float | int | None]]:
    """The columns as lists for JSON, with at most `most` rows: the first, the last, and each column's extremes in every bin."""
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
    """The value if it is a finite number, else None. Records write nan as text, and a foreign file may hold anything."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        value = float(value)
    except OverflowError:
        return None
    return value if math.isfinite(value) else None


def short(value: float) -> float | int | None:
    """A number rounded to the digits that a chart can show; whole numbers as int."""
    if not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.7g}")


def text(value: Any, most: int = 2_000) -> str:
    """A value from a record as readable text: without control characters, and cut where it is long."""
    words = value if isinstance(value, str) else "" if value is None else json.dumps(value, default=str)
    words = "".join(c if c.isprintable() else " " for c in words[: most + 1])
    return words if len(words) <= most else words[:most] + " ..."


def lines(value: Any, most: int = 20_000) -> str:
    """Like `text`, but with its line breaks, and the end is kept if it is long: a traceback ends with the error."""
    words = value if isinstance(value, str) else ""
    kept = words if len(words) <= most else "... " + words[-most:]
    return "\n".join(text(line, most) for line in kept.expandtabs(4).splitlines()).rstrip()


def _rows(path: AnyPath, found: Metrics, end: int | None) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        at = 0
        for line in file:
            at += len(line)
            if end is not None and at > end:
                return
            row = parse_row(line)
            if row is not None:
                yield row
            elif line.strip() and line.endswith(b"\n"):
                found.unreadable += 1


def _resume_note(row: Mapping[str, Any]) -> str:
    contract = row.get("contract")
    workers = number(contract.get("workers")) if isinstance(contract, dict) else None
    where = "" if workers is None else f" on {plural(workers, 'worker')}"
    return f"resumed from step {row['step']:,}{where}"


def _join_note(row: Mapping[str, Any]) -> str:
    """What a join cost; "" if the row is incomplete."""
    joins, components = _join_of(row), row.get("components_s")
    if not joins or not isinstance(components, dict):
        return ""
    [join] = joins
    listed = ", ".join(
        f"{text(name, 20)} {value:.2f} s" for name, each in list(components.items())[:8] if (value := number(each))
    )
    workers = f"{join['was']:,.0f} to {plural(int(join['workers']), 'worker')}"
    return f"join after step {join['step']:,.0f}: {workers} in {join['join_s']:.1f} s ({listed})"


def _spread(count: int, most: int) -> list[int]:
    """All of `count` places, or `most` of them, evenly spread, with the first and the last."""
    return list(range(count)) if count <= most else [index * (count - 1) // (most - 1) for index in range(most)]


def _or_nan(value: Any) -> float:
    found = number(value)
    return math.nan if found is None or found < 0 else found


def _rounded(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None


def _extremes(column: "array[float]", low: int, high: int) -> list[int]:
    """The indices of the smallest and the largest value of a bin."""
    values = column[low:high]
    if not math.isfinite(sum(values)):  # nan cannot be ordered
        finite = [value for value in values if math.isfinite(value)]
        return [low + values.index(each) for each in (min(finite), max(finite))] if finite else []
    return [low + values.index(min(values)), low + values.index(max(values))]
