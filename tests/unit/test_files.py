"""Atomic files: permissions, planted links, leftovers. JSON: NaN, size limits, short errors. Locks: held, free, shared."""

import json
import math
import os
import stat
from pathlib import Path

import pytest

from paceline.files import finite, is_locked, lock, lock_open, read_json, replacing, write_file, write_json


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_the_umask_decides_who_reads_a_file(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_file(tmp_path / "plain", "text")
        with replacing(tmp_path / "private") as path:  # safetensors writes a file of its own, readable by the owner only
            path.unlink()
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    finally:
        os.umask(before)
    for name in ("plain", "private"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("planted", [".page.part", f".page.{os.getpid()}.part"], ids=["old name", "this process's name"])
def test_a_planted_link_is_not_followed(tmp_path: Path, planted: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    (tmp_path / planted).symlink_to(victim)
    write_file(tmp_path / "page", "ours")
    assert victim.read_text() == "theirs"
    assert (tmp_path / "page").read_text() == "ours"
    assert not (tmp_path / "page").is_symlink()


def test_leftovers_of_killed_writers_are_removed_and_other_files_stay(tmp_path: Path) -> None:
    names = [".page.part", ".page.7.part", ".page.8.part", ".other.9.part"]
    for name in names:
        (tmp_path / name).write_text("half")
    for name in names[:2]:
        os.utime(tmp_path / name, (1e9, 1e9))
    os.utime(tmp_path / ".other.9.part", (1e9, 1e9))
    write_file(tmp_path / "page", "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"page", ".page.8.part", ".other.9.part"}


def test_a_device_is_written_to_directly(tmp_path: Path) -> None:
    """`--json /dev/stdout` and `--out >(...)` keep working."""
    reader, writer = os.pipe()
    write_file(Path(f"/dev/fd/{writer}"), "text")
    os.close(writer)
    with os.fdopen(reader) as file:
        assert file.read() == "text"


def test_json_has_no_nan(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": [math.nan, {"b": math.inf}, 1.5], "c": (1,)})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": [None, {"b": None}, 1.5], "c": [1]}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    assert finite({1: (math.nan, [-math.inf])}, as_text=True) == {"1": ["nan", ["-inf"]]}


def test_json_that_is_read_is_an_object(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"a": 1})
    assert read_json(path) == {"a": 1}
    with pytest.raises(ValueError, match=r"^it is larger than 0 MB$"):
        read_json(path, most_bytes=3)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"{", "it is not valid JSON, or was cut short"),
        (b"\xff", "it is not valid JSON, or was cut short"),
        (b"[" * 100_000, "it is not valid JSON, or was cut short"),
        (b"[1]", "it does not hold a JSON object"),
        (b"3", "it does not hold a JSON object"),
    ],
)
def test_json_that_cannot_be_read_has_a_short_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"^{reason}$"):
        read_json(tmp_path / "x.json")


def test_json_in_a_pipe_or_a_folder_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match=r"^it is not a file$"):
            read_json(path)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none")


def test_a_lock_file_has_one_holder(tmp_path: Path) -> None:
    path = tmp_path / "claim"
    with lock(path) as held, lock(path, wait=False) as again:
        assert (held, again) == (True, False)
    with lock(path, wait=False) as held:
        assert held


def test_a_locked_data_file_is_seen_by_any_number_of_readers(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("ab") as writer:
        assert lock_open(writer)
        with path.open("rb") as one, path.open("rb") as two, path.open("ab") as another:
            assert is_locked(one)
            assert is_locked(two)
            assert not lock_open(another)
    with path.open("rb") as one, path.open("rb") as two:
        assert not is_locked(one)
        assert not is_locked(two), "a reader must not look like a writer"
