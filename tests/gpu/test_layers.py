"""On a real GPU: watched layers and snapshots, in plain, captured and compiled steps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.training import Trained, train_in
from paceline.config import make_config
from paceline.dist.world import World, world
from paceline.training import tasks
from paceline.training.build import build
from paceline.training.capture.captured import capture
from paceline.training.capture.replay import CapturedStep
from paceline.training.layers import LayerWatch
from paceline.training.plain import make_clock, make_step
from paceline.training.snapshots import list_snapshots, read_snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test ARGS=tests/gpu"),
]

OPTIONS = {"model": "cnn:width=8", "precision": "fp32", "max_steps": 50, "base_lr": 0.01, "watch_layers": 5}


@pytest.fixture(scope="module")
def here() -> Iterator[World]:
    with world() as found:
        yield found


def images(here: World, folder: Path | None = None, **options: Any) -> Trained:
    task, config = tasks.resolve("fashion-mnist-mini", {**OPTIONS, **options})
    return train_in(here, task, {**vars(config), "log_every": 1}, folder and folder / "checkpoints")


def is_captured(trained: Trained, compiled: bool = False) -> bool:
    words = "the step is captured as a CUDA graph" + (" and compiled" if compiled else "")
    return any(note.startswith(words) for note in trained.watcher.notes)


def column(trained: Trained, name: str) -> np.ndarray:
    return np.array([row[name] for row in trained.watcher.layers_rows], dtype=float)


@pytest.mark.parametrize("fast", ["auto", "on"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"virtual_workers": 4, "clip_norm": 0.5},
        {"accumulate": 2},
        {"optimizer": "lars", "base_lr": 0.5},
        {"optimizer": "lamb", "base_lr": 0.002},
        {"optimizer": "muon", "base_lr": 0.02},
    ],
)
def test_captured_and_compiled_steps_have_the_numbers_of_plain_steps(here: World, options: dict[str, Any], fast: str) -> None:
    slow, quick = images(here, fast="off", **options), images(here, fast=fast, **options)
    assert is_captured(quick, compiled=fast == "on"), quick.watcher.notes
    assert not is_captured(slow)
    assert [row["step"] for row in quick.watcher.layers_rows] == list(range(5, 51, 5))  # steps 46 to 48 are an epoch's end
    assert [row["names"] for row in quick.watcher.layers_rows] == [row["names"] for row in slow.watcher.layers_rows]
    for name in ("gradient_norm", "update_ratio"):
        a, b = column(slow, name), column(quick, name)
        assert (a > 0).all()
        np.testing.assert_allclose(b[0], a[0], rtol=0.02, err_msg=name)
        assert (b > 0).all()  # rounding makes later steps differ more and more: exact mode has a test of its own
        assert len(np.unique(b[:, 0])) == len(b), "a graph's number did not change from step to step"


@pytest.mark.parametrize("fast", ["off", "auto"])
def test_the_weights_are_the_same_bits(here: World, fast: str) -> None:
    options: dict[str, Any] = {"reduce": "exact", "virtual_workers": 4, "fast": fast}
    plain, watched = images(here, watch_layers=0, **options), images(here, watch_layers=3, **options)
    assert is_captured(watched) == (fast == "auto"), watched.watcher.notes
    assert watched.result.model_sha256 == plain.result.model_sha256
    assert len(watched.watcher.layers_rows) == 16


def test_exact_mode_has_the_same_numbers_captured_or_not(here: World) -> None:
    options: dict[str, Any] = {"reduce": "exact", "virtual_workers": 4, "model": "mlp:width=32"}
    slow, quick = images(here, fast="off", **options), images(here, **options)
    assert is_captured(quick), quick.watcher.notes
    for name in ("gradient_norm", "update_ratio"):
        np.testing.assert_allclose(column(quick, name), column(slow, name), rtol=1e-3)  # four digits are recorded


def test_the_loss_scale_is_divided_out(here: World) -> None:
    wide, scaled = (images(here, precision=precision, max_steps=6, watch_layers=1) for precision in ("fp32", "fp16"))
    assert is_captured(scaled), scaled.watcher.notes
    ratios = column(scaled, "gradient_norm")[0] / column(wide, "gradient_norm")[0]  # steps that overflow have no row
    assert ((ratios > 0.3) & (ratios < 3)).all(), ratios


@pytest.mark.parametrize("fast", ["off", "auto"])
def test_snapshots_have_the_weights(here: World, tmp_path: Path, fast: str) -> None:
    options: dict[str, Any] = {"reduce": "exact", "virtual_workers": 4, "fast": fast}
    trained = images(here, tmp_path, snapshots=6, **options)
    found = list_snapshots(tmp_path)
    assert [step for step, _ in found] == [0, 10, 20, 30, 40, 50]
    first, last = (read_snapshot(path) for _, path in (found[0], found[-1]))
    for name, value in last.items():
        torch.testing.assert_close(value, torch.from_numpy(trained.weights[name]).bfloat16().float(), rtol=0, atol=0)
    assert any(not torch.equal(first[name], last[name]) for name in first)
    assert trained.result.model_sha256 == images(here, **options).result.model_sha256, "snapshots changed the run"


def test_snapshots_are_those_of_their_steps(here: World, tmp_path: Path) -> None:
    """The copy is in stream order: the next step, already queued, must not be in it."""
    options: dict[str, Any] = {"reduce": "exact", "virtual_workers": 4, "schedule": "constant"}
    images(here, tmp_path, snapshots=6, **options)
    for step, path in list_snapshots(tmp_path)[1:3]:
        short = images(here, max_steps=step, **options)
        for name, value in read_snapshot(path).items():
            torch.testing.assert_close(value, torch.from_numpy(short.weights[name]).bfloat16().float(), rtol=0, atol=0)


@pytest.mark.parametrize("fast", ["off", "auto"])
def test_a_watched_step_does_not_wait_for_the_gpu(here: World, fast: str) -> None:
    task, config = tasks.resolve("fashion-mnist-mini", {**OPTIONS, "fast": fast, "watch_layers": 1})
    with build(task, make_config(vars(config)), here) as run:
        plain = make_step(run, make_clock(run))
        run.model.train()
        step = capture(run, plain, 0, print)
        assert isinstance(step, CapturedStep) == (fast == "auto")
        watch = LayerWatch(run.model, run.update.norms, 1)
        steps = run.steps(0, range(8))
        inputs = run.train.inputs([item.samples for each in steps for item in each.passes], 0, lambda i: None)
        for each in steps[:5]:  # the checks of the first passes wait
            with watch.around(each.number):
                step(each, inputs)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for each in steps[5:]:
                with watch.around(each.number):
                    step(each, inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        assert all(min(watch.read(number)["gradient_norm"]) > 0 for number in range(8))  # type: ignore[index]
