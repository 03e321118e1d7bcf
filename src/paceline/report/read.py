"""A record, a scale record or a study as one JSON-able dict: what the page and the board show.

Records come from runs that were killed, disks that were full and programs that are not ours. So nothing here raises: what
cannot be read is said in `problems`, and the rest is shown. Nothing here writes, not even a lock file.
"""

import math
import os
from array import array
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, reason
from paceline.files import is_locked, read_json
from paceline.records import COMPONENTS, unit_of
from paceline.report.confined import AnyPath
from paceline.report.ends import read_ends
from paceline.report.facts import contract_lines, environment_lines
from paceline.report.series import Columns, Metrics, number, read_metrics_columns, short, text, thin
from paceline.report.summary import sentence, tone
from paceline.report.tables import view_landscape, view_scale, view_study
from paceline.report.timeline import view_timeline
from paceline.study.results import check_results

STUDY_FILES = ("study.json", "results.json")
"""What a study's folder has its results in."""

_OF_A_RECORD = (
    "metrics.jsonl",
    "environment.json",
    "result.json",
    "config.toml",
    "timeline.json",
    "landscape.json",
    "course.csv",
)


def read_source(path: AnyPath) -> dict[str, Any]:
    """Everything a page shows of a folder or a file. `problems` says what is missing or broken; it never raises."""
    path = _folder_of(path)
    source: dict[str, Any] = {
        "id": str(path),
        "name": text(path.stem if path.is_file() else path.resolve().name, 200) or str(path),
        "kind": kind_of(path),
        "path": str(path),
        "status": "unknown",
        "why": "",
        "when": None,
        "contract": [],
        "facts": {},
        "unit": "samples",
        "environment": {},
        "last": {},
        "series": {"step": {}, "epoch": {}, "health": {}},
        **dict.fromkeys(("where", "scale", "timeline", "study", "landscape")),
        "notes": [],
        "problems": [],
    }
    fill = {"train": _fill_train, "scale": _fill_scale, "study": _fill_study}.get(source["kind"], _fill_unknown)
    try:
        fill(source, path)
    except Exception as error:  # a record nobody thought of must not take the other runs' page with it
        source["problems"].append(f"cannot be read: {type(error).__name__}: {text(str(error), 300)}")
    try:
        source["summary"] = sentence(source)
    except Exception:
        source["summary"] = f"{source['name']} cannot be summed up: it holds values of unexpected kinds."
    source["tone"] = tone(source["status"])
    return source


def read_summary(path: AnyPath) -> dict[str, Any]:
    """A line of a list of runs, cheap enough for thousands: reads no long file but its end. It never raises."""
    kind = kind_of(path)
    line: dict[str, Any] = {"id": str(path), "name": text(path.name, 200), "kind": kind, "path": str(path), "status": "unknown"}
    names = ("when", "task", "model", "workers", "virtual_workers", "global_batch", "optimizer")
    line |= dict.fromkeys((*names, "unit", "accuracy", "loss", "samples_per_s", "steps", "total_steps"))
    try:
        if kind == "train":
            _line_of_train(line, path)
        elif kind in ("scale", "study"):
            source = read_source(path)
            view = source[kind] or {}
            line |= {"status": source["status"], "when": source["when"], "task": view.get("task"), "unit": view.get("unit")}
            if kind == "scale" and view.get("counts"):
                last = view["counts"][-1]
                line |= {name: last[name] for name in ("workers", "virtual_workers", "global_batch", "samples_per_s")}
    except Exception as error:
        line["why"] = f"{type(error).__name__}: {text(str(error), 200)}"
    line["when"] = line["when"] or _changed(path)
    line["tone"] = tone(line["status"])
    return line


def find_sources(folder: Path) -> list[Path]:
    """The records, scale records and studies right under a folder, the newest last."""
    try:
        with os.scandir(folder) as entries:
            paths = [Path(entry.path) for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:
        return []
    return sorted((path for path in paths if kind_of(path) != "unknown"), key=lambda path: (_changed(path) or "", path))


def kind_of(path: AnyPath) -> str:
    """train, scale, study or unknown, by the files that are there."""
    if path.is_file():
        found = _read_json(path, [])
        if not isinstance(found, dict):
            return "unknown"
        return "scale" if found.get("kind") == "scale" else "study" if "study" in found and "runs" in found else "unknown"
    if (path / "scale.json").is_file():
        return "scale"
    if any((path / name).is_file() for name in ("metrics.jsonl", "environment.json", "result.json")):
        return "train"
    return "study" if any((path / name).is_file() for name in STUDY_FILES) else "unknown"


def is_running(metrics: AnyPath) -> bool:
    """Whether somebody writes to this metrics.jsonl: its writer holds a lock on it. Ours is shared, so readers see no other."""
    try:
        if not metrics.is_file():  # opening a pipe would wait for its writer
            return False
        with metrics.open("rb") as file:
            return is_locked(file)
    except OSError:
        return False


def _folder_of(path: AnyPath) -> AnyPath:
    """A file that lies in a record stands for the record."""
    return path.parent if path.name in (*_OF_A_RECORD, "scale.json", *STUDY_FILES) and path.is_file() else path


def _fill_train(source: dict[str, Any], path: AnyPath) -> None:
    problems = source["problems"]
    about = _read_object(path / "environment.json", problems, missing="environment.json is missing: no contract, no versions")
    result = _read_object(path / "result.json", problems)
    metrics = Metrics()
    try:
        metrics = read_metrics_columns(path / "metrics.jsonl")
    except FileNotFoundError:
        problems.append("metrics.jsonl is missing: no curves")
    except OSError as error:
        problems.append(f"metrics.jsonl cannot be read: {error.strerror}")
    else:
        if metrics.unreadable:
            problems.append(f"metrics.jsonl: {metrics.unreadable:,} line(s) hold no row of ours and are left out")
        if not (metrics.step.count or metrics.epoch.count):
            problems.append("metrics.jsonl has no step in it: no curves")
    facts = _object(about.get("contract")) | _object(_object(metrics.resumed).get("contract"))
    source["facts"] = {name: value for name, value in facts.items() if isinstance(value, str | int | float)}
    source["unit"] = unit_of(source["facts"])
    source["contract"] = contract_lines(facts)
    source["environment"] = environment_lines(about, _object(metrics.resumed))
    source["when"] = text(about.get("when"), 40) or None
    source["status"] = _status(path, result)
    if about and not source["contract"]:
        problems.append("environment.json holds no contract")
    if result and not isinstance(result.get("status"), str):
        problems.append("result.json does not say how the run ended")
    if source["status"] == "cut short":
        problems.append("result.json is missing and nobody writes to this record: the run was cut short")
    source["why"] = text(result.get("why"))
    _set_epochs(metrics, number(facts.get("steps_per_epoch")))
    source["series"] = {name: thin(getattr(metrics, name)) for name in ("step", "epoch", "health")}
    source["notes"] = metrics.notes
    source["last"] = _last(metrics, result)
    source["where"] = _where(metrics.health)
    if (path / "timeline.json").is_file():
        source["timeline"] = view_timeline(_read_json(path / "timeline.json", problems), problems)
    if (path / "landscape.json").is_file():
        source["landscape"] = view_landscape(_read_json(path / "landscape.json", problems), problems)


def _fill_scale(source: dict[str, Any], path: AnyPath) -> None:
    file = path if path.is_file() else path / "scale.json"
    found = _read_object(file, source["problems"])
    source["scale"] = view_scale(found, source["problems"])
    source["unit"] = source["scale"]["unit"]
    counts = found.get("counts")
    contracts = [_object(_object(row).get("contract")) for row in counts] if isinstance(counts, list) else []
    lines = [contract_lines(facts) for facts in contracts]
    source["contract"] = [line for line in lines[0] if all(line in each for each in lines)] if lines else []
    about = _object(found.get("environment"))
    source["environment"], source["when"] = environment_lines(about), text(about.get("when"), 40) or None
    source["status"] = "done" if source["scale"] and source["scale"]["counts"] else "unknown"


def _fill_study(source: dict[str, Any], path: AnyPath) -> None:
    file = path if path.is_file() else next(path / name for name in STUDY_FILES if (path / name).is_file())
    found = _read_json(file, source["problems"])
    if source["problems"]:
        return
    try:
        results = check_results(found, str(file))
    except PacelineError as error:
        source["problems"].append(str(error))
        return
    view = source["study"] = view_study(results, source["problems"])
    source["name"] = view["name"] or source["name"]
    about = _object(results.get("environment"))
    source["environment"], source["when"] = environment_lines(about), text(about.get("when"), 40) or None
    running = path.is_dir() and any(map(is_running, path.glob("*/metrics.jsonl")))
    whole = view["planned"] is None or view["ended"] >= view["planned"]
    source["status"] = "running" if running else "done" if whole else "in part"


def _fill_unknown(source: dict[str, Any], path: AnyPath) -> None:
    if not path.exists():
        source["problems"].append("there is no such file or folder")
    elif path.is_dir():
        source["problems"].append(
            "no record: none of metrics.jsonl, environment.json, result.json, scale.json, study.json is here"
        )
    else:
        _read_json(path, source["problems"])
        source["problems"] = source["problems"] or ["JSON, but neither results of a study nor a scale measurement"]


def _line_of_train(line: dict[str, Any], path: AnyPath) -> None:
    about, result = (_read_object(path / name, []) for name in ("environment.json", "result.json"))
    ends = read_ends(path / "metrics.jsonl")
    facts = _object(about.get("contract")) | ends.contract
    for name in ("task", "model", "optimizer"):
        line[name] = text(facts.get(name) or about.get(name), 200) or None
    for name in ("workers", "virtual_workers", "global_batch", "total_steps"):
        line[name] = number(facts.get(name))
    line["unit"] = unit_of(facts) if facts else None
    line["when"] = text(about.get("when"), 40) or None
    line["status"] = _status(path, result)
    found = _object(result.get("metrics"))
    line |= {name: number(found.get(name)) for name in ("accuracy", "loss")}
    line |= {name: number(result.get(name)) or None for name in ("steps", "samples_per_s")}
    if result and line["steps"] is not None:
        return
    for name in ("steps", "samples_per_s", "accuracy", "loss"):
        line[name] = _either(getattr(ends, name), line[name])


def _status(path: AnyPath, result: Mapping[str, Any]) -> str:
    """How the run stands. While somebody writes to the record it is running, whatever an earlier attempt left."""
    if is_running(path / "metrics.jsonl"):
        return "running"
    said = result.get("status")
    if isinstance(said, str) and said:
        return text(said, 60)
    return "unknown" if (path / "result.json").exists() else "cut short"


def _set_epochs(metrics: Metrics, steps_per_epoch: float | None) -> None:
    """Epochs as fractions, so that rows within an epoch have places of their own on its axis."""
    if not steps_per_epoch or steps_per_epoch <= 0:
        ends = metrics.epoch.values
        if "step" not in ends or not ends.get("epoch") or not ends["epoch"][0] > 0:
            return
        steps_per_epoch = ends["step"][0] / ends["epoch"][0] or 1.0
    for columns in (metrics.step, metrics.health):
        if "step" in columns.values:
            columns.values["epoch"] = array("d", (step / steps_per_epoch for step in columns.values["step"]))


def _last(metrics: Metrics, result: Mapping[str, Any]) -> dict[str, float | int | None]:
    """Where the run ended, or stands: from its result, or from its last rows."""
    said, epoch, step = _object(result.get("metrics")), metrics.epoch, metrics.step
    found = {
        "accuracy": _either(number(said.get("accuracy")), epoch.last("val_accuracy")),
        "loss": _either(number(said.get("loss")), epoch.last("val_loss")),
        "train_loss": step.last("loss"),
        "epochs": _either(number(result.get("epochs")), epoch.last("epoch")),
        "steps": number(result.get("steps")) or step.last("step") or epoch.last("step"),
        "time_s": number(result.get("train_time_s")) or max(step.last("time_s") or 0.0, epoch.last("time_s") or 0.0) or None,
        "samples_per_s": number(result.get("samples_per_s"))
        or epoch.last("samples_per_s")
        or metrics.health.last("samples_per_s"),
        "noise_scale": _either(step.last("noise_scale"), epoch.last("noise_scale")),
        "memory_bytes": metrics.health.last("memory_bytes"),
    }
    return {name: None if value is None else short(value) for name, value in found.items()}


def _where(health: Columns) -> dict[str, Any] | None:
    """Where the run's steps went, on the whole: each health row counts for the steps since the one before."""
    names = [name for name in health.values if name.startswith("components_s.")]
    steps = health.values.get("step")
    if not names or steps is None:
        return None
    weights = [max(0.0, step - before) for before, step in zip([0.0, *steps], steps, strict=False)]
    means = {}
    for name in names:
        pairs = [(value, w) for value, w in zip(health.values[name], weights, strict=True) if value == value and w == w]
        whole = sum(w for _, w in pairs)
        if whole:
            means[name.removeprefix("components_s.")] = sum(value * w for value, w in pairs) / whole
    ordered = [*(name for name in COMPONENTS if name in means), *(name for name in means if name not in COMPONENTS)]
    slowest, lag_s = _straggler(health)
    return {
        "components_s": {name: short(means[name]) for name in ordered},
        "step_s": short(sum(means.values())),
        "slowest": slowest,
        "lag_s": None if lag_s is None else short(lag_s),
        "rows": health.count,
    }


def _straggler(health: Columns) -> tuple[int | None, float | None]:
    """The worker that was slowest in two rows of three or more, and how far behind it was in those, on the mean."""
    ranks = health.values.get("slowest", array("d"))
    slow = Counter(rank for rank in ranks if math.isfinite(rank))
    rank, count = slow.most_common(1)[0] if slow else (math.nan, 0)
    if 3 * count < 2 * health.count or not count:
        return None, None
    lags = [lag for lag, who in zip(health.values.get("lag_s", []), ranks, strict=False) if who == rank and math.isfinite(lag)]
    return int(rank), math.fsum(lags) / len(lags) if lags else None


def _read_object(path: AnyPath, problems: list[str], missing: str = "") -> dict[str, Any]:
    if not path.exists():
        problems += [missing] if missing else []
        return {}
    return _read_json(path, problems) or {}


def _read_json(path: AnyPath, problems: list[str]) -> dict[str, Any] | None:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {reason(error)}")
        return None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _either(value: float | None, other: float | None) -> float | None:
    return other if value is None else value


def _changed(path: AnyPath) -> str | None:
    """When a source last changed, for those that do not say when they began."""
    for name in ("metrics.jsonl", "scale.json", *STUDY_FILES, "environment.json", ""):
        try:
            return datetime.fromtimestamp((path / name if name else path).stat().st_mtime, UTC).isoformat(timespec="seconds")
        except OSError:
            continue
    return None
