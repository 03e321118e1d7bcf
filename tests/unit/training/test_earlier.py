"""A finished run is extended as if it had been longer from the start; other records are refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.records import read_metrics, read_result
from paceline.report.page import report_verb
from paceline.toml import read_recipe
from paceline.training.run import train

TASK = """
from paceline import Arrays, Task
import torch
from torch import nn

def task(name="t"):
    def data(samples=40):
        random = torch.Generator().manual_seed(samples)
        labels = torch.arange(samples) % 2
        return Arrays((labels[:, None] + 0.3 * torch.randn(samples, 3, generator=random), labels))

    def objective(model, batch):
        logits = model(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1], reduction="none")
        return {"loss": loss, "accuracy": (logits.argmax(1) == batch[1]).float()}

    return Task(name=name, model=lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), train=data,
                validation=lambda: data(20), objective=objective,
                defaults={"schedule": "constant", "global_batch": 10, "base_lr": 0.05, "reduce": "exact"})

def other():
    return task("other")
"""


@pytest.fixture(autouse=True)
def task_file(runs: Path) -> None:
    Path("task.py").write_text(TASK)


def timeless(record: Path) -> list[dict[str, Any]]:
    """The rows of a record's steps and epochs, without their times."""
    rows = [row for row in read_metrics(record) if row["kind"] in ("step", "epoch")]
    return [{name: value for name, value in row.items() if "time" not in name and "per_s" not in name} for row in rows]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "step", "step_at": "1,4"},
        {"virtual_workers": 2, "ema": 0.9},
        {"optimizer": "adamw", "checkpoint_every": "12"},  # the last step has had its checkpoint
    ],
)
def test_an_extended_run_equals_a_longer_one_bit_for_bit(runs: Path, capsys: Any, options: dict[str, Any]) -> None:
    whole = train("task.py", name="whole", epochs=5, log_every=1, **options)
    short = train("task.py", name="x", epochs=3, log_every=1, **options)
    assert short.model_sha256 != whole.model_sha256
    capsys.readouterr()
    longer = train("task.py", resume="x", epochs=5)
    said = capsys.readouterr().out
    assert "from 12 steps to 20 (5 epochs); the learning rate does not depend on the length of the run" in said
    assert (longer.model_sha256, longer.metrics, longer.epochs) == (whole.model_sha256, whole.metrics, 5)
    assert timeless(runs / "x") == timeless(runs / "whole")
    assert read_recipe("runs/x/config.toml")["epochs"] == 5
    assert (runs / "x" / "model.safetensors").read_bytes() == (runs / "whole" / "model.safetensors").read_bytes()


def test_steps_end_and_go_on_within_an_epoch(runs: Path) -> None:
    whole = train("task.py", name="whole", epochs=9, max_steps=15)
    train("task.py", name="x", epochs=9, max_steps=6)
    with pytest.raises(UsageError, match=r"^--max-steps 5: runs/x has already trained 2 epochs, 6 steps: give more"):
        train("task.py", resume="x", max_steps=5)
    longer = train("task.py", resume="x", max_steps=15)
    assert (longer.model_sha256, longer.metrics, longer.steps) == (whole.model_sha256, whole.metrics, 15)
    assert [row["step"] for row in read_metrics(runs / "x") if row["kind"] == "epoch"] == [4, 8, 12, 15]


PHASES = {"virtual_workers": 2, "smallest_part": 1, "global_batch": 16, "batch_schedule": "0:4 0.2:8 0.6:16"}


@pytest.mark.parametrize("schedule", [PHASES["batch_schedule"], "auto:4"])
@pytest.mark.parametrize(("first", "then"), [({"max_steps": 3}, {"max_steps": 6}), ({"epochs": 1}, {"epochs": 3})])
def test_a_run_whose_batch_changes_is_extended(runs: Path, schedule: str, first: Any, then: Any) -> None:
    options = {**PHASES, "batch_schedule": schedule, "epochs": 2, "batch_noise_ratio": 1e-9, "log_every": 1}
    train("task.py", **{**options, **first}, name="whole")
    longer = train("task.py", **then, resume="whole")
    assert longer.model_sha256 == train("task.py", **{**options, **then}, name="straight").model_sha256
    assert timeless(runs / "whole")[-1] == timeless(runs / "straight")[-1]


def test_a_finished_run_is_not_resumed_with_other_options(runs: Path) -> None:
    train("task.py", **PHASES, epochs=2, name="x")
    assert train("task.py", **PHASES, epochs=2, resume="x").steps
    with pytest.raises(UsageError, match=r'--batch-schedule was "0:4 0.2:8 0.6:16", is "0:8 1:16"'):
        train("task.py", **{**PHASES, "batch_schedule": "0:8 1:16"}, resume="x")
    with pytest.raises(UsageError, match=r"--base-lr was 0.05, is 0.1"):
        train("task.py", base_lr=0.1, resume="x")
    with pytest.raises(UsageError, match=r"--warmup-from was not given, is 0.5"):
        train("task.py", warmup_from=0.5, resume="x")


def test_a_finished_run_is_resumed_with_the_same_options_in_other_words(runs: Path, capsys: Any) -> None:
    train("task.py", **PHASES, epochs=2, name="x", precision="auto")
    table = {0: 4, 0.2: 8, 0.6: 16}
    for options in ({"precision": "auto"}, {"batch_schedule": "0:4,0.20:8,0.6:16"}, {"batch_schedule": table}):
        capsys.readouterr()
        train("task.py", **options, resume="x")
        assert "runs/x is already done" in capsys.readouterr().out


def test_a_finished_run_is_resumed_with_its_own_options_as_they_were_given(runs: Path, capsys: Any) -> None:
    train("task.py", name="first", epochs=1, momentum=0.0)
    given = {"schedule_by": "auto", "momentum": 0.0, "nesterov": True, "branch_from": "runs/first", "epochs": 2}
    train("task.py", **given, name="x")
    for options in (given, {"branch_from": "first"}, {"branch_from": str(Path("runs/first").resolve())}):
        capsys.readouterr()
        train("task.py", **options, resume="x")
        assert "runs/x is already done" in capsys.readouterr().out
    train("task.py", name="second", epochs=1)
    with pytest.raises(UsageError, match=r"--branch-from was .*first, is .*second"):
        train("task.py", branch_from="second", resume="x")
    Path("runs/x/config.toml").unlink()
    assert train("task.py", base_lr=0.7, resume="x").steps, "there is nothing left to compare with"


def test_an_unfinished_run_is_resumed_with_its_schedule_in_other_words(runs: Path) -> None:
    whole = train("task.py", **PHASES, epochs=2, name="whole")
    train("task.py", **PHASES, epochs=1, name="x")
    again = {**PHASES, "batch_schedule": "0:4, 0.20:8, 0.6:16"}
    assert train("task.py", **again, epochs=2, resume="x").model_sha256 == whole.model_sha256


def test_a_schedule_that_depends_on_the_length_is_that_of_the_new_length(runs: Path, capsys: Any) -> None:
    whole = train("task.py", name="whole", schedule="linear", epochs=3, log_every=1)
    train("task.py", name="x", schedule="linear", epochs=2, log_every=1)
    capsys.readouterr()
    longer = train("task.py", resume="x", epochs=3)
    said = capsys.readouterr().out
    assert "from 8 steps to 12 (3 epochs); from here on the linear schedule is that of the new length" in said
    assert "in the next step (was 0)" in said
    assert longer.model_sha256 != whole.model_sha256
    lrs = [[row["lr"] for row in read_metrics(runs / name) if row["kind"] == "step"] for name in ("x", "whole")]
    assert lrs[0][8:] == lrs[1][8:]
    report_verb(["runs/x"], out="page.html")
    page = Path("page.html").read_text()
    assert "from 8 steps to 12 (3 epochs); from here on the linear schedule" in page


def test_local_steps_follow_the_new_length_and_the_contract_says_so(runs: Path, capsys: Any) -> None:
    train("task.py", name="x", epochs=2, virtual_workers=2, local_steps=2)
    capsys.readouterr()
    train("task.py", resume="x", epochs=4)
    assert "local steps begin after step 8 (was 4), and the averaging at step 8 stays" in capsys.readouterr().out


def test_a_record_without_options_knows_its_length_from_its_contract(runs: Path, capsys: Any) -> None:
    train("task.py", name="x", epochs=2)
    (runs / "x" / "config.toml").unlink()
    capsys.readouterr()
    train("task.py", resume="x")
    assert "give --epochs above 2" in capsys.readouterr().out


def test_the_record_is_appended_to(runs: Path) -> None:
    train("task.py", name="x", epochs=1)
    before = (runs / "x" / "metrics.jsonl").read_bytes()
    train("task.py", resume="x", epochs=2)
    assert (runs / "x" / "metrics.jsonl").read_bytes().startswith(before)
    (row,) = [row for row in read_metrics(runs / "x") if row["kind"] == "resume"]
    assert (row["step"], row["was"]["epochs"], row["contract"]["epochs"]) == (4, 1, 2)
    assert read_result(runs / "x")["epochs"] == 2
    assert json.loads((runs / "x" / "environment.json").read_text())["contract"]["total_steps"] == 8


def test_a_finished_run_says_how_to_extend_it(runs: Path, capsys: Any) -> None:
    first = train("task.py", name="x", epochs=2)
    for options in ({}, {"epochs": 2}):
        assert train("task.py", resume="x", **options) == first
        assert "runs/x is already done" in (said := capsys.readouterr().out)
        assert said.endswith("; to extend it, give --epochs above 2\n")
    with pytest.raises(UsageError, match=r"^--epochs 1: runs/x has already trained 2 epochs, 8 steps: give more to extend it"):
        train("task.py", resume="x", epochs=1)
    with pytest.raises(UsageError, match="--seed was 0, is 1"):
        train("task.py", resume="x", epochs=3, seed=1)
    assert Path("runs/x/result.json").exists(), "a refusal changes nothing"
    train("task.py", name="y", epochs=2, max_steps=3)
    capsys.readouterr()
    train("task.py", resume="y", epochs=9)
    assert capsys.readouterr().out.endswith("; to extend it, give --max-steps above 3\n")


def test_checkpoints_that_are_gone_or_old(runs: Path, capsys: Any) -> None:
    whole = train("task.py", name="whole", epochs=4)
    train("task.py", name="x", epochs=3, checkpoint_every="5")
    (runs / "x" / "checkpoints" / "step-000000012.safetensors").unlink()
    longer = train("task.py", resume="x", epochs=4)
    note = "note: the last checkpoint of runs/x is from step 10, and the run ended at step 12: the steps between are"
    assert note in capsys.readouterr().out
    assert longer.model_sha256 == whole.model_sha256
    train("task.py", name="y", epochs=1, checkpoint_every="0")
    with pytest.raises(UsageError, match="runs/y is done and kept no checkpoint to continue from: start a new run with"):
        train("task.py", resume="y", epochs=2)


def test_a_run_that_reached_its_target_continues_with_another(runs: Path, capsys: Any) -> None:
    whole = train("task.py", name="whole", epochs=4)
    first = train("task.py", name="x", epochs=4, target_accuracy=0.1, patience=2)
    assert (first.status, first.epochs) == ("target reached", 2)
    capsys.readouterr()
    assert train("task.py", resume="x") == first
    assert "to extend it, give a higher --target-accuracy than" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"^--epochs 9: runs/x ended at its target: to extend it, give a higher"):
        train("task.py", resume="x", epochs=9)
    longer = train("task.py", resume="x", target_accuracy=0.0)
    assert (longer.status, longer.model_sha256) == ("done", whole.model_sha256)


def test_hits_of_another_target_do_not_count(runs: Path) -> None:
    """Of the three epochs in a row that the new target needs, the first is the one that is validated again."""
    train("task.py", name="x", epochs=9, target_accuracy=0.1, patience=2)
    again = train("task.py", resume="x", target_accuracy=1e-9, patience=3)
    assert (again.status, again.epochs) == ("target reached", 4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("fashion-mnist-mini", "--resume: runs/x is a record of task task.py, not fashion-mnist-mini"),
        ("task.py:other", "--resume: runs/x is a record of task t, not other"),
    ],
)
def test_a_record_of_another_task_is_named_before_its_options(runs: Path, given: str, said: str) -> None:
    train("task.py", name="x", epochs=1)
    (runs / "x" / "result.json").unlink()
    with pytest.raises(UsageError, match=f"^{said}"):
        train(given, resume="x", seed=7, epochs=9)


def test_a_record_of_a_built_in_task(runs: Path) -> None:
    train("fashion-mnist-mini", name="m", model="linear", train_samples=100, epochs=1)
    with pytest.raises(UsageError, match=r"^--resume: runs/m is a record of task fashion-mnist-mini, not task.py"):
        train("task.py", resume="m", epochs=2)
