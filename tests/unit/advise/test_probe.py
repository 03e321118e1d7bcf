"""What `paceline advise` accepts: an existing record, or a task to train briefly."""

import json
import sys
from pathlib import Path

import pytest

from paceline import cli
from paceline.advise.probe import find_or_train
from paceline.errors import UsageError
from paceline.records import read_metrics

_TASK = """
import torch
from torch import nn
from paceline import Arrays, Task

def task():
    return Task(
        name="mine",
        model=lambda: nn.Linear(4, 1),
        train=lambda: Arrays((torch.randn(240, 4), torch.randn(240))),
        validation=lambda: Arrays((torch.randn(20, 4), torch.randn(20))),
        objective=lambda model, batch: {"loss": (model(batch[0]).squeeze(1) - batch[1]).square()},
        defaults={"reference_batch": 12, "base_lr": 0.01},
    )
"""


def test_a_task_is_trained_as_on_one_worker_with_its_step_cut_into_parts(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # loading a task adds its folder
    Path("mine.py").write_text(_TASK)
    assert cli.run(["advise", "mine.py", "--epochs", "2"]) == 0
    said = capsys.readouterr().out
    (record,) = runs.iterdir()
    contract = json.loads((record / "environment.json").read_text())["contract"]
    assert (contract["global_batch"], contract["virtual_workers"], contract["k"], contract["epochs"]) == (12, 4, 1, 2)
    assert any("noise_scale" in row for row in read_metrics(record))
    assert "The noise scale is" in said
    assert "Worth it: up to about" in said

    assert cli.run(["advise", record.name]) == 0
    assert capsys.readouterr().out.splitlines()[0] in said, "the record says the same when it is read again"
    assert len(list(runs.iterdir())) == 1


def test_a_record_is_not_trained(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert find_or_train("run", {"runs_dir": str(tmp_path)}) == tmp_path / "run"
    with pytest.raises(UsageError, match="--epochs is only for training"):
        find_or_train("run", {"runs_dir": str(tmp_path), "epochs": "3"})
    with pytest.raises(UsageError, match="--recipe is only for training"):
        find_or_train("run", {"runs_dir": str(tmp_path)}, "batch-128")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nowhere"], "unknown task 'nowhere'"),
        (["runs/nowhere"], "no record 'runs/nowhere', neither here nor in runs"),
        (["fashion-mnist-mini", "--epochs", "0"], "--epochs is 0: it must be at least 1"),
        (["fashion-mnist-mini", "--virtual-workers", "1"], "use --virtual-workers 2 or more"),
        ([], "the following arguments are required"),
    ],
)
def test_mistakes_are_one_line(runs: Path, args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["advise", *args]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
