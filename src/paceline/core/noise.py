"""The gradient noise scale, measured from the parts while training, and AdaScale's gain, which follows from it.

A unit is what one worker computes in one go: a part, or several together. Its gradient is the mean over its b samples, so the
mean of its square is |G|^2 + tr(S) / b, where G is the true gradient and S the covariance of a sample's (McCandlish et al.
2018, arXiv:1812.06162). With L the mean over units and T the square of the step's gradient (b is then B, the global batch):

    tr(S) = (L - T) / (mean of 1/b - 1/B),     |G|^2 = T - tr(S) / B,     noise scale = tr(S) / |G|^2

Both are smoothed over steps before they are divided: a mean of ratios would be too large. All of it stays on the device, in
tensors, so that a captured step measures too; every worker has the same numbers, and in exact mode the same bits for any P.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.dist.world import World

_SMOOTHING = 0.95


class Noise:
    """What the units' gradients say about their noise."""

    def __init__(self, parameters: Iterable[Tensor], units: Sequence[int], part_batch: int, parts: int, device: Any) -> None:
        """`units`: how many parts each unit of all workers has."""
        self.parameters = list(parameters)
        self._units, self._global_batch = len(units), part_batch * parts
        inverse = math.fsum(1 / (count * part_batch) for count in units) / len(units)
        self._spread = inverse - 1 / self._global_batch
        self.state = torch.zeros(2, dtype=torch.float64, device=device)
        """Smoothed tr(S) and |G|^2, both times 1 - 0.95^steps, which no ratio of them sees."""
        self._squares = torch.zeros(parts, dtype=torch.float64, device=device)
        self._before: dict[Tensor, Tensor] = {}

    def start(self) -> None:
        """Before a step's first pass."""
        self._squares.zero_()
        self._before = {}

    def take(self, part: int, share: float, sums: bool) -> None:
        """A unit's gradients are there; `sums`: added to those of the units before it. `part` is the unit's first."""
        grads = {p: p.grad for p in self.parameters if p.grad is not None}
        self.add(part, share, grads)
        self._before = {p: grad.clone() for p, grad in grads.items()} if sums else {}

    def add(self, part: int, share: float, grads: dict[Tensor, Tensor]) -> None:
        """Count some of a unit's gradients, whose loss was weighted by `share`."""
        if not grads:
            return
        own = [grad - self._before[p] if p in self._before else grad for p, grad in grads.items()]
        self._squares[part] += _square(own) / share**2

    def finish(self, world: World) -> None:
        """The step's gradient is there, on every worker: bring the estimate up to date."""
        if world.size > 1:
            dist.all_reduce(self._squares)  # every number comes from one worker: adding zeros is exact
        mean = self._squares.sum() / self._units
        whole = _square([p.grad for p in self.parameters if p.grad is not None])
        variance = (mean - whole) / self._spread
        now = torch.stack((variance, whole - variance / self._global_batch))
        self.state.lerp_(now, 1 - _SMOOTHING)

    def gain(self, reference_batch: int) -> Tensor:
        """AdaScale's gain by the estimate so far."""
        return adascale_gain(self.state, self._global_batch, reference_batch)


def noise_scale(variance: float, square: float) -> float:
    """The global batch at which noise and gradient are of a size; infinite while no gradient shows in the noise."""
    return max(variance, 0.0) / square if square > 0 else math.inf


def adascale_gain(state: Tensor, global_batch: int, reference_batch: int) -> Tensor:
    """By how much a larger batch may raise the learning rate, for `state` = (tr(S), |G|^2), of which one scale is as good as
    another (Johnson et al. 2020, arXiv:2007.05105): 1 where there is no noise to remove, k where the gradient is all noise.
    """
    k = global_batch / reference_batch
    variance, square = state.clamp(min=1e-30)
    gain: Tensor = (variance / reference_batch + square) / (variance / global_batch + square)
    return gain.clamp(min(1.0, k), max(1.0, k))


def _square(tensors: list[Tensor]) -> Tensor:
    """The squared norm of all of them, summed in one order."""
    return torch.stack(torch._foreach_norm(tensors)).double().square().sum()
