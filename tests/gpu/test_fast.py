"""On a real GPU: the fast step gives what the plain step gives, and steps aside with one line where it cannot."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from harness.training import Trained, blobs, train_in
from paceline.core import engine as engine_module
from paceline.dist.world import World, world
from paceline.training import tasks
from paceline.training.build import build
from paceline.training.capture import captured as fast
from paceline.training.capture.replay import CapturedStep
from paceline.training.plain import make_clock, make_step
from paceline.training.task import Task, classify
from paceline.training.validation import Validation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test ARGS=tests/gpu"),
]

STEPS = 50  # an epoch of the mini set has 47 of batch 128: the tail of one and the beginning of the next are among them
IMAGES = {"model": "wide_resnet:depth=10,width=1", "precision": "bf16", "crop": 2, "base_lr": 0.01, "label_smoothing": 0.1}


@pytest.fixture(scope="module")
def here() -> Iterator[World]:
    with world() as found:
        yield found


def images(here: World, options: dict[str, Any]) -> Trained:
    task, config = tasks.resolve("fashion-mnist-mini", {**IMAGES, "max_steps": STEPS, **options})
    return train_in(here, task, {**vars(config), "log_every": 1})


def losses(trained: Trained) -> np.ndarray:
    return np.array([row["loss"] for row in trained.watcher.steps])


def same_to_rounding(one: Trained, other: Trained) -> None:
    """bf16 has 8 bits: a loss of one step may differ by 2^-8, and the differences of 50 steps add up like a random walk."""
    a, b = losses(one), losses(other)
    assert len(a) == len(b) > 1
    assert abs(a[0] - b[0]) < 2**-8 * a[0]
    assert np.abs(a - b).max() < 7 * 2**-8 * a.mean(), np.abs(a - b).max()
    assert a[-5:].mean() < a[:5].mean()


def note(trained: Trained) -> str:
    return trained.watcher.notes[-1]


@pytest.mark.parametrize("mode", ["auto", "on"])
@pytest.mark.parametrize("options", [{}, {"virtual_workers": 4}, {"optimizer": "adamw", "base_lr": 0.001, "clip_norm": 1.0}])
def test_it_gives_the_plain_steps_losses(here: World, options: dict[str, Any], mode: str) -> None:
    slow, quick = images(here, {**options, "fast": "off"}), images(here, {**options, "fast": mode})
    assert ("and compiled" in note(quick)) == (mode == "on"), quick.watcher.notes
    same_to_rounding(slow, quick)


def test_parts_in_turn_are_captured_too(here: World) -> None:
    options = {"virtual_workers": 4, "parts_at_once": 1}
    slow, quick = images(here, {**options, "fast": "off"}), images(here, options)
    assert note(quick).startswith("the step is captured")
    same_to_rounding(slow, quick)


def test_exact_mode_has_the_same_bits_captured_or_not(here: World) -> None:
    options = {"virtual_workers": 4, "reduce": "exact", "model": "mlp:width=32", "max_steps": 60}
    slow, quick = images(here, {**options, "fast": "off"}), images(here, options)
    assert note(quick).startswith("the step is captured")
    assert losses(slow).tolist() == losses(quick).tolist()


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_dropout_draws_what_the_plain_step_draws(here: World, mode: str) -> None:
    options = {"epochs": 2, "reference_batch": 20, "precision": "fp32"}
    slow, quick, other = (
        train_in(here, blobs(200, dropout=0.5), {**options, "fast": kind, "seed": seed})
        for kind, seed in (("off", 0), (mode, 0), ("off", 1))
    )
    assert note(quick).startswith("the step is captured")
    np.testing.assert_allclose(losses(slow), losses(quick), rtol=1e-3)
    assert not np.allclose(losses(slow), losses(other), rtol=1e-2)


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_ddp_over_nccl_is_part_of_the_graph(here: World, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One NCCL worker that averages with nobody: the hooks, buckets and collectives are those of many."""
    slow = images(here, {"fast": "off"})
    monkeypatch.setattr(engine_module, "averages", lambda world, exact: True)
    monkeypatch.setattr(fast, "_warm_ups", lambda run: 11)
    quick = images(here, {"fast": mode})
    assert note(quick).startswith("the step is captured"), note(quick)
    same_to_rounding(slow, quick)


def test_validation_is_the_same_replayed(here: World) -> None:
    task, config = tasks.resolve("fashion-mnist-mini", IMAGES)
    run = build(task, config, here)
    step = make_step(run, make_clock(run))
    replayed = Validation(run, step, fast.capture(run, step, 0, print))
    first, second = replayed(0), replayed(0)
    assert replayed._sets["validation"]._graph is not None
    assert first == second == Validation(run, step, step)(0)


class Tuned(nn.Module):
    """Frozen weights, a batch norm kept in evaluation, and a layer that no pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU()), nn.Linear(8, 3)
        self.never = nn.Linear(8, 3)
        self.body.requires_grad_(False)

    def train(self, mode: bool = True) -> "Tuned":
        super().train(mode)
        self.body.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.mark.parametrize("options", [{}, {"virtual_workers": 4}, {"virtual_workers": 4, "reduce": "exact"}])
@pytest.mark.parametrize("ddp", [False, True])
def test_frozen_and_unused_parameters(here: World, options: dict[str, Any], ddp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured on one worker; with DDP, which asks the GPU who used what, plain. Nothing moves what was not used."""
    common = {"epochs": 2, "reference_batch": 20, "global_batch": 20, "precision": "fp32", "weight_decay": 0.1, **options}
    slow = train_in(here, replace(blobs(200), model=Tuned), {**common, "fast": "off"})
    if ddp:
        monkeypatch.setattr(engine_module, "averages", lambda world, exact: not exact)
    quick = train_in(here, replace(blobs(200), model=Tuned), common)
    captured = not ddp or "reduce" in options
    expected = "the step is captured" if captured else "the step runs without a CUDA graph"
    assert note(quick).startswith(expected), quick.watcher.notes
    np.testing.assert_allclose(losses(slow), losses(quick), rtol=1e-3)
    untrained = build(replace(blobs(200), model=Tuned), tasks.configure(blobs(), {}), here).model
    np.testing.assert_array_equal(quick.weights["never.weight"], untrained.never.weight.detach().cpu().numpy())


class Words(Dataset[Any]):
    """Batches whose width depends on who is in them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.randn(5), index % 3, index


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = nn.Linear(5, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.net(x)


def waits(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    values = classify()(model, batch[:2])
    if float(values["loss"].mean()) > 1e9:
        raise AssertionError
    return values


def draws(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return classify()(model, (batch[0] * random.choice([1.0, 1.0]), batch[1]))


def plain(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return classify()(model, batch[:2])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"objective": waits}, "test_fast.py, line"),
        ({"objective": draws}, "Python's random numbers"),
        ({"objective": plain, "model": Counts}, "the model.calls"),
    ],
)
def test_what_cannot_be_captured_trains_as_it_is(here: World, change: dict[str, Any], why: str) -> None:
    task = replace(blobs(200), **change)
    trained = train_in(here, task, {"epochs": 2, "reference_batch": 20, "fast": "on"})
    assert note(trained).startswith("the step runs without a CUDA graph"), trained.watcher.notes
    assert why in note(trained)
    assert np.isfinite(losses(trained)).all()
    assert trained.result.status == "done"


def test_dropout_in_several_passes_is_said(here: World) -> None:
    trained = train_in(here, blobs(200, dropout=0.5), {"epochs": 1, "reference_batch": 20, "accumulate": 2})
    assert "2 passes" in note(trained)


def test_a_failed_capture_leaves_the_gpu_usable(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "find_obstacle", lambda body, inputs, model, objective: (body(inputs), ""))
    trained = train_in(here, blobs(200, objective=waits, dropout=0.5), {"epochs": 2, "reference_batch": 20})
    assert note(trained).startswith("the step runs without a CUDA graph")
    assert trained.result.status == "done"


def test_what_cannot_be_compiled_is_captured(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(function: Callable[..., Any], **_: Any) -> Any:
        raise RuntimeError("no compiler\non this machine")

    monkeypatch.setattr(torch, "compile", broken)
    trained = train_in(here, blobs(200), {"epochs": 2, "reference_batch": 20, "fast": "on"})
    assert "(not compiled: RuntimeError: no compiler)" in note(trained)


def test_a_run_is_left_as_it_was(here: World) -> None:
    """Trials before the first step change nothing: not weights, statistics, nor what the optimizer begins with."""
    options = {**IMAGES, "virtual_workers": 2, "optimizer": "adamw"}
    task, config = tasks.resolve("fashion-mnist-mini", options)
    run = build(task, config, here)
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    rows = [tensor.clone() for tensor in run.parts.statistics.tensors()]
    assert isinstance(fast.capture(run, make_step(run, make_clock(run)), 0, print), CapturedStep)
    assert all(tensor.equal(before[name]) for name, tensor in run.model.state_dict().items())
    assert all(a.equal(b) for a, b in zip(rows, run.parts.statistics.tensors(), strict=True))
    assert all(not value.any() for state in run.update.optimizer.state.values() for value in state.values())


def test_batches_of_another_shape_run_as_they_are(here: World) -> None:
    def prepare(batch: tuple[Tensor, ...], samples: Tensor, epoch: int | None) -> tuple[Tensor, ...]:
        width = 1 + int(samples[0]) % 2  # a wait for the GPU, but outside of the step
        return batch[0].repeat(1, width), batch[1]

    def objective(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        points, labels = batch
        return classify()(model, (points[:, :5] * (points.shape[1] // 5), labels))

    task = Task(
        name="ragged",
        model=lambda: nn.Linear(5, 3),
        train=Words,
        validation=Words,
        prepare=lambda batch, samples, epoch: prepare(batch[:2], samples, epoch),
        objective=objective,
    )
    options = {"epochs": 3, "reference_batch": 16, "loader_workers": 0, "precision": "fp32"}
    slow, quick = (train_in(here, task, {**options, "fast": kind}) for kind in ("off", "auto"))
    assert note(quick).startswith("the step is captured")
    np.testing.assert_allclose(losses(slow), losses(quick), rtol=1e-3)
