"""The last rows of a metrics.jsonl that say where a run stands, found from its end: for a list of thousands of runs."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from paceline.report.confined import AnyPath
from paceline.report.series import number

_TAIL_BYTES = 8_192  # read row by row: the last few
_MOST_BYTES = 1 << 20  # searched for a row of one kind: an epoch may have thousands of step rows
_MOST_ROWS = 100  # of one kind that are looked at


@dataclass
class Ends:
    """What the end of a file says: numbers by the names that a list has for them."""

    steps: float | None = None
    accuracy: float | None = None
    loss: float | None = None
    samples_per_s: float | None = None
    contract: dict[str, Any] = field(default_factory=dict)
    """Of the last `resume` row, whose run may have other workers than the one that began."""


def read_ends(path: AnyPath) -> Ends:
    """What the last rows say; what of it is not there, or too far from the end, is None."""
    found = Ends()
    try:
        text = _last_bytes(path)
    except OSError:
        return found
    resume = next(_backwards(text, "resume"), {})
    contract = resume.get("contract")
    found.contract = contract if isinstance(contract, dict) else {}
    resumed_at, after = number(resume.get("step")), text.rfind(b'"kind": "resume"')
    rows = [row for line in text[-_TAIL_BYTES:].splitlines() if (row := _decode(line))]
    for row in rows:
        found.steps = number(row.get("step")) or found.steps
    for row in _backwards(text, "epoch", after, resumed_at):
        for name, column in (("accuracy", "val_accuracy"), ("loss", "val_loss"), ("samples_per_s", "samples_per_s")):
            if getattr(found, name) is None:
                setattr(found, name, number(row.get(column)))
        if found.samples_per_s is not None and (found.accuracy is not None or found.loss is not None):
            break
    speeds = [number(row.get("samples_per_s")) for row in rows if row.get("kind") == "health"]
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


def _backwards(text: bytes, kind: str, after: int = -1, resumed_at: float | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a kind, the last first; not those before a resume (at `after`) that were done again."""
    at = len(text)
    for _ in range(_MOST_ROWS):
        at = text.rfind(f'"kind": "{kind}"'.encode(), 0, at)
        if at < 0:
            return
        end = text.find(b"\n", at)
        row = _decode(text[text.rfind(b"\n", 0, at) + 1 : end if end >= 0 else len(text)])
        again = row and at < after and resumed_at is not None and (number(row.get("step")) or 0) >= resumed_at
        if row and row.get("kind") == kind and not again:
            yield row


def _decode(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # cut in two by where the search begins, or still being written
        return {}
    return row if isinstance(row, dict) else {}
