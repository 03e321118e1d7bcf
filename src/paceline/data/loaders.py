"""The two loaders that bring batches to a worker's device, behind one interface.

`batches(indices, epoch)` yields one batch for every array of sample numbers. `Resident` holds the whole data set on the device;
`Streaming` reads a map-style Dataset or a Stream with torch's DataLoader. Both prepare batches on the device. They call
`before(i)` just before batch i is prepared, after all random numbers for fetching it were drawn: there a part is seeded.

A batch is made in two stages, so that a step captured as a CUDA graph can contain the second: `inputs` yields what differs
between batches, as tensors on the device; `make` does the same work on them each time.
"""

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from paceline.core.keyed import PassSampler
from paceline.core.keys import on_device
from paceline.core.stream import Stream
from paceline.core.trees import map_tensors, tensors_in
from paceline.data.batching import Batches, Collate, checked
from paceline.data.conversion import name_type, to_tensors
from paceline.data.mapped import is_mapped
from paceline.data.processes import begin_process, close_loaders, start_loader, start_method
from paceline.errors import UsageError

Batch = tuple[Any, ...]
Inputs = tuple[Any, ...]
BatchIndices = Sequence[np.ndarray]
"""One array of sample numbers per batch, in order."""
Before = Callable[[int], None]
Prepare = Callable[[tuple[Tensor, ...], Tensor, int | None], tuple[Tensor, ...]]
"""(batch on the device, sample numbers, epoch or None in validation) -> the batch for the objective."""

_MANY_BYTES = 2**30  # a mapped file of this size may not fit in memory


@runtime_checkable
class KeyedPrepare(Protocol):
    """A `prepare` that accepts the epoch as a tensor, so it can be part of a captured step. `Images` is one."""

    def epoch_key(self, epoch: int) -> int:
        """A number that stands for the epoch."""
        ...

    def apply(self, batch: tuple[Tensor, ...], samples: Tensor, epoch_key: Tensor | None) -> tuple[Tensor, ...]:
        """The batch for the objective, made only with tensor operations."""
        ...


@dataclass(frozen=True)
class Arrays:
    """A data set as tensors of equal length: inputs, targets and any others. Numpy arrays become tensors of the same type."""

    tensors: tuple[Tensor, ...]
    about: str = ""
    """Which data this is; shown in the contract and the record."""

    def __post_init__(self) -> None:
        if not isinstance(self.about, str):
            raise UsageError(
                f"Arrays got {name_type(self.about)} as its text `about`: give all arrays as one tuple, Arrays((x, y))"
            )
        object.__setattr__(self, "tensors", to_tensors(self.tensors))

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(tensor[index] for tensor in self.tensors)

    def first(self, count: int) -> "Arrays":
        """The first `count` samples."""
        return Arrays(tuple(tensor[:count] for tensor in self.tensors), self.about)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class Feed:
    """How batches are made and brought to the device."""

    collate: Collate | None = None
    """Makes a batch of a list of samples; None: stack them."""
    prefetch: int = 2
    """Batches that each loader process makes ahead."""
    pin_memory: Literal["auto", "on", "off"] = "auto"
    """Whether to make batches in pinned memory. auto: for a GPU."""
    cores: Iterable[int] | None = None
    """The cores that loader processes may use."""
    shards: int = 1
    """Shards of a Stream: V in training, one in validation."""
    own_shards: int = 1
    """Shards of this worker that separate processes may read; more loader processes would have nothing to do."""
    repeats: bool = False
    """Sample numbers beyond the length are repetitions: number n is sample n modulo the length."""


def _nothing(i: int) -> None:
    """The default `before`: do nothing."""


class Loader(ABC):
    """The interface of both loaders."""

    @abstractmethod
    def inputs(self, indices: BatchIndices, epoch: int | None, before: Before = _nothing) -> Iterator[Inputs]:
        """For every array of `indices`, in order: the tensors on the device that `make` turns into a batch."""

    @abstractmethod
    def make(self, inputs: Inputs) -> Batch:
        """The batch. Does not wait for the device and depends only on the inputs."""

    def start(self) -> None:  # noqa: B027  # most loaders have nothing to start
        """Start the loader's processes. Without this call, the first batch starts them.

        Call it before starting threads or locking files: a forked process inherits the locks of both.
        """

    def close(self) -> None:  # noqa: B027
        """End the loader's processes. It yields no batches afterwards."""

    def batches(self, indices: BatchIndices, epoch: int | None, before: Before = _nothing) -> Iterator[Batch]:
        """One batch on the device for every array of `indices`, in order."""
        yield from map(self.make, self.inputs(indices, epoch, before))


def make_loader(
    data: Arrays | Stream | Dataset[Any],
    kind: str,
    prepare: Prepare | None,
    device: torch.device,
    workers: int,
    seed: int,
    feed: Feed = Feed(),  # noqa: B008  # it cannot change
) -> Loader:
    """The loader for this data: by default resident for arrays that fit, otherwise streaming."""
    if kind == "resident" and not isinstance(data, Arrays):
        raise UsageError(f"--loader resident needs data as Arrays: this task's is a {type(data).__name__}, which is streamed")
    if isinstance(data, Arrays) and kind != "streaming" and (kind == "resident" or _fits(data, device)):
        return Resident(data, prepare, device, feed.repeats)
    return Streaming(data, prepare, device, workers, seed, feed)


class Resident(Loader):
    """The whole data set on the worker's device; a batch is one gather."""

    def __init__(self, data: Arrays, prepare: Prepare | None, device: torch.device, repeats: bool = False) -> None:
        self._tensors = tuple(tensor.to(device) for tensor in data.tensors)
        self._rows = len(data) if repeats else None
        self._prepare, self._device = _Preparation(prepare, device, self._rows), device

    def inputs(self, indices: BatchIndices, epoch: int | None, before: Before = _nothing) -> Iterator[Inputs]:
        if not indices:
            return
        sizes, begun = [len(samples) for samples in indices], self._prepare.begin(epoch)
        everything = torch.from_numpy(np.concatenate(indices)).to(self._device)  # one copy per epoch, not per step
        for i, samples in enumerate(torch.split(everything, sizes)):
            if self._prepare.later:
                before(i)
                yield samples, begun
            else:
                batch = self._gather(samples)
                before(i)
                yield self._prepare.now(batch, samples, epoch)

    def make(self, inputs: Inputs) -> Batch:
        if not self._prepare.later:
            return inputs
        samples, begun = inputs
        return self._prepare.then(self._gather(samples), samples, begun)

    def _gather(self, samples: Tensor) -> tuple[Tensor, ...]:
        rows = samples if self._rows is None else samples % self._rows
        if self._device.type == "cpu":
            return tuple(tensor.index_select(0, rows) for tensor in self._tensors)  # there ten times as fast as an index
        return tuple(tensor[rows] for tensor in self._tensors)


class Streaming(Loader):
    """torch's DataLoader: its processes live on between epochs; for a GPU, memory is pinned and the next batch copied ahead.

    A map-style Dataset has one DataLoader, whose processes take turns. All samples of a stream's shard must be read by one
    process, so a Stream has one DataLoader per process, and its shards are dealt to these "lanes".
    """

    def __init__(
        self,
        data: Arrays | Stream | Dataset[Any],
        prepare: Prepare | None,
        device: torch.device,
        workers: int,
        seed: int,
        feed: Feed = Feed(),  # noqa: B008  # it cannot change
    ) -> None:
        self._prepare = _Preparation(prepare, device, len(data) if feed.repeats else None)  # type: ignore[arg-type]
        self._device, self._shards = device, feed.shards
        self._samplers, self._lanes = [], []
        # torch counts only the cores that this worker is bound to, but its loader processes may use more.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        several = isinstance(data, Stream) and workers > 1
        for _ in range(min(workers, feed.own_shards) if several else 1):
            sampler, processes = PassSampler(), 1 if several else workers
            lane = DataLoader(
                Batches(
                    data, seed, feed.collate, feed.shards, feed.repeats, data.tensors if isinstance(data, Arrays) else None
                ),
                batch_sampler=sampler,
                num_workers=processes,
                multiprocessing_context=start_method() if processes else None,
                prefetch_factor=feed.prefetch if processes else None,
                pin_memory=device.type == "cuda" and feed.pin_memory != "off",
                persistent_workers=processes > 0,
                collate_fn=_unchanged,
                worker_init_fn=partial(begin_process, os.getpid(), feed.cores),
                generator=torch.Generator(),  # each epoch draws a number from it: do not use the generator that training uses
            )
            self._samplers.append(sampler)
            self._lanes.append(lane)

    def start(self) -> None:
        for sampler, lane in zip(self._samplers, self._lanes, strict=True):
            sampler.set_epoch((), None)
            start_loader(lane)

    def close(self) -> None:
        close_loaders(self._lanes)

    def inputs(self, indices: BatchIndices, epoch: int | None, before: Before = _nothing) -> Iterator[Inputs]:
        begun = self._prepare.begin(epoch)
        copied = self._copy_ahead(zip(self._load(indices, epoch), indices, strict=True))
        for i, (batch, samples) in enumerate(copied):
            before(i)
            yield (batch, samples, begun) if self._prepare.later else self._prepare.now(batch, samples, epoch)

    def make(self, inputs: Inputs) -> Batch:
        return self._prepare.then(*inputs) if self._prepare.later else inputs

    def _load(self, indices: BatchIndices, epoch: int | None) -> Iterator[Batch]:
        """The batches of all lanes, in order. The first sample's shard decides the lane, so a group of parts stays in one."""
        if len(self._lanes) == 1:
            self._samplers[0].set_epoch(indices, epoch)
            yield from self._lanes[0]
            return
        lanes = [int(samples[0]) % self._shards % len(self._lanes) for samples in indices]
        for number, sampler in enumerate(self._samplers):
            sampler.set_epoch([samples for samples, lane in zip(indices, lanes, strict=True) if lane == number], epoch)
        batches = [iter(lane) for lane in self._lanes]
        for lane in lanes:
            yield next(batches[lane])

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    def _copy_ahead(self, batches: Iterator[tuple[Batch, np.ndarray]]) -> Iterator[tuple[Batch, Tensor]]:
        if self._device.type != "cuda":
            for batch, samples in batches:
                yield checked(batch), torch.from_numpy(samples)
            return
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        ready: tuple[Batch, Tensor] | None = None
        for batch, samples in batches:
            with torch.cuda.stream(stream):
                coming = map_tensors(self._copy, (checked(batch), torch.from_numpy(samples)))
            if ready is not None:
                yield ready
            torch.cuda.current_stream(self._device).wait_stream(stream)
            for tensor in tensors_in(coming):
                if tensor.is_cuda:  # the batch sizes of a PackedSequence stay on the CPU
                    tensor.record_stream(torch.cuda.current_stream(self._device))
            ready = coming
        if ready is not None:
            yield ready


class _Preparation:
    """Decides in which stage a task's `prepare` runs: in the second if it can be part of a captured step."""

    def __init__(self, prepare: Prepare | None, device: torch.device, rows: int | None = None) -> None:
        self._prepare, self._device, self._rows = prepare, device, rows
        self._keyed = prepare if isinstance(prepare, KeyedPrepare) else None
        self.later = prepare is None or self._keyed is not None

    def begin(self, epoch: int | None) -> Tensor | None:
        """What the second stage needs to know about the epoch."""
        if epoch is None or self._keyed is None:
            return None
        return on_device(self._keyed.epoch_key(epoch), self._device)

    def now(self, batch: tuple[Tensor, ...], samples: Tensor, epoch: int | None) -> Batch:
        """Prepare in the first stage."""
        assert self._prepare is not None
        prepared = self._prepare(batch, samples if self._rows is None else samples % self._rows, epoch)
        if prepared is None:
            raise UsageError(
                "the task's prepare returned None: it must return the batch for the objective (is a `return` missing?)"
            )
        return prepared

    def then(self, batch: tuple[Tensor, ...], samples: Tensor, begun: Tensor | None) -> Batch:
        """Prepare in the second stage."""
        return batch if self._keyed is None else self._keyed.apply(batch, samples, begun)


def _unchanged(batch: Any) -> Any:
    return batch


def _fits(data: Arrays, device: torch.device) -> bool:
    """Whether a GPU's free memory is more than three times the data. A CPU worker's data is in memory, or in a mapped file."""
    if device.type == "cuda":
        return data.nbytes < torch.cuda.mem_get_info(device)[0] / 3
    return sum(tensor.nbytes for tensor in data.tensors if is_mapped(tensor)) < _MANY_BYTES
