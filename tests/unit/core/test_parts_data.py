"""`paceline.Parts` with other data: own collate, weights and streams."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import paceline
from paceline.core.determinism import deterministic
from paceline.errors import UsageError


class Words(Dataset[Any]):
    """Ten rows of different lengths."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, sample: int) -> Tensor:
        return torch.full((1 + sample % 3,), float(sample))


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with deterministic():
        yield


def team(**options: Any) -> paceline.Parts:
    return paceline.Parts(nn.Linear(1, 1), **{"samples": 10, "global_batch": 4, "virtual_workers": 2, **options})


def batches(parts: paceline.Parts, loader: Any, epoch: int = 0) -> list[Any]:
    found = []
    for step in parts.epoch(epoch, loader):
        for part in step:
            found.append((part.samples.tolist(), part.batch))
            part.backward(parts.model(torch.zeros(1, 1)))
        step.reduce()
    return found


def test_a_collate_function_of_ones_own() -> None:
    parts = team()
    loader = parts.loader(Words(), collate_fn=lambda samples: nn.utils.rnn.pad_sequence(samples, batch_first=True))
    for samples, batch in batches(parts, loader):
        assert batch[:, 0].tolist() == samples
        assert batch.shape == (len(samples), max(1 + sample % 3 for sample in samples))


def test_weights_draw_samples_with_replacement() -> None:
    parts = team(samples=40, weights=[1.0] + [0.0] * 8 + [3.0])
    loader = parts.loader(Words(), collate_fn=lambda samples: [float(row[0]) for row in samples])
    drawn = [sample for samples, batch in batches(parts, loader) for sample in samples if samples == batch]
    assert len(drawn) == 40, "the loader must read the samples that part.samples names"
    assert set(drawn) == {0, 9}
    assert drawn != [sample for samples, _ in batches(parts, loader, 1) for sample in samples]


def test_a_stream_feeds_the_parts() -> None:
    parts = team(stream=True)
    stream = paceline.Stream(lambda shard, shards, epoch: range(shard, 10, shards), samples=10)
    found = [batch.tolist() for _, batch in batches(parts, parts.loader(stream))]
    assert found == [[0, 2], [1, 3], [4, 6], [5, 7], [8], [9]]


def test_mistakes() -> None:
    stream = paceline.Stream(lambda shard, shards, epoch: range(10), samples=10)
    with pytest.raises(UsageError, match=r"the loader got a Stream, but Parts was made without stream=True"):
        team().loader(stream)
    with pytest.raises(UsageError, match=r"the loader got Words, but Parts was made with stream=True"):
        team(stream=True).loader(Words())
    with pytest.raises(UsageError, match=r"num_workers is 2: a Stream is read in order, by one process"):
        team(stream=True).loader(stream, num_workers=2)
    with pytest.raises(UsageError, match=r"the dataset has 10 samples, and Parts was made for 3"):
        team(weights=[1, 1, 1]).loader(Words())
