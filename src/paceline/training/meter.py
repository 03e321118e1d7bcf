"""Read each step's metrics without waiting for the GPU."""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.dist.world import World


@dataclass
class EpochMeans:
    """Means over an epoch's samples so far. A checkpoint holds them, so that a resumed run has the same ones."""

    sums: dict[str, float] = field(default_factory=dict)
    samples: float = 0
    """Their number, or the sum of their weights."""

    def add(self, metrics: Mapping[str, float], samples: float) -> None:
        """Add a step's means, which are over this many samples, or over samples of this weight."""
        self.sums = {name: self.sums.get(name, 0.0) + samples * value for name, value in metrics.items()}
        self.samples += samples

    def read(self) -> dict[str, float]:
        """The means; empty before the first step."""
        return {name: total / self.samples if self.samples else 0.0 for name, total in self.sums.items()}


@dataclass
class Rows:
    """Means over the steps since the last row."""

    sums: dict[str, float] = field(default_factory=dict)
    count: int = 0

    def add(self, metrics: Mapping[str, float], every: int, last: bool) -> dict[str, float] | None:
        """Add a step. Returns a row after `every` steps, or now if `last`: at an epoch's end, or where the schedule bends."""
        self.sums = {name: self.sums.get(name, 0.0) + value for name, value in metrics.items()}
        self.count += 1
        if self.count < every and not last:
            return None
        means = {name: total / self.count for name, total in self.sums.items()}
        self.sums, self.count = {}, 0
        return means


class Meter:
    """The metrics of each step, read a few steps late on a GPU, so that the host does not wait for them.

    Every worker reads the same numbers at the same step, so decisions made from them need no further agreement.
    """

    def __init__(self, world: World, waits: bool = False) -> None:
        """With `waits`, metrics are read at once, and the host waits for the GPU."""
        self._lag = 4 if world.device.type == "cuda" and not waits else 0
        self._waiting: deque[tuple[int, Tensor, Any]] = deque()

    def push(self, step: int, means: Tensor) -> Iterator[tuple[int, list[float]]]:
        """Take a step's metrics; yields (step, metrics) of the steps whose numbers have arrived."""
        arrived = None
        if means.device.type == "cuda":
            means = means.to("cpu", non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        self._waiting.append((step, means, arrived))
        while len(self._waiting) > self._lag:
            yield self._read()

    def flush(self) -> Iterator[tuple[int, list[float]]]:
        """Read the rest."""
        while self._waiting:
            yield self._read()

    def _read(self) -> tuple[int, list[float]]:
        step, means, arrived = self._waiting.popleft()
        if arrived is not None:
            arrived.synchronize()
        return step, means.tolist()
