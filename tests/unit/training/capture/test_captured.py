"""The fast step's bookkeeping, with graphs that are replayed in Python; tests/gpu/test_fast.py has real ones.

A graph here keeps its own inputs, as a real one does, and runs the recorded work on them at every call. So what is replayed for
which step, with which inputs, and what the trials before leave behind, can be compared bit for bit with plain steps.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from harness.tokens import Y, per_batch, per_sample, tokens
from harness.training import ALONE, Trained, blobs, train_in
from paceline.core.trees import map_tensors, tensors_in
from paceline.data.loaders import Inputs
from paceline.dist.world import World, world
from paceline.training import loop, tasks, validation
from paceline.training.build import Run, build
from paceline.training.capture import captured as fast
from paceline.training.capture import graph
from paceline.training.step import TrainStep
from paceline.training.task import classify

CALLS: list[int] = []


class Replayed(graph.Graph):
    """A graph without a GPU."""

    def __init__(self, body: graph.Body, inputs: list[Inputs], stamps: Any = lambda: None, pool: Any = None) -> None:
        self.stamps = stamps()
        self._body, self._held = body, map_tensors(torch.clone, inputs)
        self._into = list(tensors_in(self._held))
        self._last = [None] * len(self._into)
        self._graph, self._out = self, torch.zeros(())  # type: ignore[assignment]

    def replay(self) -> None:
        CALLS.append(len(self._into[0]))
        self._out = self._body(self._held)


@pytest.fixture
def replaying(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are captured on the CPU as they would be on a GPU."""
    CALLS.clear()
    monkeypatch.setattr(fast, "Graph", Replayed)
    monkeypatch.setattr(fast, "find_obstacle", lambda body, inputs, model, objective: (body(inputs), ""))
    monkeypatch.setattr(fast, "_why_never", lambda run: "")
    monkeypatch.setattr(fast._Trials, "_is_long", lambda self, case, graph, batches: False)
    monkeypatch.setattr(validation, "_Set", _Plain)
    monkeypatch.setattr(loop, "capture", _capture)
    monkeypatch.setattr(fast, "compiler", compiler)


COMPILED: list[Any] = []


@contextmanager
def compiler(shapes: int = 1) -> Iterator[Any]:
    """One that changes nothing."""

    def compile(function: Any) -> Any:
        COMPILED.append(function)
        return function

    yield compile


def _capture(run: Run, step: TrainStep, at: int, say: Any) -> Any:
    if run.config.fast == "off":
        return step
    captured, how = fast._Trials(run, step, at, say).attempt()
    say(how)
    run.parts.statistics.rest()
    CALLS.clear()
    return captured or step


def plain_step(run: Run) -> TrainStep:
    return loop.make_step(run, loop.make_clock(run))


SET = validation._Set


class _Plain(validation._Set):
    def _record(self, compiled: bool) -> None:
        return None


def both(here: World, options: dict[str, Any], task: Any = None) -> tuple[Trained, Trained]:
    task, given = (task, options) if task else (lambda resolved: (resolved[0], vars(resolved[1])))(_images(options))
    return tuple(train_in(here, task, {**given, "log_every": 1, "fast": mode}) for mode in ("off", "auto"))  # type: ignore


def _images(options: dict[str, Any]) -> Any:
    small = {"model": "mlp:width=8", "train_samples": 150, "global_batch": 32, "crop": 1, "erase": 0.3, "epochs": 4}
    return tasks.resolve("fashion-mnist-mini", {**small, **options})


def same(one: Trained, other: Trained) -> None:
    losses = [[row["loss"] for row in trained.watcher.steps] for trained in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # plain and fused optimizers round differently
    assert one.watcher.epochs[-1]["val_loss"] == pytest.approx(other.watcher.epochs[-1]["val_loss"], rel=1e-4)


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"virtual_workers": 4},
        {"virtual_workers": 4, "parts_at_once": 1},
        {"virtual_workers": 4, "reduce": "exact"},
        {"accumulate": 2},
        {"loader": "streaming", "loader_workers": 0},
        {"optimizer": "adamw", "base_lr": 0.001, "clip_norm": 1.0},
    ],
)
def test_every_step_is_replayed_with_its_own_inputs(options: dict[str, Any]) -> None:
    with world() as here:
        plain, replayed = both(here, options)
    same(plain, replayed)
    assert len(CALLS) == len(replayed.watcher.steps) == 4 * 5  # 150 samples: three full steps, then 27 and 27
    assert len(set(CALLS)) == 2


@pytest.mark.usefixtures("replaying")
def test_weights_are_part_of_the_captured_step() -> None:
    with world() as here:
        for objective in (per_sample, per_batch):
            for options in ({"epochs": 4, "virtual_workers": 2}, {"epochs": 4, "accumulate": 2, "reduce": "exact"}):
                same(*both(here, options, tokens(objective)))
                assert CALLS


@pytest.mark.usefixtures("replaying")
def test_outputs_are_collected_from_captured_validation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "_Set", SET)
    monkeypatch.setattr(validation, "Graph", Replayed)
    monkeypatch.setattr(validation, "find_obstacle", lambda body, inputs, model, objective: (body(inputs), ""))

    def objective(model: Any, batch: Any) -> dict[str, Any]:
        return {**per_sample(model, batch), "outputs": batch[1]}

    def check(rows: torch.Tensor) -> float:
        assert rows.equal(Y)
        return float(rows.mean())

    with world() as here:
        same(*both(here, {"epochs": 2}, tokens(objective, metrics={"mean": check})))


@pytest.mark.usefixtures("replaying")
def test_dropout_is_seeded_by_the_step() -> None:
    with world() as here:
        same(*both(here, {"epochs": 3}, blobs(dropout=0.5)))
        same(*both(here, {"epochs": 3, "accumulate": 2}, blobs(dropout=0.5)))
    assert not CALLS, "several passes with random numbers are not captured"


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"fast": "on"}, " and compiled"),
        ({"fast": "on", "virtual_workers": 4}, " and compiled"),
        ({"fast": "on", "reduce": "exact"}, " (not compiled: exact mode)"),
        ({"fast": "auto"}, " (not compiled: the run is short)"),
    ],
)
def test_a_compiled_step_is_the_plain_one(options: dict[str, Any], said: str) -> None:
    COMPILED.clear()
    with world() as here:
        task, config = _images({**options, "fast": "off", "model": "cnn:width=4"})
        plain = train_in(here, task, {**vars(config), "log_every": 1})
        CALLS.clear()
        task, config = _images({**options, "model": "cnn:width=4"})
        compiled = train_in(here, task, {**vars(config), "log_every": 1})
    same(plain, compiled)
    assert compiled.watcher.notes[-1] == said
    assert len(COMPILED) == (said == " and compiled")
    assert len(CALLS) == 20


@pytest.mark.usefixtures("replaying")
def test_a_compiler_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def broken(shapes: int) -> Iterator[Any]:
        yield _raise

    monkeypatch.setattr(fast, "compiler", broken)
    with world() as here:
        task, config = _images({"fast": "on"})
        trained = train_in(here, task, {**vars(config), "log_every": 1})
    assert trained.watcher.notes[-1] == " (not compiled: RuntimeError: late)"
    assert len(CALLS) == 20


def _raise(*_: Any) -> None:
    raise RuntimeError("late")


@pytest.mark.usefixtures("replaying")
def test_a_short_run_leaves_its_tails_alone() -> None:
    with world() as here:
        same(*both(here, {"epochs": 2}))
    assert set(CALLS) == {32}


@pytest.mark.usefixtures("replaying")
def test_a_resumed_run_is_captured_where_it_goes_on(tmp_path: Path) -> None:
    task, config = _images({"reduce": "exact", "checkpoint_every": "7"})
    options = {**vars(config), "log_every": 1}
    with world() as here:
        whole = train_in(here, task, options, tmp_path / "whole")
        assert whole.result.steps == 20
        (tmp_path / "whole" / "step-000000020.safetensors").unlink()  # written at the end, to extend the run
        resumed = train_in(here, task, options, tmp_path / "whole", resumes=True)
    assert resumed.watcher.steps[0]["step"] == 15
    assert resumed.result.model_sha256 == whole.result.model_sha256


@pytest.mark.usefixtures("replaying")
def test_trials_leave_nothing_behind() -> None:
    with world() as here:
        task, config = _images({"virtual_workers": 2, "optimizer": "adamw", "model": "cnn:width=4"})
        run = build(task, config, here)
        before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
        rows = [tensor.clone() for tensor in run.parts.statistics.tensors()]
        assert isinstance(_capture(run, plain_step(run), 0, print), fast.CapturedStep)
        assert all(tensor.equal(before[name]) for name, tensor in run.model.state_dict().items())
        assert all(a.equal(b) for a, b in zip(rows, run.parts.statistics.tensors(), strict=True))
        state = [value for one in run.update.optimizer.state.values() for value in one.values()]
        assert state
        assert not any(value.any() for value in state)


@pytest.mark.usefixtures("replaying")
def test_a_graph_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: Replayed) -> None:
        self._out = self._body(self._held) * 1.5

    monkeypatch.setattr(Replayed, "replay", wrong)
    with world() as here:
        plain, tried = both(here, {})
    assert "its replay gives loss" in tried.watcher.notes[0]
    same(plain, tried)


@pytest.mark.usefixtures("replaying")
def test_other_shapes_are_not_squeezed_into_a_graph() -> None:
    recorded = Replayed(lambda given: given[0][0].sum(), [(torch.zeros(4, 3), torch.zeros(4))])
    assert recorded.fits([(torch.ones(4, 3), torch.ones(4))])
    for other in ((torch.ones(4, 1), torch.ones(4)), (torch.ones(4, 3), torch.ones(4).double()), (torch.ones(4, 3),)):
        assert not recorded.fits([other])
    assert recorded([(torch.ones(4, 3), torch.ones(4))]) == 12
    given: Tensor = torch.full((4, 3), 2.0)
    assert recorded([(given, torch.ones(4))]) == 24
    assert recorded([(given.mul_(2), torch.ones(4))]) == 48, "the same tensor with other numbers in it"


@pytest.mark.usefixtures("replaying")
def test_a_step_that_differs_each_time_is_not_captured() -> None:
    """Mixed with a number from who knows where: only the loss tells."""
    numbers = itertools.count(1)

    def objective(model: Any, batch: Any) -> dict[str, Tensor]:
        return classify()(model, (batch[0] * next(numbers), batch[1]))

    with world() as here:
        trained = train_in(here, blobs(objective=objective), {"epochs": 1})
    assert "gives a different loss each time" in trained.watcher.notes[0]
    assert trained.result.status == "done"


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("options", [{}, {"reduce": "exact", "virtual_workers": 4}])
def test_a_recording_that_fails_late_leaves_nothing_behind(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with world() as here:
        plain, _ = both(here, {"epochs": 1, **options})
        run = build(*_images({"epochs": 1, **options}), here)
        engine = run.parts.engine

        def fails(body: graph.Body, inputs: list[Inputs], *rest: Any) -> None:
            where, what = (engine._reducer, "finish") if engine._reducer else (run.update.optimizer, "step")
            with patch.object(where, what, side_effect=RuntimeError("late")):
                body(inputs)

        monkeypatch.setattr(fast, "Graph", fails)
        assert fast._Trials(run, plain_step(run), 0, print).attempt() == (None, "late")
        assert all(parameter.grad is None for parameter in engine.carrier.parameters())
        monkeypatch.setattr(loop, "capture", lambda run, step, at, say: step)
        result = loop.fit(run, ())
    assert result.metrics["loss"] == pytest.approx(plain.result.metrics["loss"], rel=1e-4)


@pytest.mark.usefixtures("replaying")
def test_no_fault_in_the_trials_ends_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(self: Any) -> None:
        self.run.model.weight_of_nobody  # noqa: B018

    monkeypatch.setattr(fast._Trials, "_tails", faulty)
    with world() as here:
        plain, tried = both(here, {"virtual_workers": 2, "optimizer": "adamw", "base_lr": 0.001})
    assert tried.watcher.notes[0].startswith("AttributeError")
    assert not CALLS
    same(plain, tried)


def test_nothing_is_captured_on_a_cpu() -> None:
    with world() as here:
        task, config = _images({"fast": "on"})
        run = build(task, config, here)
        step = plain_step(run)
        assert fast.capture(run, step, 0, print) is step


@pytest.mark.usefixtures("replaying")
@pytest.mark.parametrize("name", ["RMSprop", "Adadelta", "NAdam", "Rprop", "ASGD"])
@pytest.mark.parametrize("resumes", [False, True])
def test_an_own_optimizer_is_replayed_from_the_state_it_starts_with(tmp_path: Path, name: str, resumes: bool) -> None:
    """NAdam, Rprop and ASGD have state that does not start at zero: their first step is plain, the others are replayed."""
    kind = getattr(torch.optim, name)
    task = replace(
        blobs(samples=96),
        optimizer=lambda model, config: kind(model.parameters(), lr=0.01),
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
    )
    with world() as here:
        options = {"reduce": "exact", "epochs": 3}
        whole = train_in(here, task, {**options, "fast": "off"})
        if resumes:
            train_in(here, task, {**options, "max_steps": 11}, tmp_path)
        replayed = train_in(here, task, options, tmp_path, resumes)
    assert replayed.weights.keys() == whole.weights.keys()
    for key in whole.weights:
        np.testing.assert_array_equal(replayed.weights[key], whole.weights[key])
    lrs = [row["lr"] for row in whole.watcher.steps]
    assert [row["lr"] for row in replayed.watcher.steps] == lrs[-len(replayed.watcher.steps) :]
    assert sorted(set(lrs)) == [0.0025, 0.005, 0.01]
    plain = 0 if resumes or name in ("RMSprop", "Adadelta") else 1
    assert len(CALLS) == len(replayed.watcher.steps) - plain > 1


@pytest.mark.usefixtures("replaying")
def test_a_schedule_that_changes_a_setting_ends_the_replays() -> None:
    class Momentum(torch.optim.lr_scheduler.StepLR):
        def step(self, epoch: Any = None) -> None:
            super().step(epoch)
            for group in self.optimizer.param_groups:
                group["momentum"] = 0.5 if self.last_epoch > 1 else 0.9

    task = replace(
        blobs(samples=96),
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        schedule=lambda optimizer: Momentum(optimizer, step_size=1),
    )
    with world() as here:
        plain, replayed = both(here, {"epochs": 4}, task)
    same(plain, replayed)
    said = "the schedule changed a setting of the optimizer: from here on steps run without a CUDA graph"
    assert replayed.watcher.notes.count(said) == 1
    assert len(CALLS) == 2 * 8


@pytest.mark.usefixtures("replaying")
def test_an_optimizer_that_counts_on_the_host_is_not_captured_and_starts_as_if_nothing_happened() -> None:
    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                group["seen"] = group.get("seen", 0) + 1
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    parameter.grad.mul_(1 / (state["count"] + group["seen"]))
            super().step()

    task = replace(blobs(), optimizer=lambda model, config: Counts(model.parameters(), lr=0.1))
    with world() as here:
        plain, replayed = both(here, {"epochs": 2}, task)
    same(plain, replayed)
    assert not CALLS
    assert "Counts keeps 'count' of its state on the host" in replayed.watcher.notes


@pytest.mark.parametrize("varies", [False, True])
def test_batches_of_different_shapes_are_not_captured(varies: bool, replaying: None) -> None:
    def collate(samples: list[Any]) -> Any:
        longest = max(int(sample[0]) % 5 for sample in samples) if varies else 4
        return torch.stack([torch.full((5 + longest,), float(sample[0])) for sample in samples])

    def objective(model: Any, batch: Tensor) -> dict[str, Tensor]:
        return {"loss": model(batch[:, :5] / 100).square().sum(1)}

    numbers = TensorDataset(torch.arange(60))
    task = replace(blobs(objective=objective, collate=collate), train=numbers, validation=None)
    said = train_in(ALONE, task, {"global_batch": 4, "epochs": 1, "loader_workers": 0}).watcher.notes
    assert any("batches of the task's collate differ in shape from step to step" in note for note in said) == varies, said
    assert bool(CALLS) != varies


@pytest.mark.parametrize(("batches", "pays"), [(1, True), (2, True), (3, False)])
def test_compiling_pays_if_enough_training_is_left_for_each_batch(
    monkeypatch: pytest.MonkeyPatch, batches: int, pays: bool
) -> None:
    """Ten steps take 10 s, and 4 times as many samples are left as 100 steps of this batch have: 400 s."""
    times = iter((5.0, 15.0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(fast.time, "perf_counter", lambda: next(times))
    sampler = SimpleNamespace(samples_before=lambda step: {7: 0, 57: 4 * 100 * 32}[step])
    run = SimpleNamespace(sampler=sampler, plain_until=57, world=SimpleNamespace(broadcast=lambda value: value))
    trials = SimpleNamespace(at=7, run=run, _put_back=lambda: None)
    case = SimpleNamespace(inputs=[], step=SimpleNamespace(samples=32))
    assert fast._Trials._is_long(trials, case, lambda inputs: None, batches) is pays  # type: ignore[arg-type]
