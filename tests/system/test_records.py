"""Records on a real full disk, with git, and shared by processes."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from paceline import records
from paceline.errors import RecordError
from paceline.records import Record, environment, read_result
from unit.test_records import Full, no_space, rows


class Disk:
    """A real file system of 64 KiB."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self, record: Record | None = None) -> None:
        """Fill it to the last byte."""
        with (self.folder / "fill").open("wb", buffering=0) as file:
            for size in (4096, 1):
                with suppress(OSError):
                    while True:
                        file.write(b"x" * size)

    def free(self) -> None:
        (self.folder / "fill").unlink()


class PretendDisk(Disk):
    """The same without mounting: the calls that would fail are made to fail."""

    def fill(self, record: Record | None = None) -> None:
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(Path, "mkdir", no_space)
        self._patch.setattr(Path, "write_text", no_space)
        if record is not None:
            self._file = record._metrics.file = Full(record._metrics.file, room=700)

    def free(self) -> None:
        self._patch.undo()
        self._file.room = 1 << 20


@pytest.fixture(params=["real", "pretend"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    """A small disk: a real one if it can be mounted, and always a simulated one."""
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


def test_a_full_disk_loses_rows_but_not_the_run(disk, monkeypatch):
    monkeypatch.setattr(records, "_MOST_HELD", 1000)  # three of the rows below
    record = Record(str(disk.folder), "x")
    record.row({"step": 0})
    disk.fill(record)
    for step in range(1, 41):  # the last page of the file has room for a few
        record.row({"step": step, "text": "y" * 300})
    written = [row["step"] for row in rows(record.path)]
    assert 0 < len(written) < 30
    assert written == list(range(len(written))), "half a row"
    with pytest.raises(RecordError) as caught:
        record.write("config.toml", "x" * 10_000)
    assert str(caught.value) == (
        f"cannot write the record in {record.path}: No space left on device; free some space or choose another --runs-dir"
    )
    assert {path.name for path in record.path.iterdir()} == {"metrics.jsonl", "course.csv"}
    disk.free()
    record.finish({"status": "failed"})
    assert [row["step"] for row in rows(record.path)] == [*written, 38, 39, 40], "the newest rows waited"
    assert read_result(record.path) == {"status": "failed", "lost_rows": 40 - len(written) - 2}


def test_a_full_disk_at_the_start_is_one_line(disk):
    disk.fill()
    with pytest.raises(RecordError, match=f"cannot write the record in {disk.folder}.*No space left"):
        Record(str(disk.folder), "x")


def test_git_revision_marks_changed_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x"]
    (tmp_path / "file").write_text("a")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-qm", "x", "--no-verify"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    clean = environment()["git"]
    assert len(clean) == 40
    (tmp_path / "file").write_text("b")
    assert environment()["git"] == clean + "+"
