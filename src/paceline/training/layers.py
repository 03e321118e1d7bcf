"""How layers train (`--watch-layers N`): the norm of each layer's gradient, and how far a step moved its weights.

A layer is a module that owns trained parameters, all of them together. The gradient is the one that the optimizer gets, before
clipping and noise. The update-to-weight ratio is |change of the weights| / |weights before the step|. A large batch needs a
large learning rate, and the layer with the largest ratio limits it. LARS and LAMB give every layer a rate of its own.

Nothing here waits for the device. On a GPU the norms of gradients are part of the captured step, in every step: one fused
kernel. Weights are copied before a watched step and compared after it, outside the graph; the numbers are read when the step's
metrics arrive.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paceline.errors import printable
from paceline.output import plural
from paceline.spread import median

FAR = 100.0
"""A layer moves too fast or too slowly if its ratio is this many times above or below the median of all layers."""
ROOT = "(model)"
"""The name of a model as the owner of parameters."""
_MOST_LINES = 5


class GradientNorms:
    """The norm of every trained parameter's gradient, in a place that a captured step fills, too."""

    def __init__(self, trained: Sequence[Tensor]) -> None:
        self._trained = trained
        self.values = torch.zeros(len(trained), device=trained[0].device)
        self.wanted = False
        """Whether this step is watched. A captured step takes the norms in any case: its graph is the same in all steps."""

    @torch.no_grad()
    def take(self) -> None:
        """Take the norms of the reduced gradients; 0 for a parameter without one."""
        if not (self.wanted or (self.values.is_cuda and torch.cuda.is_current_stream_capturing())):
            return
        grads = [parameter.grad for parameter in self._trained]
        norms = iter(_norms([grad for grad in grads if grad is not None]))
        zero = torch.zeros((), device=self.values.device)
        torch.stack([zero if grad is None else next(norms) for grad in grads], out=self.values)


class LayerWatch:
    """Looks at every n-th step of a run."""

    def __init__(self, model: nn.Module, norms: GradientNorms | None, every: int) -> None:
        """`norms` is that of the run's update; None, and `every` 0, if this worker does not watch."""
        self._norms, self._every = norms, every
        self.names, self._layer = layers_of(model)
        self._weights = [parameter.detach() for parameter in model.parameters() if parameter.requires_grad]
        self._before: list[Tensor] = []
        self._found: dict[int, Tensor] = {}

    def around(self, number: int) -> AbstractContextManager[None]:
        """The context of step `number`, from 0."""
        watched = self._norms is not None and self._every and (number + 1) % self._every == 0
        return self._watched(number) if watched else nullcontext()

    @contextmanager
    def _watched(self, number: int) -> Iterator[None]:
        assert self._norms is not None
        if not self._before:
            self._before = [torch.empty_like(weights) for weights in self._weights]
        torch._foreach_copy_(self._before, self._weights)
        self._norms.wanted = True
        yield
        self._norms.wanted = False
        lengths = torch.stack(_norms(self._before))
        torch._foreach_sub_(self._before, self._weights)
        found = torch.cat((self._norms.values, lengths, torch.stack(_norms(self._before))))
        self._found[number] = found.to("cpu", non_blocking=True)

    def read(self, number: int) -> dict[str, Any] | None:
        """What was seen in step `number`, when its metrics have arrived; None if it was not watched."""
        found = self._found.pop(number, None)
        if found is None:
            return None
        squares = found.numpy().astype(np.float64).reshape(3, -1) ** 2
        gradient, before, moved = (np.sqrt(np.bincount(self._layer, row, len(self.names))).tolist() for row in squares)
        ratios = [change / length if length else math.nan for change, length in zip(moved, before, strict=True)]
        return {"names": self.names, "gradient_norm": list(map(_short, gradient)), "update_ratio": list(map(_short, ratios))}


def layers_of(model: nn.Module) -> tuple[list[str], list[int]]:
    """The names of a model's layers, in its own order, and the place of each trained parameter's layer among them."""
    owner: dict[int, str] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owner.setdefault(id(parameter), name or ROOT)  # a shared parameter belongs to the first
    of_each = [owner[id(parameter)] for parameter in model.parameters() if parameter.requires_grad]
    names = list(dict.fromkeys(of_each))
    place = {name: index for index, name in enumerate(names)}
    return names, [place[name] for name in of_each]


class FarLayers:
    """Says which layers move much faster or more slowly than the others: once per layer and direction."""

    def __init__(self, optimizer: str) -> None:
        """`optimizer`: as the contract describes it."""
        adapts = optimizer.startswith(("lars", "lamb"))
        self._advice = "LARS and LAMB correct this (--optimizer lars)"
        if adapts:
            self._advice = "--adapt-all scales the steps of norm layers and biases, too"
        self._told: set[tuple[str, bool]] = set()
        self._before: set[tuple[str, bool]] = set()
        """Which were too fast (True) or too slow in the last row."""

    def lines(self, row: Mapping[str, Any]) -> list[str]:
        """What is new in a row of kind "layers", if the row before had it too.

        A parameter that starts at 0 moves by about its own size at first.
        """
        columns = (row[name] for name in ("names", "update_ratio", "gradient_norm"))
        layers: list[tuple[str, float, Any]] = [each for each in zip(*columns, strict=True) if each[1] is not None]
        moving = [ratio for _, ratio, _ in layers if ratio]
        middle = median(moving) if moving else 0.0
        far = [each for each in layers if moving and not middle / FAR <= each[1] <= middle * FAR]
        marks = {(name, ratio > middle) for name, ratio, _ in far}
        new = [each for each in far if (each[0], each[1] > middle) in self._before - self._told]
        self._told |= marks & self._before
        self._before = marks
        lines = [self._describe(*each, middle) for each in new[:_MOST_LINES]]
        left = len(new) - _MOST_LINES
        return [*lines, f"{plural(left, 'more layer')} too fast or too slow: see the report"] if left > 0 else lines

    def _describe(self, name: str, ratio: float, gradient: float | None, middle: float) -> str:
        ratios = f"(update-to-weight ratio {ratio:.2g}, median {middle:.2g})"
        if not ratio:
            why = "its gradient is 0" if gradient == 0 else "it has a gradient, but its steps are 0"
            return f"layer {printable(name)} does not move {ratios}: {why}"
        times, how = (ratio / middle, "fast") if ratio > middle else (middle / ratio, "slowly")
        return f"layer {printable(name)} moves {times:,.0f} times as {how} as the median layer {ratios}; {self._advice}"


def _norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each tensor, in float32."""
    found: dict[int, Tensor] = {}
    dense = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    for dtype in {tensor.dtype for tensor in dense}:
        places = [place for place, tensor in enumerate(dense) if tensor.dtype == dtype]
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None  # or the norm would be rounded, or infinite
        found |= zip(places, torch._foreach_norm([dense[place] for place in places], 2, wide), strict=True)
    return [found[place].float() for place in range(len(dense))]


def _short(value: float) -> float | None:
    """Four significant digits; None for what is not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
