"""Records: each run gets a new folder; files and rows are complete or absent, even on a full disk."""

import errno
import fcntl
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import records
from paceline.errors import RecordError
from paceline.records import Record, close_cut_short, environment, read_result
from paceline.status import Status


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Record]:
    made = Record(str(tmp_path / "runs"), "mine")
    yield made
    made._metrics.close()
    made._csv.close()


class Full:
    """A file on a disk with room for a few more bytes."""

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


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def strict(text: str) -> object:
    """Parse JSON as strict readers do: they refuse NaN."""

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


def test_ten_thousand_runs_of_one_name_are_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "range", lambda *_: (1, 2), raising=False)
    for _ in range(2):
        Record(str(tmp_path), "x").finish({})
    with pytest.raises(RecordError, match="choose another --name"):
        Record(str(tmp_path), "x")


def test_rows_are_written_immediately(record):
    record.row({"step": 1, "loss": 0.5})
    record.row({"step": 2})
    epoch = {"kind": "epoch", "step": 2, "time_s": 1.23456, "val_accuracy": 0.98765}
    record.row(epoch)
    record.course_row(epoch)
    assert rows(record.path) == [{"step": 1, "loss": 0.5}, {"step": 2}, epoch]
    assert (record.path / "course.csv").read_text() == "time,val_accuracy\n1.235,0.9877\n"


def test_a_row_with_nan_stays_valid_json(record):
    record.row({"loss": math.nan, "up": math.inf, "down": -math.inf, "step": 3, "fine": 0.5})
    line = (record.path / "metrics.jsonl").read_text()
    assert strict(line) == {"loss": "nan", "up": "inf", "down": "-inf", "step": 3, "fine": 0.5}


def test_a_result_with_nan_stays_valid_json(record):
    record.finish({"status": "done", "metrics": {"loss": math.nan, "accuracy": 0.1}})
    text = (record.path / "result.json").read_text()
    assert strict(text) == {"status": "done", "metrics": {"loss": "nan", "accuracy": 0.1}}


def test_replacing_leaves_the_complete_file(record):
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


def test_a_row_that_does_not_fit_is_retried_with_the_next(record):
    record.row({"step": 1})
    small = record._metrics.file = Full(record._metrics.file, room=5)
    record.row({"step": 2})
    assert rows(record.path) == [{"step": 1}], "half a row"
    small.room = 1000
    record.row({"step": 3})
    assert rows(record.path) == [{"step": 1}, {"step": 2}, {"step": 3}]
    small.room = 5
    record.row({"step": 4})
    record.finish({"status": "done"})
    assert read_result(record.path) == {"status": "done", "lost_rows": 1}


def test_rows_after_the_end_are_ignored(record):
    record.row({"step": 1})
    record.finish({"status": "done"})
    record.row({"step": 2})
    record.course_row({"time_s": 1.0, "val_accuracy": 0.5})
    assert rows(record.path) == [{"step": 1}]
    assert read_result(record.path) == {"status": "done"}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize("log", ["_metrics", "_csv"])
def test_both_files_retry_rows_that_do_not_fit(record, monkeypatch, log, code):
    """The disk, the quota and the file size limit; metrics.jsonl and course.csv."""

    class Refuses(Full):
        def write(self, data: bytes) -> int:
            raise OSError(code, os.strerror(code))

    first, second = ({"kind": "epoch", "step": step, "time_s": 1.0, "val_accuracy": 0.5} for step in (1, 2))
    with monkeypatch.context() as patch:
        patch.setattr(getattr(record, log), "file", Refuses(getattr(record, log).file, 0))
        record.row(first)
        record.course_row(first)
    record.row(second)
    record.course_row(second)
    assert rows(record.path) == [first, second]
    assert (record.path / "course.csv").read_text() == "time,val_accuracy\n" + "1.000,0.5000\n" * 2


def test_errors_other_than_a_full_disk_are_raised(record, monkeypatch):
    monkeypatch.setattr(record._metrics, "file", Broken(record._metrics.file, 0))
    with pytest.raises(RecordError, match="Input/output error; choose another --runs-dir"):
        record.row({"kind": "step", "step": 1})


class Broken(Full):
    def write(self, data: bytes) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_finish_writes_the_result_last(record):
    assert not (record.path / "result.json").exists()
    record.row({"step": 1})
    record.write("config.toml", "")
    record.finish({"status": "done"})
    assert read_result(record.path) == {"status": "done"}


DIED = {"status": "failed", "why": "worker 1 was killed by SIGKILL", "where": "", "traceback": ""}


def test_a_record_of_a_dead_worker_is_closed(record):
    close_cut_short(record.path, "failed", "worker 1 was killed by SIGKILL")
    assert read_result(record.path) == DIED


@pytest.mark.parametrize("status", ["diverged", "done", "interrupted"])
def test_a_record_that_has_a_result_keeps_it(record, status):
    record.finish({"status": status, "why": "its own"})
    close_cut_short(record.path, "failed", "later")
    assert read_result(record.path) == {"status": status, "why": "its own"}


def test_a_record_that_only_knew_of_lost_contact_gets_the_cause(record):
    record.finish({"status": "failed", "why": "Connection closed by peer", "traceback": "of gloo", "steps": 17})
    close_cut_short(record.path, "failed", "worker 1 was killed by SIGKILL")
    assert read_result(record.path) == {**DIED, "steps": 17}


def test_closing_a_record_that_does_not_exist_does_nothing(tmp_path):
    close_cut_short(tmp_path / "none", "failed", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", [None, "", "{", "\xff", "[]", "3"])
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


def test_environment_has_command_versions_and_machine(monkeypatch):
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


def row(step: int, kind: str = "step", **more: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, **more}


def test_a_record_is_resumed_on_a_full_disk(record, monkeypatch):
    epochs = [{"kind": "epoch", "step": step, "time_s": float(step), "val_accuracy": 0.5} for step in (3, 6)]
    for row in epochs:
        record.row(row)
        record.course_row(row)
    for log in (record._metrics, record._csv):
        log.file = Full(log.file, room=0)
    monkeypatch.setattr(Path, "write_text", no_space)
    record.resume(4, {})
    for log in (record._metrics, record._csv):
        log.file.room = 1000
    record.row(epochs[1])
    record.course_row(epochs[1])
    assert (record.path / "course.csv").read_text() == "time,val_accuracy\n3.000,0.5000\n6.000,0.5000\n"
    assert [row["kind"] for row in records.read_metrics(record.path)] == ["epoch", "resume", "epoch"]


def test_a_resumed_record_reads_like_an_uninterrupted_one(record: Record) -> None:
    for step in (2, 4, 6):
        record.row(row(step, loss=float(step)))
    record.row(row(6, "epoch", time_s=1.0, val_accuracy=0.5))
    record.course_row(row(6, time_s=1.0, val_accuracy=0.5))
    record.row(row(8, loss=8.0))
    record.row(row(12, "epoch", time_s=2.0, val_accuracy=0.6))
    record.course_row(row(12, time_s=2.0, val_accuracy=0.6))
    record._metrics.file.write(b'{"kind": "step", "st')  # killed in the middle of a row
    record._metrics.close()
    record._csv.close()
    close_cut_short(record.path, "failed", "killed")
    again = Record.reopen(record.path)
    assert (record.path / "result.json").exists(), "a record keeps its result until it is resumed"
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
    assert json.loads(kept[4])["loss"] == 8.0, "rows are never removed from the file"


def test_an_epoch_with_a_repeated_validation_appears_once(record: Record) -> None:
    """A checkpoint at an epoch's last step is written before the validation, so a run resumed there repeats it."""
    record.row(row(6, loss=1.0))
    for _ in range(2):
        record.resume(6, {})
        epoch = row(6, "epoch", time_s=1.0, val_accuracy=0.5)
        record.row(epoch)
        record.course_row(epoch)
    kinds = [r["kind"] for r in records.read_metrics(record.path)]
    assert kinds == ["step", "resume", "resume", "epoch"]
    assert (record.path / "course.csv").read_text() == "time,val_accuracy\n1.000,0.5000\n"


def test_only_one_run_at_a_time_writes_to_a_record(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))  # half a second per call
    monkeypatch.setattr(time, "monotonic", lambda: next(clock) / 2)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(RecordError, match="another run is writing to"):
        Record.reopen(record.path)
    assert next(clock) <= 5, "it waited for more than two seconds"
    record.finish({"status": "failed"})
    Record.reopen(record.path).finish({"status": "done"})


def leave(runs: Path, name: str, task: str, status: str | None, when: float = 1e8) -> Record:
    made = Record(str(runs), name)
    made.write("environment.json", json.dumps({"task": task}))
    if status is not None:
        made.finish({"status": status})
        os.utime(made.path / "metrics.jsonl", (when, when))
    return made


def test_the_newest_unfinished_record_of_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert records.find_unfinished(tmp_path / "nowhere", "mine") == (None, [])
    leave(tmp_path, "done", "mine", "done", 9e8)
    leave(tmp_path, "diverged", "mine", "diverged", 8e8)
    leave(tmp_path, "other", "theirs", "failed", 7e8)
    assert records.find_unfinished(tmp_path, "mine") == (None, [])
    leave(tmp_path, "old", "mine", "failed", 1e8)
    leave(tmp_path, "new", "mine", "interrupted", 2e8)
    busy = leave(tmp_path, "busy", "mine", None)
    (tmp_path / "rubbish").mkdir()
    (tmp_path / "rubbish" / "metrics.jsonl").write_text("")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it must not wait for a record in use"))
    assert records.find_unfinished(tmp_path, "mine") == (tmp_path / "new", [tmp_path / "busy"])
    busy._metrics.close()  # its run was killed: it has no result
    busy._csv.close()
    assert records.find_unfinished(tmp_path, "mine") == (tmp_path / "busy", [])


def test_reading_a_record_does_not_mark_it_as_in_use(tmp_path: Path) -> None:
    """The board takes a shared lock for a moment to see whether a run is writing."""
    leave(tmp_path, "mine", "mine", "failed")
    with (tmp_path / "mine" / "metrics.jsonl").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        assert records.find_unfinished(tmp_path, "mine") == (tmp_path / "mine", [])


@pytest.mark.parametrize("name", ["environment.json", "result.json"])
@pytest.mark.parametrize("content", [b"[]", b"1", b"\xff", b"{", b"[" * 100_000, b'{"status": 3}'])
def test_a_damaged_record_does_not_hide_others(tmp_path: Path, name: str, content: bytes) -> None:
    leave(tmp_path, "good", "mine", "failed", 2e8)
    leave(tmp_path, "bad", "theirs", "failed", 3e8)
    (tmp_path / "bad" / name).write_bytes(content)
    assert records.find_unfinished(tmp_path, "mine") == (tmp_path / "good", [])


ODD_LINES = [b"\xff\xfe", b"5", b"[1]", b'"text"', b"null", b"{}", b'{"kind": 3}', b'{"kind": "step", "step": "9"}']
ODD_LINES += [b'{"kind": "resume"}', b'{"kind": "resume", "step": null}', b'{"kind": "st', b"[" * 100_000]


@pytest.mark.parametrize("line", ODD_LINES)
def test_a_line_that_is_not_a_row_is_skipped(record: Record, line: bytes) -> None:
    record.row(row(1, "epoch", time_s=1.0, val_accuracy=0.5))
    record._metrics.file.write(line + b"\n")
    record.row(row(2, loss=1.0))
    record.finish({"status": "failed"})
    again = Record.reopen(record.path)
    again.resume(2, {})
    again.finish({"status": "done"})
    assert [(r["kind"], r["step"]) for r in records.read_metrics(record.path)] == [("epoch", 1), ("step", 2), ("resume", 2)]
    assert records.count_odd_lines(record.path) == 1
    assert (record.path / "course.csv").read_text() == "time,val_accuracy\n1.000,0.5000\n"


def test_an_accuracy_that_is_not_a_number_is_accepted(record: Record) -> None:
    record.row(row(1, "epoch", time_s=1.0, val_accuracy=math.nan))
    record.row(row(2, "epoch", time_s=[], val_accuracy="high"))
    record.resume(3, {})
    assert (record.path / "course.csv").read_text() == "time,val_accuracy\n1.000,nan\n"


@pytest.mark.parametrize("content", ["[]", "3", "{"])
def test_an_invalid_result_is_replaced_when_a_worker_died(record: Record, content: str) -> None:
    (record.path / "result.json").write_text(content)
    close_cut_short(record.path, "failed", "worker 1 was killed by SIGKILL")
    assert read_result(record.path) == DIED


def test_statuses_that_finish_and_those_that_would_repeat() -> None:
    assert [status for status in Status if status.good] == ["done", "target reached", "stopped early"]
    assert [status for status in Status if status.final] == ["done", "target reached", "stopped early", "diverged"]


@pytest.mark.parametrize("value", ["", "Done", "<b>", None, 3, [], {}])
def test_a_status_that_is_none_of_ours_is_unknown(value: Any) -> None:
    assert Status(value) is Status.UNKNOWN


def test_early_records_are_read_under_the_new_names(record: Record) -> None:
    record.row({"kind": "health", "step": 1, "parts_s": {"compute": 1.0}})
    (found,) = records.read_metrics(record.path)
    assert found["components_s"] == {"compute": 1.0}
