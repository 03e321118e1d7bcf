"""Samples from a source that can only be read in order: an IterableDataset, tar files, a function of (shard, shards, epoch).

A stream is split by virtual worker, never by worker: part p of every step takes the next samples of shard p. So the model
depends on V and not on P. Sample number n of an epoch is sample n // V of shard n % V (`Sampler.dealt` deals these numbers).

A shard has no state to save. A resumed run opens its shards again and skips the samples that are done. torch, numpy and random
are seeded before each sample, also before those that are skipped, so the rest of the shard is the same as without the break.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch.utils.data
from torch.utils.data import Dataset

from paceline.core.keys import key, seed_sample
from paceline.errors import UsageError, describe_exit
from paceline.output import plural

VALIDATION = -1
"""The epoch that a stream is opened with in validation."""
_OPEN, _BUFFER = 0x57EA, 0xB0FF  # keep these random numbers apart from those of samples


@dataclass(frozen=True)
class Stream:
    """Samples that are read in order, split by virtual worker."""

    source: Any
    """A function of (shard, shards, epoch) that returns an iterable of that shard's samples, or an iterable data set.

    The function must split the data into `shards` shards. What it draws from torch, numpy or random when it is called is the
    same for all shards of an epoch, so `random.shuffle(files)` followed by `files[shard::shards]` reads each file once. In
    validation it is called with (0, 1, -1). A data set of Hugging Face is split by its own shards if V divides their number.
    Any other iterable data set is read in full for each part, which keeps one sample in V."""
    samples: int
    """Samples in an epoch, over all shards. What a shard has beyond its share is not read in this epoch."""
    shuffle: int = 0
    """Mix the samples of a shard in a buffer of this size, by (seed, epoch, shard); 0: keep the order of the source."""
    short: Literal["error", "repeat"] = "error"
    """What to do if a shard has fewer samples than an epoch takes from it. error: end the run with a line that says which.
    repeat: start the shard again, so that some samples are seen twice."""
    about: str = ""
    """Which data this is; shown in the contract and the record."""

    def __post_init__(self) -> None:
        source = self.source
        if isinstance(source, str | bytes | dict) or not (callable(source) or isinstance(source, Iterable)):
            raise UsageError(
                f"Stream got {type(source).__name__} as its source: give a function of (shard, shards, epoch) that returns an"
                " iterable of samples, or an iterable data set"
            )
        if isinstance(source, Iterator):
            raise UsageError(
                f"Stream got an iterator, {type(source).__name__}, which can be read only once: give a function of"
                " (shard, shards, epoch) that makes one"
            )
        if not isinstance(self.samples, int) or isinstance(self.samples, bool) or self.samples < 1:
            raise UsageError(f"Stream(samples={self.samples!r}): give the number of samples in an epoch, a whole number")
        if not isinstance(self.shuffle, int) or self.shuffle < 0:
            raise UsageError(f"Stream(shuffle={self.shuffle!r}): give the size of the buffer, such as 1000, or 0 for none")
        if self.short not in ("error", "repeat"):
            raise UsageError(f'Stream(short={self.short!r}): it must be "error" or "repeat"')
        if self._is_function:
            _check_function(source)

    def __len__(self) -> int:
        return self.samples

    def describe(self, shards: int) -> str:
        """How the shards are read, for the contract."""
        if shards == 1:
            how = "one shard"
        elif self._is_function or self._has_shards(shards):
            how = f"{shards:,} shards, one per part"
        else:
            how = f"not split: each of the {shards:,} parts reads all of it and keeps one sample in {shards:,}"
        mixed = f", mixed in a buffer of {self.shuffle:,}" if self.shuffle else ""
        again = ", a shard that ends early starts again" if self.short == "repeat" else ""
        return f"{self.about or 'a stream'} of {plural(self.samples, 'sample')}: {how}{mixed}{again}"

    def open(self, shard: int, shards: int, epoch: int, seed: int) -> Iterator[Any]:
        """The samples of a shard, from its first one; torch, numpy and random are seeded for each."""
        if self.short == "repeat":
            return self._repeat(shard, shards, epoch, seed)
        return self._mix(shard, shards, epoch, seed)

    @property
    def _is_function(self) -> bool:
        return callable(self.source) and not isinstance(self.source, Iterable)

    def _has_shards(self, shards: int) -> bool:
        """Whether the source can give each part shards of its own, as the streams of Hugging Face can."""
        own = getattr(self.source, "num_shards", 0)
        return isinstance(own, int) and own > 0 and own % shards == 0 and callable(getattr(self.source, "shard", None))

    def _repeat(self, shard: int, shards: int, epoch: int, seed: int) -> Iterator[Any]:
        found = True
        while found:
            found = False
            for sample in self._mix(shard, shards, epoch, seed):
                found = True
                yield sample

    def _mix(self, shard: int, shards: int, epoch: int, seed: int) -> Iterator[Any]:
        """With a buffer: fill it, then give a random one of its samples for each that is read."""
        samples = self._read(shard, shards, epoch, seed)
        if not self.shuffle:
            yield from samples
            return
        buffer, place, mixed = list(islice(samples, self.shuffle)), 0, key(seed, epoch, _BUFFER, shard)
        while buffer:
            at = key(mixed, place) % len(buffer)
            place += 1
            following = next(samples, _END)
            if following is _END:
                yield buffer.pop(at)
            else:
                given, buffer[at] = buffer[at], following
                yield given

    def _read(self, shard: int, shards: int, epoch: int, seed: int) -> Iterator[Any]:
        """The samples of a shard in the order of the source.

        Opening, and the first sample, are seeded without the shard: a generator function runs its first lines, which may
        shuffle files, only when its first sample is read. A source that cannot be split is seeded by its own sample numbers, so
        that all parts see the same source.
        """
        opening = key(seed, epoch, _OPEN)
        seed_sample(opening)
        split, source = True, self.source
        if self._is_function:
            source = source(shard, shards, epoch)
            if not isinstance(source, Iterable):
                raise UsageError(
                    f"the function of a Stream returned {type(source).__name__} for shard {shard} of {shards}: it must return"
                    " an iterable of samples (is a `return` or `yield` missing?)"
                )
        elif shards > 1 and self._has_shards(shards):
            source = source.shard(num_shards=shards, index=shard)
        else:
            split = shards == 1
        if callable(getattr(source, "set_epoch", None)):
            source.set_epoch(max(epoch, 0))
        number, samples = 0, iter(source)
        while True:
            seed_sample(key(seed, epoch, number * shards + shard if split else number) if number else opening)
            sample = next(samples, _END)
            if sample is _END:
                return
            if split or number % shards == shard:
                yield sample
            number += 1


class StreamReader(Dataset[Any]):
    """Gives the samples of a stream by (epoch, number). Reading in order is cheap: anything else opens the shard again.

    One process must read all samples of a shard: a second one would have to read and drop those of the first.
    """

    def __init__(self, stream: Stream, shards: int, seed: int) -> None:
        self._stream, self._shards, self._seed = stream, shards, seed
        self._open: dict[int, _OpenShard] = {}

    def __len__(self) -> int:
        return len(self._stream)

    def __getitem__(self, number: int) -> Any:
        return self.read(0, number)

    def __getitems__(self, pairs: list[tuple[int | None, int]]) -> list[Any]:
        try:
            return [self.read(VALIDATION if epoch is None else epoch, number) for epoch, number in pairs]
        except SystemExit as error:  # torch would not say where it was called in a loader process
            raise RuntimeError(describe_exit(error)) from error

    def read(self, epoch: int, number: int) -> Any:
        """The sample with this number. Raises a UsageError if its shard has too few samples."""
        place, shard = divmod(number, self._shards)
        at = self._open.get(shard)
        if at is None or at.epoch != epoch or at.place > place:
            _hide_loader_process()
            at = _OpenShard(epoch, self._stream.open(shard, self._shards, epoch, self._seed))
            self._open[shard] = at
        sample = at.skip_to(place)
        if sample is _END:
            del self._open[shard]
            raise UsageError(self._explain(shard, at.place))
        return sample

    def _explain(self, shard: int, found: int) -> str:
        samples, shards = self._stream.samples, self._shards
        needs = samples // shards + (shard < samples % shards)
        if shards == 1 and found:
            return f"the stream ended after {plural(found, 'sample')}, but an epoch takes {samples:,}: use samples={found}"
        if shards == 1:
            return "the stream has no samples: check for a wrong folder, or a filter that removes everything"
        ended = f"shard {shard} of {shards} of the stream ended after {plural(found, 'sample')}, but an epoch of {samples:,}"
        if not found:
            return f"{ended} takes {needs:,} from it: use at most as many virtual workers as there are shards with samples"
        return (
            f"{ended} takes {needs:,} from it: use Stream(..., samples={found * shards}), or short='repeat' to start it again"
        )


@dataclass
class _OpenShard:
    epoch: int
    samples: Iterator[Any]
    place: int = 0
    """Samples that were read."""

    def skip_to(self, place: int) -> Any:
        """The sample at this place."""
        sample: Any = _END
        while self.place <= place:
            sample = next(self.samples, _END)
            if sample is _END:
                return _END
            self.place += 1
        return sample


_END = object()


def _hide_loader_process() -> None:
    """Make `get_worker_info()` return None here: many data sets read it to split themselves by loader process, or to seed."""
    torch.utils.data._utils.worker._worker_info = None


def _check_function(function: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind("shard", "shards", "epoch")
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise UsageError(
            f"the function of a Stream, {name}{signature}, cannot be called with (shard, shards, epoch) ({error}): write"
            " def read(shard, shards, epoch): ..."
        ) from None
