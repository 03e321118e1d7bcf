"""CUDA graphs: work on tensors that is recorded once and replayed with one launch, and what prevents that; torch's compiler.

A graph repeats what the GPU did, not what Python did between its kernels. So work is run and checked once before it is
recorded: does it wait for the GPU, draw random numbers on the host, or change attributes of a module or the objective? Changes
elsewhere, in a global or deeper within an object, cannot be detected.
"""

import inspect
import os
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from paceline.data.loaders import Inputs, leaves, map_tensors, tensors_in

Body = Callable[[list[Inputs]], Tensor]
Function = TypeVar("Function", bound=Callable[..., Any])
_CACHE = "TORCHINDUCTOR_CACHE_DIR"


class Graph:
    """Work on tensors, recorded once and replayed on other tensors of the same shapes."""

    def __init__(self, body: Body, inputs: list[Inputs]) -> None:
        self._held = cast("list[Inputs]", map_tensors(Tensor.clone, inputs))
        self._into = list(tensors_in(self._held))
        self._last: list[tuple[Tensor, int] | None] = [None] * len(
            self._into
        )  # what was copied last: an epoch's key is copied once
        self._graph = torch.cuda.CUDAGraph()
        self.stamps: Any = None
        """The clock's stamps in it."""
        try:
            # thread_local: a DataLoader's thread may pin memory, and NCCL's thread may query events, while this thread records.
            with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
                self._out = body(self._held)
        except BaseException:
            random_numbers = torch.cuda.default_generators[torch.cuda.current_device()]
            random_numbers.graphsafe_set_state(random_numbers.clone_state())  # or it still believes that it is being recorded
            raise

    def fits(self, inputs: list[Inputs]) -> bool:
        """Whether these inputs have the shapes and types it was recorded with."""
        given = list(tensors_in(inputs))
        return len(given) == len(self._into) and all(
            a.shape == b.shape and a.dtype == b.dtype for a, b in zip(given, self._into, strict=True)
        )

    def __call__(self, inputs: list[Inputs]) -> Tensor:
        """The result for these inputs, valid until the next call."""
        for i, tensor in enumerate(tensors_in(inputs)):
            last = self._last[i]
            if last is None or tensor is not last[0] or tensor._version != last[1]:
                self._into[i].copy_(tensor)
                self._last[i] = tensor, tensor._version
        self._graph.replay()
        return self._out


@contextmanager
def compiler() -> Iterator[Callable[[Function], Function]]:
    """torch.compile, for functions that are first called in this block. Compiled code is kept for later runs; the compiler's
    processes end with the block.
    """
    given, cache = os.environ.get(_CACHE), os.environ.get("XDG_CACHE_HOME")
    with suppress(OSError, RuntimeError):  # no writable home: torch then uses a folder under /tmp
        folder = (Path(cache) if cache else Path.home() / ".cache") / "paceline" / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault(_CACHE, str(folder))  # unlike /tmp, it is not emptied

    def compile(function: Function) -> Function:
        # fallback_random: dropout draws the same numbers as in the plain function.
        return cast(Function, torch.compile(function, dynamic=False, options={"fallback_random": True}))

    try:
        yield compile
    finally:
        from torch._inductor.async_compile import shutdown_compile_workers  # not at the top: it takes 1 s

        shutdown_compile_workers()
        if given is None:
            os.environ.pop(_CACHE, None)


def find_obstacle(body: Body, inputs: list[Inputs], model: nn.Module, objective: Any) -> tuple[Tensor, str]:
    """Run the work; returns its result, and what in it a graph could not repeat, or ""."""
    before = _host_state(model, objective)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            out = body(inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = next((w for w in caught if "synchronizing CUDA operation" in str(w.message)), None)
    return out, _obstacle(inputs, waits) or _change(before, _host_state(model, objective))


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


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


def _obstacle(inputs: list[Inputs], waits: warnings.WarningMessage | None) -> str:
    other = next((type(leaf).__name__ for leaf in leaves(inputs) if not isinstance(leaf, Tensor | None)), None)
    if other is not None:
        return f"a batch holds a {other}, which a graph cannot take as input"
    if any(leaf.device.type != "cuda" for leaf in tensors_in(inputs)):
        return "a batch holds a tensor that is not on the GPU"
    return "" if waits is None else f"{Path(waits.filename).name}, line {waits.lineno}, waits for the GPU"


def _change(before: dict[str, Any], after: dict[str, Any]) -> str:
    changed = next((what for what, state in after.items() if state != before.get(what)), None)
    return "" if changed is None else f"a step changes {changed}, and a graph would not"


def _host_state(model: nn.Module, objective: Any) -> dict[str, Any]:
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
