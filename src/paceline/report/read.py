"""A record, a scaling record, a study or toys as one JSON-able dict: the source that the page and the board draw.

Records come from runs that were killed, from full disks and from other programs. So `read_source` never raises: it lists what
it could not read in `problems` and returns the rest. Nothing here writes, not even a lock file.
"""

import math
import shlex
from array import array
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from paceline.contract import contract_lines
from paceline.errors import PacelineError, UsageError
from paceline.output import plural
from paceline.phases import batch_words
from paceline.records import unit_of
from paceline.report.confined import AnyPath
from paceline.report.landscapes import view_landscapes, view_sharpness
from paceline.report.learning import view_learning
from paceline.report.series import (
    Columns,
    Metrics,
    lines,
    number,
    phases_so_far,
    planned_phases,
    read_metrics_columns,
    short,
    text,
    thin,
)
from paceline.report.sources import (
    LEARNING_FILE,
    SHARPNESS,
    STUDY_FILES,
    folder_of,
    is_running,
    kind_of,
    read_file,
    read_object,
    status_of,
)
from paceline.report.summary import summarize, tone
from paceline.report.tables import order_components, view_scale, view_study
from paceline.report.timeline import view_timeline
from paceline.report.toys import view_toys
from paceline.status import Status
from paceline.study.results import check_results
from paceline.toml import read_toml


def read_source(path: AnyPath, end: int | None = None) -> dict[str, Any]:
    """Everything a page shows of a folder or a file. It never raises: `problems` lists what is missing or broken.

    Rows of metrics.jsonl from byte `end` on are left out, if it is given: the board sends those one by one.
    """
    path = folder_of(path)
    source: dict[str, Any] = {
        "id": str(path),
        "name": text(path.stem if path.is_file() else path.resolve().name, 200) or str(path),
        "kind": kind_of(path),
        "path": str(path),
        "status": Status.UNKNOWN,
        "why": "",
        "error": None,
        "when": None,
        "contract": [],
        "facts": {},
        "options": {},
        "unit": "samples",
        "environment": {},
        "last": {},
        "series": {"step": {}, "epoch": {}, "health": {}},
        "phases": [],
        "joins": [],
        "batch": "",
        "workers": "",
        "landscapes": [],
        **dict.fromkeys(("where", "layers", "scale", "timeline", "study", "learning", "sharpness", "toys")),
        "notes": [],
        "problems": [],
    }
    try:
        match source["kind"]:
            case "train":
                _fill_train(source, path, end)
            case "scale":
                _fill_scale(source, path)
            case "study":
                _fill_study(source, path)
            case "toys":
                _fill_toys(source, path)
            case _:
                _fill_unknown(source, path)
    except Exception as error:  # one unexpected record must not break the page of the other runs
        source["problems"].append(f"cannot be read: {type(error).__name__}: {text(str(error), 300)}")
    source["summary"] = summarize(source)
    source["tone"] = tone(source["status"])
    return source


def _fill_train(source: dict[str, Any], path: AnyPath, end: int | None) -> None:
    problems = source["problems"]
    about = read_object(path / "environment.json", problems, missing="environment.json is missing: no contract, no versions")
    result = read_object(path / "result.json", problems)
    status = source["status"] = status_of(path, result)
    metrics = Metrics()
    try:
        metrics = read_metrics_columns(path / "metrics.jsonl", end)
    except FileNotFoundError:
        problems.append("metrics.jsonl is missing: no curves")
    except OSError as error:
        problems.append(f"metrics.jsonl cannot be read: {error.strerror}")
    else:
        if metrics.unreadable:
            problems.append(f"metrics.jsonl: {plural(metrics.unreadable, 'line')} skipped: not a valid row")
        if not (metrics.step.count or metrics.epoch.count):
            _explain_no_steps(status, metrics, problems)
    facts = _object(about.get("contract")) | _object(_object(metrics.resumed).get("contract"))
    source["facts"] = {name: value for name, value in facts.items() if _is_plain(value)}
    source["unit"] = unit_of(source["facts"])
    source["contract"] = _contract(facts)
    source["environment"] = _environment(about, _object(metrics.resumed))
    source["when"] = text(about.get("when"), 40) or None
    if about and not source["contract"]:
        problems.append("environment.json has no contract")
    if result and not isinstance(result.get("status"), str):
        problems.append("result.json does not say how the run ended")
    if source["status"] == Status.CUT_SHORT:
        problems.append("result.json is missing and no run is writing to this record: the run was cut short")
    source["why"] = text(result.get("why"))
    source["error"] = _error(source["status"], result)
    source["options"] = _options(path / "config.toml")
    _fill_growth(source, metrics, facts, number(result.get("steps")))
    if not source["phases"]:  # the page places the steps of a growing batch
        _set_epochs(metrics, number(facts.get("steps_per_epoch")))
    source["series"] = {name: thin(getattr(metrics, name)) for name in ("step", "epoch", "health")}
    source["notes"] = metrics.notes
    source["last"] = _last(metrics, result)
    source["where"] = _step_times(metrics.health)
    source["layers"] = metrics.layers.view()
    if (path / "timeline.json").is_file():
        source["timeline"] = view_timeline(read_file(path / "timeline.json", problems), problems)
    source["landscapes"] = view_landscapes(path, problems)
    if (path / SHARPNESS).is_file() and (found := read_object(path / SHARPNESS, problems)):
        source["sharpness"] = view_sharpness(found, problems)


def _fill_growth(source: dict[str, Any], metrics: Metrics, facts: Mapping[str, Any], steps: float | None) -> None:
    """The phases of a growing batch, and the workers that joined."""
    planned = planned_phases(facts)
    source["phases"] = phases_so_far(metrics, planned, steps)
    newest = metrics.phases[-1] if metrics.phases else {}  # after a resume the contract may be newer
    total = newest.get("total_steps") if newest.get("step", -1) >= (metrics.resumed or {}).get("step", -1) else None
    source["facts"] |= {} if total is None else {"total_steps": short(total)}
    batches = [phase["global_batch"] for phase in max(source["phases"], planned, key=len)]
    source["batch"] = batch_words([int(batch) for batch in batches]) if len(batches) > 1 else ""
    source["joins"] = metrics.joins
    counts = sorted({int(join[name]) for join in metrics.joins for name in ("was", "workers")})
    source["workers"] = f"{counts[0]:,} to {counts[-1]:,}" if len(counts) > 1 else ""


def _explain_no_steps(status: str, metrics: Metrics, problems: list[str]) -> None:
    """Say why there are no curves. A run that started now, or failed at once, has no steps yet: nothing is missing."""
    if status in (Status.FAILED, Status.DIVERGED):
        metrics.notes.append("no curves: the run ended before its first metrics were recorded")
    elif status != Status.RUNNING:
        problems.append("metrics.jsonl has no steps: no curves")


def _fill_scale(source: dict[str, Any], path: AnyPath) -> None:
    file = path if path.is_file() else path / "scale.json"
    found = read_object(file, source["problems"])
    source["scale"] = view_scale(found, source["problems"])
    source["unit"] = source["scale"]["unit"]
    counts = found.get("counts")
    contracts = [_object(_object(row).get("contract")) for row in counts] if isinstance(counts, list) else []
    lines = [_contract(facts) for facts in contracts]
    source["contract"] = [line for line in lines[0] if all(line in each for each in lines)] if lines else []
    about = _object(found.get("environment"))
    source["environment"], source["when"] = _environment(about), text(about.get("when"), 40) or None
    source["status"] = Status.DONE if source["scale"]["counts"] else Status.UNKNOWN


def _fill_study(source: dict[str, Any], path: AnyPath) -> None:
    file = path if path.is_file() else next(path / name for name in STUDY_FILES if (path / name).is_file())
    found = read_file(file, source["problems"])
    if source["problems"]:
        return
    try:
        results = check_results(found, str(file))
    except PacelineError as error:
        source["problems"].append(str(error))
        return
    view = source["study"] = view_study(results, source["problems"])
    source["name"] = view["name"] or source["name"]
    source["learning"] = view_learning(_learning(path, results, source["problems"]), source["problems"])
    about = _object(results.get("environment"))
    source["environment"], source["when"] = _environment(about), text(about.get("when"), 40) or None
    running = path.is_dir() and any(map(is_running, path.glob("*/metrics.jsonl")))
    whole = view["planned"] is None or view["ended"] >= view["planned"]
    source["status"] = Status.RUNNING if running else Status.DONE if whole else Status.INCOMPLETE


def _learning(path: AnyPath, results: Mapping[str, Any], problems: list[str]) -> Any:
    """The learning curve of a study's results: in the same file, or next to it."""
    if path.is_file():
        return results.get("learning_curve")
    file = path / LEARNING_FILE
    found = read_object(file, problems) if file.is_file() else {}
    if found and found.get("study") != results["study"]:
        problems.append(f"{LEARNING_FILE} is not shown: it was made with other options; run paceline learning-curve to its end")
        return None
    return found.get("learning_curve")


def _fill_toys(source: dict[str, Any], path: AnyPath) -> None:
    found = read_object(path if path.is_file() else path / "toys.json", source["problems"])
    source["toys"] = view_toys(found, source["problems"])
    about = _object(found.get("environment"))
    source["environment"], source["when"] = _environment(about), text(about.get("when"), 40) or None
    source["status"] = Status.DONE if source["toys"] else Status.UNKNOWN


def _fill_unknown(source: dict[str, Any], path: AnyPath) -> None:
    if not path.exists():
        source["problems"].append("no such file or folder")
    elif path.is_dir():
        source["problems"].append(
            "not a record: it has none of metrics.jsonl, environment.json, result.json, scale.json, study.json and toys.json"
        )
    else:
        read_file(path, source["problems"])
        source["problems"] = source["problems"] or ["JSON, but neither study results nor a scaling measurement nor toys"]


def _error(status: str, result: Mapping[str, Any]) -> dict[str, str] | None:
    """Why a run failed, the line of the user's code where it did, and the whole traceback; None if it did not fail."""
    if status not in (Status.FAILED, Status.DIVERGED) or not result.get("why"):
        return None
    return {
        "why": text(result["why"]).removeprefix(f"{status}: "),
        **{name: lines(result.get(name)) for name in ("where", "traceback")},
    }


def _options(path: AnyPath) -> dict[str, str | int | float]:
    """The options in a record's config.toml; empty if it cannot be read. They only serve to compare runs."""
    try:
        found = read_toml(cast(Path, path), path.name)
    except UsageError:
        return {}
    return {
        text(name, 60): text(value, 200) if isinstance(value, str) else value
        for name, value in found.items()
        if _is_plain(value)
    }


def _contract(facts: Mapping[str, Any]) -> list[list[str]]:
    """A contract's lines, as its run printed them."""
    return [[what, text(line)] for what, line in contract_lines(facts)]


def _environment(about: Mapping[str, Any], resumed: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Where and how a run was started and resumed, as text by name: versions, machine, commands, git revision."""
    found = {name: about.get(name) for name in ("when", "python", "system", "machine", "processor", "cores", "git", "devices")}
    for name, command in (("command", about.get("command")), ("resumed with", (resumed or {}).get("command"))):
        if isinstance(command, list):
            found[name] = shlex.join(text(word, 500) for word in command[:200])
    versions = _object(about.get("versions"))
    found |= {name: versions[name] for name in list(versions)[:30]}
    if "task" in about:
        found["task"] = about["task"]
    if isinstance(found["devices"], list):
        found["devices"] = ", ".join(text(each, 200) for each in found["devices"][:20])
    return {text(name, 60): text(value) for name, value in found.items() if value not in (None, "", [])}


def _set_epochs(metrics: Metrics, steps_per_epoch: float | None) -> None:
    """Write epochs as fractions, so that rows within an epoch get their own places on the epoch axis."""
    if not steps_per_epoch or steps_per_epoch <= 0:
        ends = metrics.epoch.values
        if "step" not in ends or not ends.get("epoch") or not ends["epoch"][0] > 0:
            return
        steps_per_epoch = ends["step"][0] / ends["epoch"][0] or 1.0
    for columns in (metrics.step, metrics.health):
        if "step" in columns.values:
            columns.values["epoch"] = array("d", (step / steps_per_epoch for step in columns.values["step"]))


def _last(metrics: Metrics, result: Mapping[str, Any]) -> dict[str, float | int | None]:
    """Where the run ended, or has got to: from its result, or from its last rows."""
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


def _step_times(health: Columns) -> dict[str, Any] | None:
    """The mean time of each component of a step. A health row counts for the steps since the row before it."""
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
    slowest, lag_s = _straggler(health)
    return {
        "components_s": {name: short(mean) for name, mean in order_components(means).items()},
        "step_s": short(sum(means.values())),
        "slowest": slowest,
        "lag_s": None if lag_s is None else short(lag_s),
        "rows": health.count,
    }


def _straggler(health: Columns) -> tuple[int | None, float | None]:
    """The worker that was slowest in at least two thirds of the rows, and its mean lag in those."""
    ranks = health.values.get("slowest", array("d"))
    slow = Counter(rank for rank in ranks if math.isfinite(rank))
    rank, count = slow.most_common(1)[0] if slow else (math.nan, 0)
    if 3 * count < 2 * health.count or not count:
        return None, None
    timed = zip(health.values.get("lag_s", []), ranks, strict=False)
    lags = [lag for lag, slowest in timed if slowest == rank and math.isfinite(lag)]
    return int(rank), math.fsum(lags) / len(lags) if lags else None


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _either(value: float | None, other: float | None) -> float | None:
    return other if value is None else value
