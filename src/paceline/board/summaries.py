"""One line of the list of runs: what a record came to, read from its small files and the end of its metrics.jsonl.

Cheap enough for thousands of runs: of a long metrics.jsonl, only the last megabyte is searched.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from paceline.records import is_repeated, parse_row, unit_of
from paceline.report.confined import AnyPath
from paceline.report.read import changed_at, kind_of, read_object, read_source, status_of
from paceline.report.series import number, text
from paceline.report.summary import tone
from paceline.status import Status

_TAIL_BYTES = 8_192  # at the end of the file, read row by row
_MOST_BYTES = 1 << 20  # searched for rows of one kind: an epoch may have thousands of step rows
_MOST_ROWS = 100  # of one kind that are parsed


def read_summary(path: AnyPath) -> dict[str, Any]:
    """The line of a run, scaling record or study in the list. It never raises."""
    kind = kind_of(path)
    line: dict[str, Any] = {"id": str(path), "name": text(path.name, 200), "kind": kind, "path": str(path)}
    names = ("when", "task", "model", "workers", "virtual_workers", "global_batch", "optimizer")
    line |= dict.fromkeys((*names, "unit", "accuracy", "loss", "samples_per_s", "steps", "total_steps"))
    line["status"] = Status.UNKNOWN
    try:
        if kind == "train":
            _fill_train(line, path)
        elif kind in ("scale", "study"):
            source = read_source(path)
            view = source[kind] or {}
            line |= {"status": source["status"], "when": source["when"], "task": view.get("task"), "unit": view.get("unit")}
            if kind == "scale" and view.get("counts"):
                last = view["counts"][-1]
                line |= {name: last[name] for name in ("workers", "virtual_workers", "global_batch", "samples_per_s")}
    except Exception as error:
        line["why"] = f"{type(error).__name__}: {text(str(error), 200)}"
    line["when"] = line["when"] or changed_at(path)
    line["tone"] = tone(line["status"])
    return line


def _fill_train(line: dict[str, Any], path: AnyPath) -> None:
    about, result = (read_object(path / name, []) for name in ("environment.json", "result.json"))
    latest = _read_latest(path / "metrics.jsonl")
    facts = _object(about.get("contract")) | latest.contract
    for name in ("task", "model", "optimizer"):
        line[name] = text(facts.get(name) or about.get(name), 200) or None
    for name in ("workers", "virtual_workers", "global_batch", "total_steps"):
        line[name] = number(facts.get(name))
    line["unit"] = unit_of(facts) if facts else None
    line["when"] = text(about.get("when"), 40) or None
    line["status"] = status_of(path, result)
    found = _object(result.get("metrics"))
    line |= {name: number(found.get(name)) for name in ("accuracy", "loss")}
    line |= {name: number(result.get(name)) or None for name in ("steps", "samples_per_s")}
    if result and line["steps"] is not None:
        return
    for name in ("steps", "samples_per_s", "accuracy", "loss"):
        value = getattr(latest, name)
        line[name] = line[name] if value is None else value


@dataclass
class _Latest:
    """The last values in a metrics.jsonl, by their names in the list."""

    steps: float | None = None
    accuracy: float | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    contract: dict[str, Any] = field(default_factory=dict)
    """From the last `resume` row: a resumed run may have other workers."""


def _read_latest(path: AnyPath) -> _Latest:
    """The last values of a metrics.jsonl; None for those that are missing, or too far from its end."""
    found = _Latest()
    try:
        tail = _last_bytes(path)
    except OSError:
        return found
    resumes = list(_backwards(tail, "resume"))
    found.contract = _object(resumes[0][1].get("contract")) if resumes else {}
    rows = [row for line in tail[-_TAIL_BYTES:].splitlines() if (row := parse_row(line))]
    for row in rows:
        found.steps = number(row.get("step")) or found.steps
    for at, row in _backwards(tail, "epoch"):
        if any(at < later and is_repeated("epoch", row.get("step"), resume["step"]) for later, resume in resumes):
            continue
        for name, column in (("accuracy", "val_accuracy"), ("loss", "val_loss"), ("samples_per_s", "samples_per_s")):
            if getattr(found, name) is None:
                setattr(found, name, number(row.get(column)))
        if found.samples_per_s is not None and (found.accuracy is not None or found.loss is not None):
            break
    speeds = [number(row.get("samples_per_s")) for row in rows if row["kind"] == "health"]
    if not found.samples_per_s:
        found.samples_per_s = next((speed for speed in reversed(speeds) if speed), None)
    return found


def _last_bytes(path: AnyPath) -> bytes:
    if not path.is_file():  # opening a pipe would wait for its writer
        return b""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _MOST_BYTES))
        return file.read(_MOST_BYTES)


def _backwards(tail: bytes, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(position, row) of the rows of a kind, the last row first."""
    at = len(tail)
    for _ in range(_MOST_ROWS):
        at = tail.rfind(f'"kind": "{kind}"'.encode(), 0, at)
        if at < 0:
            return
        end = tail.find(b"\n", at)
        row = parse_row(tail[tail.rfind(b"\n", 0, at) + 1 : end if end >= 0 else len(tail)])
        if row and row["kind"] == kind:
            yield at, row


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
