"""What a folder is, and whether a run still writes to it."""

import fcntl
import os
from pathlib import Path

from harness.pages import make_train
from paceline.records import Record
from paceline.report.read import read_source
from paceline.report.sources import find_sources, is_running


def test_a_real_record_being_written_counts_as_running(tmp_path: Path) -> None:
    record = Record(str(tmp_path), "r")
    assert is_running(record.path / "metrics.jsonl")
    record.finish({"status": "failed", "why": "no"})
    assert not is_running(record.path / "metrics.jsonl")
    assert read_source(record.path)["status"] == "failed"


def test_other_readers_do_not_count_as_a_writer(tmp_path: Path) -> None:
    demo = make_train(tmp_path / "demo")
    with (demo / "metrics.jsonl").open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert not is_running(demo / "metrics.jsonl")


def test_the_newest_source_comes_last_and_others_are_left_out(tmp_path: Path) -> None:
    for age, name in enumerate(["c", "a", "b"]):
        path = make_train(tmp_path / name) / "metrics.jsonl"
        os.utime(path, (1_000_000 - age, 1_000_000 - age))
    (tmp_path / "empty").mkdir()
    make_train(tmp_path / ".hidden")
    assert [path.name for path in find_sources(tmp_path)] == ["b", "a", "c"]
    assert find_sources(tmp_path / "gone") == []
