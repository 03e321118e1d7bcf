"""`paceline lr-find`: what it refuses, writes and prints."""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline import cli
from paceline.lr_find.sweep import set_lr

TASK = """
import torch
from torch import nn
from paceline import Arrays, Task, classify

def points(count, seed):
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    centers = 3 * torch.randn(3, 5, generator=torch.Generator().manual_seed(7))
    return Arrays((centers[labels] + torch.randn(count, 5, generator=random), labels))

def task():
    return Task(
        name="points",
        model=lambda: nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3)),
        train=lambda: points(200, 0),
        objective=classify(),
        defaults={"reference_batch": 16, "global_batch": 32, "base_lr": 0.1},
    )
"""


@pytest.fixture(autouse=True)
def task_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "points.py").write_text(TASK)
    return tmp_path / "points.py"


def test_it_prints_a_short_table_and_one_recommendation_and_writes_all_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["lr-find", "points.py", "--name", "x", "--steps", "80", "--to", "1000"]) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "runs" / "x" / "lr-find.json").read_text())
    points, advice = found["points"], found["advice"]
    assert found["exploded"]
    assert points[0]["lr"] == pytest.approx(1e-5)
    assert points[1]["lr"] / points[0]["lr"] == pytest.approx(points[-1]["lr"] / points[-2]["lr"])
    assert {"step", "lr", "loss", "smoothed"} == set(points[0])
    assert advice["base_lr"] == pytest.approx(advice["lr"] / 2, rel=0.05), (
        "global batch 32 is twice the reference, by rule linear"
    )
    assert f"recommended: --base-lr {advice['base_lr']:g} (a peak of " in out
    assert "at global batch 32, by rule linear)" in out
    assert "the rule: half of the learning rate with the lowest smoothed loss" in out
    assert 8 <= sum(line[:1].isdigit() for line in out.splitlines()) <= 14, "a short table"
    assert (tmp_path / "runs" / "x" / "lr-find.svg").read_text().startswith("<svg")
    assert {path.name for path in (tmp_path / "runs" / "x").iterdir()} == {"lr-find.json", "lr-find.svg"}, (
        "weights are not kept"
    )


def test_the_groups_of_an_optimizer_keep_their_ratio() -> None:
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": weights[:1], "lr": 0.1}, {"params": weights[1:], "lr": 0.01}])
    on_host = SimpleNamespace(optimizer=optimizer, lrs={})
    set_lr(on_host, 2.0)  # type: ignore[arg-type]
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([2.0, 0.2])
    shared = [torch.tensor(2.0), torch.tensor(0.2)]
    for group, tensor in zip(optimizer.param_groups, shared, strict=True):
        group["lr"] = tensor
    set_lr(SimpleNamespace(optimizer=optimizer, lrs=dict(enumerate(shared))), 4.0)  # type: ignore[arg-type]
    assert [float(tensor) for tensor in shared] == pytest.approx([4.0, 0.4])
    assert optimizer.param_groups[0]["lr"] is shared[0], "a captured step would read the old tensor"


@pytest.mark.parametrize("lr", [0.1, 0.0])
def test_an_optimizer_of_the_tasks_own_gets_a_rate_for_its_first_group(
    task_file: Path, lr: float, capsys: pytest.CaptureFixture[str]
) -> None:
    groups = f"[{{'params': model[0].parameters(), 'lr': {lr}}}, {{'params': model[2].parameters(), 'lr': 0.2}}]"
    own = f"optimizer=lambda model, config: torch.optim.SGD({groups}),\n        defaults="
    task_file.write_text(TASK.replace("defaults=", own))
    status = cli.run(["lr-find", "points.py", "--name", "x", "--steps", "40"])
    out, said = capsys.readouterr()
    if lr == 0:
        assert status == 2
        assert "the first parameter group of the task's optimizer has lr 0" in said
        return
    assert status == 0
    assert "for the first parameter group of the task's own optimizer, and the others in proportion (a peak of" in out
    assert "--base-lr" not in out, "the task's function does not read it"


def test_a_task_that_does_not_learn_gets_no_recommendation(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["lr-find", "points.py", "--name", "x", "--from", "1e-7", "--to", "1e-5"]) == 1
    assert "no recommendation: the smoothed loss did not fall by 10% between 1e-07 and 1e-05" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--base-lr 0.1", "--base-lr does not apply to lr-find, which finds the learning rate: remove it"),
        ("--schedule cosine", "--schedule does not apply to lr-find, which sets the learning rate of each step"),
        ("--epochs 3", "--epochs does not apply to lr-find"),
        ("--resume", "--resume does not apply to lr-find"),
        ("--local-steps 2", "--local-steps does not apply to lr-find"),
        ("--ema 0.9", "--ema does not apply to lr-find"),
        ("--from 0", "--from is 0: a learning rate must be a positive number"),
        ("--to nan", "--to is nan: a learning rate must be a positive number"),
        ("--from 0.1 --to 0.5", "--to is 0.5: it must be at least 10 times --from (0.1)"),
        ("--from x", "argument --from: invalid float value: 'x'"),
        (
            "--batch-schedule '0:16 1:64' --global-batch 32",
            "--global-batch is 32, but the largest batch of --batch-schedule '0:16 1:64' is 64",
        ),
        ("--steps 5", "--steps is 5: it must be between 20 and 100,000"),
        ("--name taken", "exists: choose another --name"),
        ("--min-lr 3", "unknown flag --min-lr"),
    ],
)
def test_what_makes_no_sense_is_one_line(flags: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    assert cli.run(["lr-find", "points.py", *shlex.split(flags)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1


def test_a_recipe_may_have_a_schedule_and_a_length(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('epochs = 9\nschedule = "cosine"\nbase_lr = 0.2\noptimizer = "adamw"\n')
    assert cli.run(["lr-find", "points.py", "--recipe", "r.toml", "--name", "x"]) == 0
    contract = json.loads((tmp_path / "runs" / "x" / "lr-find.json").read_text())["contract"]
    assert contract["optimizer"].startswith("adamw")
    assert contract["schedule"].startswith("constant")


@pytest.mark.parametrize("schedule", ["0:8 1:64", "0:8 9:64", "auto"])
def test_a_growing_batch_is_swept_at_its_largest(schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "points.py").write_text(TASK.replace('"global_batch": 32, ', ""))

    def find(name: str, *flags: str) -> dict[str, Any]:
        flags = ("--virtual-workers", "2", "--steps", "60", "--to", "100", *flags)
        assert cli.run(["lr-find", "points.py", "--name", name, *flags]) == 0
        found: dict[str, Any] = json.loads((tmp_path / "runs" / name / "lr-find.json").read_text())
        return found

    constant = find("constant", "--global-batch", "64")
    assert "--batch-schedule" not in capsys.readouterr().out
    largest = ("--global-batch", "64") if schedule == "auto" else ()
    growing = find("growing", "--batch-schedule", schedule, "--batch-lr-power", "0.5", *largest)
    assert growing["points"] == constant["points"], "all steps have the largest batch"
    assert growing["advice"] == constant["advice"]
    assert growing["contract"] == constant["contract"]
    assert growing["batch_schedule"] == schedule
    said = f"all steps had a global batch of 64, the largest of --batch-schedule {schedule}; for smaller batches a run scales"
    assert f"{said} the learning rate (--batch-lr-power 0.5)\n" in capsys.readouterr().out
