"""Exact evaluation: every sample counts once, for any number of workers (law 4).

Samples are cut into fixed chunks; worker r evaluates chunks r, r + P, ... Each worker writes its samples' metrics into their
places in a table of zeros. Summing the tables over the workers adds zeros to every value, which is exact. The mean is then
taken in one order. A metric that is one number per chunk counts for each of its samples. Weights are one more row of the table.
"""

from collections.abc import Mapping, Sequence
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

    `rows` has what `lay_out` made of each chunk of this worker. If one of the names is "weight", means are weighted by it.
    """
    world = chunks.world
    expected = tuple(world.broadcast(names))  # a worker without a chunk has no names
    check_names(names or expected, expected)
    table = torch.zeros(len(expected), chunks.samples, device=world.device)
    for chunk, values in zip(chunks.mine, rows, strict=True):
        table[:, int(chunk[0]) : int(chunk[-1]) + 1] = values
    if world.size > 1:
        dist.all_reduce(table)
    if "weight" not in expected:
        return dict(zip(expected, table.double().mean(1).tolist(), strict=True))
    means = _weighted_means(table.double(), expected.index("weight")).tolist()
    return {name: mean for name, mean in zip(expected, means, strict=True) if name != "weight"}


def lay_out(values: Mapping[str, Tensor], names: Sequence[str], count: int) -> Tensor:
    """A chunk's values as one row per name and one column per sample. No host sync.

    A number for the whole chunk is repeated for each sample. A weight for the whole chunk belongs to its first sample, and the
    others have 0: so no weight is rounded.
    """
    rows = [values[name].detach().float() for name in names]
    wide = [row if row.dim() else row.expand(count) for row in rows]
    if "weight" in names and not values["weight"].dim():
        wide[list(names).index("weight")] = torch.nn.functional.pad(rows[list(names).index("weight")].view(1), (0, count - 1))
    return torch.stack(wide)


def _weighted_means(table: Tensor, at: int) -> Tensor:
    """The mean of each row, weighted by row `at`. A value of weight 0 does not count, even if it is nan."""
    weight = table[at]
    if not bool((weight >= 0).all()) or not bool(weight.isfinite().all()):
        raise UsageError("a 'weight' of the validation data is negative or not finite: a weight must be a number of 0 or more")
    total = weight.sum()
    if not bool(total > 0):
        raise UsageError("every 'weight' of the validation data is 0: the mean of nothing is not defined; check the mask")
    return (torch.where(weight == 0, 0.0, table) * weight).sum(1) / total


def check_names(found: tuple[str, ...], expected: tuple[str, ...]) -> None:
    """Raise a UsageError unless two batches reported the same metrics."""
    if found != expected:
        raise UsageError(
            f"one batch of validation reported {', '.join(found)}, another {', '.join(expected)}:"
            " report the same metrics in the same order each time"
        )
