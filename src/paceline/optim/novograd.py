"""NovoGrad (Ginsburg et al. 2019, arXiv:1905.11286, algorithm 1): gradients normalized layer by layer, then momentum.

v = b2 v + (1 - b2) |g|^2, starting at v = |g|^2, one value per layer;  d = g / (sqrt(v) + eps) + wd w;  m = b1 m + c d with c =
1, or 1 - b1 with `grad_averaging`;  w -= lr m.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.optim.flat import Flat, Pack


class NovoGrad(Flat):
    """Momentum of normalized gradients, with half of Adam's memory. With b2 = 0 each gradient is divided by its own norm.

    v = 0 means that there was no gradient so far: the first nonzero one sets v to its squared norm.
    """

    elements = ("exp_avg",)
    values = ("exp_avg_sq",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.01,
        betas: tuple[float, float] = (0.95, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        grad_averaging: bool = False,
    ) -> None:
        """The defaults are the paper's."""
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "grad_averaging": grad_averaging})

    def update(self, pack: Pack, group: Mapping[str, Any]) -> None:
        """Algorithm 1."""
        flat, mean, square = pack.flat, pack.buffers["exp_avg"], pack.values["exp_avg_sq"]
        first, second = group["betas"]
        found = pack.norms(pack.tensors).square()
        square.copy_(torch.where(square == 0, found, torch.lerp(found, square, second)))
        size = square.sqrt() + group["eps"]
        pack.scale((1 / size).masked_fill(size == 0, 0.0))
        pack.add_weights(group["weight_decay"])
        mean.mul_(first).add_(flat, alpha=1 - first if group["grad_averaging"] else 1.0)
        torch.mul(mean, -group["lr"], out=flat)
        pack.move()
