"""Commands train with the garbage collector at work."""

import sys
from pathlib import Path

import pytest

from harness.processes import run

TASK = """
import gc
import torch
from paceline import Arrays, Task
assert gc.isenabled(), "a task is built with the collector on: its data may leave much garbage"

def objective(model, batch):
    assert gc.isenabled()
    assert gc.get_freeze_count() > 100_000, "the loaded objects are scanned again"
    return {"loss": model(batch[0]).square().mean(1)}

def task():
    data = lambda: Arrays((torch.ones(8, 2),))
    return Task(name="t", model=lambda: torch.nn.Linear(2, 1), train=data, validation=data, objective=objective)
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_command_trains_with_the_collector_on(tmp_path: Path, workers: int) -> None:
    (tmp_path / "my_task.py").write_text(TASK)
    flags = ["--workers", str(workers), "--reference-batch", "2", "--max-steps", "1", "--runs-dir", str(tmp_path)]
    done = run([sys.executable, "-m", "paceline", "train", str(tmp_path / "my_task.py"), *flags], timeout_s=90)
    assert done.returncode == 0, done.stderr
