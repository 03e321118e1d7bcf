"""What a step changes, kept before a trial and restored after it, and what a trial gave."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from paceline.training.build import Run


@dataclass(frozen=True)
class Outcome:
    """What a step gave: its loss, and how far it moved the weights."""

    loss: float
    distance: float

    def is_like(self, other: Self, tolerance: float) -> bool:
        """Equal up to a relative tolerance; two NaNs are equal."""
        pairs = ((self.loss, other.loss), (self.distance, other.distance))
        return all(a == b or (a != a and b != b) or abs(a - b) <= tolerance * abs(b) + 1e-12 for a, b in pairs)


class Kept:
    """Copies of all that a step changes, to be restored after a trial."""

    def __init__(self, run: Run) -> None:
        self._optimizer, self.fresh = run.update.optimizer, not run.update.optimizer.state
        self._numbers = [(state, numbers_of(state)) for state in self._optimizer.state.values()]
        self._groups = [dict(group) for group in self._optimizer.param_groups]
        self._tensors = [*run.model.parameters(), *run.model.buffers(), *run.parts.statistics_tensors(), *self._state()]
        self._tensors += [*run.kept().values(), *run.update.lrs.values()]
        self._copies = [tensor.detach().clone() for tensor in self._tensors]

    @torch.no_grad()
    def distance(self) -> float:
        """How far the weights have moved."""
        pairs = zip(self._tensors, self._copies, strict=True)
        return float(torch.stack([(tensor - copy).float().norm() for tensor, copy in pairs if tensor.requires_grad]).norm())

    @torch.no_grad()
    def put_back(self) -> None:
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.copy_(copy)
        for group, settings in zip(self._optimizer.param_groups, self._groups, strict=True):
            for new in group.keys() - settings.keys():
                del group[new]
            group.update(settings)
        for state, numbers in self._numbers:
            state.update(numbers)
        if self.fresh:  # all our optimizers start at zero; for a task's own see `_take_state`
            for tensor in self._state():
                tensor.zero_()

    def why_not(self) -> str:
        """What in the optimizer's state a graph could not change, after a step."""
        for parameter, state in self._optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, int | float) or (isinstance(value, Tensor) and value.device != parameter.device):
                    return f"{type(self._optimizer).__name__} keeps {name!r} of its state on the host"
        return ""

    def _state(self) -> list[Tensor]:
        return [tensor for state in self._optimizer.state.values() for tensor in tensors_of(state).values()]


State = dict[Any, dict[str, Tensor]]
"""The tensors of an optimizer's state, by parameter and name."""


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors in the state of a parameter."""
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def numbers_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Everything else in it."""
    return {name: value for name, value in state.items() if not isinstance(value, Tensor)}
