"""The garbage collector is paused while a command loads, and only then."""

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.processes import run
from paceline import loading

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


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    loading._paused = False
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_command_trains_with_the_collector_on(tmp_path: Path, workers: int) -> None:
    (tmp_path / "my_task.py").write_text(TASK)
    flags = ["--workers", str(workers), "--reference-batch", "2", "--max-steps", "1", "--runs-dir", str(tmp_path)]
    done = run([sys.executable, "-m", "paceline", "train", str(tmp_path / "my_task.py"), *flags], timeout_s=90)
    assert done.returncode == 0, done.stderr


def test_pause_and_resume() -> None:
    loading.pause_collector()
    assert not gc.isenabled()
    loading.resume_collector()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


@pytest.mark.parametrize("enabled", [True, False])
def test_a_callers_collector_is_left_alone(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    loading.load_rest()
    assert gc.isenabled() == enabled
    assert gc.get_freeze_count() == 0
