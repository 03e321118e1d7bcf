"""On a real GPU: variable lengths, weighted draws and streams."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from harness.training import blobs, train_in
from paceline.core.stream import Stream
from paceline.dist.world import world
from paceline.training.task import Task

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test ARGS=tests/gpu"),
]


class Words(Dataset[Any]):
    def __len__(self) -> int:
        return 96

    def __getitem__(self, sample: int) -> Tensor:
        return torch.sin(torch.arange(6.0) + sample).repeat(1 + sample % 4)


def pad(samples: list[Tensor]) -> dict[str, Tensor]:
    return {"rows": nn.utils.rnn.pad_sequence(samples, batch_first=True)}


def objective(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    rows = batch["rows"] if isinstance(batch, dict) else batch
    return {"loss": (model(rows[:, :5]).squeeze(1) - rows.sum(1)).square()}


def fed(**fields: Any) -> Task:
    defaults = {"global_batch": 8, "virtual_workers": 2, "epochs": 2, "base_lr": 0.01, "loader_workers": 1}
    return Task(**{"name": "fed", "model": lambda: nn.Linear(5, 1), "objective": objective, "defaults": defaults, **fields})


def notes(task: Task, **options: Any) -> list[str]:
    with world() as here:
        return train_in(here, task, options).watcher.notes


def test_variable_lengths_run_without_a_graph() -> None:
    said = notes(fed(train=Words(), validation=Words(), collate=pad))
    assert any("without a CUDA graph: batches of the task's collate differ in shape" in note for note in said), said


def test_a_collate_of_one_shape_is_captured() -> None:
    said = notes(fed(train=Words(), collate=lambda samples: torch.stack([sample[:6] for sample in samples])))
    assert any("the step is captured as a CUDA graph" in note for note in said), said


@pytest.mark.parametrize("pin_memory", ["auto", "off"])
def test_a_stream_is_captured_and_has_the_plain_steps_bits(pin_memory: str) -> None:
    def read(shard: int, shards: int, epoch: int) -> Any:
        return (torch.sin(torch.arange(6.0) + number) for number in range(shard, 96, shards))

    found = []
    for fast in ("auto", "off"):
        with world() as here:
            options = {"reduce": "exact", "fast": fast, "pin_memory": pin_memory}
            found.append(train_in(here, fed(train=Stream(read, 96)), options))
    assert any("the step is captured" in note for note in found[0].watcher.notes), found[0].watcher.notes
    assert found[0].result.model_sha256 == found[1].result.model_sha256


def test_weighted_draws_have_the_same_bits_resident_and_streamed() -> None:
    task = replace(blobs(), sampling=[1.0 + number % 3 for number in range(103)])
    hashes = set()
    for loader in ("resident", "streaming"):
        with world() as here:
            options = {"reduce": "exact", "loader": loader, "virtual_workers": 2}
            hashes.add(train_in(here, task, options).result.model_sha256)
    assert len(hashes) == 1
