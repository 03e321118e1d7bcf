"""DataLoader pieces for parts: batches that are a worker's passes, and samples whose random numbers follow the sample."""

from collections.abc import Iterator, Sequence, Sized
from typing import Any, cast

import numpy as np
from torch.utils.data import Dataset, Sampler

from paceline.core.keys import key, seed_sample
from paceline.errors import describe_exit


class PassSampler(Sampler[list[tuple[int | None, int]]]):
    """A batch sampler that yields the passes of the current epoch as (epoch, sample) pairs.

    It runs in the training process, so loader processes can be kept from one epoch to the next.
    """

    def __init__(self) -> None:
        self._passes: Sequence[np.ndarray] = ()
        self._epoch: int | None = None

    def set_epoch(self, passes: Sequence[np.ndarray], epoch: int | None) -> None:
        """Yield these passes next; epoch None is validation."""
        self._passes, self._epoch = passes, epoch

    def __iter__(self) -> Iterator[list[tuple[int | None, int]]]:
        for samples in self._passes:
            yield [(self._epoch, sample) for sample in samples.tolist()]

    def __len__(self) -> int:
        return len(self._passes)


class KeyedDataset(Dataset[Any]):
    """A Dataset whose random numbers follow the sample: seeded by (seed, epoch, sample) before each sample is made.

    With `repeats`, number n is sample n modulo the length, seeded by n: a sample drawn twice gets different random numbers.
    """

    def __init__(self, data: Any, seed: int, repeats: bool = False) -> None:
        self._data, self._seed, self._repeats = data, seed, repeats

    def __getitems__(self, pairs: list[tuple[int | None, int]]) -> Any:
        try:
            return [self._make(epoch, sample) for epoch, sample in pairs]
        except SystemExit as error:  # torch would not say where it was called in a loader process
            raise RuntimeError(describe_exit(error)) from error

    def __len__(self) -> int:
        return len(cast(Sized, self._data))

    def _make(self, epoch: int | None, sample: int) -> Any:
        seed_sample(key(self._seed, -1 if epoch is None else epoch, sample))
        return self._data[sample % len(self) if self._repeats else sample]
