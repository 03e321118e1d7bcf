"""A moving average of the weights (`--ema`): after every step, average += (1 - decay) * (weights - average).

Polyak & Juditsky's averaging with a forgetting factor: the average of roughly the last 1 / (1 - decay) steps has less of the
noise that a large learning rate leaves in the weights. The average is validated and saved; training never uses it. In the first
steps the decay is at most (1 + step) / (10 + step), so that the untrained weights are soon forgotten.

Batch-norm statistics of the training weights do not fit the average: `validation.Averaged` takes new ones.
"""

import torch
from torch import Tensor, nn


class Ema:
    """The averages of a model's trained parameters, on its device, in float32 or wider."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self._trained = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
        wide = [torch.promote_types(parameter.dtype, torch.float32) for parameter in self._trained]
        self._averages = [p.to(dtype, copy=True) for p, dtype in zip(self._trained, wide, strict=True)]
        self._weight = torch.zeros((), device=self._trained[0].device)  # read by a captured step
        self._kept: list[Tensor] | None = None

    def begin(self, step: int, steps: float = 1) -> None:
        """Set the weight of the next update, after step `step`. It counts for `steps` steps: less than 1 if its global batch is
        smaller than the largest of the run."""
        self._weight.fill_(1 - min(self._decay**steps, ((1 + step) / (10 + step)) ** max(1, steps)))

    @torch.no_grad()
    def update(self) -> None:
        """Take in the current weights. It does not wait for the device or use host values, so a CUDA graph can contain it.

        `_foreach_lerp_` will not do: it reads a weight on the device back to the host.
        """
        distances = torch._foreach_sub(self._trained, self._averages)
        torch._foreach_mul_(distances, self._weight)
        torch._foreach_add_(self._averages, distances)

    def tensors(self) -> list[Tensor]:
        """All tensors that an update changes."""
        return self._averages

    @torch.no_grad()
    def put_in(self) -> None:
        """Copy the averages into the model, in place: DDP and captured graphs hold its tensors."""
        assert self._kept is None, "the averages are in the model already"
        self._kept = [parameter.clone() for parameter in self._trained]
        torch._foreach_copy_(self._trained, self._averages)

    @torch.no_grad()
    def take_out(self) -> None:
        """Restore the model's training weights, bit for bit."""
        assert self._kept is not None, "the averages are not in the model"
        torch._foreach_copy_(self._trained, self._kept)
        self._kept = None
