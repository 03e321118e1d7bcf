"""What a folder or a file is: a record, a scaling record, a study or toys; its JSON files; and whether a run still writes.

Nothing here raises for a file that is missing or broken, and nothing writes, not even a lock file.
"""

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from paceline.errors import reason
from paceline.files import is_locked, read_json
from paceline.report.confined import AnyPath
from paceline.report.series import text
from paceline.status import Status

STUDY_FILES = ("study.json", "results.json")
"""The files that may hold a study's results."""

LANDSCAPES = "landscape"
"""The folder in a record that holds its loss surfaces."""

SHARPNESS = "sharpness.json"
"""The file of a record that says how sharp its minimum is."""

LEARNING_FILE = "learning-curve.json"
"""The file of a learning curve in its study's folder."""

_OF_A_RECORD = (
    "metrics.jsonl",
    "environment.json",
    "result.json",
    "config.toml",
    "timeline.json",
    SHARPNESS,
    "course.csv",
)


def find_sources(folder: Path) -> list[Path]:
    """The records, scaling records, studies and toys directly in a folder, the newest last."""
    try:
        with os.scandir(folder) as entries:
            paths = [Path(entry.path) for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:
        return []
    return sorted((path for path in paths if kind_of(path) != "unknown"), key=lambda path: (changed_at(path) or "", path))


def kind_of(path: AnyPath) -> str:
    """train, scale, study, toys or unknown, from the files that exist."""
    if path.is_file():
        found = read_file(path, [])
        if not isinstance(found, dict):
            return "unknown"
        if found.get("kind") in ("scale", "toys"):
            return str(found["kind"])
        return "study" if "study" in found and "runs" in found else "unknown"
    if (path / "scale.json").is_file():
        return "scale"
    if any((path / name).is_file() for name in ("metrics.jsonl", "environment.json", "result.json")):
        return "train"
    if any((path / name).is_file() for name in STUDY_FILES):
        return "study"
    return "toys" if (path / "toys.json").is_file() else "unknown"


def is_running(metrics: AnyPath) -> bool:
    """Whether a run is writing to this metrics.jsonl: the writer holds a lock. Ours is shared, so readers do not count."""
    try:
        if not metrics.is_file():  # opening a pipe would wait for its writer
            return False
        with metrics.open("rb") as file:
            return is_locked(file)
    except OSError:
        return False


def status_of(path: AnyPath, result: Mapping[str, Any]) -> str:
    """How a run stands. While a run is writing to the record it is running, whatever an earlier attempt left."""
    if is_running(path / "metrics.jsonl"):
        return Status.RUNNING
    found = result.get("status")
    if isinstance(found, str) and found:
        return text(found, 60)
    return Status.UNKNOWN if (path / "result.json").exists() else Status.CUT_SHORT


def changed_at(path: AnyPath) -> str | None:
    """When a source last changed: for sources that do not say when they started."""
    for name in ("metrics.jsonl", "scale.json", *STUDY_FILES, "toys.json", "environment.json", ""):
        try:
            return datetime.fromtimestamp((path / name if name else path).stat().st_mtime, UTC).isoformat(timespec="seconds")
        except OSError:
            continue
    return None


def folder_of(path: AnyPath) -> AnyPath:
    """The record that a file belongs to; the path itself if it belongs to none."""
    if path.parent.name == LANDSCAPES and path.name.endswith(".json") and kind_of(path.parent.parent) == "train":
        return path.parent.parent
    return path.parent if path.name in (*_OF_A_RECORD, "scale.json", "toys.json", *STUDY_FILES) and path.is_file() else path


def read_object(path: AnyPath, problems: list[str], missing: str = "") -> dict[str, Any]:
    """The object in a JSON file; empty, with a problem, if it cannot be read. `missing` is the problem if there is no file."""
    if not path.exists():
        problems += [missing] if missing else []
        return {}
    said = len(problems)
    found = read_file(path, problems)
    if not isinstance(found, dict) and len(problems) == said:
        problems.append(f"{path.name} is not a JSON object")
    return found if isinstance(found, dict) else {}


def read_file(path: AnyPath, problems: list[str]) -> dict[str, Any] | None:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} cannot be read: {reason(error)}")
        return None
