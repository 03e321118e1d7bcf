"""The command line as a process: exit code, CPU time of --help, output that cannot be written."""

import json
import os
import re
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


LOADS = """
import torch
from torch.utils.data import Dataset
from paceline import Task

class Numbers(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        if torch.utils.data.get_worker_info() is not None:
            raise ValueError(f"sample {i} is damaged")
        return torch.ones(1)

def task():
    objective = lambda model, batch: {"loss": model(batch)[:, 0]}
    return Task(name="loads", model=lambda: torch.nn.Linear(1, 1), train=Numbers, validation=Numbers, objective=objective)
"""


def test_an_error_in_a_loader_process_of_a_worker_shows_the_users_line_and_its_traceback_if_asked_to(runs: Path) -> None:
    Path("my_task.py").write_text(LOADS)
    flags = ("--workers", "2", "--global-batch", "8", "--loader-workers", "1", "--name", "x", "--traceback")
    done = paceline("train", "my_task.py", *flags)
    assert done.returncode == 1
    first, where, code, *rest = done.stderr.splitlines()
    assert re.fullmatch(r"paceline: worker [01] failed first: ValueError: sample \d+ is damaged", first), done.stderr
    assert (where, code) == ("  my_task.py, line 12, in __getitem__", '      raise ValueError(f"sample {i} is damaged")')
    assert rest[0] == "Traceback (most recent call last):"
    assert any("Caught ValueError in DataLoader worker process 0" in line for line in rest)
    result = json.loads((runs / "x" / "result.json").read_text())
    assert f"paceline: {result['why']}" == first
    assert f"  {result['where']}".splitlines()[0] == where
    assert result["traceback"] == "\n".join(rest)
