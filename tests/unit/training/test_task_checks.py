"""What the first passes of a run refuse, and what they say."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.training import ALONE, blobs, train_in
from paceline.config import make_config
from paceline.errors import Diverged, UsageError
from paceline.training.build import build
from paceline.training.task import Task, classify

ONE = {"epochs": 1, "max_steps": 2}


def task_of(model: Any, **fields: Any) -> Task:
    task = blobs()
    defaults = {**task.defaults, **fields.pop("defaults", {})}
    return replace(task, model=model, defaults=defaults, **fields)


def detached(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {"loss": nn.functional.cross_entropy(model(batch[0]).detach(), batch[1], reduction="none")}


@torch.no_grad()
def without_gradients(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {"loss": nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")}


@pytest.mark.parametrize("objective", [detached, without_gradients])
@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_a_model_that_cannot_learn_is_refused(objective: Any, mode: str) -> None:
    with pytest.raises(UsageError, match="does not depend on any trainable parameter"):
        train_in(ALONE, blobs(objective=objective), {**ONE, "reduce": mode})


class Counting(nn.Module):
    """Keeps something in a plain attribute."""

    def __init__(self, held: Any = 0, caches: bool = False) -> None:
        super().__init__()
        self.linear, self._held, self.caches = nn.Linear(5, 3), held, caches

    def forward(self, inputs: Tensor) -> Tensor:
        if isinstance(self._held, list):
            self._held.append(len(self._held))
        else:
            self._held = 7 if self.caches else self._held + 1
        return self.linear(inputs)


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("held", [0, torch.zeros(2), []])
def test_state_in_a_plain_attribute_is_told(mode: str, held: Any) -> None:
    options = {**ONE, "reduce": mode, "virtual_workers": 2, "parts_at_once": 1}
    (note,) = train_in(ALONE, task_of(lambda: Counting(held)), options).watcher.notes
    assert "the forward pass changes the model._held, a plain attribute" in note
    assert train_in(ALONE, task_of(lambda: Counting(caches=True)), options).watcher.notes == [], "filled once: a cache"
    assert train_in(ALONE, task_of(Counting), ONE).watcher.notes == [], "one part: nothing depends on the number of workers"


def test_a_layer_that_is_unfrozen_during_training_is_told() -> None:
    def objective(model: Any, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        model.requires_grad_(True)
        return classify()(model, batch[:2])

    def frozen() -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3))
        model[0].requires_grad_(False)
        return model

    (note,) = train_in(ALONE, task_of(frozen, objective=objective), {"epochs": 2}).watcher.notes
    assert "0.weight was frozen when the run began and is not now: it is still not trained" in note


def only_parts(batch: tuple[Tensor, ...], samples: Tensor, epoch: int | None) -> tuple[Any, ...]:
    """Takes parts of six alone."""
    assert epoch is None or len(samples) == 6, "not a part"
    return batch


def test_a_prepare_that_fails_in_the_trial_runs_in_turn() -> None:
    task = replace(blobs(), prepare=only_parts)
    run = build(task, make_config(task.defaults, {"virtual_workers": 4, "global_batch": 24}), ALONE)
    assert {len(group) for group in run.parts.groups} == {1}
    assert "the task's prepare failed in a trial (not a part)" in run.contract.parts


class Generating:
    """Draws from a generator that nobody seeds."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __call__(self, batch: tuple[Tensor, ...], samples: Tensor, epoch: int | None) -> tuple[Any, ...]:
        return batch[0] + float(self.random.random()), *batch[1:]


def test_a_prepare_with_a_generator_of_its_own_is_told() -> None:
    for options in ({"virtual_workers": 4, "global_batch": 24}, {"virtual_workers": 2, "reduce": "exact"}):
        notes = train_in(ALONE, replace(blobs(), prepare=Generating()), {**ONE, **options}).watcher.notes
        assert "preparing the same samples twice gives different results" in notes[0]


def test_a_sync_batch_norm_that_has_no_stand_in_is_refused() -> None:
    with pytest.raises(UsageError, match="runs on GPUs only"):
        train_in(ALONE, task_of(lambda: nn.Sequential(nn.Linear(5, 3), nn.SyncBatchNorm(3, affine=False))), ONE)


def by_mode(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Other metrics in training than in validation."""
    values = classify()(model, batch[:2])
    return {"loss": values["loss"], "margin": values["accuracy"]} if model.training else values


def test_training_and_validation_may_report_different_metrics() -> None:
    trained = train_in(ALONE, blobs(objective=by_mode), ONE)
    assert "margin" in trained.watcher.steps[0]
    assert "accuracy" not in trained.watcher.steps[0]
    assert "val_accuracy" in trained.watcher.epochs[0]
    assert "val_margin" not in trained.watcher.epochs[0]
    assert set(trained.result.metrics) == {"loss", "accuracy"}


def changing(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    values = classify()(model, batch[:2])
    if not model.training and int(batch[2][0]) > 0:
        values["extra"] = values["loss"]
    return values


def test_metrics_that_change_within_a_validation_are_refused() -> None:
    with pytest.raises(UsageError, match="report the same metrics"):
        train_in(ALONE, blobs(objective=changing), ONE)


def test_a_first_loss_that_is_not_a_number_has_diverged() -> None:
    """Several parts in one pass: their losses are compared with those of a part alone."""

    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {"loss": model(batch[0]).sum(1) * float("nan")}

    with pytest.raises(Diverged, match="the loss is nan in the first step"):
        train_in(ALONE, replace(blobs(), objective=objective), {"virtual_workers": 4, "epochs": 1})
