"""The points that are done, in a file beside the result: an interrupted surface continues from it."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from paceline.errors import RecordError, reason

Values = dict[int, list[list[float]]]
"""By point: a row per data set, with its metrics."""


class Store:
    """An append-only file: a line that says what is evaluated, then a line per block of points."""

    def __init__(self, path: Path, about: Mapping[str, Any], shape: tuple[int, int]) -> None:
        """Continue the file if it is about the same; else start a new one. `shape`: sets and metrics of a point."""
        self.path, self.values = path, Values()
        head = json.dumps({"about": about}, sort_keys=True)
        lines = _lines(path)
        try:
            path.parent.mkdir(exist_ok=True)
            if lines and lines[0] == head:
                for line in lines[1:]:
                    self._read(line, shape)
                self._file: IO[str] = path.open("a", encoding="utf-8")
                self._file.write("\n")  # the last line may have been cut short
            else:
                self._file = path.open("w", encoding="utf-8")
                self._file.write(head + "\n")
            self._file.flush()
        except OSError as error:
            raise RecordError(f"cannot write {path}: {reason(error)}") from None

    def add(self, numbers: Sequence[int], values: Sequence[list[list[float]]]) -> None:
        """Keep some points; they are with the system when this returns."""
        new = dict(zip(numbers, values, strict=True))
        self.values |= new
        try:
            self._file.write(json.dumps(new) + "\n")
            self._file.flush()
        except OSError as error:
            raise RecordError(f"cannot write {self.path}: {reason(error)}; the same command continues") from None

    def close(self, *, done: bool) -> None:
        """Close the file, and remove it if the result is written."""
        with suppress(OSError):
            self._file.close()
            if done:
                self.path.unlink(missing_ok=True)

    def _read(self, line: str, shape: tuple[int, int]) -> None:
        """Take a line's points; skip a damaged line: its points are evaluated again."""
        with suppress(ValueError, TypeError, AttributeError):
            for number, rows in json.loads(line).items():
                values = [[float(value) for value in row] for row in rows]
                if len(values) == shape[0] and all(len(row) == shape[1] for row in values):
                    self.values[int(number)] = values


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
