"""Keskar's sharpness: how far the loss can rise within a small box around the weights (Keskar et al. 2017, metric 2.1).

    100 (max f(x + A y) - f(x)) / (1 + f(x)),   |y_i| <= eps (|(A^+ x)_i| + 1)

The maximum is searched with ten iterations of L-BFGS-B, over all weights (A = identity) or in a random subspace of 100
dimensions (A has normal entries). The result is a lower bound of the maximum, as in the paper.

Rank 0 runs the optimizer, and sends each point to the others, which only add their share of the loss and its gradient. So only
rank 0 needs A and the optimizer's memory, and workers cannot disagree about the next point, even on different processors.

The optimizer's units are ours, the box is not: y_i is measured in widths of the box, and the loss in units of its first change.
L-BFGS-B has absolute tolerances, and a first step as long as the gradient. In a flat minimum it would stop at once.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.keys import key, keys_torch, uniform
from paceline.sharpness.surface import Surface

ITERATIONS, SUBSPACE = 10, 100
_COLUMNS = 0x5A4F  # keeps these random numbers apart from others
_LONGEST = 3  # evaluations per iteration; one is usual
_FIRST = 1e3
"""The mean slope in the optimizer's units: so large that its first step ends near the corner that the gradient points to. On a
trained cnn, 1 finds 4% less in ten iterations, and 1e6 no more."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """The directions that may be moved in, on rank 0."""

    center: Tensor
    """|A^+ x|, in float64."""
    move: Callable[[Tensor], Tensor]
    """From y to the weights x + A y."""
    pull: Callable[[Tensor], Tensor]
    """From the gradient of the weights to that of y."""


def full(weights: Tensor) -> Space:
    """All weights: A is the identity."""
    return Space(center=weights.double().abs(), move=lambda y: weights + y.to(weights.dtype), pull=lambda gradient: gradient)


def subspace(weights: Tensor, seed: int) -> Space:
    """A random subspace: A has independent standard normal entries that follow from the seed."""
    size, kind = weights.numel(), weights.dtype
    columns = torch.empty(SUBSPACE, size, dtype=kind, device=weights.device)
    for number in range(SUBSPACE):
        columns[number] = normal(size, key(seed, _COLUMNS, number), weights.device)
    gram = torch.zeros(SUBSPACE, SUBSPACE, dtype=torch.float64, device=weights.device)
    right = torch.zeros(SUBSPACE, dtype=torch.float64, device=weights.device)
    for block, piece in zip(torch.split(columns, 1 << 16, 1), torch.split(weights, 1 << 16), strict=True):
        gram += block.double() @ block.double().T
        right += block.double() @ piece.double()
    center = (torch.linalg.pinv(gram, hermitian=True) @ right).abs()  # A^+ x = (A'A)^+ A'x
    return Space(
        center=center,
        move=lambda y: weights + y.to(kind) @ columns,
        pull=lambda gradient: (columns @ gradient.to(kind)).double(),
    )


def normal(size: int, base: int, device: torch.device) -> Tensor:
    """Standard normal numbers that follow from the key alone, by Box and Muller's transform."""
    keys = keys_torch(base, torch.arange(size, device=device))
    radius = torch.sqrt(-2 * torch.log1p(-uniform(keys, 0)))
    return radius * torch.cos(2 * math.pi * uniform(keys, 1))


def sharpness(
    surface: Surface, space: Space | None, epsilon: float, start: tuple[float, Tensor], tell: Callable[[int, int], None]
) -> float | None:
    """The sharpness in a space; None if the loss is not finite somewhere in the box. Collective: call on every rank.

    `space` is rank 0's. `start`: the loss and its gradient at the weights. Every rank returns the same number.
    """
    largest = _lead(surface, space, epsilon, start, tell) if space is not None else _follow(surface)
    loss = start[0]
    return None if largest is None else 100 * (largest - loss) / (1 + loss)


class _NotFinite(Exception):
    pass


def _lead(
    surface: Surface, space: Space, epsilon: float, start: tuple[float, Tensor], tell: Callable[[int, int], None]
) -> float | None:
    from scipy.optimize import Bounds, minimize  # type: ignore[import-untyped]

    reach = epsilon * (space.center + 1)
    values: list[float] = []
    unit = 0.0
    box = Bounds(-np.ones(len(reach)), np.ones(len(reach)))
    options: dict[str, Any] = {"maxiter": ITERATIONS, "maxfun": _LONGEST * ITERATIONS, "ftol": 0.0, "gtol": 0.0}

    def negative(scaled: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal unit
        if values:
            point = space.move(torch.from_numpy(scaled).to(reach.device) * reach)
            _send(surface, point)
            loss, gradient = surface.gradient(point)
        else:
            loss, gradient = start
        slope = space.pull(gradient) * reach
        if not math.isfinite(loss) or not bool(slope.isfinite().all()):
            raise _NotFinite
        values.append(loss)
        tell(min(len(values), ITERATIONS), ITERATIONS + 1)
        unit = unit or _FIRST / max(float(slope.abs().mean()), 1e-300)
        return -(loss - start[0]) * unit, -(slope * unit).cpu().numpy()

    try:
        minimize(negative, np.zeros(len(reach)), jac=True, method="L-BFGS-B", bounds=box, options=options)
        largest: float | None = max(values)
    except _NotFinite:
        largest = None
    _send(surface, None)
    return surface.world.broadcast(largest)  # type: ignore[no-any-return]


def _follow(surface: Surface) -> float | None:
    while (point := _receive(surface)) is not None:
        surface.gradient(point)
    return surface.world.broadcast(None)  # type: ignore[no-any-return]


def _send(surface: Surface, point: Tensor | None) -> None:
    """Send the other ranks the next point, or that there are no more."""
    if surface.world.size > 1:
        given = surface.weights if point is None else point
        dist.broadcast(torch.cat((given, given.new_full((1,), float(point is not None)))), 0)


def _receive(surface: Surface) -> Tensor | None:
    received = surface.weights.new_empty(surface.size + 1)
    dist.broadcast(received, 0)
    return received[:-1] if bool(received[-1]) else None
