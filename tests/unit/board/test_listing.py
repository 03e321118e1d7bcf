"""Which records are listed, and that a look reads only what changed: reads are counted, not timed."""

import math
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness.boards import add_steps, begin_run, end_run, make_run
from paceline.board.listing import Listing, Tail
from paceline.board.summaries import read_summary


class Counted:
    """A reader of summaries that counts what it reads."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()

    def __call__(self, path: Path) -> dict[str, Any]:
        self.reads[path.name] += 1
        return read_summary(path)


def ids(listing: Listing) -> list[str]:
    return sorted(summary["id"] for summary in listing.changes()["changed"])


def settle(root: Path) -> None:
    """Make everything as old as records usually are: files written this second are checked again."""
    for path in [*root.rglob("*"), root]:
        os.utime(path, ns=(10**18, 10**18))


def small_run(root: Path, name: str) -> Path:
    (root / name).mkdir(parents=True)
    (root / name / "result.json").write_text('{"status": "done"}')
    return root / name


def test_thousands_of_records_are_read_once(tmp_path: Path) -> None:
    for number in range(5_000):
        small_run(tmp_path, f"run-{number}")
    settle(tmp_path)
    read = Counted()
    listing = Listing(tmp_path, read)
    listing.look(budget_s=math.inf)
    assert listing.pending == 0
    assert read.reads.total() == len(ids(listing)) == 5_000
    read.reads.clear()
    version = listing.version
    for _ in range(8):
        listing.look()
    listing.look(everything=True)
    assert not read.reads
    (tmp_path / "run-7" / "result.json").write_text('{"status": "diverged"}')
    small_run(tmp_path, "run-new")
    listing.look(everything=True)
    assert read.reads == {"run-7": 1, "run-new": 1}
    changed = {summary["id"]: summary["status"] for summary in listing.changes(version)["changed"]}
    assert changed == {"run-7": "diverged", "run-new": "done"}


def test_every_record_gets_its_turn(tmp_path: Path) -> None:
    for number in range(50):
        small_run(tmp_path, f"run-{number}")
    settle(tmp_path)
    listing = Listing(tmp_path)
    listing.look()
    (tmp_path / "run-33" / "result.json").write_text('{"status": "diverged"}')
    for _ in range(8):
        listing.look()
    assert [each["status"] for each in listing.changes()["changed"] if each["id"] == "run-33"] == ["diverged"]


def test_a_look_ends_when_its_time_is_used_and_the_next_continues(tmp_path: Path) -> None:
    for number in range(10):
        os.utime(small_run(tmp_path, f"run-{number}"), ns=(0, 10**18 + number))
    listing = Listing(tmp_path)
    listing.look(budget_s=-1)
    assert (ids(listing), listing.pending) == (["run-9"], 9)  # the newest first
    left = []
    for _ in range(9):  # one record per look: a look that reads none must fail here, not loop forever
        listing.look(budget_s=-1)
        left.append(listing.pending)
    assert left == [8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert len(ids(listing)) == 10


def test_what_is_listed(tmp_path: Path) -> None:
    make_run(tmp_path, "run")
    make_run(tmp_path / "study-x", "arm-0")
    (tmp_path / "study-x" / "study.json").write_text("{}")
    (tmp_path / "group" / "deeper").mkdir(parents=True)
    small_run(tmp_path / "group" / "deeper", "too-deep")
    small_run(tmp_path, ".hidden")
    (tmp_path / "run" / "checkpoints").mkdir()
    (tmp_path / "no-record").mkdir()
    (tmp_path / "file.json").touch()
    (tmp_path / "latest").symlink_to(tmp_path / "run")
    listing = Listing(tmp_path)
    listing.look()
    assert ids(listing) == ["run", "study-x", "study-x/arm-0"]
    assert str(listing.path("study-x/arm-0")) == str(tmp_path.resolve() / "study-x" / "arm-0")
    for id in ("group", "no-record", "latest", "..", ".", "", "run/checkpoints", "study-x/../run"):
        assert listing.path(id) is None, id


def test_a_record_that_becomes_a_link_is_no_longer_listed(tmp_path: Path) -> None:
    small_run(tmp_path / "runs", "run")
    elsewhere = small_run(tmp_path, "elsewhere")
    listing = Listing(tmp_path / "runs")
    listing.look()
    shutil.rmtree(tmp_path / "runs" / "run")
    (tmp_path / "runs" / "run").symlink_to(elsewhere)
    listing.look()
    assert (ids(listing), listing.path("run")) == ([], None)


def test_a_record_that_becomes_a_link_just_before_it_is_read(tmp_path: Path) -> None:
    record = small_run(tmp_path / "runs", "run")
    elsewhere = small_run(tmp_path, "elsewhere")
    (elsewhere / "result.json").write_text('{"status": "a secret"}')

    def read(path: Any) -> dict[str, Any]:
        record.rename(tmp_path / "before")
        record.symlink_to(elsewhere)
        return read_summary(path)

    listing = Listing(tmp_path / "runs", read)
    listing.look()
    assert [each["status"] for each in listing.changes()["changed"]] == ["unknown"]


def test_what_was_not_read_yet_has_no_path(tmp_path: Path) -> None:
    os.utime(small_run(tmp_path, "old"), ns=(0, 0))
    small_run(tmp_path, "new")
    listing = Listing(tmp_path)
    listing.look(budget_s=-1)
    assert (ids(listing), listing.path("old")) == (["new"], None)


def test_a_folder_that_is_a_record_itself_is_listed(tmp_path: Path) -> None:
    listing = Listing(make_run(tmp_path, "run"))
    listing.look()
    assert [(each["id"], each["name"]) for each in listing.changes()["changed"]] == [(".", "run")]


def test_a_run_comes_and_goes(tmp_path: Path) -> None:
    listing = Listing(tmp_path)
    listing.look()
    (tmp_path / "run").mkdir()
    listing.look()
    assert ids(listing) == []
    small_run(tmp_path / "group", "inner")
    (tmp_path / "run" / "result.json").write_text('{"status": "done"}')
    listing.look()
    assert ids(listing) == ["group/inner", "run"]
    version = listing.version
    shutil.rmtree(tmp_path / "group")
    shutil.rmtree(tmp_path / "run")
    listing.look()
    assert ids(listing) == []
    assert sorted(listing.changes(version)["removed"]) == ["group/inner", "run"]
    small_run(tmp_path, "run")
    listing.look()
    told = listing.changes(version)
    assert ([each["id"] for each in told["changed"]], told["removed"]) == (["run"], ["group/inner"])


def test_a_killed_run_is_noticed_although_no_file_changes(tmp_path: Path) -> None:
    record = begin_run(tmp_path, "run")
    add_steps(record, 1, 3)
    settle(tmp_path)
    listing = Listing(tmp_path)
    listing.look()
    assert listing.changes()["changed"][0]["status"] == "running"
    record._metrics.close()  # as the end of its process does
    record._csv.close()
    for _ in range(4):
        listing.look()
    assert listing.changes()["changed"][0]["status"] == "cut short"


def test_a_reader_that_fails_hides_one_record_only(tmp_path: Path) -> None:
    small_run(tmp_path, "good")
    small_run(tmp_path, "bad")

    def read(path: Path) -> dict[str, Any]:
        if path.name == "bad":
            raise RecursionError("too deep")
        return read_summary(path)

    listing = Listing(tmp_path, read)
    listing.look()
    found = {each["id"]: each for each in listing.changes()["changed"]}
    assert found["good"]["status"] == "done"
    assert (found["bad"]["status"], found["bad"]["note"]) == ("unreadable", "cannot be read: RecursionError: too deep")


def test_a_tail_reads_what_is_appended(tmp_path: Path) -> None:
    record = begin_run(tmp_path, "run")
    add_steps(record, 1, 3)
    tail = Tail(record.path)
    assert tail.read() == []
    add_steps(record, 4, 5)
    rows = tail.read()
    assert rows is not None
    assert [row["step"] for _, row in rows] == [4, 5]
    assert rows[-1][0] == tail.end == (record.path / "metrics.jsonl").stat().st_size
    assert tail.read() == []
    end_run(record)


def test_a_tail_waits_for_the_rest_of_a_row_and_skips_invalid_lines(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(b'{"kind": "step", "step": 1}\n{"kind"')
    tail = Tail(tmp_path)
    assert tail.read() == []
    with metrics.open("ab") as file:
        file.write(b': "step", "step": 2}\nnonsense\n[1]\n{"kind": "st')
    rows = tail.read()
    assert rows is not None
    assert [row["step"] for _, row in rows] == [2]


@pytest.mark.parametrize("how", ["truncated", "replaced", "resumed"])
def test_a_tail_says_when_the_record_must_be_read_again(tmp_path: Path, how: str) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(b'{"kind": "step", "step": 1}\n' * 3)
    tail = Tail(tmp_path)
    if how == "truncated":
        os.truncate(metrics, 28)
    elif how == "replaced":
        (tmp_path / "new").write_bytes(b'{"kind": "step", "step": 1}\n' * 5)
        (tmp_path / "new").replace(metrics)
    else:
        with metrics.open("ab") as file:
            file.write(b'{"kind": "resume", "step": 1}\n')
    assert tail.read() is None
    assert tail.read() == []
    with metrics.open("ab") as file:
        file.write(b'{"kind": "step", "step": 9}\n')
    rows = tail.read()
    assert rows is not None
    assert [row["step"] for _, row in rows] == [9]


def test_a_tail_of_nothing_begins_when_there_is_something(tmp_path: Path) -> None:
    tail = Tail(tmp_path)
    assert tail.read() == []
    (tmp_path / "metrics.jsonl").write_bytes(b'{"kind": "step", "step": 1}\n')
    assert tail.read() is None  # the whole record is read again


def test_a_landscape_that_is_added_or_replaced_changes_its_record(tmp_path: Path) -> None:
    run = small_run(tmp_path, "run")
    (run / "landscape").mkdir()
    (tmp_path / "landscape").mkdir()  # a folder of this name is no record
    settle(tmp_path)
    listing = Listing(tmp_path)
    listing.look()
    assert ids(listing) == ["run"]
    before = listing.marks("run")
    (run / "landscape" / "plane-0.json").write_text("{}")
    listing.look(everything=True)
    assert listing.marks("run") != before
    shutil.rmtree(run / "landscape")
    (run / "landscape").symlink_to("/etc")
    listing.look(everything=True)
    assert [mark[0] for mark in listing.marks("run")] == ["result.json"]
    assert listing.knows("run")
