"""Printing never fails: streams that cannot be written to drop their text and keep the reason."""

import errno
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import output

TASK = """
import os
from paceline import Arrays, Task
import torch
from torch import nn

def objective(model, batch):
    {line}
    return {{"loss": (model(batch[0]) - batch[1]).square().squeeze(1)}}

def task():
    data = lambda: Arrays((torch.ones(40, 1), torch.ones(40, 1)))
    return Task(name="t", model=lambda: nn.Linear(1, 1), train=data, validation=data, objective=objective,
                defaults={{"global_batch": 10, "base_lr": 0.01, "epochs": 1}})
"""


@pytest.fixture
def broken() -> Iterator[int]:
    """A pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.fixture
def full() -> Iterator[int]:
    number = os.open("/dev/full", os.O_WRONLY)
    yield number
    os.close(number)


def stream(number: int, **options: object) -> io.TextIOWrapper:
    return open(number, "w", closefd=False, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_protected_stream_never_raises_and_keeps_the_error(broken: int, full: int, unbuffered: bool) -> None:
    for number, code in ((broken, errno.EPIPE), (full, errno.ENOSPC)):
        plain = stream(number)
        if unbuffered:  # as with PYTHONUNBUFFERED
            plain = io.TextIOWrapper(io.FileIO(number, "w", closefd=False), write_through=True)
        protected = output.protect(plain)
        assert protected is not None
        for _ in range(3):
            print("x" * 100_000, file=protected, flush=True)
        protected.buffer.write(b"bytes")
        protected.flush()
        assert isinstance(protected.error, OSError)
        assert protected.error.errno == code
        error = output.write(protected, "more")
        assert error is protected.error


def test_a_protected_stream_behaves_like_the_one_it_replaces(tmp_path: Path) -> None:
    plain = (tmp_path / "file").open("w", encoding="latin-1")
    plain.write("first\n")
    protected = output.protect(plain)
    assert protected is not None
    assert (protected.fileno(), protected.encoding, protected.isatty()) == (plain.fileno(), plain.encoding, False)
    assert protected.line_buffering == plain.line_buffering
    print("größer", "\u2192", file=protected)
    assert output.write(protected, "last\n") is None
    assert protected.error is None
    plain.close()
    assert (tmp_path / "file").read_bytes() == "first\ngrößer \\u2192\nlast\n".encode("latin-1")


def test_a_terminal_stays_a_terminal() -> None:
    ours, theirs = os.openpty()
    try:
        protected = output.protect(stream(theirs))
        assert protected is not None
        assert output.is_terminal(protected)
    finally:
        os.close(ours)
        os.close(theirs)


def test_writing_waits_for_a_full_non_blocking_stream(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with (tmp_path / "read").open("wb") as file:
        drain = subprocess.Popen(["cat"], stdin=reader, stdout=file)
    os.close(reader)
    try:
        protected = output.protect(stream(writer))
        assert protected is not None
        print("x" * 3_000_000, file=protected, flush=True)
    finally:
        os.close(writer)
        drain.wait(timeout=60)
    assert (tmp_path / "read").read_bytes() == b"x" * 3_000_000 + b"\n"


class Notebook(io.StringIO):
    """What a notebook may use as stdout: it has a file descriptor, but prints elsewhere."""

    def fileno(self) -> int:
        return 1


def test_a_stream_without_a_file_of_its_own_is_left_alone() -> None:
    assert output.protect(io.TextIOWrapper(io.BytesIO())) is None
    assert output.protect(Notebook()) is None
    assert output.protect(None) is None


def train(line: str, stdout: int) -> subprocess.CompletedProcess[str]:
    Path("task.py").write_text(TASK.format(line=line))
    return paceline(stdout, "train", "task.py", "--name", "x")


def paceline(stdout: int, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *args]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120, check=False)


def test_a_print_in_the_objective_does_not_end_a_run_without_a_reader(runs: Path, broken: int) -> None:
    done = train("print('hello', flush=True)", broken)
    assert (done.returncode, done.stderr) == (0, "")
    assert (runs / "x" / "model.safetensors").exists()
    assert "could not be printed" in (runs / "x" / "metrics.jsonl").read_text()


def test_a_full_stdout_is_one_line_on_stderr(runs: Path, full: int) -> None:
    done = train("print('hello', flush=True)", full)
    why = os.strerror(errno.ENOSPC)
    assert done.returncode == 0
    assert done.stderr == f"paceline: stdout cannot be written ({why}): training continues, and the record has everything\n"


def test_a_broken_pipe_in_the_task_itself_is_reported_as_a_failure(runs: Path, broken: int) -> None:
    done = train("raise BrokenPipeError(32, 'mine')", broken)
    assert done.returncode == 1
    assert done.stderr.startswith("paceline: BrokenPipeError: [Errno 32] mine\n  ")
    assert "raise BrokenPipeError(32, 'mine')" in done.stderr


def test_a_verb_that_only_prints_ends_quietly_when_its_reader_goes_away(broken: int) -> None:
    done = paceline(broken, "plan", "--cluster", "list")
    assert (done.returncode, done.stderr) == (1, "")
