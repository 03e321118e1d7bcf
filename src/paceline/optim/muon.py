"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): orthogonalized momentum for the matrices of a network.

The step of each matrix has singular values near 1, so every direction moves. Five Newton-Schulz steps compute it with matrix
products alone, in bf16 on a GPU. torch's own Muon supports only parameters with two dimensions; here convolutions are matrices
too, of shape (out, in kh kw), as in the CIFAR-10 speed record. Another optimizer trains the rest of a network: see `Paired`.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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


class Paired(Optimizer):
    """Two optimizers over different parameters, used as one: the groups of the first, then of the second, in one state."""

    def __init__(self, first: Optimizer, second: Optimizer) -> None:
        """Do not use `first` and `second` on their own afterwards."""
        self.inner: tuple[Optimizer, Optimizer] = (first, second)
        self._complete = False
        super().__init__([*first.param_groups, *second.param_groups], {})
        self._complete = True
        self._tie()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for inner in self.inner:
            inner.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses groups after construction: it cannot know which optimizer should train them."""
        if self._complete:
            raise TypeError("a pair accepts no more parameters: add the group to one of its optimizers before pairing them")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give each optimizer its own groups and their state."""
        begin = 0
        if len(state_dict["param_groups"]) != len(self.param_groups):
            raise ValueError("loaded state dict has a different number of parameter groups")
        for inner in self.inner:
            groups = state_dict["param_groups"][begin : begin + len(inner.param_groups)]
            numbers = set(chain.from_iterable(group["params"] for group in groups))
            state = {number: value for number, value in state_dict["state"].items() if number in numbers}
            inner.load_state_dict({"state": state, "param_groups": groups})
            begin += len(groups)
        self._tie()

    def __getstate__(self) -> dict[str, Any]:
        """Include both optimizers, for copies and pickles."""
        return {**super().__getstate__(), "inner": self.inner, "_complete": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._tie()

    def _tie(self) -> None:
        """Let the pair and both optimizers share one dictionary of state and the same groups."""
        states = [dict(inner.state) for inner in self.inner]
        self.state.clear()
        for inner, state in zip(self.inner, states, strict=True):
            own = set(chain.from_iterable(group["params"] for group in inner.param_groups))
            self.state.update({parameter: value for parameter, value in state.items() if parameter in own})
            inner.state = self.state
        self.param_groups = [group for inner in self.inner for group in inner.param_groups]


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
