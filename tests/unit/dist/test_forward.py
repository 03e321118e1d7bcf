"""Output of workers that this process prints itself."""

import io
import os
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from paceline.dist.forward import Forward, forward_output


def test_output_goes_to_the_programs_own_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, in order, with its carriage returns, and characters that arrive in two halves."""
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with closing(Forward(tmp_path)) as forward:
        pipes = [os.open(tmp_path / name, os.O_WRONLY) for name in ("stdout", "stderr")]
        ended = threading.Event()

        def work() -> None:
            for half in ("50 %\r100 %\nµ".encode()[:-1], "µ".encode()[-1:]):
                os.write(pipes[0], half)
            ended.wait(10)

        thread = threading.Thread(target=work)
        thread.start()
        while not out.getvalue().endswith("µ"):
            forward.join(thread, 0.1)
        assert err.getvalue() == ""
        ended.set()
        forward.join(thread, 10)
        assert not thread.is_alive()
        os.write(pipes[1], b"late\n")
        for pipe in pipes:
            os.close(pipe)
    assert (out.getvalue(), err.getvalue()) == ("50 %\r100 %\nµ", "late\n")


def test_streams_that_workers_inherit_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with os.fdopen(os.dup(1), "w") as other, open(1, "w", closefd=False) as own:
        monkeypatch.setattr(sys, "stdout", own)
        monkeypatch.setattr(sys, "stderr", None)  # closed before Python started
        with closing(Forward(tmp_path)):
            assert list(tmp_path.iterdir()) == []
        monkeypatch.setattr(sys, "stdout", other)
        with closing(Forward(tmp_path)):
            assert [path.name for path in tmp_path.iterdir()] == ["stdout"]


def test_a_worker_without_a_launcher_prints_as_before(tmp_path: Path) -> None:
    before = os.fstat(1)
    forward_output(tmp_path)
    os.mkfifo(tmp_path / "stdout")  # nobody reads it: the launcher is gone
    forward_output(tmp_path)
    assert os.path.samestat(before, os.fstat(1))
