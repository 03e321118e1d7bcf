"""A record's model in a program of one's own: `paceline.load` and `Result.model`."""

import json
import pickle
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import paceline
from harness.training import blobs
from paceline.errors import UsageError
from paceline.training.weights import model_sha256
from unit.training.test_earlier import TASK


def test_the_model_of_a_result_and_of_its_record(runs: Path) -> None:
    Path("task.py").write_text(TASK)
    result = paceline.train("task.py", epochs=1, name="x")
    state = torch.get_rng_state()
    model = paceline.load("x")
    assert torch.equal(torch.get_rng_state(), state), "the program's own random numbers stay"
    assert not model.training
    assert model_sha256(model) == result.model_sha256 == model_sha256(result.model) == model_sha256(paceline.load(runs / "x"))
    assert result.model is result.model, "loaded once"
    changed = {name: value + 1 for name, value in model.state_dict().items()}
    save_file(changed, runs / "x" / "best.safetensors")
    assert all(
        torch.equal(value, changed[name]) for name, value in paceline.load("runs/x/best.safetensors").state_dict().items()
    )
    assert "model" not in asdict(result)
    assert pickle.loads(pickle.dumps(result)) == result


def test_a_task_made_in_python_is_remembered_by_its_result_only(runs: Path) -> None:
    task = blobs(norm=True)
    result = paceline.train(task, epochs=1, name="x")
    assert model_sha256(result.model) == result.model_sha256
    assert pickle.loads(pickle.dumps(result)) == result, "the Task, with its lambdas, is left out"
    with pytest.raises(UsageError, match=r"runs/x was trained from a Task made in Python, 'blobs': give that Task"):
        paceline.load("x")
    assert model_sha256(paceline.load("x", task=task)) == result.model_sha256


def test_built_in_tasks_and_models(runs: Path) -> None:
    result = paceline.train("fashion-mnist-mini", model="linear", max_steps=1)
    assert model_sha256(result.model) == result.model_sha256


def test_wrong_records_are_one_line(runs: Path) -> None:
    Path("task.py").write_text(TASK)
    result = paceline.train("task.py", epochs=1, name="x")
    Path("task.py").write_text(TASK.replace("nn.Linear(4, 2)", "nn.Linear(4, 3)"))
    del sys.modules["task"]
    with pytest.raises(UsageError, match=r"does not fit runs/x/model.safetensors: 7 of 9 tensors, 2 of another shape"):
        paceline.load("x")
    Path("task.py").unlink()
    with pytest.raises(UsageError, match=r"was trained from task.py, which does not exist here"):
        paceline.load("x")
    (runs / "x" / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"runs/x has no model.safetensors: the run is not finished"):
        paceline.load("x")
    (runs / "x" / "environment.json").write_text("{")
    with pytest.raises(UsageError, match=r"is not a record of paceline train"):
        paceline.load("x")
    with pytest.raises(UsageError, match=r"no record 'y'"):
        paceline.load("y")
    with pytest.raises(UsageError, match=r"is a file: give the folder"):
        paceline.load(runs / "x" / "config.toml")
    missing: Any = paceline.Result(status="done", metrics={})
    with pytest.raises(UsageError, match=r"this run left no record here"):
        missing.model  # noqa: B018
    assert json.dumps(asdict(result))
