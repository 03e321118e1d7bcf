"""Streams: split by virtual worker, seeded by sample, and read on from any place."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from paceline.core.sampler import Sampler
from paceline.core.stream import Stream, StreamReader
from paceline.errors import UsageError


def count(shard: int, shards: int, epoch: int) -> Iterator[tuple[int, float]]:
    """Every shards-th number below 24, with noise."""
    for number in range(shard, 24, shards):
        yield number, random.random() + float(torch.rand(())) + float(np.random.rand())


class Numbers(IterableDataset[Any]):
    """A stream that cannot be split; it shuffles itself."""

    def __iter__(self) -> Iterator[int]:
        numbers = list(range(24))
        random.shuffle(numbers)
        yield from numbers


def read(stream: Stream, shards: int, epoch: int = 0, seed: int = 0, numbers: Any = range(24)) -> list[Any]:
    reader = StreamReader(stream, shards, seed)
    return [reader.read(epoch, number) for number in numbers]


@pytest.mark.parametrize("samples", [24, 23, 18, 17, 13, 11, 8, 7, 5])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_part_p_takes_every_parts_th_sample_in_order(samples: int, parts: int) -> None:
    sampler = Sampler(samples, 8, parts, 0, dealt=True)
    order, taken = sampler.order(3), [list[int]() for _ in range(parts)]
    assert sorted(order) == list(range(samples))
    for step in range(sampler.cut(3).steps):
        bounds = sampler.part_bounds(3, step)
        assert (np.diff(bounds) > 0).all()
        for part in range(parts):
            taken[part] += order[bounds[part] : bounds[part + 1]].tolist()
    assert taken == [list(range(part, samples, parts)) for part in range(parts)]


def test_a_shard_is_the_functions_own() -> None:
    assert [number for number, _ in read(Stream(count, 24), 4)] == list(range(24))


def test_noise_follows_the_sample_and_its_epoch() -> None:
    first = read(Stream(count, 24), 4)
    assert len({noise for _, noise in first}) == 21, "only the first samples of the four shards may share their noise"
    assert read(Stream(count, 24), 4) == first
    assert read(Stream(count, 24), 4, numbers=[5, 21, 1, 3])[:2] == [first[5], first[21]], "skipped samples leave no trace"
    assert read(Stream(count, 24), 4, numbers=[21, 5]) == [first[21], first[5]], "an earlier sample opens the shard again"
    assert not {noise for _, noise in read(Stream(count, 24), 4, epoch=1)} & {noise for _, noise in first}
    assert not {noise for _, noise in read(Stream(count, 24), 4, seed=1)} & {noise for _, noise in first}


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_an_iterable_that_cannot_be_split_is_dealt(shards: int) -> None:
    found = read(Stream(Numbers(), 24), shards)
    assert sorted(found) == list(range(24)), "all parts must see the same order"
    assert found == read(Stream(Numbers(), 24), 1)
    assert found != read(Stream(Numbers(), 24), shards, epoch=1)


def test_an_iterable_that_draws_its_next_sample_is_dealt() -> None:
    class Draws(IterableDataset[Any]):
        def __iter__(self) -> Iterator[int]:
            left = list(range(24))
            while left:
                yield left.pop(random.randrange(len(left)))

    assert sorted(read(Stream(Draws(), 24), 3)) == list(range(24)), "each part must see the same draws"


def test_a_function_deals_files_in_an_order_that_all_shards_share() -> None:
    def files(shard: int, shards: int, epoch: int) -> Iterator[str]:
        names = list("abcdef")
        random.shuffle(names)
        yield from names[shard::shards]

    orders = {tuple(read(Stream(files, 6), 3, epoch, numbers=range(6))) for epoch in range(4)}
    assert len(orders) == 4
    assert all(sorted(order) == list("abcdef") for order in orders)


def test_a_buffer_mixes_each_shard() -> None:
    plain, mixed = Stream(count, 24), Stream(count, 24, shuffle=4)
    found = [number for number, _ in read(mixed, 2)]
    assert found != [number for number, _ in read(plain, 2)]
    assert sorted(found[::2]) == list(range(0, 24, 2))
    assert sorted(read(mixed, 2)) == sorted(read(plain, 2)), "the noise follows the sample, not its place"
    assert found != [number for number, _ in read(mixed, 2, epoch=1)]
    assert found[12:] == [number for number, _ in read(mixed, 2, numbers=range(12, 24))]


def test_a_short_shard_is_named() -> None:
    with pytest.raises(UsageError, match=r"shard 2 of 5 .* ended after 5 samples, but an epoch of 30 takes 6 from it"):
        read(Stream(lambda shard, shards, epoch: range(5 if shard == 2 else 9), 30), 5, numbers=range(30))
    with pytest.raises(UsageError, match=r"shard 1 of 2 .* ended after 0 samples, .* at most as many virtual workers"):
        read(Stream(lambda shard, shards, epoch: range(5) if shard == 0 else [], 10), 2)


def test_a_short_shard_can_start_again() -> None:
    stream = Stream(lambda shard, shards, epoch: range(shard * 10, shard * 10 + 3), 10, short="repeat")
    assert read(stream, 2, numbers=range(10)) == [0, 10, 1, 11, 2, 12, 0, 10, 1, 11]
    with pytest.raises(UsageError, match="the stream has no samples"):
        read(Stream(lambda shard, shards, epoch: [], 4, short="repeat"), 1)
    with pytest.raises(UsageError, match="the stream ended after 24 samples, but an epoch takes 25: use samples=24"):
        read(Stream(count, 25), 1, numbers=range(25))


class Sharded:
    """As Hugging Face's streams: `num_shards` files, dealt by `shard`."""

    def __init__(self, files: list[list[int]]) -> None:
        self.files, self.num_shards, self.epoch = files, len(files), -1

    def shard(self, num_shards: int, index: int) -> "Sharded":
        return Sharded(self.files[index::num_shards])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((self.epoch, number) for file in self.files for number in file)


def test_a_source_with_shards_reads_only_its_own() -> None:
    source = Sharded([[0, 4], [1, 5], [2, 6], [3, 7]])
    assert read(Stream(source, 8), 2, epoch=3, numbers=range(8)) == [(3, n) for n in (0, 1, 4, 5, 2, 3, 6, 7)]
    assert [n for _, n in read(Stream(source, 8), 3, numbers=range(8))] == [0, 4, 1, 5, 2, 6, 3, 7]
    assert "2 shards, one per part" in Stream(source, 8).describe(2)
    assert "not split: each of the 3 parts reads all of it" in Stream(source, 8).describe(3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((3, 10), "Stream got int as its source: give a function"),
        (("data/*.tar", 10), "Stream got str as its source"),
        ((iter([1]), 10), "Stream got an iterator, .* which can be read only once"),
        ((lambda shard: [], 10), r"cannot be called with \(shard, shards, epoch\)"),
        ((count, 0), r"Stream\(samples=0\): give the number of samples"),
        ((count, 1.5), r"Stream\(samples=1.5\)"),
        ((count, 10, -1), r"Stream\(shuffle=-1\)"),
        ((count, 10, 0, "wrap"), r"Stream\(short='wrap'\)"),
    ],
)
def test_mistakes(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Stream(*arguments)


def test_a_function_that_forgets_to_return() -> None:
    with pytest.raises(UsageError, match=r"returned NoneType for shard 0 of 1: .*is a `return` or `yield` missing"):
        read(Stream(lambda shard, shards, epoch: None, 4), 1)
