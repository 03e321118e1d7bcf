"""On a real GPU: fp16 with a loss scale, plain and captured."""

import math
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.training import Trained, blobs, first_two, train_in
from paceline.config import make_config
from paceline.dist.world import World, world
from paceline.errors import Diverged
from paceline.training import scaler, tasks
from paceline.training.build import build
from paceline.training.capture.captured import capture
from paceline.training.capture.replay import CapturedStep
from paceline.training.plain import make_clock, make_step
from paceline.training.scaler import FIRST_SCALE, MOST_IN_A_ROW
from paceline.training.task import classify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test ARGS=tests/gpu"),
]

IMAGES = {"model": "wide_resnet:depth=10,width=1", "precision": "fp16", "crop": 2, "base_lr": 0.01, "max_steps": 50}


@pytest.fixture(scope="module")
def here() -> Iterator[World]:
    with world() as found:
        yield found


def images(here: World, options: dict[str, Any]) -> Trained:
    task, config = tasks.resolve("fashion-mnist-mini", {**IMAGES, **options})
    return train_in(here, task, {**vars(config), "log_every": 1})


def losses(trained: Trained) -> np.ndarray:
    return np.array([row["loss"] for row in trained.watcher.steps])


def is_captured(trained: Trained) -> bool:
    return any(note.startswith("the step is captured") for note in trained.watcher.notes)


def times(factor: float) -> Any:
    """The loss of `blobs`, multiplied: its scaled gradients do not fit into float16 until the scale is small enough."""

    def objective(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        values: dict[str, Tensor] = first_two(classify())(model, batch)
        return {**values, "loss": values["loss"] * factor}

    return objective


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer": "adamw", "base_lr": 0.001, "clip_norm": 1.0},
        {"optimizer": "lars", "base_lr": 0.5},
        {"optimizer": "lamb", "base_lr": 0.002, "ema": 0.9},
        {"optimizer": "muon", "base_lr": 0.02},
        {"virtual_workers": 4},
    ],
)
def test_captured_and_plain_steps_agree(here: World, options: dict[str, Any]) -> None:
    slow, quick = images(here, {**options, "fast": "off"}), images(here, options)
    assert is_captured(quick), quick.watcher.notes
    a, b = losses(slow), losses(quick)
    assert abs(a[0] - b[0]) < 2**-8 * a[0]
    assert np.abs(a - b).max() < 7 * 2**-8 * a.mean()
    assert a[-5:].mean() < a[:5].mean()
    assert [row["loss_scale"] for row in slow.watcher.steps] == [row["loss_scale"] for row in quick.watcher.steps]


def test_exact_mode_has_the_same_bits_captured_or_not(here: World) -> None:
    options = {"virtual_workers": 4, "reduce": "exact", "model": "mlp:width=32"}
    slow, quick = images(here, {**options, "fast": "off"}), images(here, options)
    assert is_captured(quick), quick.watcher.notes
    assert losses(slow).tolist() == losses(quick).tolist()


@pytest.mark.parametrize("fast", ["off", "auto"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars", "lamb", "novograd", "muon"])
def test_an_overflow_skips_the_step_and_halves_the_scale(here: World, optimizer: str, fast: str) -> None:
    options = {"precision": "fp16", "optimizer": optimizer, "fast": fast, "epochs": 2, "global_batch": 12, "base_lr": 1e-5}
    trained = train_in(here, blobs(240, objective=times(100.0)), options)
    rows = trained.watcher.steps
    totals = [int(row["skipped_steps"]) for row in rows]
    assert 0 < totals[-1] < len(rows)
    assert [row["loss_scale"] for row in rows] == [FIRST_SCALE / 2**total for total in totals]
    skipped = next(i for i, total in enumerate(totals) if total == i)  # the first steps are all skipped
    assert skipped > 1
    assert all(np.isfinite(value).all() for value in (*trained.weights.values(), *trained.optimizer.values()))
    few = train_in(here, blobs(240, objective=times(100.0)), {**options, "max_steps": skipped})
    none = train_in(here, blobs(240, objective=times(100.0)), {**options, "max_steps": 1})
    assert few.result.model_sha256 == none.result.model_sha256, "a skipped step moved the weights"


def test_nan_ends_the_run(here: World) -> None:
    def objective(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        values: dict[str, Tensor] = classify()(model, (batch[0] * math.nan, batch[1]))
        return values

    with pytest.raises(Diverged, match=f"{MOST_IN_A_ROW + 1} steps in a row were skipped"):
        train_in(here, blobs(600, objective=objective), {"precision": "fp16"})


def test_a_step_does_not_wait_for_the_gpu(here: World) -> None:
    for optimizer in ("sgd", "adamw", "lamb", "muon"):
        task, config = tasks.resolve("fashion-mnist-mini", {**IMAGES, "optimizer": optimizer, "fast": "off"})
        with build(task, make_config(vars(config)), here) as run:
            step = make_step(run, make_clock(run))
            run.model.train()
            steps = run.steps(0, range(6))
            inputs = run.train.inputs([item.samples for each in steps for item in each.passes], 0, lambda i: None)
            for each in steps[:4]:  # the checks of the first passes wait
                step(each, inputs)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                for each in steps[4:]:
                    step(each, inputs)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_accuracy_is_that_of_bf16(here: World) -> None:
    found = {}
    for kind in ("bf16", "fp16"):
        options = {"model": "cnn", "precision": kind, "max_steps": 0, "epochs": 5, "base_lr": 0.05, "crop": 0}
        found[kind] = images(here, options).result.metrics["accuracy"]
    assert found["fp16"] > 0.84
    assert abs(found["fp16"] - found["bf16"]) < 0.02, found


def test_it_needs_less_memory_than_fp32(here: World) -> None:
    used = {}
    for kind in ("fp32", "fp16"):
        task, config = tasks.resolve("fashion-mnist-mini", {**IMAGES, "model": "wide_resnet:depth=16,width=4", "fast": "off"})
        with build(task, make_config({**vars(config), "precision": kind, "global_batch": 512}), here) as run:
            step = make_step(run, make_clock(run))
            run.model.train()
            steps = run.steps(0, range(3))
            inputs = run.train.inputs([item.samples for each in steps for item in each.passes], 0, lambda i: None)
            step(steps[0], inputs)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            step(steps[1], inputs)
            torch.cuda.synchronize()
            used[kind] = torch.cuda.max_memory_allocated()
    assert used["fp16"] < 0.75 * used["fp32"], used


def test_the_scale_grows_in_a_captured_step(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaler, "GROWTH_STEPS", 5)
    trained = images(here, {"max_steps": 12, "model": "mlp:width=32"})
    assert is_captured(trained), trained.watcher.notes
    scales = [row["loss_scale"] / FIRST_SCALE for row in trained.watcher.steps]
    assert scales[:10] == [1] * 4 + [2] * 5 + [4]  # a larger scale may overflow


def test_the_capture_leaves_the_scale_alone(here: World) -> None:
    """Trials before the first step overflow at the first scale. They are undone."""
    task = blobs(240, objective=times(100.0))
    run = build(task, make_config(cast(dict[str, Any], task.defaults), {"precision": "fp16", "epochs": 2}), here)
    step = make_step(run, make_clock(run))
    assert isinstance(capture(run, step, 0, print), CapturedStep)
    assert run.update.scaler is not None
    assert run.update.scaler.report().tolist() == [FIRST_SCALE, 0.0, 0.0]
