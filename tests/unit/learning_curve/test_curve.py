"""`paceline learning-curve`: its sizes, the runs it plans, its mistakes, and a whole small one."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from paceline import cli
from paceline.config import make_config
from paceline.errors import UsageError
from paceline.learning_curve.curve import choose_epochs, choose_sizes, fit_batch, make_study, parse_sizes
from paceline.study.study import list_runs

MINI = ("learning-curve", "fashion-mnist-mini", "--model", "linear")

TASK = """
from paceline import Arrays, Task
import torch
from torch import nn
from torch.utils.data import Dataset

class Own(Dataset):
    def __init__(self, count): self.count = count
    def __len__(self): return self.count
    def __getitem__(self, i): return torch.tensor([i / self.count, 1.0]), torch.tensor([i / self.count])

def objective(model, batch):
    return {"loss": ((model(batch[0]) - batch[1]) ** 2).mean(1)}

def task():
    return Task(name="t", model=lambda: nn.Linear(2, 1), train=Own(64), validation=Own(20), objective=objective,
                defaults={"global_batch": 8, "epochs": 2, "base_lr": 0.1, "loader_workers": 0, "max_steps": 9,
                          "train_samples": 32})

def nothing():
    return Task(name="t", model=lambda: nn.Linear(2, 1), train=Own(64), objective=objective)

def growing():
    return Task(name="t", model=lambda: nn.Linear(2, 1), train=Own(64), validation=Own(20), objective=objective,
                defaults={"batch_schedule": "0:8 1:16"})
"""


@pytest.fixture(autouse=True)
def own_process(runs: Path) -> Iterator[None]:
    """Reset what would otherwise leak from one call into the next: each has its own process in real use."""
    path = list(sys.path)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.path[:] = path
    sys.modules.pop("curve_task", None)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--sizes", "500,x"), "--sizes is '500,x': it must be numbers of samples, such as 500,1000,2000"),
        (("--sizes", "500,0,7"), "each at least 2"),
        (("--sizes", "500,1000"), "three parameters need at least 3 sizes"),
        (("--sizes", "500,1000,6001"), "--sizes has 6,001: use at most the task's 6,000 training samples"),
        (("--sizes", "5,10,20", "--smallest", "5"), "--sizes and --smallest are both given: choose one"),
        (("--smallest", "3000"), "gives 2 sizes, and a curve needs at least 3: use --smallest 1500 or less"),
        (("--smallest", "0"), "--smallest is 0: it must be at least 1"),
        (("--least-steps", "0"), "--least-steps is 0: it must be at least 1"),
        (("--target-error", "-1"), "--target-error is -1.0: it must be a positive number"),
        (("--seeds", "none"), "--seeds is 'none'"),
        (("--seed", "3"), "--seed cannot be given: learning-curve sets it; use --seeds"),
        (("--train-samples", "3"), "--train-samples cannot be given: learning-curve sets it; use --sizes"),
        (("--max-steps", "3"), "--max-steps cannot be given"),
        (("--batch-schedule", "auto"), "--batch-schedule cannot be given"),
        (("--resume",), "--resume cannot be given"),
        (("--name", "../x"), "--name is '../x': it must be a plain name"),
        (("--model", "lnear"), "did you mean 'linear'?"),
        (("--workers", "3", "--global-batch", "100"), "a global batch of 100 does not divide into 3 equal parts"),
    ],
)
def test_a_mistake_is_one_line(argv, words, runs, capsys):
    assert cli.run([*MINI, *argv]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1
    assert not runs.exists()


def test_data_that_have_no_curve(capsys):
    Path("curve_task.py").write_text(TASK)
    for name, words in (("nothing", "has no validation data"), ("growing", "has a batch schedule")):
        assert cli.run(["learning-curve", f"curve_task.py:{name}"]) == 2
        assert words in capsys.readouterr().err


def test_sizes_halve():
    assert choose_sizes(60_000) == (1875, 3750, 7500, 15_000, 30_000, 60_000)
    assert choose_sizes(6000, (), 1500) == (1500, 3000, 6000)
    assert choose_sizes(6000, (10, 20, 30)) == (10, 20, 30)
    assert choose_sizes(8) == (2, 4, 8)
    assert parse_sizes("2000,500,1_000,500") == (500, 1000, 2000)
    with pytest.raises(UsageError, match="only 7 training samples: too few"):
        choose_sizes(7)


def test_steps_fall_with_the_square_root_of_the_size():
    steps = [choose_epochs(5, 60_000, 128, size, 128, 200) * -(-size // 128) for size in choose_sizes(60_000)]
    assert steps == [420, 600, 826, 1180, 1645, 2345]
    assert choose_epochs(5, 60_000, 128, 60_000, 128, 200) == 5
    assert choose_epochs(5, 6000, 128, 187, 32, 200) == 34, "at least 200 steps"
    assert choose_epochs(5, 60_000, 128, 40, 8, 10_000) == 194, "more than 100 epochs only by the square root"
    assert choose_epochs(1, 6000, 128, 187, 32, 200) == 8, "no more steps than with all data"


def test_a_batch_is_at_most_a_quarter_of_the_subset():
    assert [fit_batch(128, 1, size) for size in (6000, 512, 500, 187, 2)] == [128, 128, 64, 32, 1]
    assert fit_batch(96, 4, 100) == 24
    assert fit_batch(12, 4, 10) == 12, "each part needs a sample"


def test_the_plan_of_the_runs():
    asked = {"model": "linear", "warmup_epochs": 1.0, "schedule": "step", "step_at": "2,4", "epochs": 5}
    study = make_study("fashion-mnist-mini", asked, make_config(asked), (375, 1500, 6000), 6000, name="n")
    small, middle, full = (arm.options for arm in study.arms)
    assert (study.name, study.reference) == ("n", "6000 samples")
    assert full == {**asked, "global_batch": 128, "epochs": 5, "warmup_epochs": 1.0, "step_at": "0.4,0.8"}
    assert (small["train_samples"], small["subset"], small["global_batch"], small["epochs"]) == (375, "random", 64, 34)
    assert middle["warmup_epochs"] == pytest.approx(17 / 5)
    runs = list_runs(study)
    assert [run.name for run in runs[:3]] == ["375-samples-seed0", "1500-samples-seed0", "6000-samples-seed0"]
    assert len(runs) == 9


def test_a_small_curve_of_a_task_without_accuracy_or_labels(capsys):
    Path("curve_task.py").write_text(TASK)
    argv = ["learning-curve", "curve_task.py", "--smallest", "16", "--seeds", "1", "--least-steps", "1", "--name", "c"]
    assert cli.run(argv) == 0
    out = capsys.readouterr().out
    assert "16, 32, 64 of 64 training samples: nested subsets, other ones for each seed, not stratified" in out
    assert "one seed: no spread between seeds" in out
    assert "loss, mean ± sd (n)" in out
    assert "\x1b" not in out
    found = json.loads(Path("runs/c/learning-curve.json").read_text())
    assert [row["steps"] for row in found["learning_curve"]["sizes"]] == [16, 12, 16]
    assert found["study"] == json.loads(Path("runs/c/study.json").read_text())["study"]
    first = json.loads(Path("runs/c/16-samples-seed0/environment.json").read_text())["contract"]
    assert (first["train_samples"], first["global_batch"]) == (16, 4)
    assert "16 of 64 samples, chosen by the seed, not stratified" in first["data"]
    assert cli.run(argv) == 0
    assert "3 already done" in capsys.readouterr().out


def test_the_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    from paceline.learning_curve.curve import _check_folder

    _check_folder(tmp_path / "new", "a")
    own, other = tmp_path / "own", tmp_path / "run"
    own.mkdir()
    other.mkdir()
    (own / "study.json").write_text('{"study": {"task": "a"}}')
    _check_folder(own, "a")
    with pytest.raises(UsageError, match="own holds runs of task a: choose another --name"):
        _check_folder(own, "b")
    (other / "metrics.jsonl").touch()
    with pytest.raises(UsageError, match="run holds something other than a learning curve: choose another --name"):
        _check_folder(other, "a")
