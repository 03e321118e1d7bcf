"""Records: a new folder a run, whole files and whole rows or none, also on a full disk."""

import errno
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from harness.processes import run
from paceline import records
from paceline.errors import RecordError
from paceline.records import Record, close_cut_short, environment, read_result


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    made = Record(str(tmp_path / "runs"), "mine")
    yield made
    made._metrics.close()
    made._csv.close()


class Disk:
    """A real file system of 64 KiB."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self, record: Record | None = None) -> None:
        """Use it up to the last byte."""
        with (self.folder / "fill").open("wb", buffering=0) as file:
            for size in (4096, 1):
                with suppress(OSError):
                    while True:
                        file.write(b"x" * size)

    def free(self) -> None:
        (self.folder / "fill").unlink()


class PretendDisk(Disk):
    """The same where we may not mount one: the calls that would fail do."""

    def fill(self, record: Record | None = None) -> None:
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(Path, "mkdir", no_space)
        self._patch.setattr(Path, "write_text", no_space)
        if record is not None:
            self._file = record._metrics = Full(record._metrics, room=700)

    def free(self) -> None:
        self._patch.undo()
        self._file.room = 1 << 20


class Full:
    """A file on a disk that has room for a few bytes more."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self.room = file, room

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        if not self.room:
            no_space()
        written: int = self._file.write(data[: self.room])
        self.room -= written
        return written


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(params=["real", "pretend"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    """A small disk: a real one where we may mount it, and always its double."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path]
    if request.param == "pretend" or subprocess.run(mount, capture_output=True).returncode:
        pretend = PretendDisk(tmp_path)
        yield pretend
        pretend._patch.undo()
        return
    try:
        yield Disk(tmp_path)
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def strict(text: str) -> object:
    """JSON as other readers take it: they refuse NaN."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    return json.loads(text, parse_constant=refuse)


def test_each_run_has_a_new_folder(tmp_path):
    made = [Record(str(tmp_path / "deep" / "runs"), "same") for _ in range(3)]
    for each in made:
        each.finish({})
    assert [each.path.name for each in made] == ["same", "same-2", "same-3"]


def test_a_run_without_a_name_gets_one(tmp_path):
    made = Record(str(tmp_path), "")
    made.finish({})
    assert made.path.name.startswith("run-2")


def test_two_processes_never_share_a_folder(tmp_path):
    code = (
        "import sys\nfrom paceline.records import Record\nsys.stdin.readline()\n"
        f"for _ in range(30):\n    record = Record({str(tmp_path)!r}, 'same')\n"
        "    record.finish({})\n    print(record.path)\n"
    )
    pair = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in pair:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    paths = [path for process in pair for path in process.communicate(timeout=60)[0].split()]
    assert len(paths) == 60
    assert len(set(paths)) == 60


def test_ten_thousand_of_a_name_are_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "range", lambda *_: (1, 2), raising=False)
    for _ in range(2):
        Record(str(tmp_path), "x").finish({})
    with pytest.raises(RecordError, match="choose another --name"):
        Record(str(tmp_path), "x")


def test_rows_are_there_at_once(record):
    record.row({"step": 1, "loss": 0.5})
    record.row({"step": 2})
    record.course_row(1.23456, 0.98765)
    assert rows(record.path) == [{"step": 1, "loss": 0.5}, {"step": 2}]
    assert (record.path / "course.csv").read_text() == "time,val_accuracy\n1.235,0.9877\n"


def test_not_a_number_stays_valid_json(record):
    record.row({"loss": math.nan, "up": math.inf, "down": -math.inf, "step": 3, "fine": 0.5})
    line = (record.path / "metrics.jsonl").read_text()
    assert strict(line) == {"loss": "nan", "up": "inf", "down": "-inf", "step": 3, "fine": 0.5}


def test_a_result_with_metrics_that_are_no_numbers_stays_valid_json(record):
    record.finish({"status": "done", "metrics": {"loss": math.nan, "accuracy": 0.1}})
    text = (record.path / "result.json").read_text()
    assert strict(text) == {"status": "done", "metrics": {"loss": "nan", "accuracy": 0.1}}


def test_replacing_leaves_the_whole_file(record):
    with record.replacing("model") as path:
        path.write_bytes(b"weights")
        assert not (record.path / "model").exists()
    assert (record.path / "model").read_bytes() == b"weights"
    assert not path.exists()


def test_replacing_leaves_nothing_on_failure(record):
    before = sorted(record.path.iterdir())

    def cut_short() -> None:
        with record.replacing("model") as path:
            path.write_bytes(b"half")
            raise LookupError("cut short")

    with pytest.raises(LookupError):
        cut_short()
    assert sorted(record.path.iterdir()) == before


def test_replacing_keeps_the_old_file_on_failure(record):
    record.write("config.toml", "old")

    def fail() -> None:
        with record.replacing("config.toml") as path:
            path.write_text("half")
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(RecordError, match="Input/output error"):
        fail()
    assert (record.path / "config.toml").read_text() == "old"


def test_a_row_that_does_not_fit_waits_for_the_next(record):
    record.row({"step": 1})
    small = record._metrics = Full(record._metrics, room=5)
    record.row({"step": 2})
    assert rows(record.path) == [{"step": 1}], "half a row"
    small.room = 1000
    record.row({"step": 3})
    assert rows(record.path) == [{"step": 1}, {"step": 2}, {"step": 3}]
    small.room = 5
    record.row({"step": 4})
    with pytest.raises(RecordError, match="No space left on device; free some space or choose another --runs-dir"):
        record.finish({})


def test_a_full_disk_is_one_line_and_no_half_row(disk, monkeypatch):
    monkeypatch.setattr(records, "_MOST_HELD", 1000)  # three of the rows below
    record = Record(str(disk.folder), "x")
    record.row({"step": 0})
    disk.fill(record)
    count = 0

    def append() -> None:
        nonlocal count
        while True:  # the last page of the file has room for a few
            count += 1
            record.row({"step": count, "text": "y" * 300})

    with pytest.raises(RecordError) as caught:
        append()
    assert str(caught.value) == (
        f"cannot write the record in {record.path}: No space left on device; free some space or choose another --runs-dir"
    )
    written = [row["step"] for row in rows(record.path)]
    assert written == list(range(count - 3)), "half a row, or more than three that wait in memory"
    with pytest.raises(RecordError, match="No space left"):
        record.write("config.toml", "x" * 10_000)
    assert {path.name for path in record.path.iterdir()} == {"metrics.jsonl", "course.csv"}
    disk.free()
    record.finish({"status": "failed"})
    assert [row["step"] for row in rows(record.path)] == list(range(count + 1)), "rows that waited are lost"
    assert read_result(record.path) == {"status": "failed"}


def test_a_full_disk_at_the_start_is_one_line(disk):
    disk.fill()
    with pytest.raises(RecordError, match=f"cannot write the record in {disk.folder}.*No space left"):
        Record(str(disk.folder), "x")


def test_finish_writes_the_result_last(record):
    assert not (record.path / "result.json").exists()
    record.row({"step": 1})
    record.write("config.toml", "")
    record.finish({"status": "done"})
    assert read_result(record.path) == {"status": "done"}
    with pytest.raises(ValueError, match="closed"):
        record.row({"step": 2})


def test_a_record_of_a_dead_worker_is_closed(record):
    close_cut_short(record.path, "failed", "worker 1 was killed by SIGKILL")
    assert read_result(record.path) == {"status": "failed", "why": "worker 1 was killed by SIGKILL"}


@pytest.mark.parametrize("status", ["diverged", "done", "interrupted"])
def test_a_record_that_has_a_result_keeps_it(record, status):
    record.finish({"status": status, "why": "its own"})
    close_cut_short(record.path, "failed", "later")
    assert read_result(record.path) == {"status": status, "why": "its own"}


def test_a_record_that_knew_only_of_lost_contact_learns_the_cause(record):
    record.finish({"status": "failed", "why": "Connection closed by peer", "steps": 17})
    close_cut_short(record.path, "failed", "worker 1 was killed by SIGKILL")
    assert read_result(record.path) == {"status": "failed", "why": "worker 1 was killed by SIGKILL", "steps": 17}


def test_closing_a_record_that_never_was_does_nothing(tmp_path):
    close_cut_short(tmp_path / "none", "failed", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", [None, "", "{", "\xff"])
def test_an_unreadable_result_is_one_line(tmp_path, text):
    if text is not None:
        (tmp_path / "result.json").write_text(text, encoding="latin-1")
    with pytest.raises(RecordError, match=f"record {tmp_path} has no readable result.json") as caught:
        read_result(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_in_the_way_is_one_line(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RecordError, match="choose another --runs-dir"):
        Record(str(tmp_path / "file"), "x")
    with pytest.raises(RecordError, match="choose another --runs-dir"):
        Record(str(tmp_path / "file" / "below"), "x")
    assert (tmp_path / "file").read_text() == "mine"


def test_environment_says_what_ran_where(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/paceline", "train", "x"])
    found = environment()
    assert found["command"] == ["paceline", "train", "x"]
    assert set(found["versions"]) == {"paceline", "torch", "numpy", "safetensors"}
    assert found["versions"]["paceline"] == "0.1.0"
    assert found["versions"]["torch"][0].isdigit()
    assert found["cores"] == os.cpu_count()
    assert found["when"].endswith("+00:00")
    assert all(found[key] for key in ("python", "system", "machine", "processor"))
    strict(json.dumps(found))


def test_environment_outside_git_and_with_missing_packages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert environment()["git"] is None
    assert records._version("no-such-package") == "not installed"


def test_git_revision_says_when_files_were_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x"]
    (tmp_path / "file").write_text("a")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-qm", "x", "--no-verify"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    clean = environment()["git"]
    assert len(clean) == 40
    (tmp_path / "file").write_text("b")
    assert environment()["git"] == clean + "+"


def test_records_need_no_torch():
    code = "import sys, paceline.records as r; r.environment(); sys.exit('torch' in sys.modules)"
    assert run([sys.executable, "-c", code]).returncode == 0


# --- going on with a record ---


def row(step: int, kind: str = "step", **more: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, **more}


def test_a_resumed_record_reads_as_if_nothing_had_happened(record: Record) -> None:
    for step in (2, 4, 6):
        record.row(row(step, loss=float(step)))
    record.row(row(6, "epoch", time_s=1.0, val_accuracy=0.5))
    record.course_row(1.0, 0.5)
    record.row(row(8, loss=8.0))
    record.row(row(12, "epoch", time_s=2.0, val_accuracy=0.6))
    record.course_row(2.0, 0.6)
    record._metrics.write(b'{"kind": "step", "st')  # killed in the middle of a row
    record._metrics.close()
    record._csv.close()
    close_cut_short(record.path, "failed", "killed")
    again = Record.reopen(record.path)
    assert (record.path / "result.json").exists(), "until it goes on, a record says how it ended"
    again.resume(7, {"workers": 3})
    assert [r["step"] for r in records.read_metrics(record.path) if r["kind"] == "epoch"] == [6]
    assert not (record.path / "result.json").exists()
    again.row(row(8, loss=9.0))
    again.finish({"status": "done"})
    rows = records.read_metrics(record.path)
    assert [(r["kind"], r["step"]) for r in rows] == [
        *(("step", step) for step in (2, 4, 6)),
        *(("epoch", 6), ("resume", 7), ("step", 8)),
    ]
    assert rows[-1]["loss"] == 9.0
    assert (record.path / "course.csv").read_text() == "time,val_accuracy\n1.000,0.5000\n"
    kept = (record.path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(kept[4])["loss"] == 8.0, "rows are never taken out of the file"


def test_an_epoch_whose_validation_is_done_again_is_there_once(record: Record) -> None:
    """A checkpoint at an epoch's last step is taken before its validation, which a run resumed there does again."""
    record.row(row(6, loss=1.0))
    for _ in range(2):
        record.resume(6, {})
        record.row(row(6, "epoch", time_s=1.0, val_accuracy=0.5))
        record.course_row(1.0, 0.5)
    kinds = [r["kind"] for r in records.read_metrics(record.path)]
    assert kinds == ["step", "resume", "resume", "epoch"]
    assert (record.path / "course.csv").read_text() == "time,val_accuracy\n1.000,0.5000\n"


def test_one_run_at_a_time_writes_to_a_record(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_LOCK_PATIENCE_S", 0.3)
    with pytest.raises(RecordError, match="another run is writing to"):
        Record.reopen(record.path)
    record.finish({"status": "failed"})
    Record.reopen(record.path).finish({"status": "done"})


def test_the_newest_unfinished_record_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_LOCK_PATIENCE_S", 0.0)

    def leave(name: str, task: str, status: str | None, when: float) -> Record:
        made = Record(str(tmp_path), name)
        made.write("environment.json", json.dumps({"task": task}))
        if status is not None:
            made.finish({"status": status})
            os.utime(made.path / "metrics.jsonl", (when, when))
        return made

    assert records.find_unfinished(tmp_path / "nowhere", "mine") is None
    leave("done", "mine", "done", 9e8)
    leave("diverged", "mine", "diverged", 8e8)
    leave("other", "theirs", "failed", 7e8)
    assert records.find_unfinished(tmp_path, "mine") is None
    leave("old", "mine", "failed", 1e8)
    leave("new", "mine", "interrupted", 2e8)
    busy = leave("busy", "mine", None, 0)
    (tmp_path / "rubbish").mkdir()
    (tmp_path / "rubbish" / "metrics.jsonl").write_text("")
    assert records.find_unfinished(tmp_path, "mine") == tmp_path / "new"
    busy._metrics.close()  # its run was killed: nobody said how it ended
    busy._csv.close()
    assert records.find_unfinished(tmp_path, "mine") == tmp_path / "busy"
