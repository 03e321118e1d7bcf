"""Both loaders yield the requested batches, whichever way and process makes them."""

import multiprocessing
import os
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from paceline.core.trees import tensors_in
from paceline.data.augment import Images
from paceline.data.loaders import Arrays, Resident, Streaming, make_loader
from paceline.errors import UsageError

CPU = torch.device("cpu")


INDICES = [np.array([5, 0, 7]), np.array([3]), np.array([1, 2, 4, 6]), np.array([8, 9])]


def arrays(count: int = 10) -> Arrays:
    images = torch.randint(0, 256, (count, 1, 6, 6), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return Arrays((images, torch.arange(count)), about="noise")


class Noisy(Dataset):
    """A user's Dataset whose augmentation draws from all three generators."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        noise = torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64)
        return noise, index, os.getpid()


class Named(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((2,), float(index)), "y": torch.tensor(index)}


class Bare(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index))


def test_resident_and_streaming_give_equal_batches():
    prepare = Images(mean=0.2, deviation=0.5, crop=1, flip=True, erase=0.5, seed=3)
    data = arrays()
    for epoch in (0, 1, None):
        resident = list(Resident(data, prepare, CPU).batches(INDICES, epoch))
        streaming = list(Streaming(data, prepare, CPU, 0, 3).batches(INDICES, epoch))
        assert len(resident) == len(streaming) == len(INDICES)
        for ours, theirs, samples in zip(resident, streaming, INDICES, strict=True):
            assert torch.equal(ours[0], theirs[0])
            assert ours[1].tolist() == theirs[1].tolist() == samples.tolist()


def test_resident_yields_the_requested_samples():
    data = arrays()
    for batch, samples in zip(Resident(data, None, CPU).batches(INDICES, 0), INDICES, strict=True):
        assert isinstance(batch, tuple)
        assert torch.equal(batch[0], data.tensors[0][torch.from_numpy(samples)])


@pytest.mark.parametrize("kind", ["resident", "streaming"])
def test_no_indices_give_no_batch(kind):
    assert list(make_loader(arrays(), kind, None, CPU, 0, 0).batches([], 0)) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_has_started_nothing_closes(workers):
    Streaming(Noisy(), None, CPU, workers, 0).close()
    loader = make_loader(arrays(), "resident", None, CPU, 0, 0)
    loader.start()
    loader.close()


@pytest.mark.parametrize(("chosen", "expected"), [(None, "fork"), ("spawn", "spawn"), ("forkserver", "forkserver")])
def test_loader_processes_are_forks_unless_the_program_says_otherwise(chosen, expected, monkeypatch):
    """Python 3.14 would use a fork server, to which data with a lambda cannot be sent."""
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: chosen if allow_none else "forkserver")
    loader = make_loader(Arrays((torch.arange(4),)), "streaming", None, CPU, 2, 0)
    assert loader._lanes[0].multiprocessing_context.get_start_method() == expected


def test_an_epoch_that_was_not_finished_does_not_disturb_the_next():
    loader = Streaming(Noisy(), None, CPU, 0, 0)
    batches = loader.batches(INDICES, 0)
    next(batches)
    batches.close()
    assert [batch[1].tolist() for batch in loader.batches(INDICES[::-1], 1)] == [samples.tolist() for samples in INDICES[::-1]]


def test_tuples_are_collated_to_tuples():
    (batch,) = Streaming(Noisy(), None, CPU, 0, 0).batches([np.array([4, 2])], 0)
    assert isinstance(batch, tuple)
    assert batch[0].shape == (2, 3)
    assert batch[1].tolist() == [4, 2]


def test_dicts_are_collated_to_dicts():
    (batch,) = Streaming(Named(), None, CPU, 0, 0).batches([np.array([4, 2])], 0)
    assert batch["x"].tolist() == [[4, 4], [2, 2]]
    assert batch["y"].tolist() == [4, 2]


def test_bare_tensors_are_stacked():
    (batch,) = Streaming(Bare(), None, CPU, 0, 0).batches([np.array([4, 2])], 0)
    assert isinstance(batch, torch.Tensor)
    assert batch.tolist() == [[4, 4], [2, 2]]


def test_prepare_gets_batch_samples_and_epoch():
    seen = []

    def prepare(batch, samples, epoch):
        seen.append((batch[1].tolist(), samples.tolist(), epoch))
        return ("prepared",)

    for loader in (Resident(arrays(), prepare, CPU), Streaming(arrays(), prepare, CPU, 0, 0)):
        assert list(loader.batches(INDICES, 7)) == [("prepared",)] * 4
    expected = [(samples.tolist(), samples.tolist(), 7) for samples in INDICES]
    assert seen == expected * 2


@pytest.mark.parametrize("kind", [Resident, Streaming])
def test_a_batch_is_made_of_its_inputs_alone(kind):
    """A captured step relies on this: copying new inputs into the old tensors gives the new batch, in any epoch."""
    prepare = Images(mean=0.2, deviation=0.5, crop=1, flip=True, erase=0.5, seed=3)
    loader = Resident(arrays(), prepare, CPU) if kind is Resident else Streaming(arrays(), prepare, CPU, 0, 3)
    indices = [np.array([5, 0, 7]), np.array([1, 2, 4])]
    held = [tensor.clone() for tensor in tensors_in(next(loader.inputs(indices[:1], 0)))]
    for epoch in (1, 2):
        for inputs, batch in zip(loader.inputs(indices, epoch), loader.batches(indices, epoch), strict=True):
            for into, tensor in zip(held, tensors_in(inputs), strict=True):
                into.copy_(tensor)
            given = tuple(held) if kind is Resident else (tuple(held[:2]), *held[2:])
            assert all(torch.equal(a, b) for a, b in zip(loader.make(given), batch, strict=True))


def test_a_users_own_prepare_runs_in_the_first_stage():
    def prepare(batch, samples, epoch):
        return batch[0].float() + epoch, batch[1]

    for loader in (Resident(arrays(), prepare, CPU), Streaming(arrays(), prepare, CPU, 0, 0)):
        for inputs, batch in zip(loader.inputs(INDICES, 3), loader.batches(INDICES, 3), strict=True):
            assert loader.make(inputs) is inputs
            assert torch.equal(inputs[0], batch[0])


@pytest.mark.parametrize(
    ("data", "kind", "expected"),
    [
        (arrays(), "auto", Resident),
        (arrays(), "resident", Resident),
        (arrays(), "streaming", Streaming),
        (Noisy(), "auto", Streaming),
    ],
)
def test_the_loader_that_suits_the_data(data, kind, expected):
    assert type(make_loader(data, kind, None, CPU, 0, 0)) is expected


def test_a_data_set_cannot_be_resident():
    with pytest.raises(UsageError, match="--loader resident needs data as Arrays: this task's is a Noisy, which is streamed"):
        make_loader(Noisy(), "resident", None, CPU, 0, 0)


def test_arrays():
    data = arrays()
    assert len(data) == 10
    assert data[3][1] == 3
    assert data.nbytes == 10 * 36 + 10 * 8
    first = data.first(4)
    assert (len(first), first.about) == (4, "noise")
    assert len(data.first(100)) == 10
    with pytest.raises(UsageError, match="have 2, 3 samples: they must have the same length"):
        Arrays((torch.zeros(2), torch.zeros(3)))
