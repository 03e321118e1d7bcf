"""`paceline data`: list the built-in data sets, fetch one, verify one.

Each function prints its lines and returns the exit code. A download shows a progress bar on a terminal; piped, it prints a line
for each quarter of a file.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Self

from paceline.data import fashion_mnist
from paceline.errors import DataError
from paceline.output import is_terminal, say

if TYPE_CHECKING:  # rich is slow to import, and few commands download
    from rich.progress import Progress, TaskID


def list_data(data_dir: Path | None = None) -> int:
    """Each data set, its size (training + validation images), and where it is or how to get it."""
    for name, source in fashion_mnist.SOURCES.items():
        folder = fashion_mnist.find(name, data_dir)
        if source.ships:
            place = "ships with paceline"
        else:
            place = str(folder) if folder else f"not found: {fashion_mnist.WAYS_TO_GET_IT}"
        print(f"{name:<20}{source.size:<18}{place}")
    return 0


def fetch(name: str, data_dir: Path | None = None) -> int:
    """Download `name` unless it is complete already: in `data_dir` if given, otherwise anywhere that `load` searches."""
    if fashion_mnist.source_named(name).ships:
        print(f"{name} ships with paceline: nothing to fetch")
        return 0
    try:
        folder = fashion_mnist.find(name) if data_dir is None else None
        if folder is not None and all(verdict.ok for verdict in fashion_mnist.verify(folder, name)):
            print(f"{name} is already in {folder}: all files are correct")
            return 0
        with DownloadProgress() as progress:
            folder = fashion_mnist.fetch_fashion_mnist(data_dir, progress)
    except DataError as error:
        print(f"{name} was not fetched: {error}")
        return 1
    print(f"{name} is in {folder}: all files are correct")
    return 0


def verify(name: str, data_dir: Path | None = None) -> int:
    """Check each file of `name` against its published SHA-256: only in `data_dir` if given, otherwise where `load` reads it."""
    ships = fashion_mnist.source_named(name).ships
    folder = fashion_mnist.find(name) if ships or data_dir is None else data_dir
    if folder is None:
        print(f"{name} was not found: {fashion_mnist.WAYS_TO_GET_IT}")
        return 1
    print(f"{name} in {folder}")
    verdicts = fashion_mnist.verify(folder, name)
    for verdict in verdicts:
        print(f"  {'ok ' if verdict.ok else 'BAD'} {verdict.file:<28}{verdict.detail}")
    return 0 if all(verdict.ok for verdict in verdicts) else 1


class DownloadProgress:
    """Shows how far a download is: rich's bars on a terminal, otherwise a plain line for each quarter of a file."""

    def __init__(self) -> None:
        self._terminal = is_terminal(sys.stdout)
        self._last = ""
        self._bars: Progress | None = None  # started with the first download, so that nothing is drawn without one
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, file: str, done: int, total: int | None) -> None:
        if self._terminal:
            self._draw(file, done, total)
            return
        quarter = f"{file} {4 * done // total if total else ''}"
        if quarter != self._last:
            self._last = quarter
            say(f"{file}: {done / 1e6:.1f} MB" if total is None else f"{file}: {done / 1e6:.1f} of {total / 1e6:.1f} MB")

    def _draw(self, file: str, done: int, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        if self._bars is None:
            columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
            self._bars = Progress(*columns, console=Console(file=sys.stdout))
            self._bars.start()
        if file not in self._tasks:
            self._tasks[file] = self._bars.add_task(file, total=total)
        self._bars.update(self._tasks[file], completed=done, total=total)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()
