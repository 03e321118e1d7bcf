"""On a real GPU: gradient checkpointing in a task's model, plain and captured."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness.training import Trained, blobs, train_in
from paceline.dist.world import World, world
from paceline.training.task import Task

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test ARGS=tests/gpu"),
]


@pytest.fixture(scope="module")
def here() -> Iterator[World]:
    with world() as found:
        yield found


class Net(nn.Module):
    """Two blocks with batch norm, and dropout if asked for; `how` gives the arguments of a checkpoint around each."""

    def __init__(self, how: dict[str, Any] | None, dropout: float) -> None:
        super().__init__()
        self.how = how
        self.first = nn.Linear(5, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(dropout)) for _ in range(2)
        )
        self.last = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if self.how is None else checkpoint(block, x, **self.how)
        found: Tensor = self.last(x)
        return found


def train(here: World, how: dict[str, Any] | None, dropout: float = 0.0, **options: Any) -> Trained:
    task = Task(**{**vars(blobs(samples=96)), "model": partial(Net, how, dropout)})
    return train_in(here, task, {"epochs": 4, **options})


def is_captured(trained: Trained) -> bool:
    return any(note.startswith("the step is captured") for note in trained.watcher.notes)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("options", [{"reduce": "exact", "virtual_workers": 2}, {}, {"precision": "fp16"}])
def test_a_checkpointed_model_is_captured_and_trains_alike(here: World, options: dict[str, Any], reentrant: bool) -> None:
    plain = train(here, None, **options)
    recomputed = train(here, {"use_reentrant": reentrant, "preserve_rng_state": False}, **options)
    assert is_captured(plain)
    assert is_captured(recomputed), recomputed.watcher.notes
    if options.get("reduce") == "exact":
        assert recomputed.result.model_sha256 == plain.result.model_sha256
    for name, value in plain.weights.items():
        np.testing.assert_allclose(recomputed.weights[name], value, atol=2e-2, err_msg=name)
        if "num_batches" in name:
            assert int(recomputed.weights[name]) == int(value)


def test_with_dropout_it_trains_alike_without_a_graph_and_says_why(here: World) -> None:
    options = {"reduce": "exact", "virtual_workers": 2, "parts_at_once": 1}
    plain, recomputed = train(here, None, 0.3, **options), train(here, {"use_reentrant": False}, 0.3, **options)
    assert recomputed.result.model_sha256 == plain.result.model_sha256
    one = train(here, {"use_reentrant": False}, 0.3)
    assert not is_captured(one)
    assert any("torch.utils.checkpoint keeps the state of the random numbers" in note for note in one.watcher.notes)
