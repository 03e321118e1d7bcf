"""LARS: layer-wise adaptive rate scaling (You, Gitman and Ginsburg 2017, arXiv:1708.03888, algorithm 1).

r = eta |w| / (|g| + wd |w| + eps);  b = mu b + r (g + wd w);  w -= lr b. A layer with a zero norm has r = 1. The learning rate
is not part of the buffer, so a schedule also acts on past gradients, as in torch's SGD.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.optim.flat import Flat, Pack


class Lars(Flat):
    """SGD with momentum, with each layer's step scaled to the norm of the layer.

    A group with `adapt=False` (usually norms and biases) has r = 1 (plain SGD), whatever its weight decay.
    """

    elements = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        nesterov: bool = False,
        adapt: bool = True,
    ) -> None:
        """`trust_coefficient` is eta."""
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust_coefficient": trust_coefficient}
        super().__init__(params, {**defaults, "eps": eps, "nesterov": nesterov, "adapt": adapt})

    def update(self, pack: Pack, group: Mapping[str, Any]) -> None:
        """Algorithm 1."""
        decay, momentum, buffer, flat = group["weight_decay"], group["momentum"], pack.buffers["momentum_buffer"], pack.flat
        ratio = None
        if group["adapt"]:
            weights, gradients = pack.norms(pack.weights), pack.norms(pack.tensors)
            found = group["trust_coefficient"] * weights / (gradients + decay * weights + group["eps"])
            ratio = found.masked_fill((weights == 0) | (gradients == 0), 1.0)
        pack.add_weights(decay)
        if ratio is not None:
            pack.scale(ratio)
        buffer.mul_(momentum).add_(flat)
        if group["nesterov"]:
            flat.add_(buffer, alpha=momentum).mul_(-group["lr"])
        else:
            torch.mul(buffer, -group["lr"], out=flat)
        pack.move()
