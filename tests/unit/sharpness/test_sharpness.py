"""`paceline sharpness` in one process: its numbers where they are known, what it keeps, and wrong inputs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import paceline
from harness.surfaces import points, surface_of
from paceline import cli, output
from paceline.sharpness import curvature, keskar, verb
from paceline.sharpness.sharpness import _rises

TASK = """
from paceline import Arrays, Task, classify
import torch
from torch import nn

CURVATURE = torch.tensor([8.0, 4.0, 2.0, 1.0, 0.5, 0.25, 0.1, 0.05, 0.02, 0.01, 0.0, 0.0])
WEIGHTS = torch.linspace(-1, 1.2, 12)

def data():
    return Arrays((torch.randn(60, 12, generator=torch.Generator().manual_seed(0)),))

class Bowl(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(WEIGHTS.clone())
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

def objective(model, batch):
    return {"loss": (CURVATURE * (model.w - 0.1 * batch[0]) ** 2).sum(1) / 2}

def task():
    return Task(name="bowl", model=Bowl, train=data, objective=objective,
                defaults={"global_batch": 20, "base_lr": 1e-4, "epochs": 1, "eval_batch": 7})

def other():
    return Task(name="bowl", model=lambda: nn.Linear(3, 3), train=data, objective=objective)

def step():
    def step(step, model, batches):
        pass
    return Task(name="bowl", model=Bowl, train=data, step=step)

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x ** 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g * 2 * ctx.saved_tensors[0]

def once():
    return Task(name="bowl", model=Bowl, train=data,
                objective=lambda model, batch: {"loss": torch.cdist(model.w[None], batch[0], p=3)[0]})

def silent():
    return Task(name="bowl", model=Bowl, train=data,
                objective=lambda model, batch: {"loss": Square.apply(model.w - batch[0]).sum(1) + 0.1 * (model.w ** 2).sum()})
"""
FAST = ("--vectors", "5", "--lanczos-steps", "12")


@pytest.fixture(autouse=True)
def record(runs: Path) -> Path:
    Path("quadratic.py").write_text(TASK)
    paceline.train("quadratic.py:task", epochs=1, name="x")
    return runs / "x"


def call(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    """What `paceline sharpness x` prints; its one error line if it fails."""
    capsys.readouterr()
    found = cli.run(["sharpness", "x", *argv])
    out, err = capsys.readouterr()
    assert found == code, err
    if code:
        assert err.count("\n") == 1, err
    return err if code else out


def bowl(record: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """The weights, the curvatures, the mean center and the loss, in float64."""
    known: dict[str, Any] = {}
    exec(TASK, known)
    weights = load_file(record / "model.safetensors")["w"].double()
    centers = 0.1 * known["data"]().tensors[0].double()
    curvatures = known["CURVATURE"].double()
    return weights, curvatures, centers.mean(0), float((curvatures * (weights - centers) ** 2).sum(1).mean() / 2)


def test_a_quadratic_with_known_answers(capsys: pytest.CaptureFixture[str], record: Path) -> None:
    printed = call(capsys, *FAST)
    found = json.loads((record / "sharpness.json").read_text())
    weights, curvatures, center, loss = bowl(record)
    assert (found["samples"], found["set"], found["weights"], found["workers"]) == (60, "train", "last", 1)
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["model_sha256"] == json.loads((record / "result.json").read_text())["model_sha256"]

    gradient = curvatures * (weights - center)
    for name, units in (("sam", torch.ones_like(weights)), ("adaptive", weights.abs())):
        rho = found[name]["rho"]
        step = rho * units**2 * gradient / (units * gradient).norm()
        assert found[name]["rise"] == pytest.approx(float(gradient @ step + (curvatures * step**2).sum() / 2), rel=1e-4)

    hessian = found["hessian"]
    assert hessian["top"] == pytest.approx([8, 4, 2], rel=1e-5)
    assert max(hessian["residuals"]) < 1e-4
    assert hessian["trace"] == pytest.approx(15.93, rel=1e-5), "random signs are exact for a diagonal matrix"
    assert hessian["trace_error"] < 1e-4
    assert (hessian["vectors"], hessian["steps"]) == (5, 12)
    x, y = hessian["density"]["x"], hessian["density"]["y"]
    assert sum(y) * (x[1] - x[0]) == pytest.approx(1, abs=0.01)
    assert hessian["density"]["near_zero"] == pytest.approx(5 / 12, abs=1e-3)

    for each in found["keskar"][:2]:
        assert each["space"] == "full"
        reach = each["epsilon"] * (weights.abs() + 1)
        rise = float((gradient.abs() * reach).sum() + (curvatures * reach**2).sum() / 2)
        assert each["sharpness"] == pytest.approx(100 * rise / (1 + loss), rel=1e-3)
    assert [(each["space"], each["epsilon"]) for each in found["keskar"][2:]] == [("subspace", 1e-3), ("subspace", 5e-4)]
    assert all(each["sharpness"] > 0 for each in found["keskar"])
    assert set(found) == {
        *("samples", "set", "loss", "keskar", "sam", "adaptive", "hessian", "seed", "weights", "model_sha256", "workers"),
        *("time_s", "environment"),
    }
    for text in ("Keskar, full, epsilon 0.001", "eigenvalue 1", "8", "written to runs/x/sharpness.json"):
        assert text in printed


def test_rescaled_relu_layers_have_the_same_adaptive_rise() -> None:
    """The function is the same; SAM's rise and the Hessian are not."""
    batches, rises = points(), []
    for factor in (1.0, 5.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)).double()
        with torch.no_grad():
            first, last = model[0], model[2]
            assert isinstance(first, nn.Linear)
            assert isinstance(last, nn.Linear)
            for each in (first.weight, first.bias):
                each.mul_(factor)
            last.weight.div_(factor)
        surface = surface_of(model, batches)
        rises.append(_rises(surface, *surface.gradient(surface.weights)))
    assert rises[0]["adaptive"]["rise"] == pytest.approx(rises[1]["adaptive"]["rise"], rel=1e-9)
    assert abs(rises[0]["sam"]["rise"] / rises[1]["sam"]["rise"] - 1) > 0.2


def test_some_samples_and_some_measures(capsys: pytest.CaptureFixture[str], record: Path) -> None:
    found = json.loads(call(capsys, "--json", "--samples", "20", "--measures", "sam", "--seed", "3"))
    assert found["samples"] == 20
    assert found["seed"] == 3
    assert "hessian" not in found
    assert "keskar" not in found
    again = json.loads(call(capsys, "--json", "--samples", "20", "--measures", "hessian", "--seed", "3", *FAST))
    assert again["sam"] == found["sam"], "kept"
    assert again["hessian"]["top"][0] == pytest.approx(8, rel=1e-5)
    whole = json.loads(call(capsys, "--json", "--samples", "0", "--measures", "sam"))
    assert (whole["samples"], "hessian" in whole) == (60, False), "of other samples"


def test_workers_get_the_same_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """0 is a value, too."""
    commands = []
    monkeypatch.setattr("paceline.training.after.in_world", lambda request, command, work: commands.append(command))
    call(capsys, "--samples", "0", "--measures", "sam", "--workers", "2", "--json")
    assert {"--samples=0", "--seed=0", "--measures=sam", "--workers=2", "--json"} < set(commands[0])


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C during the second of Keskar's searches."""
    searched = keskar.sharpness
    calls = []

    def search(*args: Any) -> float | None:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return searched(*args)

    with monkeypatch.context() as patched:
        patched.setattr(keskar, "sharpness", search)
        yield


def test_an_interrupted_call_continues(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, record: Path, interrupted: None
) -> None:
    assert cli.run(["sharpness", "x", *FAST]) == 130
    assert not (record / "sharpness.json").exists()
    partial = json.loads((record / "sharpness.partial.json").read_text())
    assert [each["epsilon"] for each in partial["keskar"]] == [1e-3]
    measured = curvature.measure
    monkeypatch.setattr(curvature, "measure", None)  # a second call would fail
    call(capsys, *FAST)
    continued = json.loads((record / "sharpness.json").read_text())
    assert not (record / "sharpness.partial.json").exists()
    assert continued["time_s"] > partial["time_s"]
    monkeypatch.setattr(curvature, "measure", measured)
    (record / "sharpness.json").unlink()
    call(capsys, *FAST)
    whole = json.loads((record / "sharpness.json").read_text())
    assert all(continued[name] == whole[name] for name in ("keskar", "sam", "adaptive", "hessian", "loss"))


def test_a_finished_call_is_not_repeated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, record: Path
) -> None:
    call(capsys, *FAST)
    before = (record / "sharpness.json").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(curvature, "measure", None)
        assert "measured before: delete runs/x/sharpness.json" in call(capsys, *FAST)
    assert (record / "sharpness.json").read_bytes() == before
    call(capsys, "--measures", "hessian", "--vectors", "6", "--lanczos-steps", "12")
    assert json.loads((record / "sharpness.json").read_text())["hessian"]["vectors"] == 6
    weights = load_file(record / "model.safetensors")
    save_file({**weights, "w": weights["w"] * 1.5}, record / "model.safetensors")
    assert "SAM" not in call(capsys, "--measures", "hessian", *FAST), "of other weights"


def test_progress_and_the_time_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda stream: True)
    for module in ("paceline.evaluate", "paceline.sharpness.sharpness"):
        monkeypatch.setattr(f"{module}.is_terminal", lambda stream: True)
    printed = call(capsys, *FAST)
    assert "Hessian: product 4 of 52, about" in printed
    assert "Keskar: a random subspace, epsilon 0.0005, iteration" in printed
    assert "left ..." in printed


def test_what_does_not_fit_is_left_out_or_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, record: Path
) -> None:
    monkeypatch.setattr("paceline.sharpness.sharpness._free_bytes", lambda here: 8000)
    printed = call(capsys, "--measures", "keskar,sam")
    assert "Keskar's sharpness in a random subspace is left out: it needs" in printed
    found = json.loads((record / "sharpness.json").read_text())
    assert {each["space"] for each in found["keskar"]} == {"full"}
    assert len(found["notes"]) == 1
    monkeypatch.setattr("paceline.sharpness.sharpness._free_bytes", lambda here: 1900)
    said = call(capsys, "--measures", "hessian", *FAST, code=2)
    assert "12 Lanczos steps keep" in said
    assert "use --lanczos-steps 9" in said
    call(capsys, "--measures", "hessian", "--lanczos-steps", "9")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--samples=-1", "--samples is -1: it must be from 0 to"),
        ("--measures=sam,kesker", "unknown measure 'kesker': did you mean 'keskar'?"),
        ("--top=0", "--top is 0: it must be from 1 to 100"),
        ("--top=50", "--top is 50 and --lanczos-steps 40: N steps find at most N eigenvalues"),
        ("--vectors=0", "--vectors is 0: it must be from 1"),
        ("--lanczos-steps=1", "--lanczos-steps is 1: it must be from 2"),
        ("--seed=-4", "--seed is -4: it must be from 0"),
        ("--workers=0", "--workers is 0: it must be from 1"),
        ("--weights=best", "has no best.safetensors: train with --save-best"),
        ("--task=quadratic.py:other", "the task's model does not fit"),
        ("--task=quadratic.py:step", "task bowl has no objective"),
        ("--task=quadratic.py:once", "this model's gradients cannot be differentiated again"),
        ("--task=gone.py", "task file gone.py does not exist"),
    ],
)
def test_wrong_inputs_are_one_line(capsys: pytest.CaptureFixture[str], flags: str, words: str) -> None:
    assert words in call(capsys, flags, code=2)


def test_records_without_a_minimum_are_one_line(capsys: pytest.CaptureFixture[str], record: Path, runs: Path) -> None:
    weights = load_file(record / "model.safetensors")
    for value, words in ((float("nan"), "x has diverged: 1 of its 12 weights are not finite"), (3e38, "its loss is inf")):
        changed = {**weights, "w": weights["w"].clone()}
        changed["w"][0] = value
        save_file(changed, record / "model.safetensors")
        assert words in call(capsys, code=2)
    (record / "model.safetensors").unlink()
    assert "x has no model.safetensors" in call(capsys, code=2)
    (runs / "study").mkdir()
    (runs / "study" / "study.toml").touch()
    assert cli.run(["sharpness", "study"]) == 2
    assert "study is not a record of paceline train" in capsys.readouterr().err


def test_products_that_miss_a_layer_are_noted(capsys: pytest.CaptureFixture[str], record: Path) -> None:
    """torch takes a gradient from such a layer for a constant, without a word: the eigenvalues here are 2.2, not 0.2."""
    printed = call(capsys, "--task", "quadratic.py:silent", "--measures", "hessian", *FAST)
    assert "the Hessian may be wrong: along its first direction the gradient changes by 2.2, not by 0.2" in printed
    assert "the Hessian may be wrong" in json.loads((record / "sharpness.json").read_text())["notes"]["hessian"]


def test_without_scipy_the_extra_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "find_spec", lambda name: None)
    assert "pip install 'paceline[curvature]'" in call(capsys, code=2)
    call(capsys, "--measures", "sam")
