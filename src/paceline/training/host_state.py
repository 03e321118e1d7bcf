"""What a step may change on the host, as far as it can be detected: random states, and plain attributes of modules."""

import inspect
import random
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def module_state(model: nn.Module) -> dict[str, Any]:
    """The values of the plain attributes of a model's modules, by name, as far as a change can be detected."""
    return {
        f"{path or 'the model'}.{name}": _Held(value, value._version) if isinstance(value, Tensor) else _reading(value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _OF_MODULES
    }


@dataclass(frozen=True, eq=False)
class _Held:
    """A tensor and its version. Holding it keeps another tensor from taking its place in memory."""

    tensor: Tensor
    version: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.tensor is other.tensor and self.version == other.version

    __hash__ = None  # type: ignore[assignment]


_OF_MODULES = frozenset(vars(nn.Module()))  # parameters, buffers, hooks: checked elsewhere


def host_state(model: nn.Module, objective: Any) -> dict[str, Any]:
    """What a step may change besides tensors on the GPU: random states, and attributes of modules and the objective."""
    _, keys, position, *_ = np.random.get_state()
    state: dict[str, Any] = {
        "the state of Python's random numbers": random.getstate(),
        "the state of numpy's random numbers": (np.asarray(keys).tobytes(), position),
        "the state of torch's random numbers on the CPU": torch.get_rng_state().numpy().tobytes(),
    }
    held: dict[str, Any] = {path or "the model": vars(module) for path, module in model.named_modules()}
    held["the objective"] = dict(getattr(objective, "__dict__", {}))
    if inspect.isfunction(objective):
        with suppress(ValueError):  # a variable without a value yet
            held["the objective"] |= inspect.getclosurevars(objective).nonlocals
    for where, values in held.items():
        state |= {f"{where}.{name}": _reading(value) for name, value in values.items() if not name.startswith("_")}
    return state


def _reading(value: Any) -> Any:
    """A value that differs if the original has changed; None if that cannot be known."""
    match value:
        case bool() | int() | float() | str():
            return value
        case np.random.Generator():
            return str(value.bit_generator.state)
        case random.Random():
            return value.getstate()
        case torch.Generator():
            return value.get_state().cpu().numpy().tobytes()
        case Tensor() if value.device.type == "cpu":
            return id(value), value._version
        case list() | tuple() | dict() | set() if len(value) < 1000:
            return [_reading(each) for each in (value.values() if isinstance(value, dict) else value)]
    return None
