"""DataLoaders of a script for one worker, made into those of `Parts`: the same dataset and options, other batches."""

from collections.abc import Iterator, Sized
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, SequentialSampler

from paceline.core.trees import move
from paceline.errors import UsageError

_EVALUATED_AT_ONCE = 250
_KEPT = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor")


class Dealt:
    """The batches of a loader that one worker has, on its device."""

    def __init__(self, loader: DataLoader[Any], dataset: Dataset[Any], device: torch.device) -> None:
        self._loader, self.dataset, self._device = loader, dataset, device

    def __iter__(self) -> Iterator[Any]:
        return (move(batch, self._device) for batch in self._loader)

    def __len__(self) -> int:
        return len(self._loader)


def plan_batches(loader: DataLoader[Any] | None, samples: int | None, global_batch: int | None) -> tuple[int, int]:
    """Samples in an epoch and per step, from a loader or as given."""
    if loader is None:
        if samples is None or global_batch is None:
            raise UsageError("Parts needs a DataLoader, Parts(model, loader), or samples and global_batch")
        return samples, global_batch
    if samples is not None or global_batch is not None:
        raise UsageError("Parts got a loader and samples or global_batch: the loader has both; leave them out")
    return data_of(loader)[1:]


def data_of(data: int | Dataset[Any] | DataLoader[Any]) -> tuple[Dataset[Any] | None, int, int]:
    """The dataset (None: only numbers of samples), how many samples it has, and how many to take at once."""
    if isinstance(data, int):
        return None, data, _EVALUATED_AT_ONCE
    dataset, size = (data.dataset, _check_loader(data)) if isinstance(data, DataLoader) else (data, _EVALUATED_AT_ONCE)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"{type(dataset).__name__} is not a map-style Dataset: parts are chosen by sample number, so it needs __len__ and"
            " __getitem__"
        )
    return dataset, len(cast(Sized, dataset)), size


def _check_loader(loader: DataLoader[Any]) -> int:
    """The loader's batch size; a UsageError if it chooses samples in a way that parts would change."""
    if isinstance(loader.dataset, IterableDataset):
        return _EVALUATED_AT_ONCE  # refused next
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise UsageError("this DataLoader has a batch_sampler of its own or no batch_size: give it batch_size=N instead")
    if type(loader.sampler) not in (RandomSampler, SequentialSampler):
        raise UsageError(
            f"this DataLoader has a {type(loader.sampler).__name__}: Parts chooses the samples of each step itself; use"
            " shuffle=True"
        )
    if len(cast(Sized, loader.sampler)) != len(cast(Sized, loader.dataset)):
        raise UsageError("this DataLoader's sampler draws another number of samples than the dataset has: use shuffle=True")
    return loader.batch_size


def with_batches(loader: DataLoader[Any], dataset: Dataset[Any], sampler: Sampler[list[Any]]) -> DataLoader[Any]:
    """A loader with the same options, for these batches. Random numbers of training are not drawn for it."""
    options = {name: getattr(loader, name) for name in _KEPT}
    options["persistent_workers"] = loader.num_workers > 0 and loader.persistent_workers
    return DataLoader(dataset, batch_sampler=sampler, generator=torch.Generator(), **options)
