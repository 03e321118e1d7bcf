"""On a real GPU: a global batch that changes during the run. Steps of all phases are captured, and train as plain ones do."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.processes import paceline
from harness.training import Trained, train_in
from paceline.core.determinism import deterministic
from paceline.dist.world import World, world
from paceline.training import loop, tasks
from paceline.training.build import Run, build
from paceline.training.capture import captured as fast
from paceline.training.capture.replay import CapturedStep
from paceline.training.plain import make_clock, make_step
from paceline.training.step import Executor, TrainStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test ARGS=tests/gpu"),
]

GROWS = {"batch_schedule": "0:64 1:256 2.5:512", "virtual_workers": 4, "smallest_part": 32, "epochs": 4}
"""Phases of 94 steps in 2 parts, of 36 in 4 parts, and of 18 in 4 parts. Epochs end with steps of 48, 184 twice, and 368."""
FULL = {(64, 2, 64), (256, 4, 256), (512, 4, 512)}
PLAIN_TAILS = [(64, 48), (256, 184), (256, 184), (512, 368), (512, 368)]
"""They come too seldom to be captured."""
MLP = {"model": "mlp:width=32", "precision": "fp32", "base_lr": 0.01, **GROWS}
NORM = {**MLP, "model": "wide_resnet:depth=10,width=1"}
EXACT = {"reduce": "exact"}


@pytest.fixture(scope="module")
def here() -> Iterator[World]:
    with world() as found:
        yield found


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Steps that run without a graph: the global batch of their phase, and their samples."""
    found: list[tuple[int, int]] = []
    call = TrainStep.__call__

    def counted(self: TrainStep, step: Any, *rest: Any) -> Any:
        found.append((step.phase.global_batch, step.samples))
        return call(self, step, *rest)

    monkeypatch.setattr(TrainStep, "__call__", counted)
    return found


def train(here: World, options: dict[str, Any], folder: Path | None = None, resumes: bool = False) -> Trained:
    task, config = tasks.resolve("fashion-mnist-mini", options)
    return train_in(here, task, {**vars(config), "log_every": 1}, folder, resumes)


def capture(here: World, options: dict[str, Any]) -> tuple[Run, Executor, list[str]]:
    """A run before its first step, its captured step, and what was said."""
    task, config = tasks.resolve("fashion-mnist-mini", options)
    run, notes = build(task, config, here), list[str]()
    with deterministic(config.reduce == "exact"):
        return run, fast.capture(run, make_step(run, make_clock(run)), 0, notes.append), notes


def kinds(executor: Executor) -> set[Any]:
    assert isinstance(executor, CapturedStep)
    return set(executor._graphs)


def column(trained: Trained, name: str) -> list[Any]:
    return [row[name] for row in trained.watcher.steps]


def is_captured(trained: Trained) -> bool:
    return any(note.startswith("the step is captured") for note in trained.watcher.notes)


def test_every_phase_has_a_graph_before_the_first_step_and_tails_if_they_come_often(here: World) -> None:
    assert kinds(capture(here, MLP)[1]) == FULL
    assert kinds(capture(here, {**MLP, "epochs": 5})[1]) == FULL | {(512, 4, 368)}
    assert kinds(capture(here, {**MLP, "max_steps": 100})[1]) == {(64, 2, 64), (256, 4, 256)}


def test_a_schedule_that_shrinks_has_its_own_phases_alone(here: World) -> None:
    """Doubling the last batch, as auto does, would lead to 256, which does not divide into 6 parts."""
    options = {**MLP, "batch_schedule": "0:768 1:128", "virtual_workers": 6, "epochs": 2}
    assert kinds(capture(here, options)[1]) == {(768, 6, 768), (128, 4, 128)}


def test_the_trials_leave_a_run_as_it_was(here: World) -> None:
    task, config = tasks.resolve("fashion-mnist-mini", NORM)
    run = build(task, config, here)
    before, phase = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}, run.parts.phase
    assert kinds(fast.capture(run, make_step(run, make_clock(run)), 0, print)) == FULL
    assert run.parts.phase == phase
    assert all(tensor.equal(before[name]) for name, tensor in run.model.state_dict().items())
    rows = run.parts.statistics_tensors()
    assert {len(tensor) for tensor in rows} == {2, 4}
    assert all(bool(((tensor == 0) | (tensor == 1)).all()) for tensor in rows), "a trial moved batch-norm statistics"
    assert all(not value.any() for state in run.update.optimizer.state.values() for value in state.values())


@pytest.mark.parametrize(
    "options",
    [
        MLP,
        NORM,
        {**NORM, "parts_at_once": 1},
        {**MLP, "precision": "fp16"},
        {**MLP, "ema": 0.9, "batch_lr_power": 1.0, "optimizer": "adamw", "base_lr": 0.001},
    ],
)
def test_replays_in_all_phases_give_what_plain_steps_give(
    here: World, launched: list[tuple[int, int]], options: dict[str, Any]
) -> None:
    slow = train(here, {**options, "fast": "off"})
    launched.clear()
    quick = train(here, options)
    assert is_captured(quick), quick.watcher.notes
    assert launched == PLAIN_TAILS
    assert column(slow, "global_batch") == column(quick, "global_batch") == [64] * 94 + [256] * 36 + [512] * 18
    assert column(slow, "lr") == column(quick, "lr")
    a, b = (np.array(column(trained, "loss")) for trained in (slow, quick))
    assert abs(a[0] - b[0]) < 1e-3 * a[0]
    assert np.abs(a - b).max() < 0.1 * a.mean(), np.abs(a - b).max()  # small differences of 148 steps add up
    assert abs(a[-10:].mean() - b[-10:].mean()) < 0.02 * a.mean()
    assert a[-5:].mean() < a[:5].mean()
    assert abs(slow.result.metrics["accuracy"] - quick.result.metrics["accuracy"]) < 0.03
    counts = {int(value) for name, value in quick.weights.items() if "num_batches" in name}
    assert counts <= {148}, "a step moved the batch-norm statistics of a different phase"


@pytest.mark.parametrize(
    "options",
    [
        NORM,
        {**MLP, "precision": "bf16", "optimizer": "adamw", "base_lr": 0.001, "ema": 0.9, "batch_lr_power": 1.0},
        {**MLP, "precision": "fp16"},
        {**MLP, "precision": "fp32", "measure_noise": True},
    ],
)
def test_exact_mode_has_the_same_bits_captured_or_not(
    here: World, launched: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    with monkeypatch.context() as patch:  # not --fast off, which has other layouts and optimizers too
        patch.setattr(loop, "capture", lambda run, step, at, say: step)
        slow = train(here, {**options, **EXACT})
    launched.clear()
    quick = train(here, {**options, **EXACT})
    assert is_captured(quick), quick.watcher.notes
    assert launched == PLAIN_TAILS
    for name in ("loss", "lr", *(("loss_scale",) if options["precision"] == "fp16" else ())):
        assert column(slow, name) == column(quick, name), name
    assert slow.result.model_sha256 == quick.result.model_sha256


@pytest.mark.parametrize("killed_at", [60, 100, 145])
def test_killed_in_one_phase_and_resumed_in_another(
    here: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: int
) -> None:
    """Checkpoints are from step 47, from step 94, where the next phase begins with more parts, and from step 141."""
    options = {**NORM, **EXACT, "checkpoint_every": "47"}
    calm = train(here, options)
    call = CapturedStep.__call__

    def until(self: CapturedStep, step: Any, *rest: Any) -> Any:
        if step.number == killed_at:
            raise KeyboardInterrupt
        return call(self, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(CapturedStep, "__call__", until)
        with pytest.raises(KeyboardInterrupt):
            train(here, options, tmp_path)
    resumed = train(here, options, tmp_path, resumes=True)
    assert is_captured(resumed), resumed.watcher.notes
    assert column(resumed, "step")[0] == killed_at // 47 * 47 + 1
    assert resumed.result.model_sha256 == calm.result.model_sha256


def test_all_phases_are_compiled_at_once_and_none_later(here: World) -> None:
    from torch._dynamo import config as dynamo
    from torch._dynamo.utils import counters

    limit = dynamo.recompile_limit
    run, executor, notes = capture(here, {**MLP, "fast": "on"})
    assert kinds(executor) == FULL
    assert notes[0].startswith("compiling the step for 3 batches")
    assert "and compiled" in notes[-1], notes
    assert dynamo.recompile_limit == limit
    compiled = counters["frames"]["total"], counters["stats"]["unique_graphs"]
    assert compiled[1] >= 3
    for epoch in (0, 1, 3):
        (step,) = run.steps(epoch, range(1))
        run.parts.enter(step.phase)
        values = executor(step, iter(run.train.inputs([item.samples for item in step.passes], epoch)))
        assert 0 < float(values[0]) < 5
    assert (counters["frames"]["total"], counters["stats"]["unique_graphs"]) == compiled


def test_a_compiled_run_follows_the_plain_one(here: World, launched: list[tuple[int, int]]) -> None:
    slow = train(here, {**MLP, "fast": "off"})
    launched.clear()
    quick = train(here, {**MLP, "fast": "on"})
    assert launched == PLAIN_TAILS
    np.testing.assert_allclose(column(slow, "loss"), column(quick, "loss"), rtol=0.05)


@pytest.mark.parametrize(
    ("mode", "fails", "lost", "said"),
    [
        ("on", {1}, set(), "(not compiled: "),  # the first phase, compiled: all phases are captured as they are
        ("on", {2}, set(), "and compiled"),  # the second, compiled: it is captured as it is
        ("auto", {2}, {(256, 4, 256)}, "steps of a global batch of 256 run without a CUDA graph: "),
    ],
)
def test_a_graph_that_cannot_be_recorded_does_not_prevent_the_others(
    here: World, monkeypatch: pytest.MonkeyPatch, mode: str, fails: set[int], lost: set[Any], said: str
) -> None:
    real, count = fast.Graph, 0

    def graph(body: Any, *rest: Any) -> Any:
        nonlocal count
        count += 1

        def waits(inputs: Any) -> Any:
            out = body(inputs)
            float(out[0])  # not allowed while a graph is recorded
            return out

        return real(waits if count in fails else body, *rest)

    monkeypatch.setattr(fast, "Graph", graph)
    run, executor, notes = capture(here, {**MLP, "fast": mode})
    assert kinds(executor) == FULL - lost, notes
    assert any(said in note for note in notes), notes
    for epoch in (0, 1, 3):
        (step,) = run.steps(epoch, range(1))
        run.parts.enter(step.phase)
        assert 0 < float(executor(step, iter(run.train.inputs([item.samples for item in step.passes], epoch)))[0]) < 5


def test_auto_captures_what_may_come_and_decides_as_plain_steps_do(here: World, launched: list[tuple[int, int]]) -> None:
    options = {**MLP, **EXACT, "base_lr": 0.05, "batch_schedule": "auto:64", "global_batch": 512, "smallest_part": 16}
    batches = {(64, 4, 64), (128, 4, 128), (256, 4, 256), (512, 4, 512)}
    assert kinds(capture(here, options)[1]) == batches | {(64, 4, 48)}
    slow = train(here, {**options, "fast": "off"})
    launched.clear()
    quick = train(here, options)
    assert is_captured(quick), quick.watcher.notes
    assert len(quick.watcher.phases) > 1, "the noise scale did not grow"
    assert slow.watcher.phases == quick.watcher.phases
    assert all(batch != samples for batch, samples in launched), "a full step ran without a graph"
    for name in ("loss", "lr", "global_batch", "noise_scale"):
        assert column(slow, name) == column(quick, name), name
    assert slow.result.model_sha256 == quick.result.model_sha256


def test_idle_gloo_workers_that_share_a_gpu_have_the_bits_of_one(runs: Path) -> None:
    """Two of four workers, and one of three, have no part in the first phase."""
    flags = ["--model", "cnn:width=8", "--reduce", "exact", "--virtual-workers", "4", "--batch-schedule", "0:64 1:256"]
    found = []
    for workers in ("1", "3", "4"):
        command = ["train", "fashion-mnist-mini", *flags, "--epochs", "2", "--workers", workers, "--backend", "gloo"]
        done = paceline(*command, "--name", workers)
        assert done.returncode == 0, done.stderr
        result = json.loads((runs / workers / "result.json").read_text())
        found.append((result["model_sha256"], result["metrics"]))
    assert found == [found[0]] * 3
