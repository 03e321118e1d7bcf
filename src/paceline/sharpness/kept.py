"""What was measured, kept in the record: sharpness.json, and sharpness.partial.json until all measures are finished.

A second call continues with the measures that are missing, if it is about the same weights and samples.
"""

import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.dist.world import World
from paceline.errors import RecordError, reason
from paceline.files import read_json, write_json
from paceline.records import environment

FILE, PARTIAL = "sharpness.json", "sharpness.partial.json"
MEASURED = ("keskar", "sam", "adaptive", "hessian")
"""Fields of the file that are measured one after the other."""


class Kept:
    """The contents of the files, the same on every rank. Only rank 0 writes."""

    def __init__(self, record: Path, about: dict[str, Any], here: World) -> None:
        """Read what is known. `about`: what was looked at. Collective: call on every rank."""
        self._record, self._about, self._here = record, about, here
        self._begin_s = time.monotonic()
        found = [_read(record / name, about) for name in (FILE, PARTIAL)] if here.is_main else []
        self._found: dict[str, Any] = here.broadcast({name: value for each in found for name, value in each.items()})
        self._before_s = float(self._found.pop("time_s", 0.0))
        self._notes: dict[str, str] = {name: text for name, text in self._found.pop("notes", {}).items() if self.has(name)}
        self.new = False
        """Whether anything was measured in this call."""

    def get(self, name: str) -> Any:
        """A measured field; None if it is missing."""
        return self._found.get(name)

    def has(self, *names: str) -> bool:
        """Whether all of these fields are known."""
        return all(name in self._found for name in names)

    def note(self, name: str, text: str) -> None:
        """Keep a line about a measure: why it was left out, or may be wrong."""
        self._notes[name] = text

    def add(self, fields: dict[str, Any]) -> None:
        """Add finished measures, and write them to the disk."""
        self._found.update(fields)
        self.new = True
        self._write(PARTIAL)

    def finish(self) -> dict[str, Any]:
        """Write the whole file and return its contents."""
        if self.new:
            self._write(FILE)
        if self._here.is_main:
            with suppress(OSError):
                (self._record / PARTIAL).unlink(missing_ok=True)
        return {**self._contents(), "new": self.new}

    def _contents(self) -> dict[str, Any]:
        about = dict(self._about)
        first = {name: about.pop(name) for name in ("samples", "set", "loss")}
        return {
            **first,
            **{name: self._found[name] for name in MEASURED if name in self._found},
            **about,
            "workers": self._here.size,
            "time_s": self._before_s + time.monotonic() - self._begin_s,
            **({"notes": self._notes} if self._notes else {}),
            "environment": environment(),
        }

    def _write(self, name: str) -> None:
        if not self._here.is_main:
            return
        try:
            write_json(self._record / name, self._contents())
        except OSError as error:
            raise RecordError(f"cannot write {self._record / name}: {reason(error)}") from error


def _read(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The measured fields of a file about the same weights and samples; nothing if it is another, or unreadable."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    loss = found.get("loss")
    same = isinstance(loss, int | float) and math.isclose(loss, about["loss"], rel_tol=1e-4, abs_tol=1e-9)
    if not same or any(found.get(name) != value for name, value in about.items() if name != "loss"):
        return {}
    return {name: found[name] for name in (*MEASURED, "time_s", "notes") if name in found and _is_sound(name, found[name])}


def _is_sound(name: str, value: Any) -> bool:
    """Whether a field has the form in which it was written: a damaged one is measured again."""
    match name:
        case "time_s":
            return isinstance(value, int | float) and math.isfinite(value)
        case "notes":
            return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
        case "keskar":
            return isinstance(value, list) and all(_has(each, "space", "epsilon", "sharpness") for each in value)
        case "hessian":
            return _has(value, "top", "residuals", "trace", "trace_error", "vectors", "steps") and _has(
                value.get("density"), "x", "y"
            )
    return _has(value, "rho", "rise")


def _has(value: Any, *names: str) -> bool:
    return isinstance(value, dict) and all(name in value for name in names)
