"""CUDA graphs: work on tensors that is recorded once and replayed with one launch, and what prevents that; torch's compiler.

A graph repeats what the GPU did, not what Python did between its kernels. So work is run and checked once before it is
recorded: does it wait for the GPU, draw random numbers on the host, or change attributes of a module or the objective? Changes
elsewhere, in a global or deeper within an object, cannot be detected.
"""

import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from paceline.core.trees import leaves, map_tensors, tensors_in
from paceline.data.loaders import Inputs
from paceline.training.host_state import host_state

Body = Callable[[list[Inputs]], Tensor]
Function = TypeVar("Function", bound=Callable[..., Any])
_CACHE = "TORCHINDUCTOR_CACHE_DIR"


class Pool:
    """Memory that graphs share."""

    @functools.cached_property
    def handle(self) -> Any:
        """Torch's name for it; made for the first graph, because it needs a GPU."""
        return torch.cuda.graph_pool_handle()


class Graph:
    """Work on tensors, recorded once and replayed on other tensors of the same shapes."""

    def __init__(
        self, body: Body, inputs: list[Inputs], stamps: Callable[[], Any] = lambda: None, pool: Pool | None = None
    ) -> None:
        """`stamps` is called after recording, for the clock's stamps in the graph. Graphs with the same `pool` share memory: a
        replay of one overwrites what another one returned."""
        self._held = cast("list[Inputs]", map_tensors(Tensor.clone, inputs))
        self._into = list(tensors_in(self._held))
        self._last: list[tuple[Tensor, int] | None] = [None] * len(
            self._into
        )  # what was copied last: an epoch's key is copied once
        self._graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: a DataLoader's thread may pin memory, and NCCL's thread may query events, while this thread records.
            here = torch.cuda.current_stream()
            with torch.cuda.graph(
                self._graph, pool=None if pool is None else pool.handle, stream=here, capture_error_mode="thread_local"
            ):
                self._out = body(self._held)
        except BaseException:
            random_numbers = torch.cuda.default_generators[torch.cuda.current_device()]
            random_numbers.graphsafe_set_state(random_numbers.clone_state())  # or it still believes that it is being recorded
            raise
        self.stamps = stamps()

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
def compiler(shapes: int = 1) -> Iterator[Callable[[Function], Function]]:
    """torch.compile, for functions that are first called in this block, with this many shapes. Compiled code is kept for later
    runs; the compiler's processes end with the block.
    """
    from torch._dynamo import config as dynamo  # not at the top: it takes 1 s

    limit = dynamo.recompile_limit
    dynamo.recompile_limit = limit + shapes
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
        dynamo.recompile_limit = limit
        if given is None:
            os.environ.pop(_CACHE, None)


def find_obstacle(body: Body, inputs: list[Inputs], model: nn.Module, objective: Any) -> tuple[Tensor, str]:
    """Run the work; returns its result, and what in it a graph could not repeat, or ""."""
    before = host_state(model, objective)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with _checkpoints() as kept:
                out = body(inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    if kept:
        return out, _KEEPS_RANDOM_STATE
    waits = next((w for w in caught if "synchronizing CUDA operation" in str(w.message)), None)
    return out, _obstacle(inputs, waits) or _change(before, host_state(model, objective))


_KEEPS_RANDOM_STATE = (
    "torch.utils.checkpoint keeps the state of the random numbers in every pass, which a graph cannot; if the layers in it draw"
    " none, give it preserve_rng_state=False"
)


@contextmanager
def _checkpoints() -> Iterator[list[str]]:
    """The calls by which `torch.utils.checkpoint` reads the state of the GPU's random numbers in this block.

    A graph would repeat the state of the recorded step: layers would drop other values in the backward pass than before.
    """
    found: list[str] = []
    read = torch.cuda.get_rng_state

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        caller = sys._getframe(1).f_code.co_filename
        if caller == torch.utils.checkpoint.__file__:
            found.append(caller)
        return read(*args, **kwargs)

    torch.cuda.get_rng_state = watched
    try:
        yield found
    finally:
        torch.cuda.get_rng_state = read


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
