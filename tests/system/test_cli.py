"""The command line as a process: exit code, CPU time of --help, output that cannot be written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.processes import paceline
from unit.test_cli import MINI


def test_help_uses_little_cpu_time():
    def cpu_s() -> float:
        process = subprocess.Popen([sys.executable, "-m", "paceline", "--help"], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return usage.ru_utime + usage.ru_stime

    assert min(cpu_s() for _ in range(3)) < 0.3


def test_the_exit_code_reaches_the_shell():
    done = paceline("trian")
    assert done.returncode == 2
    assert done.stderr == "paceline: unknown verb 'trian': did you mean 'train'?\n"


@pytest.mark.parametrize("where", ["full", "closed", "gone"])
def test_output_that_cannot_be_written_ends_no_run(runs: Path, where: str) -> None:
    """A full disk, closed streams, a reader that is gone: the run trains to its end and says so by its exit code."""
    reader, writer = os.pipe()
    os.close(reader)
    redirect = {"full": ">/dev/full 2>/dev/full", "closed": ">&- 2>&- <&-", "gone": f">&{writer}"}[where]
    try:
        command = f"{sys.executable} -m paceline {' '.join(MINI)} --name x {redirect}"
        done = subprocess.run(["bash", "-c", command], pass_fds=(writer,), capture_output=True, timeout=120, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (runs / "x" / "model.safetensors").exists()
    assert json.loads((runs / "x" / "result.json").read_text())["status"] == "done"
    noted = "could not be printed" in (runs / "x" / "metrics.jsonl").read_text()
    assert noted == (where != "closed"), "what the user closed is not missed"
