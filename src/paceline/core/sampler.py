"""The samples of each step, and how they are cut into parts (law 2).

The order of an epoch depends on (seed, epoch) alone. Steps cut it into global batches, and each global batch into V equal
parts. Which worker computes a part does not matter here. Every sample of the epoch is used exactly once: if the samples do not
fill the last step, the last two steps share what is left, so that no part is empty and none is smaller than half of a full one
(a tiny part would have poor batch statistics).
"""

import functools
from dataclasses import dataclass

import numpy as np

from paceline.core.keys import key, keys_numpy
from paceline.errors import UsageError
from paceline.output import plural


@dataclass(frozen=True)
class Sampler:
    """The steps and parts of any epoch."""

    samples: int
    global_batch: int
    parts: int
    seed: int

    def __post_init__(self) -> None:
        check_divides(self.global_batch, self.parts)
        if self.samples < self.parts:
            raise UsageError(
                f"{plural(self.samples, 'training sample')} cannot feed {self.parts} virtual workers: each needs at least one"
                " per step"
            )

    def order(self, epoch: int) -> np.ndarray:
        """The epoch's samples, shuffled: the ranks of 64-bit hashes, the same in all versions of numpy.

        No two samples have the same hash (splitmix64 is a bijection), so any sorting algorithm gives the same order.
        """
        return np.argsort(keys_numpy(key(self.seed, epoch), np.arange(self.samples)))

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
            return np.append(starts[:-1], [starts[-2] + (shared + 1) // 2, self.samples])
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
        return np.asarray(start + (stop - start) * np.arange(self.parts + 1) // self.parts)


def check_divides(global_batch: int, parts: int) -> None:
    """Raise a UsageError unless a global batch can be cut into equal parts."""
    if global_batch % parts:
        below, above = global_batch // parts * parts, (global_batch // parts + 1) * parts
        hint = f"{below} or {above}" if below else f"{above}"
        raise UsageError(f"a global batch of {global_batch} does not divide into {parts} equal parts: use {hint}")
