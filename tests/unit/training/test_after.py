"""`paceline evaluate` and `paceline predict` in one process: the data, the numbers, the files, and wrong inputs."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import paceline
from paceline import cli, output
from paceline.records import read_result
from paceline.training import outputs

TASK = """
from paceline import Arrays, Task
import torch
from torch import nn

def points(count, seed):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(count, 1, 6, 6, generator=random)

def data(count=40, seed=0):
    x = points(count, seed)
    return Arrays((x, (x.mean((1, 2, 3)) > 0).long()))

def unlabelled():
    return points(30, 5)

def random():
    return Arrays((torch.randn(20, 1, 6, 6), torch.zeros(20).long()))

def empty():
    return Arrays((torch.zeros(0, 1, 6, 6), torch.zeros(0).long()))

def nothing():
    pass

def broken():
    raise KeyError("no such column")

def model():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))

def objective(model, batch):
    logits = model(batch[0]) + 0 * torch.rand(1, device=batch[0].device)
    loss = nn.functional.cross_entropy(logits, batch[1], reduction="none") + torch.rand(len(logits), device=logits.device)
    return {"loss": loss, "accuracy": (logits.argmax(1) == batch[1]).float()}

def task():
    return Task(name="t", model=model, train=data, validation=lambda: data(33, 1), objective=objective,
                defaults={"global_batch": 20, "base_lr": 0.05, "reduce": "exact", "eval_batch": 10})

def predicts():
    return Task(name="t", model=model, train=data, validation=random, objective=objective,
                predict=lambda model, batch: {"label": model(batch[0]).argmax(1), "logits": model(batch[0])},
                defaults={"global_batch": 20, "eval_batch": 10})

def no_validation():
    return Task(name="t", model=model, train=data, objective=objective, defaults={"global_batch": 20})
"""


@pytest.fixture(autouse=True)
def task_file(runs: Path) -> None:
    Path("my.py").write_text(TASK)


def call(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    """What a command prints; its one error line if it fails."""
    capsys.readouterr()
    found = cli.run([*argv])
    out, err = capsys.readouterr()
    assert found == code, err
    if code:
        assert err.count("\n") == 1, err
    return err.strip() if code else out


@pytest.mark.parametrize("options", [{}, {"virtual_workers": 2}, {"ema": 0.9}, {"virtual_workers": 2, "reduce": "fast"}])
def test_evaluation_equals_the_runs_own_last_validation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Bit for bit, though the objective draws random numbers in validation."""
    result = paceline.train("my.py:task", epochs=2, name="x", **options)
    monkeypatch.setattr(output, "_LONG_S", 0.0)  # a slow start is said on stdout, but not into JSON
    found = json.loads(call(capsys, "evaluate", "x", "--json"))
    assert found["metrics"] == found["in_the_record"] == result.metrics
    assert found["samples"] == 33
    said = call(capsys, "evaluate", "runs/x")
    assert f"loss {result.metrics['loss']:.6g} {result.metrics['loss']:.6g}" in " ".join(said.split())
    assert "model.safetensors on the validation data, 33 samples" in said


def test_other_data_and_random_data(capsys: pytest.CaptureFixture[str]) -> None:
    result = paceline.train("my.py:predicts", epochs=1, name="x")
    found = json.loads(call(capsys, "evaluate", "x", "--json"))
    assert found["metrics"] == result.metrics, "validation data made at random is that of the run"
    for data, samples in (("train", 40), ("validation", 20), ("my.py:data", 40), ("my:random", 20)):
        assert json.loads(call(capsys, "evaluate", "x", "--json", "--data", data))["samples"] == samples
    paceline.train("my.py:no_validation", epochs=1, name="y", train_samples=20)
    assert json.loads(call(capsys, "evaluate", "y", "--json", "--data", "train"))["samples"] == 20
    assert "task t has no validation data: use --data train" in call(capsys, "evaluate", "y", code=2)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("evaluate", "z"), "no record 'z'"),
        (("evaluate", "x", "--data", "test"), "unknown value for --data 'test': known: train, validation (or FILE.py:FUNCTION"),
        (("evaluate", "x", "--data", "other.py:f"), "--data other.py:f: other.py does not exist"),
        (("evaluate", "x", "--data", "my.py:f"), "--data my.py:f: my.py has no function f()"),
        (("evaluate", "x", "--data", "nowhere:f"), "--data nowhere:f raised ModuleNotFoundError"),
        (("evaluate", "x", "--data", "my.py:nothing"), "--data my.py:nothing returned None: it must return data"),
        (("evaluate", "x", "--data", "my.py:task"), "--data my.py:task returned a Task: give a function that returns data"),
        (("evaluate", "x", "--data", "my.py:empty"), "my.py:empty has no samples"),
        (("evaluate", "x", "--workers", "0"), "--workers is 0: it must be at least 1"),
        (("evaluate", "x", "--weights", "best"), "runs/x has no best.safetensors: train with --save-best"),
        (("evaluate", "x", "--task", "other.py"), "task file other.py does not exist"),
        (("predict", "x", "--to", "p.txt"), "--to p.txt has the suffix '.txt': use .npz, .npy, .safetensors, .csv or .jsonl"),
        (("predict", "x", "--to", "p"), "--to p has no suffix: use .npz"),
        (("predict", "x", "--to", "no/p.npz"), "--to no/p.npz: the folder no does not exist"),
        (("predict", "x", "--to", "taken.npz"), "--to taken.npz exists: use --force to replace it"),
        (("predict", "x"), "the following arguments are required: --to"),
    ],
)
def test_a_wrong_input_is_one_line(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], says: str) -> None:
    paceline.train("my.py:task", epochs=1, name="x")
    Path("taken.npz").touch()
    assert says in call(capsys, *argv, code=2)
    assert not [path for path in Path().iterdir() if path.name.startswith((".", "p"))]


def test_predictions_in_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    paceline.train("my.py:predicts", epochs=1, name="x")
    for suffix in outputs.SUFFIXES[:1] + outputs.SUFFIXES[2:]:
        said = call(capsys, "predict", "x", "--to", f"p{suffix}", "--data", "my.py:unlabelled")
        assert f"p{suffix}: label, logits of 30 samples, in sample order" in said
        assert "on my.py:unlabelled, by the task's predict" in said
    model = paceline.load("x")
    with torch.no_grad():
        logits = model(torch.randn(30, 1, 6, 6, generator=torch.Generator().manual_seed(5))).numpy()
    arrays = np.load("p.npz")
    np.testing.assert_allclose(arrays["logits"], logits, rtol=1e-5, atol=1e-6)
    assert (arrays["label"] == logits.argmax(1)).all()
    stored = load_file("p.safetensors")
    rows = list(csv.reader(Path("p.csv").read_text().splitlines()))
    lines = [json.loads(line) for line in Path("p.jsonl").read_text().splitlines()]
    assert rows[0] == ["sample", "label", "logits_0", "logits_1", "logits_2"]
    for name in ("label", "logits"):
        assert (stored[name] == arrays[name]).all()
        assert (np.array([line[name] for line in lines], arrays[name].dtype) == arrays[name]).all()
    table = np.array(rows[1:], "f8")
    assert (table[:, 0] == np.arange(30)).all()
    assert (table[:, 2:].astype("f4") == arrays["logits"]).all()
    assert "a .npy file holds one array, and each prediction has label, logits" in call(
        capsys, "predict", "x", "--to", "p.npy", code=2
    )
    assert not Path("p.npy").exists()


def test_predictions_without_a_function_for_them(capsys: pytest.CaptureFixture[str]) -> None:
    """The objective's outputs if it has some; else the model's, as for data without labels."""
    paceline.train("my.py:task", epochs=1, name="x")
    said = call(capsys, "predict", "x", "--to", "p.npy")
    assert "by model(batch[0]), because the objective reports no 'outputs'" in said
    assert np.load("p.npy").shape == (33, 3)
    said = call(capsys, "predict", "x", "--to", "p.npy", "--force", "--data", "my.py:unlabelled")
    assert "by model(batch[0]), because the objective cannot be called on this data (IndexError:" in said
    assert np.load("p.npy").shape == (30, 3)
    reports = TASK.replace('"accuracy":', '"outputs": (logits.softmax(1), batch[1]), "accuracy":')
    Path("again.py").write_text(reports)
    said = call(capsys, "predict", "x", "--to", "p.npz", "--task", "again.py:task")
    assert "p.npz: outputs.0, outputs.1 of 33 samples" in said
    assert "by the objective's outputs" in said
    np.testing.assert_allclose(np.load("p.npz")["outputs.0"].sum(1), 1, rtol=1e-5)


def test_evaluation_does_not_change_the_record(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paceline.train("my.py:task", epochs=1, name="x")
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    call(capsys, "evaluate", "x")
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before
    assert read_result(runs / "x")["status"] == "done"


def test_a_task_with_a_step_function_alone_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    own = """
def step(step, model, optimizers):
    found = step.backward(lambda batch: nn.functional.cross_entropy(model(batch[0]), batch[1]))
    optimizers["optimizer"].step()
    return found

def stepped():
    return Task(name="t", model=model, train=data, step=step, defaults={"global_batch": 20})
"""
    Path("my.py").write_text(TASK + own)
    paceline.train("my.py:stepped", epochs=1, name="x")
    assert "p.npz: outputs of 30 samples" in call(capsys, "predict", "x", "--to", "p.npz", "--data", "my.py:unlabelled")
