"""The samples of each step, and how they are cut into parts (law 2).

The order of an epoch depends on (seed, epoch) alone. Steps cut it into global batches, and each global batch into V equal
parts. Which worker computes a part does not matter here. Every sample of the epoch is used exactly once: if the samples do not
fill the last step, the last two steps share what is left, so that no part is empty and none is smaller than half of a full one
(a tiny part would have poor batch statistics).

Two kinds of epochs differ. With `weights`, an epoch draws samples with replacement, so a sample can appear several times or not
at all. With `dealt`, samples come from a stream that cannot be indexed: part p takes every parts-th sample, starting at p, in
the order of the stream.
"""

import functools
import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.core.keys import key, keys_numpy
from paceline.errors import UsageError
from paceline.output import plural

_DRAW = 0xD4A3  # keeps the numbers that draw weighted samples apart from those that shuffle


@dataclass(frozen=True)
class Sampler:
    """The steps and parts of any epoch."""

    samples: int
    """Samples in an epoch; with `weights`, the number of draws."""
    global_batch: int
    parts: int
    seed: int
    weights: Any = field(default=None, compare=False, repr=False)
    """One weight per sample of the data, as a list, array or tensor: an epoch then has `samples` draws with replacement."""
    dealt: bool = False
    """Part p takes samples p, p + parts, p + 2 parts and so on: for streams."""

    def __post_init__(self) -> None:
        check_divides(self.global_batch, self.parts)
        if self.weights is not None:
            object.__setattr__(self, "weights", check_weights(self.weights))
            if self.dealt:
                raise UsageError("a stream cannot be sampled by weights: it is read in its own order; leave the weights out")
        if self.samples < self.parts:
            raise UsageError(
                f"{plural(self.samples, 'training sample')} cannot feed {self.parts} virtual workers: each needs at least one"
                " per step"
            )

    def order(self, epoch: int) -> np.ndarray:
        """The epoch's samples, shuffled: the ranks of 64-bit hashes, the same in all versions of numpy.

        No two samples have the same hash (splitmix64 is a bijection), so any sorting algorithm gives the same order.

        With weights: repetition r of sample s is the number s + r N, where N is the number of samples in the data. So every
        draw has its own number, and with it its own random numbers. `rows` gives the samples back.
        """
        if self.dealt:
            return self._dealt
        if self.weights is not None:
            return self._draw(epoch)
        return np.argsort(keys_numpy(key(self.seed, epoch), np.arange(self.samples)))

    @property
    def rows_in_data(self) -> int:
        """Samples that the data has."""
        return self.samples if self.weights is None else len(self.weights)

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """The samples that these numbers of an order stand for."""
        return numbers if self.weights is None else numbers % len(self.weights)

    def _draw(self, epoch: int) -> np.ndarray:
        """The epoch's draws, by (seed, epoch) alone."""
        keys = keys_numpy(key(self.seed, epoch, _DRAW), np.arange(self.samples))
        sums = np.cumsum(self.weights)
        places = (keys >> np.uint64(11)).astype(np.float64) * 2.0**-53 * sums[-1]
        last = int(np.flatnonzero(self.weights)[-1])  # rounding must not choose a later sample of weight 0
        rows = np.minimum(np.searchsorted(sums, places, side="right"), last)
        return np.asarray(rows + _count_earlier(rows) * len(self.weights))

    @functools.cached_property
    def _dealt(self) -> np.ndarray:
        bounds = self.step_bounds
        steps = [np.arange(start, stop) for start, stop in itertools.pairwise(bounds)]
        return np.concatenate([numbers[part :: self.parts] for numbers in steps for part in range(self.parts)])

    @functools.cached_property
    def step_bounds(self) -> np.ndarray:
        """Where each step starts in the order, and where the last one ends."""
        full, rest = divmod(self.samples, self.global_batch)
        starts = np.arange(full + 1) * self.global_batch
        if rest == 0:
            return starts
        if full == 0 or (2 * rest >= self.global_batch and rest >= self.parts):
            return np.append(starts, self.samples)
        shared = self.global_batch + rest
        if shared >= 2 * self.parts:
            half = (shared + 1) // 2
            if self.dealt:  # all steps but the last have equal parts, so that part p gets every parts-th sample of the epoch
                half = min(-(-half // self.parts) * self.parts, (shared - self.parts) // self.parts * self.parts)
            return np.append(starts[:-1], [starts[-2] + half, self.samples])
        return np.append(starts[:-1], self.samples)  # parts of one sample cannot be halved: the last step takes both

    @functools.cached_property
    def full_steps(self) -> int:
        """The number of steps with a whole global batch. They come first."""
        return int((np.diff(self.step_bounds) == self.global_batch).sum())

    @property
    def steps(self) -> int:
        """Steps per epoch."""
        return len(self.step_bounds) - 1

    def part_bounds(self, step: int) -> np.ndarray:
        """Where each part of a step starts in the order, and where the last one ends. Sizes differ by one at most."""
        start, stop = self.step_bounds[step : step + 2]
        if self.dealt:
            each, more = divmod(int(stop - start), self.parts)
            return np.asarray(start + each * np.arange(self.parts + 1) + np.minimum(np.arange(self.parts + 1), more))
        return np.asarray(start + (stop - start) * np.arange(self.parts + 1) // self.parts)


def check_divides(global_batch: int, parts: int) -> None:
    """Raise a UsageError unless a global batch can be cut into equal parts."""
    if global_batch % parts:
        below, above = global_batch // parts * parts, (global_batch // parts + 1) * parts
        hint = f"{below} or {above}" if below else f"{above}"
        raise UsageError(f"a global batch of {global_batch} does not divide into {parts} equal parts: use {hint}")


def check_weights(given: Any) -> np.ndarray:
    """Weights of samples as float64. Raises a UsageError unless they are numbers, none negative, and not all 0."""
    try:
        weights = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise UsageError("the weights for sampling must be numbers, one per sample") from None
    if weights.ndim != 1 or not len(weights):
        raise UsageError(f"the weights for sampling have shape {weights.shape}: give one number per sample")
    wrong = np.flatnonzero(~np.isfinite(weights) | (weights < 0))
    if len(wrong):
        raise UsageError(
            f"the weight of sample {wrong[0]} is {weights[wrong[0]]:g}: weights must be finite and not negative; 0 leaves a"
            " sample out"
        )
    if not weights.any():
        raise UsageError("all weights for sampling are 0: at least one sample needs a positive weight")
    return weights


def _count_earlier(rows: np.ndarray) -> np.ndarray:
    """For each place, how many earlier places hold the same number."""
    order = np.argsort(rows, kind="stable")
    grouped = rows[order]
    begins = np.flatnonzero(np.append(True, grouped[1:] != grouped[:-1]))
    counts = np.empty(len(rows), dtype=np.int64)
    counts[order] = np.arange(len(rows)) - np.repeat(begins, np.diff(np.append(begins, len(rows))))
    return counts
