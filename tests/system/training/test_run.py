"""`paceline.train` with workers and loader processes leaves the program as it was."""

import gc
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from harness.processes import children, run
from harness.training import blobs
from paceline.config import Config
from paceline.errors import PacelineError, UsageError
from paceline.records import read_result
from paceline.toml import read_recipe
from paceline.training.run import WorkerFailed, train
from paceline.training.task import Task
from unit.training.test_run import TASK


def test_workers_started_from_a_program_leave_it_as_it_was(runs: Path) -> None:
    Path("task.py").write_text(TASK)
    environ, handler = dict(os.environ), signal.getsignal(signal.SIGINT)
    before = psutil.Process().net_connections()  # of other tests' libraries
    gc.disable()
    try:
        together = train("task.py", workers=2, epochs=1)
        assert psutil.Process().net_connections() == before
    finally:
        gc.enable()
    assert together.status == "done"
    assert dict(os.environ) == environ
    assert signal.getsignal(signal.SIGINT) is handler
    assert train("task.py", workers=1, epochs=1).status == "done"
    assert train(blobs(), epochs=1, name="blobs").status == "done"
    assert len(list(runs.iterdir())) == 3


def test_a_task_object_survives_a_restart(runs: Path) -> None:
    """The worker of the second attempt gets the same Task, and ends with the bits of a run in this process."""
    calls, crashed, classify = [0], Path("crashed").resolve(), blobs().objective

    def objective(model: nn.Module, batch: Any) -> Any:
        calls[0] += 1
        if calls[0] == 15 and not crashed.exists():
            crashed.touch()
            os._exit(9)
        return classify(model, batch)

    result = train(blobs(objective=objective), max_restarts=1, epochs=2, reduce="exact", checkpoint_every="3", name="a")
    assert crashed.exists()
    assert calls == [0]
    assert result.model_sha256 == train(blobs(), epochs=2, reduce="exact").model_sha256
    assert next(type(layer).__name__ for layer in result.model.children()) == "Linear"
    with pytest.raises(UsageError, match="is a record of task blobs, not other"):
        train(replace(blobs(), name="other"), resume="a", epochs=3)


def test_a_task_that_exits_is_no_success(runs: Path) -> None:
    Path("task.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(UsageError, match="raised SystemExit"):
        train("task.py")
    with pytest.raises(WorkerFailed, match="raised SystemExit"):
        train("task.py", workers=2)
    assert not runs.exists()


OWN_OPTIMIZER = """
import torch
from paceline import optim

def make(model, config):
    return torch.optim.Adagrad(model.parameters(), lr=config.base_lr)

optim.OPTIMIZERS["mine"] = optim.Entry(make=make, about="of this file", reference="")
"""


def test_a_tasks_own_optimizer_works_on_several_workers(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Only the workers run the file, so only they know the name."""
    Path("task.py").write_text(TASK + OWN_OPTIMIZER)
    assert train("task.py", workers=2, epochs=1, optimizer="mine").status == "done"
    assert "optimizer  mine, weight decay 0.0005, cosine by step" in capfd.readouterr().out
    with pytest.raises(WorkerFailed, match="unknown optimizer 'mien': did you mean 'mine'") as caught:
        train("task.py", workers=2, epochs=1, optimizer="mien")
    assert caught.value.exit_code == 2


class Numbers(Dataset):
    """Read through loader processes."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(1), torch.ones(1)


def streamed(objective: Any = None) -> Task:
    def distance(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": (model(batch[0]) - batch[1]).square().squeeze(1)}

    defaults = {"loader_workers": 2, "global_batch": 6, "base_lr": 0.01, "epochs": 1}
    return Task(
        name="streamed",
        model=lambda: nn.Linear(1, 1),
        train=Numbers,
        validation=Numbers,
        objective=objective or distance,
        defaults=defaults,
    )


PROGRAM = f"""
import os, sys
sys.path[:0] = [{str(Path(__file__).parents[2])!r}]
from harness.processes import children, run
from paceline import train
from system.training.test_run import streamed

for number in range(4):
    assert train(streamed(), name=f"run-{{number}}").status == "done"
    assert not children(os.getpid())
"""


def test_several_trainings_in_one_program_leave_no_process(runs: Path) -> None:
    """In a program of its own: forked from this one, loader processes would inherit what other tests left in torch."""
    done = run([sys.executable, "-c", PROGRAM])
    assert done.returncode == 0, done.stderr


def test_a_training_that_fails_leaves_no_process(runs: Path) -> None:
    def mistake(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        raise LookupError("a mistake")

    with pytest.raises(LookupError):
        train(streamed(mistake))
    assert not children(os.getpid())


def test_sys_exit_in_an_objective_is_a_failure_that_the_record_explains(runs: Path) -> None:
    def leave(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        sys.exit(0)

    with pytest.raises(PacelineError, match=r"sys.exit\(0\) was called in leave, line \d+ of test_run.py: the run is not done"):
        train(streamed(leave), name="left")
    result = read_result(runs / "left")
    assert result["status"] == "failed"
    assert "sys.exit(0) was called in leave" in result["why"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_config_overrides_only_what_it_was_given(runs: Path, workers: int) -> None:
    """The task's own optimizer, learning rate and schedule stay, also after `replace` and in workers started from here."""
    Path("task.py").write_text(TASK.replace('"warmup_steps": 2', '"warmup_steps": 2, "optimizer": "adamw", "momentum": 0.5'))
    config = replace(Config(epochs=1, momentum=0.9), name="x", workers=workers)
    assert train("task.py", config).status == "done"
    found = read_recipe(str(runs / "x" / "config.toml"))
    assert [found[name] for name in ("optimizer", "base_lr", "schedule", "warmup_steps")] == ["adamw", 0.01, "cosine", 2]
    assert (found["epochs"], found["momentum"]) == (1, 0.9), "given, although 0.9 is also Config's default"
