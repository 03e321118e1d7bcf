"""Exact evaluation: every sample counts once, for any number of workers (law 4).

Samples are cut into fixed chunks; worker r evaluates chunks r, r + P, ... Each worker writes its samples' metrics into their
places in a table of zeros. Summing the tables over the workers adds zeros to every value, which is exact. The mean is then
taken in one order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.dist.world import World
from paceline.errors import UsageError


@dataclass(frozen=True)
class Chunks:
    """Samples in fixed chunks, dealt to the workers."""

    samples: int
    size: int
    world: World

    @cached_property
    def numbers(self) -> range:
        """Which chunks this worker evaluates."""
        return range(self.world.rank, -(-self.samples // self.size), self.world.size)

    @cached_property
    def mine(self) -> list[np.ndarray]:
        """The sample numbers of this worker's chunks."""
        return [np.arange(i * self.size, min((i + 1) * self.size, self.samples)) for i in self.numbers]


def mean_over_workers(chunks: Chunks, names: tuple[str, ...], rows: Sequence[Tensor]) -> dict[str, float]:
    """The mean of each metric over all samples; the same numbers on every worker. Collective: call on every rank.

    `rows` has one tensor per chunk of this worker: one row per metric, one column per sample.
    """
    world = chunks.world
    expected = tuple(world.broadcast(names))  # a worker without a chunk has no names
    check_names(names or expected, expected)
    table = torch.zeros(len(expected), chunks.samples, device=world.device)
    for chunk, values in zip(chunks.mine, rows, strict=True):
        table[:, int(chunk[0]) : int(chunk[-1]) + 1] = values
    if world.size > 1:
        dist.all_reduce(table)
    return dict(zip(expected, table.double().mean(1).tolist(), strict=True))


def check_names(found: tuple[str, ...], expected: tuple[str, ...]) -> None:
    """Raise a UsageError unless two batches reported the same metrics."""
    if found != expected:
        raise UsageError(
            f"one batch of validation reported {', '.join(found)}, another {', '.join(expected)}:"
            " report the same metrics in the same order each time"
        )
