"""Whole batches, made in the loader processes: samples are read, then collated where an error can still name them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from paceline.core.keyed import KeyedDataset
from paceline.core.keys import key, seed_sample
from paceline.core.stream import Stream, StreamReader
from paceline.data.conversion import collate, explain_collate
from paceline.data.mapped import Rows
from paceline.errors import SampleError, UsageError

Collate = Callable[[list[Any]], Any]
"""A list of samples -> a batch: tensors, in a tuple or a dict."""
_COLLATE = 0xC011  # keeps the random numbers of collate apart from those of samples


class Batches(Dataset[Any]):
    """Returns whole batches. Arrays are indexed in one call, unless samples are collated by the task."""

    def __init__(
        self,
        data: Any,
        seed: int,
        own: Collate | None = None,
        shards: int = 1,
        repeats: bool = False,
        arrays: Sequence[Tensor] | None = None,
    ) -> None:
        """`arrays`: the tensors of the data, if it is Arrays."""
        self._data, self._seed, self._own, self._repeats = data, seed, own, repeats
        self._arrays = None if arrays is None or own is not None else tuple(map(Rows, arrays))
        self._reader = StreamReader(data, shards, seed) if isinstance(data, Stream) else KeyedDataset(data, seed, repeats)

    def __len__(self) -> int:
        return len(self._reader)

    def __getitems__(self, pairs: list[tuple[int | None, int]]) -> Any:
        samples = [sample % len(self) if self._repeats else sample for _, sample in pairs]
        if self._arrays is not None:
            return tuple(array[samples] for array in self._arrays)
        try:
            items = self._reader.__getitems__(pairs)
        except UsageError as error:  # of a Stream
            return Refused(str(error))
        return self._collate(items, samples) if self._own is None else self._collate_own(items, pairs)

    def _collate(self, items: Any, samples: list[int]) -> Any:
        try:
            return collate(items)
        except Exception:  # torch and numpy raise many types
            why = explain_collate(items, samples, type(self._data).__name__)
            if not why:
                raise
            return Refused(why)

    def _collate_own(self, items: list[Any], pairs: list[tuple[int | None, int]]) -> Any:
        """The task's own collate, which may draw random numbers: keyed by the batch's first sample, in a part of its own."""
        assert self._own is not None
        epoch, first = pairs[0]
        seed_sample(key(self._seed, -1 if epoch is None else epoch, first, _COLLATE))
        batch = self._own(items)
        if batch is None:
            return Refused("the task's collate returned None: it must return the batch (is a `return` missing?)")
        # A tokenizer's batch is a mapping that is not a dict. Batches are copied to the device as tuples, lists and dicts.
        return dict(batch) if isinstance(batch, Mapping) and not isinstance(batch, dict) else batch


@dataclass(frozen=True)
class Refused:
    """Returned in place of a batch if the user made a mistake: torch would bury an error of a loader process in a traceback."""

    why: str


def checked(batch: Any) -> Any:
    """The batch. Raises a SampleError if it was refused."""
    if isinstance(batch, Refused):
        raise SampleError(batch.why)
    return batch
