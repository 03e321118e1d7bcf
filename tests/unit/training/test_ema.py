"""Averaged weights: the average itself, the statistics that go with it, and that training does not notice either."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.training import Trained, Watcher, blobs, train_in
from paceline.config import make_config
from paceline.core.norms import PartNorm
from paceline.data.loaders import Arrays
from paceline.dist.world import world
from paceline.training.build import Run, build
from paceline.training.ema import Ema
from paceline.training.loop import fit
from paceline.training.task import Task
from paceline.training.update import Update


def alone(task: Task, **options: Any) -> Trained:
    with world() as here:
        return train_in(here, task, options)


@contextmanager
def built(task: Task, **options: Any) -> Iterator[Run]:
    with world() as here:
        yield build(task, make_config(task.defaults, {"global_batch": 24, **options}), here)


def test_the_average_forgets_the_first_weights_soon_and_later_ones_slowly() -> None:
    model, expected = nn.Linear(1, 1, bias=False), 5.0
    nn.init.constant_(model.weight, expected)
    ema = Ema(model, 0.6)
    for step in range(20):
        nn.init.constant_(model.weight, float(step))
        ema.begin(step)
        ema.update()
        decay = min(0.6, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
        assert float(ema.tensors()[0]) == pytest.approx(expected, rel=1e-5)


def test_weights_that_several_steps_made_count_for_as_many() -> None:
    model = nn.Linear(2, 2)
    one, three = Ema(model, 0.9), Ema(model, 0.9)
    nn.init.ones_(model.weight)
    for _ in range(3):
        one.begin(1000)
        one.update()
    three.begin(1000, steps=3)
    three.update()
    torch.testing.assert_close(one.tensors(), three.tensors())


def test_a_step_of_a_smaller_batch_counts_for_less() -> None:
    """A quarter of the largest batch: the fourth root of the decay, if it is below the limit of the first steps."""
    with built(blobs(samples=96), batch_schedule="0:6 1:24", global_batch=None, ema=0.5, epochs=2, smallest_part=1) as run:
        assert run.update.ema is not None
        weights = []
        for step in (0, 15, 16):
            run.update.begin(step)
            weights.append(float(run.update.ema._weight))
        assert weights == pytest.approx([1 - 1 / 10, 1 - 16 / 25, 1 - 0.5])
        run.update.ema.begin(100, 0.25)
        assert float(run.update.ema._weight) == pytest.approx(1 - 0.5**0.25)
        run.update.begin(14)
        assert float(run.update.ema._weight) == pytest.approx(1 - min(0.5**0.25, 15 / 24))


def test_averages_are_swapped_in_place_and_back_bit_for_bit() -> None:
    """Of bf16 weights too, whose average has float32's digits; what is not trained stays."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, dtype=torch.bfloat16), nn.Linear(3, 3))
    model[2].requires_grad_(False)
    ema = Ema(model, 0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    ema.begin(3)
    ema.update()
    before, places = [p.clone() for p in model.parameters()], [p.data_ptr() for p in model.parameters()]
    averages = [average.clone() for average in ema.tensors()]
    assert {average.dtype for average in averages} == {torch.float32}
    assert len(averages) == 4
    ema.put_in()
    for parameter, average in zip(model.parameters(), averages, strict=False):
        assert parameter.equal(average.to(parameter.dtype))
        assert not parameter.equal(before[0])
    ema.take_out()
    assert all(one.equal(other) for one, other in zip(model.parameters(), before, strict=True))
    assert all(one.equal(other) for one, other in zip(ema.tensors(), averages, strict=True))
    assert [p.data_ptr() for p in model.parameters()] == places


@pytest.mark.parametrize("options", [{}, {"virtual_workers": 3, "reduce": "exact"}, {"virtual_workers": 2, "norm_part": 3}])
def test_training_does_not_notice(options: dict[str, Any]) -> None:
    """Three epochs, so that it goes on after two validations: losses, optimizer state and statistics as without."""
    task = blobs(norm=True, dropout=0.2)
    options = {"global_batch": 24, "epochs": 3, **options}
    plain, averaged = alone(task, **options), alone(task, ema=0.8, **options)
    assert [row["loss"] for row in plain.watcher.steps] == [row["loss"] for row in averaged.watcher.steps]
    for name, value in plain.optimizer.items():
        np.testing.assert_array_equal(value, averaged.optimizer[name])
    assert averaged.weights.keys() == plain.weights.keys()
    assert averaged.weights["1.num_batches_tracked"] == plain.weights["1.num_batches_tracked"] == 15
    for name in ("0.weight", "1.running_mean", "1.running_var"):
        assert not np.array_equal(plain.weights[name], averaged.weights[name])
    for one, other in zip(plain.watcher.epochs, averaged.watcher.epochs, strict=True):
        assert one["val_loss"] != other["val_loss"]


def test_what_is_left_is_the_average_with_statistics_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against both written out by hand: 103 samples are four chunks of a part's 24, and seven are left out."""
    seen: list[list[Tensor]] = []
    update = Update.__call__

    def watched(self: Update) -> None:
        update(self)
        seen.append([parameter.detach().clone() for parameter in self._parameters])

    monkeypatch.setattr(Update, "__call__", watched)

    def model() -> nn.Module:  # dropout before the norm, where statistics would show it
        return nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    task = replace(blobs(), model=model)
    with built(task, ema=0.7, epochs=2) as run:
        averages = [parameter.detach().clone() for parameter in run.model.parameters()]
        watcher = Watcher()
        result = fit(run, [watcher])
        for step, weights in enumerate(seen):
            decay = min(0.7, (1 + step) / (10 + step))
            averages = [decay * a + (1 - decay) * w for a, w in zip(averages, weights, strict=True)]
        for parameter, average in zip(run.model.parameters(), averages, strict=True):
            torch.testing.assert_close(parameter.detach(), average)
        data = task.train()
        assert isinstance(data, Arrays)
        order = run.sampler.order(0)
        inner = [run.model[1](data.tensors[0][order[i : i + 24]]).detach() for i in range(0, 96, 24)]
        norm = run.model[2]
        torch.testing.assert_close(norm.running_mean, torch.stack([values.mean(0) for values in inner]).mean(0))
        torch.testing.assert_close(norm.running_var, torch.stack([values.var(0) for values in inner]).mean(0))
        assert norm.momentum == 0.1
        labels = task.validation().tensors[1]  # type: ignore[union-attr]
        logits = run.model.eval()(task.validation().tensors[0])  # type: ignore[union-attr]
        loss = nn.functional.cross_entropy(logits, labels).item()
    assert result.metrics["loss"] == pytest.approx(loss, rel=1e-5), "what was validated is not what was left"


class Frozen(nn.Module):
    """A net whose first norm stays in evaluation, and whose second is made of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.still, self.moving, self.last = nn.BatchNorm1d(5), PartNorm(5, 4), nn.Linear(5, 3)

    def train(self, mode: bool = True) -> "Frozen":
        super().train(mode)
        self.still.training = False
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.moving(self.still(x)))


def test_a_norm_that_a_model_keeps_in_evaluation_stays() -> None:
    trained = alone(replace(blobs(), model=Frozen), global_batch=24, ema=0.9)
    assert not trained.weights["still.running_mean"].any()
    assert (trained.weights["still.running_var"] == 1).all()
    assert trained.weights["moving.running_mean"].any()


def test_a_model_without_batch_norm() -> None:
    plain, averaged = alone(blobs()), alone(blobs(), ema=0.9)
    assert averaged.result.model_sha256 != plain.result.model_sha256
    assert [row["loss"] for row in plain.watcher.steps] == [row["loss"] for row in averaged.watcher.steps]
