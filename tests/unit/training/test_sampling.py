"""Weighted sampling and own collate, as a task gives them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from harness.training import ALONE, blobs, train_in
from paceline.config import make_config
from paceline.core.stream import Stream
from paceline.errors import SampleError, UsageError
from paceline.training import dataset
from paceline.training.build import build
from paceline.training.sampling import Weighted, balanced
from paceline.training.task import Task

FEW = {"epochs": 1, "loader_workers": 0}


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, sample: int) -> Tensor:
        return torch.full((2 + sample % 3,), float(sample))


def pad(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def task(**fields: Any) -> Task:
    def objective(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
        return {"loss": model(batch[:, :2]).squeeze(1)}

    defaults = {"global_batch": 8, "virtual_workers": 2, "base_lr": 0.01}
    return Task(
        **{
            "name": "t",
            "model": lambda: nn.Linear(2, 1),
            "train": Rows(),
            "objective": objective,
            "defaults": defaults,
            **fields,
        }
    )


def test_balanced_classes_are_drawn_equally_often() -> None:
    weights = balanced(["a", "b", "b", "b"]).weights
    assert weights.tolist() == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])
    assert balanced(torch.tensor([5, 5, 7]), draws=9).draws == 9
    with pytest.raises(UsageError, match=r"balanced\(\) got labels of shape \(2, 2\)"):
        balanced(torch.zeros(2, 2))


def test_what_is_drawn_is_what_the_objective_gets() -> None:
    """With data on the device and streamed, and the same draws in both."""
    seen: dict[str, list[int]] = {}
    for loader in ("resident", "streaming"):

        def objective(model: nn.Module, batch: Any, loader: str = loader) -> dict[str, Tensor]:
            if model.training:
                seen.setdefault(loader, []).extend(batch[2].tolist())
            return {"loss": model(batch[0]).square().sum(1)}

        weights = np.zeros(103)
        weights[[3, 50]] = 1, 4
        made = blobs(objective=objective, sampling=Weighted(weights, draws=60))
        train_in(ALONE, made, {**FEW, "loader": loader})
    assert seen["resident"] == seen["streaming"]
    assert set(seen["resident"]) == {3, 50}
    assert 5 <= seen["resident"].count(3) <= 20


def test_a_samples_own_prepare_gets_sample_numbers() -> None:
    numbers: list[int] = []

    def prepare(batch: Any, samples: Tensor, epoch: int | None) -> Any:
        numbers.extend(samples.tolist())
        return batch

    train_in(ALONE, blobs(samples=20, prepare=prepare, sampling=[1.0] * 20), FEW)
    assert max(numbers[:-41]) < 20


def test_the_contract_says_what_is_given_up() -> None:
    run = build(blobs(sampling=[1.0] * 103), make_config({}, FEW), ALONE)
    lines = dict(run.contract.lines())
    assert lines["sampling"] == "103 draws per epoch by weight, with replacement: a sample can repeat or be left out"
    plain = build(blobs(), make_config({}, FEW), ALONE)
    assert "sampling" not in dict(plain.contract.lines())
    assert plain.data_sha256 != run.data_sha256, "a resumed run must have the same weights"


def test_a_tasks_own_collate_runs_parts_in_turn() -> None:
    run = build(task(collate=pad), make_config(task().defaults, FEW), ALONE)
    assert "in turn: the task's collate may treat a sample differently" in run.contract.parts
    asked = build(task(collate=pad), make_config(task().defaults, {**FEW, "parts_at_once": 2}), ALONE)
    assert any("--parts-at-once 2: the task's collate" in note for note in asked.notes)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"collate": lambda samples: None}, SampleError, r"the task's collate returned None"),
        ({"collate": pad, "validation": blobs().train}, UsageError, r"validation is Arrays, .* collate has no samples to join"),
        ({"collate": pad, "sampling": [1.0] * 3}, UsageError, r"sampling has 3 weights, but there are 24 training samples"),
        ({"collate": pad, "sampling": lambda data: None}, UsageError, r"returned None: it must return weights"),
        (
            {"train": Stream(lambda shard, shards, epoch: [torch.zeros(2)] * 9, 4), "sampling": [1.0]},
            UsageError,
            "sampling needs data that can be",
        ),
        (
            {"train": Stream(lambda shard, shards, epoch: [torch.zeros(2)] * 9, 24)},
            SampleError,
            r"shard 0 of 2 .* after 9 samples",
        ),
        ({}, SampleError, "cannot be stacked into a batch"),
    ],
)
def test_mistakes(fields: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        train_in(ALONE, task(**fields), FEW)


def test_options_reach_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "in_child", lambda function: function())
    run = build(replace(task(), collate=pad), make_config(task().defaults, {"loader_workers": 3, "prefetch": 7}), ALONE)
    (lane,) = run.train._lanes  # type: ignore[attr-defined]
    assert (lane.num_workers, lane.prefetch_factor, lane.persistent_workers, lane.pin_memory) == (3, 7, True, False)
    noted = build(replace(task(), collate=pad), make_config(task().defaults, {**FEW, "pin_memory": "on"}), ALONE).notes
    assert "--pin-memory on does nothing: workers train on the CPU" in noted
