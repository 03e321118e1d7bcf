"""On a real GPU: where the step goes, from events in the stream and in the CUDA graph."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.processes import paceline
from harness.training import blobs, train_in
from paceline.dist.world import World, world
from paceline.records import read_metrics
from paceline.scale import windows
from paceline.training import tasks
from paceline.training.build import Run, build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test ARGS=tests/gpu"),
]

HOW = {"windows": 3, "window_s": 0.1}


@pytest.fixture(scope="module")
def here() -> Iterator[World]:
    with world() as found:
        yield found


def _images(here: World, **options: Any) -> tuple[Any, bool]:
    asked = {"model": "wide_resnet:depth=10,width=1", **options}
    launched = []

    def make(profile: bool) -> Run:
        run = build(*tasks.resolve("fashion-mnist-mini", {**asked, "profile": profile}), here)
        weigh = run.forward.weigh  # called when a step is launched, not when it is replayed
        run.forward.weigh = lambda *args: (launched.append(None), weigh(*args))[1]  # type: ignore[method-assign]
        return run

    count = windows.measure(make, HOW)["count"]
    return count, len(launched) < 60  # the trials of two captures; plain steps are 60 in warming up alone


@pytest.mark.parametrize("fast", ["auto", "off"])
def test_parts_add_up_and_compute_leads(here: World, fast: str) -> None:
    count, replayed = _images(here, fast=fast)
    assert replayed == (fast == "auto")
    parts = count["components_s"]
    assert sum(parts.values()) == pytest.approx(count["step_s"])
    assert all(value >= 0 for value in parts.values())
    assert max(parts, key=lambda name: parts[name]) == "compute"
    assert count["forward_s"] > 0
    assert count["backward_s"] > 0
    assert parts["optimizer"] > 0
    assert parts["communication"] == parts["waiting"] == 0


@pytest.mark.parametrize("fast", ["auto", "off"])
def test_a_slow_loader_is_input(here: World, fast: str) -> None:
    def prepare(batch: tuple[Tensor, ...], samples: Tensor, epoch: int | None) -> tuple[Tensor, ...]:
        time.sleep(0.03)
        return batch

    task = blobs(prepare=prepare)
    made = partial(tasks.configure, task)
    measured = windows.measure(lambda profile: build(task, made({"fast": fast, "profile": profile}), here), HOW)
    parts = measured["count"]["components_s"]
    assert max(parts, key=lambda name: parts[name]) == "input"
    assert parts["input"] > 0.025


def test_health_of_a_captured_run(here: World) -> None:
    task, config = tasks.resolve("fashion-mnist-mini", {"model": "cnn", "epochs": 3, "check_every": 20})
    rows = train_in(here, task, vars(config)).watcher.healths
    assert [row["step"] for row in rows] == [20, 47, 94, 141], "at the first check, then after every epoch"
    for row in rows:
        assert sum(row["components_s"].values()) == pytest.approx(row["step_s"])
        assert row["components_s"]["compute"] > 0
        assert row["memory_bytes"] > 0


def test_a_timeline_on_one_worker(here: World) -> None:
    task, config = tasks.resolve("fashion-mnist-mini", {"model": "cnn", "epochs": 1, "profile": True})
    (timeline,) = train_in(here, task, vars(config)).watcher.timelines
    names = {event["name"] for event in timeline["traceEvents"]}
    assert {"input", "forward", "backward", "optimizer"} <= names


def test_two_gloo_workers_share_a_gpu(runs: Path) -> None:
    flags = ["--workers", "2", "--backend", "gloo", "--profile", "--epochs", "1", "--name", "g"]
    done = paceline("train", "fashion-mnist-mini", "--model", "mlp:width=1024", *flags)
    assert done.returncode == 0, done.stderr
    assert "bucket 1:" in done.stdout
    rows = [row for row in read_metrics(runs / "g") if row["kind"] == "health"]
    assert rows
    assert all(row["components_s"]["communication"] >= 0 for row in rows)
