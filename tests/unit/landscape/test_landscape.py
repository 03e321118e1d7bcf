"""`paceline landscape` in one process: the numbers against plain loops and closed forms, the file, and wrong inputs."""

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import paceline
from harness.training import ALONE
from paceline import cli
from paceline.landscape.directions import random_direction
from paceline.landscape.points import Points
from paceline.training.after import Request
from paceline.training.fixed import Fixed, fixed
from paceline.training.weight_files import read_weights

TASK = """
from paceline import Arrays, Task
import torch
from torch import nn

def data(count=40, seed=0):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 6, 6, generator=random)
    return Arrays((x, (x.mean((1, 2, 3)) > 0).long()))

def model():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))

def objective(model, batch):
    logits = model(batch[0])
    loss = nn.functional.cross_entropy(logits, batch[1], reduction="none")
    return {"loss": loss, "accuracy": (logits.argmax(1) == batch[1]).float()}

def task():
    return Task(name="t", model=model, train=data, validation=lambda: data(33, 1), objective=objective,
                defaults={"global_batch": 20, "base_lr": 0.05, "eval_batch": 10, "precision": "fp32"})

class Bowl(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.arange(6.0).view(2, 3) + 1)

def bowl_loss(model, batch):
    loss = (model.w.square().sum() / 2).expand(len(batch[0]))
    return {"loss": loss} if len(batch) < 3 else {"loss": loss, "weight": batch[2]}

def bowl():
    return Task(name="bowl", model=Bowl, train=lambda: Arrays((torch.zeros(4, 1),)), objective=bowl_loss,
                defaults={"global_batch": 4, "base_lr": 0.1, "schedule": "constant", "precision": "fp32", "weight_decay": 0.0})
"""


@pytest.fixture(autouse=True)
def task_file(runs: Path) -> None:
    Path("nets.py").write_text(TASK)


@pytest.fixture
def trained() -> None:
    paceline.train("nets.py:task", epochs=1, name="x", snapshots=4)


def call(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    """What a command prints; its one error line if it fails."""
    capsys.readouterr()
    assert cli.run(["landscape", *argv]) == code
    found = capsys.readouterr()
    return found.out if code == 0 else found.err


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(name).read_text())
    return found


def loss_of(model: nn.Module, batches: Any) -> float:
    """The mean loss over batches, computed as plainly as possible."""
    values = [nn.functional.cross_entropy(model(x), y, reduction="none") for x, y in batches]
    return float(torch.cat(values).double().mean())


@torch.no_grad()
def test_a_plane_equals_a_plain_loop_over_copies_of_the_model(trained: None, capsys: pytest.CaptureFixture[str]) -> None:
    call(capsys, "x", "--points", "5", "--seed", "7", "--workers", "1", "--samples", "25")
    found = result("runs/x/landscape/plane-7.json")
    with fixed(Request(record="x", sets=("train",)), ALONE, samples=25, seed=7) as opened:
        directions = [random_direction(opened.model, 7, number) for number in (0, 1)]
        for j, y in enumerate(found["y"]):
            for i, x in enumerate(found["x"]):
                model = copy.deepcopy(opened.model)
                for name, weight in model.named_parameters():
                    if name in directions[0]:
                        weight += x * directions[0][name] + y * directions[1][name]
                assert found["sets"]["train"]["loss"][j][i] == pytest.approx(
                    loss_of(model, opened.sets["train"].batches), rel=1e-4
                )
    assert found["x"] == found["y"] == [-1.0, -0.5, 0.0, 0.5, 1.0]
    assert found["samples"] == {"train": 25}


def test_the_bowls_line_has_its_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    paceline.train("nets.py:bowl", epochs=1, name="b", max_steps=1)
    call(capsys, "b", "--shape", "line", "--points", "11", "--reach", "2", "--workers", "1")
    found = result("runs/b/landscape/line-0.json")
    weights = read_weights(Path("runs/b/model.safetensors"))["w"].double()
    with fixed(Request(record="b", sets=("train",)), ALONE, samples=0, seed=0) as opened:
        direction = random_direction(opened.model, 0, 0)["w"].double()
    for x, loss in zip(found["x"], found["sets"]["train"]["loss"], strict=True):
        assert loss == pytest.approx(float((weights + x * direction).square().sum() / 2), rel=1e-5)
    assert list(found["sets"]) == ["train"], "the task has no validation data"
    assert "accuracy" not in found["sets"]["train"], "the task does not report it"


def test_between_two_models_both_ends_have_their_own_metrics(trained: None, capsys: pytest.CaptureFixture[str]) -> None:
    paceline.train("nets.py:task", epochs=3, name="z", seed=1)
    call(capsys, "x", "--to", "z", "--points", "5", "--samples", "0", "--workers", "1")
    found = result("runs/x/landscape/between-z.json")
    assert found["ends"] == ["x", "z"]
    assert found["x"] == [-0.5, 0.0, 0.5, 1.0, 1.5]
    for at, name in ((1, "x"), (3, "z")):
        own = json.loads(Path(f"runs/{name}/result.json").read_text())["metrics"]
        assert found["sets"]["validation"]["loss"][at] == pytest.approx(own["loss"], rel=1e-4)
        assert found["sets"]["validation"]["accuracy"][at] == pytest.approx(own["accuracy"], abs=1e-6)
    assert all(map(math.isfinite, found["sets"]["train"]["loss"]))


def test_the_path_has_every_snapshot_and_its_own_loss(trained: None, capsys: pytest.CaptureFixture[str]) -> None:
    paceline.train("nets.py:task", epochs=2, name="z", snapshots=5)
    said = call(capsys, "x", "--shape", "path", "--also", "z", "--points", "4", "--workers", "1")
    assert "path of x: steps 0 to 2" in said
    found = result("runs/x/landscape/path.json")
    first, second = found["paths"]
    assert (first["name"], first["step"], second["step"]) == ("x", [0, 1, 2], [0, 1, 2, 3, 4])
    assert first["loss"][0] == second["loss"][0], "both runs started from the same weights"
    assert [first[axis][0] for axis in "xy"] == pytest.approx([second[axis][0] for axis in "xy"], rel=1e-4)
    assert first["x"][-1] == pytest.approx(0, abs=0.05), "the model is at the origin, to bf16"
    assert min(found["x"]) < min(first["x"] + second["x"])
    assert max(found["x"]) > max(first["x"] + second["x"])
    assert found["statistics"] == "batch"


@torch.no_grad()
def test_the_model_is_left_as_it_was(trained: None) -> None:
    with fixed(Request(record="x", sets=("train",)), ALONE, samples=20, seed=0) as opened:
        before = {name: value.clone() for name, value in opened.model.state_dict().items()}
        points = Points(opened, [random_direction(opened.model, 0, 0)])
        at_zero = points.evaluate([(0.0,)])
        assert float(points.evaluate([(1e30,), (0.0,)])[0, 0, 0]) != float(at_zero[0, 0, 0])
        assert torch.equal(points.evaluate([(0.0,)]), at_zero)
        with opened.batch_statistics():
            points.evaluate([(1e30,)])
        points.evaluate_weights({"0.weight": torch.zeros(4, 1, 3, 3)})
        assert all(torch.equal(value, before[name]) for name, value in opened.model.state_dict().items())


@torch.no_grad()
def test_batch_statistics_are_those_of_each_batch(trained: None) -> None:
    def spread(opened: Fixed) -> float:
        (x, _), *_ = opened.sets["train"].batches
        return float(opened.model[1](opened.model[0](x)).transpose(0, 1).flatten(1).std(dim=1).mean())  # type: ignore[index]

    with fixed(Request(record="x", sets=("train",)), ALONE, samples=20, seed=0) as opened:
        opened.model[1].weight.fill_(1.0)  # type: ignore[index]
        recorded = spread(opened)
        with opened.batch_statistics():
            assert spread(opened) == pytest.approx(1, abs=0.02)
        assert spread(opened) == recorded


def test_a_finished_part_of_a_surface_is_used(trained: None, capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    whole = call(capsys, "x", "--points", "4", "--workers", "1")
    assert "done before" not in whole
    kept = result("runs/x/landscape/plane-0.json")
    assert "(16 were done before)" in call(capsys, "x", "--points", "4", "--workers", "1"), "it is not computed again"
    (runs / "x" / "landscape" / "plane-0.json").unlink()
    # An interrupted surface: the same description, and some points, one of them with a value that only this file has.
    import paceline.landscape.landscape as flow

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    original = flow._assemble
    flow._assemble = stop  # type: ignore[assignment]
    try:
        assert "points that are done are kept" in call(capsys, "x", "--points", "4", "--workers", "1", code=130)
    finally:
        flow._assemble = original
    (part,) = (runs / "x" / "landscape").glob("plane-0-*.part")
    lines = part.read_text().splitlines()
    part.write_text("\n".join([lines[0], '{"5": [[123.0, 0.5]]}']))
    assert "(1 were done before)" in call(capsys, "x", "--points", "4", "--workers", "1")
    found = result("runs/x/landscape/plane-0.json")
    assert found["sets"]["train"]["loss"][1][1] == 123.0
    assert found["sets"]["train"]["loss"][0] == kept["sets"]["train"]["loss"][0]
    assert not part.exists()


def test_points_of_a_longer_run_are_not_mixed(trained: None, capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    """Neither finished surfaces nor points of an interrupted one: their names and first lines say which weights they are of."""
    call(capsys, "x", "--points", "4", "--workers", "1")
    before = result("runs/x/landscape/plane-0.json")
    paceline.train("nets.py:task", resume="x", epochs=2)
    assert "done before" not in call(capsys, "x", "--points", "4", "--workers", "1")
    assert result("runs/x/landscape/plane-0.json") == before, "nothing is overwritten"
    assert result("runs/x/landscape/plane-0-2.json")["sets"] != before["sets"]


def test_beyond_two_models_the_nearer_ones_statistics_stay(trained: None, capsys: pytest.CaptureFixture[str]) -> None:
    paceline.train("nets.py:task", epochs=1, name="z", seed=1)
    file = Path("runs/z/model.safetensors")
    save_file({name: value * 9 if name == "1.running_var" else value for name, value in read_weights(file).items()}, file)
    call(capsys, "x", "--to", "z", "--points", "5", "--sets", "train", "--workers", "1")
    found = result("runs/x/landscape/between-z.json")
    with fixed(Request(record="x", sets=("train",)), ALONE, samples=0, seed=0) as opened, torch.no_grad():
        other, model = read_weights(file), copy.deepcopy(opened.model)
        for place, x in enumerate(found["x"]):
            for name, value in model.state_dict().items():
                own, there = opened.model.state_dict()[name], other[name]
                if value.is_floating_point():
                    share = min(max(x, 0.0), 1.0) if "running" in name else x
                    value.copy_(own + share * (there - own))
            plain = loss_of(model, opened.sets["train"].batches)
            assert found["sets"]["train"]["loss"][place] == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["nope"], "no record 'nope'"),
        (["x", "--points", "0"], "--points is 0: use 3 to 500 points per side"),
        (["x", "--points", "1000000"], "--points is 1,000,000: use 3 to 500"),
        (["x", "--points", "-3", "--shape", "line"], "--points is -3: use 3 to 4,001 points"),
        (["x", "--reach", "0"], "--reach is 0: it must be a number above 0"),
        (["x", "--reach", "nan"], "--reach is nan"),
        (["x", "--samples", "-1"], "--samples is -1: it must be at least 0"),
        (["x", "--sets", "tarin"], "unknown value for --sets 'tarin': did you mean 'train'?"),
        (["x", "--to", "x", "--workers", "1"], "have the same weights: no line joins them"),
        (["x", "--to", "b", "--workers", "1"], "are different models"),
        (["x", "--to", "y", "--shape", "line"], "--to and --shape line are both given"),
        (["x", "--also", "y"], "--also adds runs to --shape path"),
        (["x", "--shape", "path", "--reach", "2"], "--reach does not apply to --shape path"),
        (["b", "--shape", "path", "--workers", "1"], "has no snapshots of its training: train with --snapshots 20"),
        (["x", "--picture", "x.gif"], "use a name that ends in .png or .svg"),
        (["b", "--sets", "validation", "--workers", "1"], "has no validation data: use --sets train"),
        (["x", "--shape", "path", "--also", "x", "--workers", "1"], "runs/x is given twice: --also adds other runs"),
        (["x", "--workers", "0"], "--workers is 0: it must be at least 1"),
        (["x", "--view", "3d"], "--view 3d says how --picture shows a plane or a path"),
        (["d", "--workers", "1"], "has no model.safetensors: its run diverged"),
        (["odd", "--workers", "1"], "the loss of runs/odd is nan on its train data: its run diverged"),
        (["lost", "--workers", "1"], "lost has no model.safetensors"),
    ],
)
def test_wrong_inputs_are_one_line(
    trained: None, argv: list[str], said: str, capsys: pytest.CaptureFixture[str], runs: Path
) -> None:
    paceline.train("nets.py:bowl", epochs=1, name="b", max_steps=1)
    if argv[0] == "d":
        with pytest.raises(paceline.errors.PacelineError):
            paceline.train("nets.py:task", epochs=2, base_lr=1e30, name="d")
    if argv[0] in ("odd", "lost"):
        shutil.copytree(runs / "x", runs / argv[0])
        (runs / argv[0] / "model.safetensors").unlink()
    if argv[0] == "odd":
        weights = read_weights(runs / "x" / "model.safetensors")
        save_file(
            {name: value * torch.nan if value.is_floating_point() else value for name, value in weights.items()},
            runs / "odd" / "model.safetensors",
        )
    error = call(capsys, *argv, code=2)
    assert said in error
    assert error.count("\n") == 1
