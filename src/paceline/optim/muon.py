"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): orthogonalized momentum for the matrices of a network.

The step of each matrix has singular values near 1, so every direction moves. Five Newton-Schulz steps compute it with matrix
products alone, in bf16 on a GPU. torch's own Muon supports only parameters with two dimensions; here convolutions are matrices
too, of shape (out, in kh kw), as in the CIFAR-10 speed record. Another optimizer trains the rest of a network: see `Paired`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.optim.flat import Flat, Pack

_A, _B, _C = 3.4445, -4.7750, 2.0315  # from the original: steep at 0, and between 0.7 and 1.2 near 1


class Muon(Flat):
    """w -= lr (sqrt(max(1, rows / columns)) orthogonal(momentum) + wd w), for parameters with two or more dimensions.

    With `fixed_norm` every matrix has norm sqrt(rows) after each step: then only the learning rate decides how far it turns.
    """

    elements = ("momentum_buffer",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.02,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        steps: int = 5,
        fixed_norm: bool = False,
    ) -> None:
        """Weight decay is decoupled from the gradient, as in AdamW."""
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "steps": steps, "fixed_norm": fixed_norm})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses parameters that are not matrices."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.ndim < 2:
                raise ValueError(f"Muon trains parameters with two or more dimensions, not with shape {tuple(parameter.shape)}")

    def update(self, pack: Pack, group: Mapping[str, Any]) -> None:
        """Matrices of equal shape are adjacent in the buffer, so each shape takes one batched product."""
        flat, buffer, momentum = pack.flat, pack.buffers["momentum_buffer"], group["momentum"]
        buffer.mul_(momentum).add_(flat)
        if group["nesterov"]:
            flat.add_(buffer, alpha=momentum)
        else:
            flat.copy_(buffer)
        for batch in pack.batches:
            rows, columns = batch.shape[1:]
            batch.copy_(orthogonal(batch, group["steps"])).mul_(max(1.0, rows / columns) ** 0.5)
        pack.add_weights(group["weight_decay"])
        flat.mul_(-group["lr"])
        if not group["fixed_norm"]:
            pack.move()
            return
        pack.add_weights(1.0)
        for batch in pack.batches:
            norm = torch.linalg.vector_norm(batch, dim=(1, 2), keepdim=True)
            batch.mul_((batch.size(1) ** 0.5 / norm).masked_fill(norm == 0, 1.0))
        pack.put()


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """Approximately U V^T for each U S V^T of a batch: singular values are between about 0.7 and 1.2. In bf16 on a GPU."""
    x: Tensor = matrices / (torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True) + 1e-7)
    if x.is_cuda and x.dtype == torch.float32:
        x = x.bfloat16()
    tall = x.size(1) > x.size(2)
    if tall:
        x = x.mT
    for _ in range(steps):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if tall else x


def split_matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split parameters: for Muon every matrix but embeddings and the last linear layer (its rows are classes); and the rest."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    apart = [module.weight for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    left_out = {id(weight) for weight in apart} | {id(module.weight) for module in linear[-1:]}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2 and p.size(0) > 1 and id(p) not in left_out]
    chosen = {id(parameter) for parameter in matrices}
    return matrices, [parameter for parameter in trained if id(parameter) not in chosen]


def describe_split(model: nn.Module, rest: str) -> str:
    """Which optimizer trains which parameters, in one line: it is not always obvious which linear layer is the last."""
    matrices, others = split_matrices(model)
    chosen = {id(parameter) for parameter in others if parameter.ndim >= 2}
    named = [name for name, parameter in model.named_parameters() if id(parameter) in chosen]
    besides = f", {', '.join(named[:3])}{' and more' if len(named) > 3 else ''}" if named else ""
    count = f"{len(matrices)} matri{'x' if len(matrices) == 1 else 'ces'}"
    return f"muon trains {count}; {rest} trains {'norms, biases' if others else 'nothing'}{besides}"
