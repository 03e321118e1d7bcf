"""Validation that a task does not have, and a target that it cannot measure."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from harness.training import ALONE, blobs, train_in
from paceline.errors import UsageError
from paceline.records import read_metrics, read_result
from paceline.training.run import train
from paceline.training.task import classify
from paceline.training.tasks import configure


@pytest.mark.parametrize(
    "options", [{}, {"ema": 0.9}, {"reduce": "exact", "virtual_workers": 3}, {"measure_noise": True, "virtual_workers": 2}]
)
def test_a_run_without_validation_trains_the_same_model(options: dict[str, Any]) -> None:
    task = blobs(norm=True)
    with_it, without = train_in(ALONE, task, options), train_in(ALONE, replace(task, validation=None), options)
    assert (without.result.status, without.result.metrics) == ("done", {})
    assert [set(with_it.watcher.epochs[0]) - set(row) for row in without.watcher.epochs] == [{"val_loss", "val_accuracy"}] * 2
    assert [row["loss"] for row in with_it.watcher.steps] == [row["loss"] for row in without.watcher.steps]
    assert all(np.array_equal(with_it.weights[name], without.weights[name]) for name in with_it.weights)


def test_the_record_and_the_output_of_a_run_without_validation(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(replace(blobs(), validation=None), runs_dir=str(runs), name="bare", checkpoint_every="5")
    said = capsys.readouterr().out
    assert "blobs: 103 training samples, no validation" in said
    assert "Validation" not in said
    assert "done without validation after 2 epochs" in said
    assert [row.get("val_loss") for row in read_metrics(runs / "bare") if row["kind"] == "epoch"] == [None, None]
    assert read_result(runs / "bare")["metrics"] == result.metrics == {}
    again = train(replace(blobs(), validation=None), runs_dir=str(runs), resume="bare")
    assert again.model_sha256 == result.model_sha256


def test_data_is_not_the_same_with_and_without_validation(runs: Path) -> None:
    train(blobs(), runs_dir=str(runs), name="stopped", max_steps=5, checkpoint_every="5")
    (runs / "stopped" / "result.json").unlink()
    with pytest.raises(UsageError, match="the training or validation data is not the same"):
        train(replace(blobs(), validation=None), runs_dir=str(runs), resume="stopped")


def test_a_target_needs_validation() -> None:
    with pytest.raises(
        UsageError, match=r"--target-accuracy 0\.5: task blobs has no validation data, so no accuracy is measured"
    ):
        configure(replace(blobs(), validation=None), {"target_accuracy": 0.5})


def test_a_target_without_an_accuracy_is_refused_before_the_first_step() -> None:
    epochs: list[int | None] = []

    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {"loss": classify()(model, batch[:2])["loss"]}

    def prepare(batch: tuple[Tensor, ...], samples: Tensor, epoch: int | None) -> tuple[Tensor, ...]:
        epochs.append(epoch)
        return batch

    with pytest.raises(UsageError, match="in validation this task's objective reports loss, but no 'accuracy'; add it"):
        train_in(ALONE, blobs(objective=objective, prepare=prepare), {"target_accuracy": 0.5})
    assert epochs == [None], "only validation data is looked at"
