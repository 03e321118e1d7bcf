"""Which records a folder holds, and what changed since the last look.

A look costs little when little has changed. A folder's modification time says whether names in it changed, so names are listed
again only then. Summaries are kept until the times or sizes of their files change. Runs that are training, or changed in the
last minute, are checked at every look; the others take turns, an eighth of them per look. Of a metrics.jsonl that a browser
follows, only appended bytes are read.

Nothing here writes. Links that lead out of the folder are not followed: folders that are links are left out (what they point to
inside the folder is listed under its own name), and a record whose files lead outside is listed but not read. Records are read
through `ConfinedPath`, which checks this again whenever a file is opened: a record may become a link after it was listed.
"""

import math
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.board.summaries import read_summary
from paceline.records import parse_row
from paceline.report.confined import AnyPath, ConfinedPath
from paceline.status import Status

MARKS = frozenset(
    {
        *("metrics.jsonl", "environment.json", "config.toml", "result.json", "course.csv", "timeline.json", "sharpness.json"),
        *("scale.json", "study.json", "results.json", "toys.json"),
    }
)
"""Files that make a folder a record."""

FOLDERS = ("landscape",)
"""Folders whose time is a mark of their record too: it changes when a file in them is added or replaced."""

Summary = dict[str, Any]


class Listing:
    """The records in a folder and one level below. `look` updates it; any thread may call it."""

    def __init__(self, root: Path, read: Callable[[ConfinedPath], Mapping[str, Any]] = read_summary) -> None:
        self.root = root.resolve()
        self.version = 0
        """Grows with every change that `changes` reports."""
        self.pending = 0
        """How many records were found but not read yet."""
        self._read = read
        self._folders = {".": _Folder(id=".", path=self.root, depth=0)}
        self._removed: dict[str, int] = {}
        self._unread: set[str] = set()
        self._turn = 0
        self._lock = threading.Lock()  # a browser may leave while its look runs, and another may ask for the next

    def look(self, *, everything: bool = False, budget_s: float = 1.0) -> None:
        """Find what changed. Stops reading when the budget is used up: `pending` says how many records are left."""
        with self._lock:
            self._look(everything, time.monotonic() + budget_s)

    def changes(self, since: int = 0) -> dict[str, Any]:
        """What changed after a version: changed and removed records. Version 0 gives everything."""
        with self._lock:
            known = [folder for folder in self._folders.values() if folder.summary is not None]
            return {
                "version": self.version,
                "pending": self.pending,
                "changed": [folder.summary for folder in known if folder.version > since],
                "removed": [id for id, version in self._removed.items() if version > since] if since else [],
            }

    def knows(self, id: str) -> bool:
        """Whether a record is listed and may be read, as of the last look."""
        folder = self._folders.get(id)
        return folder is not None and folder.summary is not None and not folder.refused

    def path(self, id: str) -> ConfinedPath | None:
        """The folder of a listed record; None if it is not listed yet, or has become a link."""
        if not self.knows(id):
            return None
        path = ConfinedPath(self.root if id == "." else self.root / id, self.root)
        return path if path.is_plain_folder() else None

    def marks(self, id: str) -> tuple[Any, ...]:
        """Times and sizes of a record's files, without those that only get appended rows: a change needs a complete read."""
        folder = self._folders.get(id)
        return tuple(mark for mark in folder.marks if mark[0] not in _APPENDED) if folder else ()

    def _look(self, everything: bool, end: float) -> None:
        self._turn += 1
        for number, folder in enumerate(list(self._folders.values())):
            due = everything or number % _TURNS == self._turn % _TURNS or folder.is_lively()
            if due and self._folders.get(folder.id) is folder:  # not removed while its parent folder was checked
                self._look_at(folder)
        version = self.version + 1
        newest_first = sorted(self._unread, key=lambda id: self._folders[id].mtime_ns, reverse=True)
        for done, id in enumerate(newest_first):
            if done and time.monotonic() > end:
                break
            self._unread.discard(id)
            folder = self._folders[id]
            summary = self._summary(folder)
            if summary != folder.summary:
                folder.summary, folder.version, self.version = summary, version, version
        self.pending = len(self._unread)

    def _look_at(self, folder: "_Folder") -> None:
        try:
            changed, names = folder.look()
        except OSError:  # gone, or not readable
            self._remove(folder.id)
            return
        asks_again = (
            folder.is_running() and self._turn % _RUNNING_TURNS == 0
        )  # a killed run changes no file, but its lock is gone
        if changed or asks_again:
            self._unread.add(folder.id)
        if not folder.marks:
            self._unread.discard(folder.id)
            self._forget(folder)
        if names is not None and folder.may_hold_records():
            self._adopt(folder, names)

    def _adopt(self, folder: "_Folder", names: set[str]) -> None:
        """Update the folders in a folder: check new ones, forget those that are gone."""
        prefix = "" if folder.depth == 0 else f"{folder.id}/"
        for id in [child for child in folder.children if child.rpartition("/")[2] not in names]:
            self._remove(id)
        folder.children = {prefix + name for name in names}
        for id in folder.children - self._folders.keys():
            child = _Folder(id=id, path=self.root / id, depth=folder.depth + 1)
            self._folders[id] = child
            self._look_at(child)

    def _remove(self, id: str) -> None:
        folder = self._folders.get(id)
        if folder is None:
            return
        for child in list(folder.children):
            self._remove(child)
        self._forget(folder)
        self._unread.discard(id)
        if folder.depth:  # the root may come back
            del self._folders[id]

    def _forget(self, folder: "_Folder") -> None:
        if folder.summary is not None:
            folder.summary = None
            self.version += 1
            self._removed[folder.id] = self.version

    def _summary(self, folder: "_Folder") -> Summary:
        """The summary of any record: one that cannot be read must not hide the others."""
        self._removed.pop(folder.id, None)
        about: Summary = {"id": folder.id, "name": folder.id if folder.depth else folder.path.name}
        try:
            folder.refused = _leads_elsewhere(folder.path, [mark[0] for mark in folder.marks], self.root)
            if not folder.refused:
                return {**self._read(ConfinedPath(folder.path, self.root)), **about}
            note = folder.refused
        except Exception as error:
            note = f"cannot be read: {type(error).__name__}: {error}"
        return {**about, "status": Status.UNREADABLE, "kind": "run", "note": note}


class Tail:
    """Reads what is appended to a metrics.jsonl after the tail was made."""

    def __init__(self, record: AnyPath) -> None:
        self._path = record / "metrics.jsonl"
        self._inode, self.end = self._start()

    def read(self) -> list[tuple[int, dict[str, Any]]] | None:
        """The rows appended since the last read, each with its end in the file.

        None if the whole record must be read again: the file was replaced or cut, or the run resumed and repeats rows.
        """
        try:
            with self._path.open("rb") as file:
                about = os.fstat(file.fileno())
                if about.st_ino != self._inode or about.st_size < self.end:
                    self._inode, self.end = self._start()
                    return None
                if about.st_size == self.end:
                    return []
                file.seek(self.end)
                text = file.read(_MOST_BYTES)
        except OSError:
            return []
        rows = []
        for line in text[: text.rfind(b"\n") + 1].splitlines(keepends=True):  # the last row may be incomplete
            self.end += len(line)
            row = parse_row(line)
            if row is not None:
                rows.append((self.end, row))
        return None if any(row["kind"] == "resume" for _, row in rows) else rows

    def _start(self) -> tuple[int, int]:
        """The file's inode, and the end of its last complete row."""
        try:
            with self._path.open("rb") as file:
                about = os.fstat(file.fileno())
                block = max(0, about.st_size - _LONGEST_ROW)
                file.seek(block)
                last = file.read(_LONGEST_ROW).rfind(b"\n")
        except OSError:
            return 0, 0
        return about.st_ino, block + last + 1 if last >= 0 else 0


_APPENDED = frozenset(("metrics.jsonl", "course.csv"))  # course.csv repeats what the epoch rows say
_TURNS = 8  # looks until every record was checked: 4 s at two looks per second
_RUNNING_TURNS = 4
_LIVELY_S = 60.0
_SETTLED_NS = 2_000_000_000  # a folder that just changed may change again without a new modification time
_MOST_BYTES = 4 << 20  # of appended rows that one look reads
_LONGEST_ROW = 1 << 16
_STUDIES = frozenset(("study.json", "results.json"))


@dataclass
class _Folder:
    """A folder that is a record, contains records, or neither."""

    id: str
    path: Path
    depth: int
    marks: tuple[tuple[str, int, int], ...] = ()
    """(name, time, size) of each file that makes it a record, and of `FOLDERS` in it."""
    mtime_ns: int = -1
    children: set[str] = field(default_factory=set)
    summary: Summary | None = None
    version: int = 0
    refused: str = ""
    """Why it is not read."""
    _settled: bool = False
    _changed: float = -math.inf

    def is_running(self) -> bool:
        return self.summary is not None and self.summary.get("status") == Status.RUNNING

    def is_lively(self) -> bool:
        return self.depth == 0 or bool(self.children) or self.is_running() or time.monotonic() - self._changed < _LIVELY_S

    def may_hold_records(self) -> bool:
        """Whether it may contain records: the root, a study's folder, and any folder that is not a record."""
        names = {mark[0] for mark in self.marks}
        return self.depth == 0 or (self.depth == 1 and (not names or bool(names & _STUDIES)))

    def look(self) -> tuple[bool, set[str] | None]:
        """Whether its files changed, and the folders in it; None for the folders if no names changed."""
        about, first = os.lstat(self.path), self.mtime_ns < 0
        if not stat.S_ISDIR(about.st_mode):  # it was replaced by a link
            raise NotADirectoryError(self.path)
        if about.st_mtime_ns == self.mtime_ns and self._settled:
            found, names = _marks(self.path, [mark[0] for mark in self.marks]), None
        else:
            self.mtime_ns, self._settled = about.st_mtime_ns, time.time_ns() - about.st_mtime_ns > _SETTLED_NS
            with os.scandir(self.path) as entries:
                seen = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
            names = {name for name, is_folder in seen if is_folder and not name.startswith(".")}
            marked = sorted(name for name, _ in seen if name in MARKS)
            found = _marks(
                self.path, [*marked, *(name for name, is_folder in seen if marked and is_folder and name in FOLDERS)]
            )
        changed = found != self.marks
        newest = max([self.mtime_ns, *(mark[1] for mark in found)])
        if time.time_ns() - newest < _LIVELY_S * 1e9 if first else changed:
            self._changed = time.monotonic()
        self.marks = found
        return changed, names


def _marks(folder: Path, names: list[str]) -> tuple[tuple[str, int, int], ...]:
    found = []
    for name in names:
        try:
            about = os.stat(f"{folder}/{name}")  # a Path would take longer than the stat itself
        except OSError:
            continue
        found.append((name, about.st_mtime_ns, about.st_size))
    return tuple(found)


def _leads_elsewhere(record: Path, names: list[str], root: Path) -> str:
    """Why a record must not be read, or "". Opening a pipe would wait forever for its writer."""
    for name in names:
        path = record / name
        about = os.lstat(path)
        if stat.S_ISLNK(about.st_mode):
            if not path.resolve().is_relative_to(root):
                return f"not read: {name} is a link that leads out of the board's folder"
            about = os.stat(path)
        if not stat.S_ISREG(about.st_mode) and not (name in FOLDERS and stat.S_ISDIR(about.st_mode)):
            return f"not read: {name} is not a regular file"
    return ""
