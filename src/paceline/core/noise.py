"""The gradient noise scale, measured from the parts while training, and AdaScale's gain, which follows from it.

A unit is what one worker computes in one pass: one part, or several together. Its gradient is the mean over its b samples, so
the expected square of it is |G|^2 + tr(S) / b, where G is the true gradient and S the covariance of one sample's gradient
(McCandlish et al. 2018, arXiv:1812.06162). With L the mean square over units and T the square of the step's gradient (for which
b is B, the global batch):

    tr(S) = (L - T) / (mean of 1/b - 1/B),     |G|^2 = T - tr(S) / B,     noise scale = tr(S) / |G|^2

Both are smoothed over steps before they are divided: a mean of ratios would be too large. All of it stays in tensors on the
device, so a captured step measures too. Every worker has the same numbers, and in exact mode the same bits for any P.
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
    """Estimates the noise scale from the gradients of the units."""

    def __init__(self, parameters: Iterable[Tensor], parts: int, device: Any) -> None:
        """`parts`: the most that a step has. Call `enter` before the first step."""
        self.parameters = list(parameters)
        self._units = self._global_batch = 1
        self._spread = 0.0
        self.state = torch.zeros(2, dtype=torch.float64, device=device)
        """Smoothed tr(S) and |G|^2, both times 1 - 0.95^steps. That factor cancels in their ratio."""
        self.unit: Tensor | None = None
        """What all gradients are multiplied by; None: 1. A step with gradients that are not finite is left out then."""
        self._squares = torch.zeros(parts, dtype=torch.float64, device=device)
        self._before: dict[Tensor, Tensor] = {}

    def enter(self, units: Sequence[int], part_batch: int, global_batch: int) -> None:
        """The next steps have this global batch. `units`: the number of parts in each unit, of all workers."""
        self._units, self._global_batch = len(units), global_batch
        inverse = math.fsum(1 / (count * part_batch) for count in units) / len(units)
        self._spread = inverse - 1 / global_batch

    @property
    def can_compare(self) -> bool:
        """Whether a step has several units."""
        return self._units > 1

    def start(self) -> None:
        """Begin a step."""
        self._squares.zero_()
        self._before = {}

    def take(self, part: int, share: float, sums: bool) -> None:
        """Take in a unit's gradients. `sums`: they include those of the units before it. `part`: the unit's first part."""
        grads = {p: p.grad for p in self.parameters if p.grad is not None}
        self.add(part, share, grads)
        self._before = {p: grad.clone() for p, grad in grads.items()} if sums else {}

    def add(self, part: int, share: float, grads: dict[Tensor, Tensor]) -> None:
        """Take in some of a unit's gradients. Its loss was weighted by `share`."""
        if not grads:
            return
        own = [grad - self._before[p] if p in self._before else grad for p, grad in grads.items()]
        self._squares[part] += _square(own) / share**2

    def finish(self, world: World) -> None:
        """Update the estimate from the reduced gradient. Collective: call on every rank."""
        if world.size > 1:
            dist.all_reduce(self._squares)  # every number comes from one worker: adding zeros is exact
        mean = self._squares.sum() / self._units
        whole = _square([p.grad for p in self.parameters if p.grad is not None])
        variance = (mean - whole) / self._spread
        now = torch.stack((variance, whole - variance / self._global_batch))
        if self.unit is not None:
            now = torch.where(now.isfinite().all(), now / self.unit.double().square(), self.state)
        self.state.lerp_(now, 1 - _SMOOTHING)

    def gain(self, reference_batch: int) -> Tensor:
        """AdaScale's gain from the estimate so far."""
        return adascale_gain(self.state, self._global_batch, reference_batch)


def noise_scale(variance: float, square: float) -> float:
    """The global batch at which noise and gradient are equally large; infinite while noise hides the gradient."""
    return max(variance, 0.0) / square if square > 0 else math.inf


def adascale_gain(state: Tensor, global_batch: int, reference_batch: int) -> Tensor:
    """The factor by which a larger batch may raise the learning rate (Johnson et al. 2020, arXiv:2007.05105).

    1 if there is no noise to remove, k if the gradient is all noise. `state` is (tr(S), |G|^2), in any common scale.
    """
    k = global_batch / reference_batch
    variance, square = state.clamp(min=1e-30)
    gain: Tensor = (variance / reference_batch + square) / (variance / global_batch + square)
    return gain.clamp(min(1.0, k), max(1.0, k))


def _square(tensors: list[Tensor]) -> Tensor:
    """The squared norm of all tensors, summed in one order."""
    return torch.stack(torch._foreach_norm(tensors)).double().square().sum()
