"""`Parts` made from the DataLoader of a script for one worker."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

import paceline
from paceline.errors import UsageError

X, Y = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)), torch.arange(50)
DATA = TensorDataset(X, Y)


def numbers(batches: Any) -> list[list[int]]:
    return [batch[1].tolist() for batch in batches]


def test_parts_take_samples_batches_and_options_from_a_loader() -> None:
    model = nn.Linear(4, 1)
    loader = DataLoader(
        DATA, batch_size=12, shuffle=True, collate_fn=lambda rows: [torch.stack(c) + 100 for c in zip(*rows, strict=True)]
    )
    team = paceline.Parts(model, loader, virtual_workers=4)
    assert (team.sampler.samples, team.sampler.global_batch, team.steps_per_epoch) == (50, 12, len(loader))
    seen = []
    for step in team.epoch(0):
        assert len(step) == 4
        for part in step:
            assert part.batch[1].tolist() == [100 + number for number in part.samples.tolist()], "its collate_fn is kept"
            seen += part.samples.tolist()
            part.backward(model(part.batch[0]).mean())
        step.reduce()
    assert sorted(seen) == list(range(50))


def test_dealt_batches_are_those_of_the_loader_in_its_order() -> None:
    model = nn.Linear(4, 1)
    team = paceline.Parts(model, samples=50, global_batch=10)
    dealt = team.deal(DataLoader(DATA, batch_size=20, shuffle=True))
    assert numbers(dealt) == numbers(dealt) == [list(range(20)), list(range(20, 40)), list(range(40, 50))]
    assert (len(dealt), dealt.dataset) == (3, DATA)


@pytest.mark.parametrize("data", [DATA, DataLoader(DATA, batch_size=7), DataLoader(DATA, batch_size=7, shuffle=True)])
def test_evaluate_takes_a_dataset_or_a_loader(data: Any) -> None:
    team = paceline.Parts(nn.Linear(4, 1), samples=50, global_batch=10)
    sizes: list[int] = []

    def score(batch: Any) -> dict[str, Tensor]:
        sizes.append(len(batch[1]))
        return {"number": batch[1]}

    assert team.evaluate(data, score) == {"number": 24.5}
    assert sizes == ([50] if data is DATA else [7] * 7 + [1])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(4))


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (DataLoader(Stream(), batch_size=2), "Stream is not a map-style Dataset"),
        (DataLoader(DATA, batch_size=None), "has a batch_sampler of its own or no batch_size"),
        (DataLoader(DATA, batch_sampler=[[0, 1]]), "has a batch_sampler of its own or no batch_size"),
        (DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 50, 50), batch_size=2), "has a WeightedRandomSampler"),
        (DataLoader(DATA, sampler=torch.utils.data.RandomSampler(DATA, num_samples=5), batch_size=2), "another number of samp"),
    ],
)
def test_a_loader_that_parts_would_change_is_refused(loader: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        paceline.Parts(nn.Linear(4, 1), loader)


def test_a_loader_and_numbers_are_too_much_and_neither_is_too_little() -> None:
    with pytest.raises(UsageError, match="the loader has both; leave them out"):
        paceline.Parts(nn.Linear(4, 1), DataLoader(DATA, batch_size=2), global_batch=4)
    with pytest.raises(UsageError, match="Parts needs a DataLoader"):
        paceline.Parts(nn.Linear(4, 1), samples=4)
    with pytest.raises(UsageError, match="NoLength is not a map-style Dataset"):
        paceline.Parts(nn.Linear(4, 1), samples=4, global_batch=2).evaluate(NoLength(), lambda batch: {})
