"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum, made orthogonal, for the matrices of a network.

Every matrix's step has singular values near 1, so that no direction is left behind. Five Newton-Schulz steps do it by products
of matrices alone, in bf16 on a GPU. torch's own Muon takes parameters of two dimensions only; here convolutions are matrices
too, of shape (out, in kh kw), as in the CIFAR-10 speed record. The rest of a network is trained by something else: `Paired`.
"""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.optim.flat import Flat, Pack

_A, _B, _C = 3.4445, -4.7750, 2.0315  # the original's: steep at 0, and between .7 and 1.2 near 1


class Muon(Flat):
    """w -= lr (sqrt(max(1, rows / columns)) orthogonal(momentum) + wd w), for parameters of two dimensions and more.

    With `fixed_norm` every matrix has the norm sqrt(rows) after each step: the learning rate alone says how far it turns.
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
        """Matrices only."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.ndim < 2:
                raise ValueError(f"Muon trains parameters of two dimensions and more, not of shape {tuple(parameter.shape)}")

    def update(self, pack: Pack, group: Mapping[str, Any]) -> None:
        """Matrices of equal shape lie side by side in the buffer, so each shape is one batch of products."""
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
    """U V^T, nearly, for each U S V^T of a batch: singular values end between about .7 and 1.2. In bf16 on a GPU."""
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
    """Two optimizers over different parameters as one: their groups one after the other, one state."""

    def __init__(self, first: Optimizer, second: Optimizer) -> None:
        """They belong to the pair from here on."""
        self.inner: tuple[Optimizer, Optimizer] = (first, second)
        self._complete = False
        super().__init__([*first.param_groups, *second.param_groups], {})
        self._complete = True
        self._tie()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of each."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for inner in self.inner:
            inner.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is put together: who should train a later group would be a guess."""
        if self._complete:
            raise TypeError("a pair takes no more parameters: add the group to one of its optimizers before pairing them")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """To each its own groups and their state."""
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
        """With both optimizers, for copies and pickles."""
        return {**super().__getstate__(), "inner": self.inner, "_complete": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._tie()

    def _tie(self) -> None:
        """One dictionary of state for all three, and the same groups."""
        states = [dict(inner.state) for inner in self.inner]
        self.state.clear()
        for inner, state in zip(self.inner, states, strict=True):
            own = set(chain.from_iterable(group["params"] for group in inner.param_groups))
            self.state.update({parameter: value for parameter, value in state.items() if parameter in own})
            inner.state = self.state
        self.param_groups = [group for inner in self.inner for group in inner.param_groups]


def split_matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """What Muon trains: every matrix but embeddings and the last linear layer's, whose rows are classes; and the rest."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    apart = [module.weight for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    left_out = {id(weight) for weight in apart} | {id(module.weight) for module in linear[-1:]}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2 and p.size(0) > 1 and id(p) not in left_out]
    chosen = {id(parameter) for parameter in matrices}
    return matrices, [parameter for parameter in trained if id(parameter) not in chosen]


def describe_split(model: nn.Module, rest: str) -> str:
    """Who trains what, in a line: which linear layer is the last cannot always be seen."""
    matrices, others = split_matrices(model)
    chosen = {id(parameter) for parameter in others if parameter.ndim >= 2}
    named = [name for name, parameter in model.named_parameters() if id(parameter) in chosen]
    besides = f", {', '.join(named[:3])}{' and more' if len(named) > 3 else ''}" if named else ""
    return f"muon trains {len(matrices)} matrices; {rest} trains {'norms, biases' if others else 'nothing'}{besides}"
