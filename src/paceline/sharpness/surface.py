"""The mean loss over fixed samples as a function of one vector: a model's trained weights. Data-parallel.

Workers take batches rank, rank + P, ... of the same set. Sums over batches are in float64, so results on different numbers of
workers agree to rounding. Every method is collective: call it on every rank, with the same vectors.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.data.loaders import Batch
from paceline.errors import UsageError, first_line
from paceline.training.fixed import Fixed


class Surface:
    """The mean loss of a record's model over one of its fixed sets."""

    def __init__(self, fixed: Fixed, name: str) -> None:
        self.world, self.fixed = fixed.run.world, fixed
        self.samples = fixed.sets[name].samples
        self._batches = list(zip(fixed.sets[name].batches, fixed.sets[name].counts, strict=True))
        self._batches = self._batches[self.world.rank :: self.world.size]
        self._parameters: list[Tensor] = [each for each in fixed.model.parameters() if each.requires_grad]
        _check(self._parameters)
        self.dtype = max((each.dtype for each in self._parameters), key=lambda kind: kind.itemsize)
        self.weights = self._flat(self._parameters)
        """The record's trained weights."""
        self.size = self.weights.numel()

    def loss(self, weights: Tensor) -> float:
        """The mean loss at these weights."""
        self._put(weights)
        sums = self._zeros(2)
        with torch.no_grad():
            for batch, count in self._batches:
                sums += self._sums(batch, count)
        loss, weight = self._reduced(sums).tolist()
        return float(loss / weight)

    def gradient(self, weights: Tensor) -> tuple[float, Tensor]:
        """The mean loss at these weights, and its gradient in float64."""
        self._put(weights)
        sums = self._zeros(2 + self.size)
        for batch, count in self._batches:
            found = self._sums(batch, count)
            sums[:2] += found.detach()
            sums[2:] += self._flat(torch.autograd.grad(found[0], self._parameters, **_UNUSED))
        sums = self._reduced(sums)
        return float(sums[0] / sums[1]), sums[2:] / sums[1]

    def products(self, vectors: Tensor) -> Tensor:
        """The Hessian at the record's weights times each row of `vectors`. They share the graph of each batch's gradient."""
        self._put(self.weights)
        sums = self._zeros(1 + vectors.numel())
        rows = sums[1:].view_as(vectors)
        # The fused kernels of attention cannot be differentiated twice.
        with sdpa_kernel(SDPBackend.MATH):
            for batch, count in self._batches:
                found = self._sums(batch, count)
                sums[0] += found[1].detach()
                self._add_products(found[0], vectors, rows)
        self._reduced(sums)
        return (rows / sums[0]).to(self.dtype)

    def _add_products(self, loss: Tensor, vectors: Tensor, rows: Tensor) -> None:
        try:
            gradients = torch.autograd.grad(loss, self._parameters, create_graph=True, **_UNUSED)
            kept = [i for i, each in enumerate(gradients) if each.requires_grad]  # the others do not depend on any weight
            for number, vector in enumerate(vectors if kept else ()):
                pieces = self._pieces(vector)
                product = torch.autograd.grad(
                    [gradients[i] for i in kept],
                    self._parameters,
                    [pieces[i] for i in kept],
                    retain_graph=number + 1 < len(vectors),
                    **_UNUSED,
                )
                rows[number] += self._flat(product)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # the loss and its gradient were computed before without one
            raise UsageError(
                f"this model's gradients cannot be differentiated again, as the Hessian needs ({first_line(error)}): use"
                " --measures keskar,sam"
            ) from error

    def _sums(self, batch: Batch, count: int) -> Tensor:
        """The sum of a batch's weighted losses, and of its weights. What the model draws is the same in each pass."""
        self.fixed.seed()
        loss, weight = self.fixed.loss(batch, count)
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise UsageError(
                "the loss does not depend on any trained weight: does the task's objective compute it under no_grad?"
            )
        return torch.stack((loss.double(), weight.double()))

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.float64, device=self.world.device)

    def _reduced(self, sums: Tensor) -> Tensor:
        if self.world.size > 1:
            dist.all_reduce(sums)
        return sums

    @torch.no_grad()
    def _put(self, weights: Tensor) -> None:
        torch._foreach_copy_(self._parameters, self._pieces(weights))

    def _pieces(self, vector: Tensor) -> list[Tensor]:
        pieces = torch.split(vector, [each.numel() for each in self._parameters])
        return [piece.view(each.shape).to(each.dtype) for piece, each in zip(pieces, self._parameters, strict=True)]

    def _flat(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([each.detach().reshape(-1).to(self.dtype) for each in tensors])


_UNUSED: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}


def _check(parameters: list[Tensor]) -> None:
    """Raise a UsageError unless there are weights to move, precise enough for small changes, and finite."""
    if not parameters:
        raise UsageError("the model has no trained weights: no parameter has requires_grad")
    coarse = {str(each.dtype).removeprefix("torch.") for each in parameters} - {"float32", "float64"}
    if coarse:
        raise UsageError(
            f"the model has weights in {' and '.join(sorted(coarse))}: sharpness needs float32 or float64, because"
            " changes of 0.1% are lost in rounding"
        )
