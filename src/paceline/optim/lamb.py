"""LAMB (You et al. 2020, arXiv:1904.00962, algorithm 2): Adam with each layer's step scaled to the norm of the layer.

u = mhat / (sqrt(vhat) + eps) + wd w;  w -= lr |w| / |u| u. Both moments are debiased inside the ratio: outside it, the first
step would be ten times too large. |w| is not clamped, gradients are not clipped, and a layer with a zero norm has a ratio of 1.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.optim.flat import Flat, Pack


class Lamb(Flat):
    """Adam with one ratio per layer. A group with `adapt=False` has ratio 1 (plain AdamW), whatever its weight decay."""

    elements = ("exp_avg", "exp_avg_sq")
    values = ("step",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adapt: bool = True,
    ) -> None:
        """The defaults are the paper's."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt})

    def update(self, pack: Pack, group: Mapping[str, Any]) -> None:
        """Algorithm 2 with phi(z) = z."""
        flat, mean, square, step = pack.flat, pack.buffers["exp_avg"], pack.buffers["exp_avg_sq"], pack.values["step"]
        first, second = group["betas"]
        step.add_(1)
        mean.lerp_(flat, 1 - first)
        square.mul_(second).addcmul_(flat, flat, value=1 - second)
        root = _seen(second, step).sqrt()  # m / c1 / (sqrt(v / c2) + eps) = (m / (sqrt(v) + eps sqrt(c2))) sqrt(c2) / c1
        torch.sqrt(square, out=flat)
        if group["eps"]:
            pack.shift(group["eps"] * root)
        torch.div(mean, flat, out=flat)
        if not group["eps"]:
            flat.masked_fill_(square == 0, 0.0)  # without a gradient so far, no step
        pack.scale(root / _seen(first, step))
        pack.add_weights(group["weight_decay"])
        if group["adapt"]:
            weights, updates = pack.norms(pack.weights), pack.norms(pack.tensors)
            ratio = (weights / updates).masked_fill((weights == 0) | (updates == 0), 1.0)
            pack.scale(ratio * -group["lr"])
        else:
            flat.mul_(-group["lr"])
        pack.move()


def _seen(beta: float, step: Tensor) -> Tensor:
    """1 - beta^step. Computed directly in float32, the first step with beta 0.999 would be accurate to only three digits."""
    return -torch.expm1(step * (math.log(beta) if beta else -math.inf))
