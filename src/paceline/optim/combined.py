"""Several optimizers over different parameters, used as one: one list of groups, one state, one checkpoint."""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer


class Combined(Optimizer):
    """Named optimizers as one: the groups of the first, then of the second and so on, in one state.

    `step` and `zero_grad` act on all of them. `combined["generator"]` is one of them, for a loop that steps them one by one.
    """

    def __init__(self, members: Mapping[str, Optimizer]) -> None:
        """No parameter may be in two of them."""
        self.members = dict(members)
        self._complete = False
        super().__init__([group for member in self.members.values() for group in member.param_groups], {})
        self._complete = True
        self._tie()

    def __getitem__(self, name: str) -> Optimizer:
        return self.members[name]

    @property
    def inner(self) -> tuple[Optimizer, ...]:
        """The optimizers without their names."""
        return tuple(self.members.values())

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
        """Refuses groups after construction: it cannot know which optimizer should train them."""
        if self._complete:
            raise TypeError("combined optimizers accept no more parameters: add the group to one of them before combining them")
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
        """Include the optimizers, for copies and pickles."""
        return {**super().__getstate__(), "members": self.members, "_complete": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._tie()

    def _tie(self) -> None:
        """Let this and all optimizers in it share one dictionary of state and the same groups."""
        states = [dict(inner.state) for inner in self.inner]
        self.state.clear()
        for inner, state in zip(self.inner, states, strict=True):
            own = set(chain.from_iterable(group["params"] for group in inner.param_groups))
            self.state.update({parameter: value for parameter, value in state.items() if parameter in own})
            inner.state = self.state
        self.param_groups = [group for inner in self.inner for group in inner.param_groups]


class Paired(Combined):
    """Two optimizers over different parameters, used as one."""

    def __init__(self, first: Optimizer, second: Optimizer) -> None:
        """Do not use `first` and `second` on their own afterwards."""
        super().__init__({"first": first, "second": second})
