"""Records: the folder of plain files that each run leaves behind.

    config.toml        the resolved configuration; `--recipe` reads it back
    environment.json   versions, hardware, launcher, command, git revision, the contract
    metrics.jsonl      append-only rows: "kind": "step" every few steps, "epoch" once per epoch, "health" with the components of
                       a step's time, "layers" (--watch-layers), "note", "resume" and "join" (other workers take over) for
                       events (`read_metrics` drops rows that a resumed run repeated)
    timeline.json      with --profile: a few steps of all workers, in Chrome's trace format
    scale.json         written by `paceline scale`, in a record of its own
    course.csv         time,val_accuracy: one line per epoch
    checkpoints/       where a resumed run starts from
    snapshots/         with --snapshots: the parameters at evenly spaced steps
    model.safetensors  the trained weights, under the bare model's own names
    best.safetensors   with --save-best: those of the best epoch
    tracker.json       with --tracker: the tracker's own id of the run
    result.json        how the run ended: written last, so a record without it was cut short

Nothing here imports torch, so reports and predictions read records without delay.
"""

import difflib
import errno
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import metadata
from io import FileIO
from pathlib import Path
from typing import Any

from paceline.errors import RecordError, UsageError, reason
from paceline.files import FULL, finite, is_locked, lock_open, read_json, replacing, write_json
from paceline.status import Status

COMPONENTS = ("input", "compute", "communication", "waiting", "optimizer", "other")
"""The components of a step's time; they add up to it."""

ROW_FIELDS = frozenset(
    (
        *("kind", "step", "epoch", "time_s", "lr", "epoch_time_s", "samples", "samples_per_s"),
        *("noise_scale", "gain", "gradient_variance", "gradient_square", "loss_scale", "skipped_steps"),
    )
)
"""Fields of step and epoch rows that Paceline writes: a task's metrics must not use these names."""


class Record:
    """A run's folder, open for writing. Only rank 0 has one."""

    def __init__(self, runs_dir: str, name: str) -> None:
        with _explained(Path(runs_dir)):
            self.path = _new_folder(Path(runs_dir), name)
            try:
                self._open()
                self._csv.append(_CSV_HEADER)
                if self._csv.waiting:  # too full to begin
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except BaseException:
                self.discard()
                raise

    @classmethod
    def reopen(cls, path: Path) -> "Record":
        """Continue a record that was cut short. Raises a RecordError if another run is writing to it."""
        record = cls.__new__(cls)
        record.path = path
        with _explained(path):
            record._open()
            rows = (path / "metrics.jsonl").read_bytes()
            record._metrics.file.truncate(rows.rfind(b"\n") + 1)  # drop a half-written last row
        return record

    def _open(self) -> None:
        self._metrics = _Log((self.path / "metrics.jsonl").open("ab", buffering=0))
        self._csv = _Log((self.path / "course.csv").open("ab", buffering=0))
        if not lock_open(self._metrics.file, _LOCK_PATIENCE_S):
            self._metrics.close()
            self._csv.close()
            raise RecordError(f"another run is writing to {self.path}: wait for it, or start one under another --name")

    def resume(self, step: int, about: Mapping[str, Any]) -> None:
        """Note that the run continues from this step. Later epochs will be repeated: remove them from the course's CSV."""
        with _explained(self.path):
            (self.path / "result.json").unlink(missing_ok=True)
        rows = read_metrics(self.path)
        self.row({"kind": "resume", "step": step, **about})
        if not rows and (self.path / "course.csv").stat().st_size:
            return  # metrics.jsonl was lost: keep these lines, because they cannot be rebuilt
        validated = about.get("validated") is True
        epochs = [row for row in rows if row["kind"] == "epoch" and not is_repeated("epoch", row.get("step"), step, validated)]
        with _explained(self.path):
            self._csv.file.truncate(0)  # in place: a full disk has no room for a second file; the lines are held in memory
            self._csv.append(_CSV_HEADER + "".join(map(_csv_line, epochs)))

    def discard(self) -> None:
        """Remove the folder, so that a disk too full to start leaves no partial record."""
        shutil.rmtree(self.path, ignore_errors=True)

    def write(self, name: str, text: str) -> None:
        """Write a file that is either complete or absent."""
        with self.replacing(name) as path:
            path.write_text(text, encoding="utf-8")

    def row(self, row: Mapping[str, Any]) -> None:
        """Append a row to metrics.jsonl. On a full disk, keep the row in memory and retry with the next one."""
        with _explained(self.path):
            self._metrics.append(json.dumps(finite(row, as_text=True)) + "\n")

    def course_row(self, row: Mapping[str, Any]) -> None:
        """Append an epoch's line to the course's CSV, if it has an accuracy. On a full disk, keep and retry it too."""
        with _explained(self.path):
            self._csv.append(_csv_line(row))

    @contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        """`files.replacing` for a file of this record; an OSError becomes a RecordError."""
        with _explained(self.path), replacing(self.path / name) as temporary:
            yield temporary

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result and close the record. Rows that still do not fit on the disk are lost; the result counts them."""
        try:
            with _explained(self.path):
                self._metrics.append("")
                self._csv.append("")
        finally:
            self._metrics.close()
            self._csv.close()
            lost = self._metrics.waiting
            noted = {**result, "lost_rows": lost} if lost else result
            self.write("result.json", json.dumps(finite(noted, as_text=True), indent=2) + "\n")


class _Log:
    """An append-only file of whole lines. On a full disk lines are held in memory and retried; too many, and the oldest go."""

    def __init__(self, file: FileIO) -> None:
        self.file, self._held, self._dropped = file, "", 0

    @property
    def waiting(self) -> int:
        """The number of lines that are not in the file, dropped ones included."""
        return self._dropped + self._held.count("\n")

    def append(self, text: str) -> None:
        """Append lines, each whole or not at all, and hand them to the system. Ignored once the log is closed."""
        if self.file.closed:  # stdout may break after the record is finished, and the note about it comes too late
            return
        self._held += text
        end, left = os.fstat(self.file.fileno()).st_size, self._held.encode()
        try:
            while left:  # unbuffered: a later write must not repeat bytes that a full disk refused
                left = left[self.file.write(left) :]
        except OSError as error:
            self.file.truncate(end)
            if error.errno not in FULL:
                raise
            while len(self._held) > _MOST_HELD:
                self._dropped += 1
                self._held = self._held.partition("\n")[2]
        else:
            self._held = ""

    def close(self) -> None:
        self.file.close()


def discard_unbegun(path: Path) -> None:
    """Remove a new record whose run was refused before it began."""
    if not (path / "config.toml").exists() and not (path / "result.json").exists():
        shutil.rmtree(path, ignore_errors=True)


def close_cut_short(path: Path, status: str, why: str, where: str = "", traceback: str = "") -> None:
    """Write the result of a run that could not write its own, or that only knew it had lost contact with another worker.

    The run's own result stays, except that a failure gets this status, reason, frame of the user's code and traceback.
    """
    if not path.is_dir():
        return
    try:
        result = read_result(path)
    except RecordError:
        result = {}
    if result.get("status", Status.FAILED) == Status.FAILED:
        how = {"status": status, "why": why, "where": where, "traceback": traceback}
        write_json(path / "result.json", finite({**result, **how}, as_text=True))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """A record's rows as an uninterrupted run would have left them: of rows that a resumed run wrote again, only the last.

    Lines that are not valid rows are skipped (`count_odd_lines` counts them).
    """
    rows: list[dict[str, Any]] = []
    for row in filter(None, map(parse_row, _lines(path))):
        if row["kind"] == "resume":
            at, validated = row["step"], row.get("validated") is True
            rows = [old for old in rows if not is_repeated(old["kind"], old.get("step"), at, validated)]
        rows.append(row)
    return rows


def is_repeated(kind: str, step: float | None, resumed_at: float, validated: bool = False) -> bool:
    """Whether a run that resumed at a step writes this earlier row again: the one rule for readers of metrics.jsonl.

    A checkpoint at an epoch's last step is taken before its validation, so the epoch's row is written again, too; unless the
    `resume` row says `validated`: workers that hand over to others finish the epoch first. A phase's row has the number of
    steps before it, so a run that resumed there writes it again.
    """
    again = kind == "phase" or (kind == "epoch" and not validated)
    return step is not None and (step >= resumed_at if again else step > resumed_at)


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The row on a line of metrics.jsonl; None if it has no kind, or a step that is not a whole number."""
    try:
        text = line.decode().strip()
        row, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):  # cut short by a power failure, or not text
        return None
    if end != len(text) or not isinstance(row, dict) or not isinstance(row.get("kind"), str):
        return None
    row, has_step = with_new_names(row), isinstance(row.get("step"), int)
    return row if has_step or (row["kind"] != "resume" and "step" not in row) else None


def with_new_names(found: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a row, or of a count of workers. Early records call `components_s` `parts_s`."""
    return {"components_s": found["parts_s"], **found} if "parts_s" in found else dict(found)


_DECODER = json.JSONDecoder()  # `json.loads` would take 4.1 us per row instead of 2.4: it looks for an encoding


def count_odd_lines(path: Path) -> int:
    """Lines of a record's metrics.jsonl that are not valid rows: damaged, or not written by Paceline."""
    return sum(parse_row(line) is None for line in _lines(path))


def _lines(path: Path) -> list[bytes]:
    return [line for line in (path / "metrics.jsonl").read_bytes().split(b"\n") if line.strip()]


def find_record(name: str, runs_dir: str) -> Path:
    """The record, study or results with this path, or this name in runs_dir. Raises a UsageError that names the nearest."""
    runs = Path(runs_dir)
    for path in (Path(name), runs / name):
        if name and path.exists():
            return path
    found = [path for path in runs.iterdir() if path.is_dir()] if runs.is_dir() else []
    known = [path.name for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)]
    near = difflib.get_close_matches(Path(name).name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the newest there: {', '.join(known[:5])}"
    hint = hint if known else f"{runs} has no records; paceline train makes one"
    raise UsageError(f"no record {name!r}, neither here nor in {runs}: {hint}")


def find_unfinished(runs_dir: Path, task: str) -> tuple[Path | None, list[Path]]:
    """The newest record of this task that can be resumed, and newer ones that cannot because a run is writing to them."""
    found: list[tuple[float, Path, bool]] = []
    for file in runs_dir.glob("*/environment.json"):
        path, metrics = file.parent, file.with_name("metrics.jsonl")
        try:
            ours, rows = read_json(file).get("task") == task, metrics.is_file()
            if ours and (rows or (path / "checkpoints").is_dir()) and not _ended(path):
                found.append(((metrics if rows else path).stat().st_mtime, path, rows and _in_use(metrics)))
        except (OSError, ValueError):  # not a record of ours
            continue
    found.sort(reverse=True)
    newest = next((number for number, (_, _, busy) in enumerate(found) if not busy), len(found))
    return found[newest][1] if newest < len(found) else None, [path for _, path, _ in found[:newest]]


def _ended(path: Path) -> bool:
    try:
        return read_result(path).get("status") not in (Status.FAILED, Status.INTERRUPTED)
    except RecordError:  # cut short, or damaged since
        return False


def read_result(path: Path) -> dict[str, Any]:
    """A record's result. Raises a RecordError if it is missing or unreadable."""
    try:
        return read_json(path / "result.json")
    except (OSError, ValueError) as error:
        raise RecordError(f"record {path} has no readable result.json: {reason(error)}") from None


def name_for(task: str) -> str:
    """A task's name, for use in a file name: `my_task` for my_task.py and for my_task.py:function."""
    return Path(task.partition(":")[0]).stem if ".py" in task else task.replace(":", "-")


def unit_of(contract: Mapping[str, Any]) -> str:
    """What a task's samples are called: from its contract or, in an older record, from the task's name."""
    said = contract.get("unit")
    if isinstance(said, str) and said:
        return said[:40]
    return "images" if str(contract.get("task") or "").startswith("fashion-mnist") else "samples"


def environment() -> dict[str, Any]:
    """Versions, machine, command and git revision, as far as they can be found without torch."""
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name.replace("__main__.py", "paceline"), *sys.argv[1:]],
        "python": platform.python_version(),
        "system": platform.platform(),
        "machine": platform.node(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "openmp": {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "GOMP_", "KMP_"))},
        "versions": {name: _version(name) for name in ("paceline", "torch", "numpy", "safetensors")},
        "git": _git_revision(),
    }


_MOST_HELD = 1 << 20  # characters of rows held in memory while the disk is full
_LOCK_PATIENCE_S = 1.5  # for a run that is just ending
_CSV_HEADER = "time,val_accuracy\n"


def _csv_line(row: Mapping[str, Any]) -> str:
    """An epoch's line in the course's CSV; empty if it has no accuracy, or one that is not a number."""
    try:
        return f"{float(row['time_s']):.3f},{float(row['val_accuracy']):.4f}\n"
    except (KeyError, TypeError, ValueError):
        return ""


def _in_use(metrics: Path) -> bool:
    """Whether a run is writing to this record."""
    with metrics.open("rb") as file:
        return is_locked(file)


def _new_folder(runs_dir: Path, name: str) -> Path:
    """Make a new folder. mkdir is atomic, so two runs that start together never share one."""
    name = name or time.strftime("run-%Y%m%d-%H%M%S")
    for number in range(1, 10_000):
        path = runs_dir / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if runs_dir.is_dir():
                continue
            raise NotADirectoryError(errno.ENOTDIR, "is a file, not a folder", str(runs_dir)) from None
        return path
    raise RecordError(f"{runs_dir} holds 10,000 runs named {name}: choose another --name")


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        fix = "free some space or choose another --runs-dir" if error.errno in FULL else "choose another --runs-dir"
        raise RecordError(f"cannot write the record in {path}: {error.strerror or error}; {fix}") from error


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def _git_revision() -> str | None:
    """The git revision of the working folder, followed by `+` if files have changed since."""
    try:
        command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
