"""Two changes to a gradient: take it uphill from the weights (SAM), and add noise to it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.keys import key, keys_torch, on_device, uniform


@dataclass
class Sam:
    """Sharpness-aware minimization (Foret et al. 2021, arXiv:2010.01412): the gradient is taken where, to first order, the loss
    is highest within `rho` of the weights.

    Each pass climbs by its own gradient, as every GPU would. So nothing is averaged for it, and the step is the same on any
    number of workers.
    """

    parameters: Sequence[Tensor]
    rho: float
    _at: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def climb(self, loss: Tensor) -> None:
        """Move the weights uphill."""
        found = torch.autograd.grad(loss, list(self.parameters), allow_unused=True)
        self._at = [parameter.clone() for parameter in self.parameters]
        pairs = [(parameter, grad) for parameter, grad in zip(self.parameters, found, strict=True) if grad is not None]
        grads = [grad for _, grad in pairs]
        norm = torch.stack(torch._foreach_norm(grads)).norm()
        torch._foreach_add_([parameter for parameter, _ in pairs], torch._foreach_mul(grads, self.rho / (norm + 1e-12)))

    @torch.no_grad()
    def descend(self) -> None:
        """Restore the weights, bit for bit."""
        torch._foreach_copy_(list(self.parameters), self._at)
        self._at = []


class Jitter:
    """Gradient noise (Neelakantan et al. 2015, arXiv:1511.06807): normal, with variance eta / (1 + step)^0.55.

    The numbers follow from (seed, step, index of the weight), by integer arithmetic on the device. So every worker adds the
    same numbers, and a captured step adds new ones each time.
    """

    _STREAM = 0x0153

    def __init__(self, parameters: Sequence[Tensor], eta: float, seed: int) -> None:
        self._parameters, self._eta, self._seed = list(parameters), eta, seed
        device = self._parameters[0].device
        self._key, self._deviation = on_device(0, device), torch.zeros((), device=device)

    def begin(self, step: int) -> None:
        """Set what differs from step to step."""
        self._key.copy_(on_device(key(self._seed, self._STREAM, step), self._key.device))
        self._deviation.fill_(math.sqrt(self._eta / (1 + step) ** 0.55))

    @torch.no_grad()
    def add(self) -> None:
        """Add this step's noise to the gradients."""
        for number, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                keys = keys_torch(self._key, torch.arange(parameter.numel(), device=parameter.device) + (number << 40))
                radius = (-2 * (1 - uniform(keys, 1)).log()).sqrt()
                normal = radius * (2 * math.pi * uniform(keys, 2)).cos()
                parameter.grad.add_((normal * self._deviation).view(parameter.shape))
