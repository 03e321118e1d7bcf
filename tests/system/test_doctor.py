"""`paceline doctor` with its real child processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.doctor.disk import measure_disk, write_some
from paceline.doctor.probe import STAGES, run_probe


def test_a_machine_that_works_has_ten_lines_and_a_verdict(tmp_path: Path) -> None:
    """As a user runs it: two real processes add a tensor and load batches, a file is written, bf16 is tried."""
    command = [sys.executable, "-m", "paceline", "doctor", "--runs-dir", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    *lines, verdict = done.stdout.splitlines()
    subjects = ["software", "device", "precision", "cores", "threads", "loader", "network", "disk", "data", "clock"]
    assert [line[6:16].strip() for line in lines] == subjects, done.stdout
    assert {line[:5].strip() for line in lines} <= {"ok", "note", "slow"}, done.stdout
    assert verdict == "ready to train" or verdict.startswith("will train, but slowly: see ")
    assert "2 workers all-reduced over gloo" in done.stdout
    assert "workers listen on the loopback only" in done.stdout
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


def fake_python(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(file))


def test_workers_that_fail_say_why_with_their_last_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_python(tmp_path, "echo first >&2\necho 'no module named torch' >&2\nexit 1", monkeypatch)
    probe = run_probe()
    assert (dict(probe.stages), probe.failure) == ({}, "no module named torch")


def test_workers_that_crash_say_which_signal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_python(tmp_path, 'echo \'{"stage": "torch"}\'\nkill -ILL $$', monkeypatch)
    probe = run_probe()
    assert (list(probe.stages), probe.why(STAGES[1])) == (["torch"], "it was killed by SIGILL")


def test_workers_that_hang_are_ended_and_what_they_said_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_python(tmp_path, 'echo \'{"stage": "torch"}\'\nexec tail -f /dev/null', monkeypatch)
    probe = run_probe(0.5)
    assert (list(probe.stages), probe.failure) == (["torch"], "it did not finish within 0.5 s")


def test_a_python_that_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    assert run_probe().failure == "Python did not start: No such file or directory"


def test_a_disk_is_written_to_and_left_as_it_was(tmp_path: Path) -> None:
    found = measure_disk(tmp_path / "not" / "there")
    assert found.folder == tmp_path
    assert found.bytes_per_s is not None
    assert found.bytes_per_s > 0
    assert os.listdir(tmp_path) == []


def test_a_disk_that_refuses_or_hangs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert write_some(tmp_path / "missing") == (None, "No such file or directory")
    fake_python(tmp_path, "exec tail -f /dev/null", monkeypatch)
    assert write_some(tmp_path, 0.2) == (None, "a few megabytes were not written within 0.2 s")
