"""`--branch-from`: a new record continues from another one's checkpoint, and `--init-from` in runs that are resumed."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.records import read_metrics
from paceline.toml import read_recipe
from paceline.training.run import train
from unit.training.test_earlier import TASK, timeless


@pytest.fixture(autouse=True)
def task_file(runs: Path) -> None:
    Path("task.py").write_text(TASK)


def files(record: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in record.rglob("*") if path.is_file()}


def contract(record: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((record / "environment.json").read_text())["contract"]
    return found


@pytest.mark.parametrize("options", [{}, {"virtual_workers": 2, "ema": 0.9, "optimizer": "adamw"}, {"max_steps": 6}])
def test_an_unchanged_branch_equals_the_extension_bit_for_bit(runs: Path, options: dict[str, Any]) -> None:
    train("task.py", epochs=2, name="a", **options)
    before = files(runs / "a")
    longer = {"epochs": 4, **({"max_steps": 0} if "max_steps" in options else {})}
    branch = train("task.py", branch_from="a", name="b", **longer)
    assert files(runs / "a") == before, "the original is not touched"
    extended = train("task.py", resume="a", **longer)
    assert branch.model_sha256 == extended.model_sha256
    assert branch.metrics == extended.metrics
    begun = timeless(runs / "b")[0]["step"]
    assert timeless(runs / "b") == [row for row in timeless(runs / "a") if row["step"] >= begun][-len(timeless(runs / "b")) :]


def test_the_contract_says_where_a_branch_comes_from_and_what_changed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = train("task.py", epochs=1, name="a")
    (runs / "a" / "best.safetensors").write_bytes(b"best so far")
    result = train("task.py", branch_from="runs/a", base_lr=0.01, clip_norm=1.0, epochs=2, schedule="cosine", name="b")
    said = contract(runs / "b")["branched"]
    assert said == (
        f"{(runs / 'a').resolve()}, after step 4; --base-lr was 0.05, is 0.01; --clip-norm was 0.0, is 1.0; --schedule was"
        " constant, is cosine; --epochs was 1, is 2"
    )
    assert f"branched  from {said}" in capsys.readouterr().out
    assert result.steps == 8
    assert (runs / "b" / "best.safetensors").read_bytes() == b"best so far", "the checkpoint refers to it"
    assert result.model_sha256 != first.model_sha256
    assert not [row for row in read_metrics(runs / "b") if row["kind"] == "resume"]
    assert read_recipe(str(runs / "b" / "config.toml"))["branch_from"] == str((runs / "a").resolve())


def test_a_branch_can_be_resumed_and_branched(runs: Path) -> None:
    train("task.py", epochs=1, name="a")
    whole = train("task.py", branch_from="a", base_lr=0.01, epochs=3, name="b")
    for path in (runs / "b").iterdir():  # as if it had been killed before its own first checkpoint
        if path.name in ("result.json", "model.safetensors"):
            path.unlink()
    (runs / "b" / "checkpoints" / "step-000000012.safetensors").unlink()
    shutil.rmtree(runs / "a")  # the branch does not need it
    assert train("task.py", resume="b").model_sha256 == whole.model_sha256
    again = train("task.py", branch_from="b", epochs=4, name="c")
    assert again.model_sha256 == train("task.py", resume="b", epochs=4).model_sha256
    shutil.copytree(runs / "b", runs / "d")
    shutil.rmtree(runs / "d" / "checkpoints")
    (runs / "d" / "result.json").unlink()
    with pytest.raises(UsageError, match=r"runs/d: no checkpoint can be read to continue from: start a new run"):
        train("task.py", resume="d")
    with pytest.raises(UsageError, match=r"is a branch of .*runs/a, not of c: leave --branch-from out"):
        train("task.py", resume="b", branch_from="c", epochs=5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"virtual_workers": 2}, "a branch cannot change this: --virtual-workers was 1, is 2"),
        ({"global_batch": 20}, "a branch cannot change this: --global-batch was 10, is 20"),
        ({"optimizer": "adamw"}, "a branch cannot change this: --optimizer was sgd, is adamw"),
        ({"train_samples": 20}, "a branch cannot change this: --train-samples was 0, is 20"),
        ({"ema": 0.9}, "leave out what was turned on .--ema"),
        ({"epochs": 1}, "has trained 4 steps and this run has 4: nothing is left to train; give more --epochs"),
        ({"init_from": "a"}, "--init-from and --branch-from are both given"),
        ({"branch_from": "z"}, "--branch-from z: no record of that name"),
    ],
)
def test_what_a_branch_cannot_change_is_one_line_and_leaves_no_record(runs: Path, options: dict[str, Any], says: str) -> None:
    train("task.py", epochs=1, name="a")
    with pytest.raises(UsageError, match=says):
        train("task.py", **{"branch_from": "a", "epochs": 2, **options})
    assert [path.name for path in runs.iterdir()] == ["a"]


def test_other_data_another_model_or_a_seed_in_mid_epoch_is_refused(runs: Path) -> None:
    train("task.py", max_steps=6, epochs=2, name="a")
    with pytest.raises(UsageError, match=r"--seed was 0, is 1, and step 6 is in the middle of an epoch"):
        train("task.py", branch_from="a", max_steps=0, seed=1)
    with pytest.raises(UsageError, match=r"is a record of task t, not other|the task was t, is other"):
        train("task.py:other", branch_from="a", max_steps=0)
    with pytest.raises(UsageError, match=r"^--branch-from: .* is a record of task"):
        train("fashion-mnist-mini", branch_from="a", max_steps=0)
    Path("second.py").write_text(TASK.replace("data(20)", "data(22)"))
    with pytest.raises(UsageError, match=r"the training or validation data is not the same"):
        train("second.py", branch_from="a", max_steps=0)
    Path("third.py").write_text(TASK.replace("nn.Linear(3, 4), nn.BatchNorm1d(4)", "nn.Linear(3, 4), nn.Identity()"))
    with pytest.raises(UsageError, match=r"the model's parameters have other names or shapes"):
        train("third.py", branch_from="a", max_steps=0)
    train("task.py", epochs=1, name="never", checkpoint_every="0")
    with pytest.raises(UsageError, match=r"kept no checkpoint to continue from; --init-from .*never starts from its weights"):
        train("task.py", branch_from="never", epochs=2)
    assert sorted(path.name for path in runs.iterdir()) == ["a", "never"]


def test_a_resumed_run_does_not_need_the_file_of_init_from_again(runs: Path) -> None:
    train("task.py", epochs=1, name="a")
    whole = train("task.py", epochs=2, name="whole", init_from="a")
    assert contract(runs / "whole")["initial_sha256"] == files(runs / "a")[str(runs / "a" / "model.safetensors")]
    train("task.py", epochs=1, name="b", init_from="runs/a/model.safetensors")
    weights = (runs / "a" / "model.safetensors").read_bytes()
    (runs / "a" / "model.safetensors").unlink()
    assert train("task.py", resume="b", epochs=2).model_sha256 == whole.model_sha256
    with pytest.raises(UsageError, match=r"--init-from was runs/a/model.safetensors, is other.pt"):
        train("task.py", resume="b", epochs=3, init_from="other.pt")
    for path in (*(runs / "b" / "checkpoints").iterdir(), runs / "b" / "result.json"):
        path.unlink()
    with pytest.raises(UsageError, match=r"model.safetensors: there is no such file"):
        train("task.py", resume="b")
    (runs / "a" / "model.safetensors").write_bytes(weights)
    assert train("task.py", resume="b").model_sha256 == whole.model_sha256
