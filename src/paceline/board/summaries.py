"""One line of the list of runs: what a record came to, read from its small files and the end of its metrics.jsonl.

Cheap enough for thousands of runs: of a long metrics.jsonl, only the last megabyte is searched. The best accuracy of such a run
is in course.csv, which has one short line per epoch; its best loss is not shown.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from paceline.records import is_repeated, parse_row, unit_of
from paceline.report.confined import AnyPath
from paceline.report.read import read_source
from paceline.report.series import number, phase_of, planned_phases, text
from paceline.report.sources import changed_at, kind_of, read_object, status_of
from paceline.report.summary import tone
from paceline.status import Status

_TAIL_BYTES = 8_192  # at the end of the file, read row by row
_MOST_BYTES = 1 << 20  # searched for rows of one kind: an epoch may have thousands of step rows
_MOST_RESUMES, _MOST_PHASES, _MOST_EPOCHS = 100, 100, 10_000  # rows that are parsed
_OF_AN_EPOCH = {"accuracy": "val_accuracy", "loss": "val_loss", "samples_per_s": "samples_per_s", "epochs": "epoch"}


def read_summary(path: AnyPath) -> dict[str, Any]:
    """The line of a run, scaling record or study in the list. It never raises."""
    kind = kind_of(path)
    line: dict[str, Any] = {"id": str(path), "name": text(path.name, 200), "kind": kind, "path": str(path)}
    names = ("when", "task", "model", "workers", "virtual_workers", "global_batch", "optimizer")
    line |= dict.fromkeys((*names, "unit", "accuracy", "loss", "best", "monitored", "samples_per_s", "steps", "total_steps"))
    line |= {**dict.fromkeys(("epochs", "total_epochs", "time_s", "planned", "failed")), "status": Status.UNKNOWN, "detail": ""}
    try:
        if kind == "train":
            _fill_train(line, path)
        elif kind == "toys":
            source = read_source(path)
            line |= {"status": source["status"], "when": source["when"], "task": "toys"}
        elif kind in ("scale", "study"):
            source = read_source(path)
            view = source[kind] or {}
            line |= {"status": source["status"], "when": source["when"], "task": view.get("task"), "unit": view.get("unit")}
            if kind == "scale" and view.get("counts"):
                measured = ("workers", "virtual_workers", "global_batch", "samples_per_s")
                line |= {name: _range(view["counts"], name) for name in measured}
                line["detail"] = _speed_up(view["counts"])
            elif kind == "study" and view:
                line |= {"planned": view["planned"], "failed": sum(arm["failed"] for arm in view["arms"])}
                line["detail"] = "a trial with --mini: its numbers mean nothing" if view["mini"] else _best_arm(view)
    except Exception as error:
        line["why"] = f"{type(error).__name__}: {text(str(error), 200)}"
    line["when"] = line["when"] or changed_at(path)
    line["tone"] = tone(line["status"])
    return line


def _range(counts: Sequence[Mapping[str, Any]], name: str) -> float | dict[str, float] | None:
    """One number if all counts have the same, else the lowest and the highest; None without any."""
    found = [row[name] for row in counts if row[name] is not None]
    if not found:
        return None
    return found[0] if min(found) == max(found) else {"low": min(found), "high": max(found)}


def _speed_up(counts: Sequence[Mapping[str, Any]]) -> str:
    first, last = counts[0], counts[-1]
    if last["workers"] == first["workers"] or not first["samples_per_s"]:
        return ""
    ratio, linear = last["samples_per_s"] / first["samples_per_s"], last["workers"] / first["workers"]
    return f"{first['workers']} to {last['workers']} workers: {ratio:.2f} times as fast, {ratio / linear:.0%} of linear"


def _best_arm(view: Mapping[str, Any]) -> str:
    arms = [arm for arm in view["arms"] if arm["mean"] is not None]
    if not arms:
        return ""
    best = (max if view["metric"] == "accuracy" else min)(arms, key=lambda arm: arm["mean"])
    return f"best arm: {best['name']}, {view['metric']} {best['spread']}"


def _fill_train(line: dict[str, Any], path: AnyPath) -> None:
    about, result = (read_object(path / name, []) for name in ("environment.json", "result.json"))
    latest = _read_latest(path / "metrics.jsonl")
    facts = _object(about.get("contract")) | latest.contract
    for name in ("task", "model", "optimizer"):
        line[name] = text(facts.get(name) or about.get(name), 200) or None
    for name in ("workers", "virtual_workers", "global_batch", "total_steps"):
        line[name] = number(facts.get(name))
    line["global_batch"], line["total_steps"] = _growth(facts, latest.phases) or (line["global_batch"], line["total_steps"])
    line["total_epochs"] = number(facts.get("epochs"))
    line["unit"] = unit_of(facts) if facts else None
    line["when"] = text(about.get("when"), 40) or None
    line["status"] = status_of(path, result)
    found = _object(result.get("metrics"))
    line |= {name: number(found.get(name)) for name in ("accuracy", "loss")}
    line |= {name: number(result.get(name)) or None for name in ("steps", "samples_per_s", "epochs")}
    line["time_s"] = number(result.get("train_time_s")) or latest.time_s
    if not Status(line["status"]).good and line["status"] != Status.RUNNING:
        line["why"] = _first_line(result.get("why")).removeprefix(f"{line['status']}: ")
    if not result or line["steps"] is None:
        for name in ("steps", "samples_per_s", "accuracy", "loss", "epochs", "time_s"):
            value = getattr(latest, name)
            line[name] = line[name] if value is None else value
    line["best"] = _best(line, latest, path)
    best = _object(result.get("best"))
    if number(best.get("value")) is not None:
        metric = str(best.get("metric"))
        line["monitored"] = {"metric": text(metric, 200), "best": number(best["value"]), "last": number(found.get(metric))}


def _growth(facts: Mapping[str, Any], began: Sequence[Mapping[str, float]]) -> tuple[Any, float | None] | None:
    """The range of the batches and the number of steps of a run with a batch schedule; None for other runs."""
    phases = [*planned_phases(facts), *began]
    if not phases:
        return None
    total = began[0].get("total_steps") if began else None
    return _range(phases, "global_batch"), number(facts.get("total_steps")) if total is None else total


def _best(line: dict[str, Any], latest: "_Latest", path: AnyPath) -> float | None:
    """The best validation of a run: its highest accuracy or, without accuracies, its lowest loss. None if not known."""
    accuracy, loss = number(line["accuracy"]), number(line["loss"])
    if accuracy is not None:
        seen = latest.accuracies if latest.is_whole else _course_accuracies(path / "course.csv")
        return max([*seen, accuracy]) if seen or latest.is_whole else None
    return min([*latest.losses, loss]) if loss is not None and latest.is_whole else None


def _course_accuracies(path: AnyPath) -> list[float]:
    try:
        lines = _last_bytes(path).decode(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for each in lines:
        with suppress(ValueError):  # the header, or a line that is being written
            found.append(float(each.rpartition(",")[2]))
    return [value for value in found if math.isfinite(value)]


def _first_line(value: Any) -> str:
    lines = value.strip().splitlines() if isinstance(value, str) else []
    return text(lines[0], 300) if lines else ""


@dataclass
class _Latest:
    """The last values in a metrics.jsonl, by their names in the list."""

    steps: float | None = None
    accuracy: float | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    epochs: float | None = None
    time_s: float | None = None
    accuracies: list[float] = field(default_factory=list)
    """Of all validations, if the file is whole."""
    losses: list[float] = field(default_factory=list)
    is_whole: bool = True
    """Whether all of the file was searched."""
    phases: list[dict[str, float]] = field(default_factory=list)
    """The phases of a batch schedule that began, the last one first."""
    contract: dict[str, Any] = field(default_factory=dict)
    """From the last `resume` row: a resumed run may have other workers."""


def _read_latest(path: AnyPath) -> _Latest:
    """The last values of a metrics.jsonl; None for those that are missing, or too far from its end."""
    found = _Latest()
    try:
        tail = _last_bytes(path)
    except OSError:
        return found
    resumes = list(_backwards(tail, "resume", _MOST_RESUMES))
    found.contract = _object(resumes[0][1].get("contract")) if resumes else {}
    for at, phase in _backwards(tail, "phase", _MOST_PHASES):
        if not any(at < later and is_repeated("phase", phase.get("step"), resume["step"]) for later, resume in resumes):
            found.phases += phase_of(phase)
    rows = [row for line in tail[-_TAIL_BYTES:].splitlines() if (row := parse_row(line))]
    for row in rows:
        found.steps = number(row.get("step")) or found.steps
        found.time_s = number(row.get("time_s")) or found.time_s
    found.is_whole = len(tail) < _MOST_BYTES and tail.count(b'"kind": "epoch"') <= _MOST_EPOCHS
    for at, row in _backwards(tail, "epoch", _MOST_EPOCHS):
        if any(
            at < later and is_repeated("epoch", row.get("step"), resume["step"], resume.get("validated") is True)
            for later, resume in resumes
        ):
            continue
        for name, column in _OF_AN_EPOCH.items():
            if getattr(found, name) is None:
                setattr(found, name, number(row.get(column)))
        accuracy, loss = number(row.get("val_accuracy")), number(row.get("val_loss"))
        found.accuracies += [] if accuracy is None else [accuracy]
        found.losses += [] if loss is None else [loss]
        if not found.is_whole and found.samples_per_s is not None and (found.accuracy is not None or found.loss is not None):
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


def _backwards(tail: bytes, kind: str, most: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """(position, row) of the rows of a kind, the last row first."""
    at = len(tail)
    for _ in range(most):
        at = tail.rfind(f'"kind": "{kind}"'.encode(), 0, at)
        if at < 0:
            return
        end = tail.find(b"\n", at)
        row = parse_row(tail[tail.rfind(b"\n", 0, at) + 1 : end if end >= 0 else len(tail)])
        if row and row["kind"] == kind:
            yield at, row


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
