"""Batch-norm statistics by part: every part has running statistics of its own, as it would on its own GPU.

The model's own buffers hold the mean over all parts. It is computed only when needed: for validation and at the end.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.core.deal import Pass
from paceline.core.norms import PartNorm
from paceline.core.sync_norm import SyncNorm
from paceline.dist.world import World


class Statistics:
    """The running statistics of this worker's parts, one row per part.

    Before a pass, layers are pointed at the rows of its parts, and update them in place. After `average`, the model's own
    buffers hold the mean over all parts.
    """

    def __init__(self, model: nn.Module, groups: Sequence[range], parts: int) -> None:
        self._groups, self._parts = groups, parts
        self._layers = [module for module in model.modules() if _has_statistics(module)]
        self._own = [{name: cast(Tensor, layer._buffers[name]) for name in _NAMES} for layer in self._layers]
        self._rows = [[_repeat(own, len(group)) for group in groups] for own in self._own]
        self._grouped = [module for module in model.modules() if isinstance(module, PartNorm)]
        self._moving = [m for m in model.modules() if isinstance(m, _NormBase) and m.running_mean is not None]
        self._scratch: dict[tuple[int, torch.Size], dict[str, Tensor]] = {}
        self.over_workers = any(spans_workers(module) for module in model.modules())
        """Some layer takes its statistics over the whole step, across workers."""
        self._views: dict[tuple[int, range], list[dict[str, Tensor]]] = {}  # one per kind of pass, made once
        self._in_use: tuple[int, range] | None = None

    def names(self, model: nn.Module) -> set[str]:
        """Names of the buffers that each part has for itself."""
        paths = [path for path, module in model.named_modules(remove_duplicate=False) if module in self._layers]
        return {f"{path}.{name}".lstrip(".") for path in paths for name in _NAMES}

    def tensors(self) -> list[Tensor]:
        """All tensors that passes change here."""
        return [tensor for own in self._rows for rows in own for tensor in rows.values()]

    def use(self, item: Pass) -> None:
        """Point the layers at the parts of this pass."""
        for grouped in self._grouped:
            grouped.parts, grouped.samples = len(item.parts), len(item.samples)
        if self._in_use == (item.group, item.parts):
            return
        self._in_use = (item.group, item.parts)
        if self._in_use not in self._views:
            rows: slice | int = slice(None) if len(item.parts) > 1 else item.parts[0] - self._groups[item.group][0]
            self._views[self._in_use] = [{name: t[rows] for name, t in own[item.group].items()} for own in self._rows]
        for layer, views in zip(self._layers, self._views[self._in_use], strict=True):
            layer._buffers.update(views)

    @torch.no_grad()
    def average(self, world: World) -> None:
        """Put the mean over all parts of all workers into the model's buffers. Collective: call on every rank."""
        if self._layers:
            values, counts = self.gather(world)
            means, start = values.mean(0), 0
            for i, own in enumerate(self._own):
                for name in _NAMES[:2]:
                    own[name].copy_(means[start : start + own[name].numel()].view_as(own[name]))
                    start += own[name].numel()
                own["num_batches_tracked"].copy_(counts[0, i])
        self.rest()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Passes in this block change copies of the statistics in use."""
        used = [dict(layer._buffers) for layer in self._layers]
        for layer in self._layers:
            layer._buffers.update({name: cast(Tensor, layer._buffers[name]).clone() for name in _NAMES})
        try:
            yield
        finally:
            for layer, buffers in zip(self._layers, used, strict=True):
                layer._buffers.update(buffers)

    def recomputing(self) -> AbstractContextManager[None]:
        """Layers called in this block do not move their running statistics. For backward passes: `torch.utils.checkpoint` calls
        layers there again, and statistics must move once per pass.

        Layers are pointed at scratch tensors, which cost no copy. In training a layer only writes to them; one in evaluation
        mode reads its statistics, moves nothing and keeps them.
        """
        return self._on_scratch() if self._moving else nullcontext()

    @contextmanager
    def _on_scratch(self) -> Iterator[None]:
        layers = [layer for layer in self._moving if layer.training]
        used = [dict(layer._buffers) for layer in layers]
        for layer, buffers in zip(layers, used, strict=True):
            layer._buffers.update(self._scratch_like(layer, buffers))
        try:
            yield
        finally:
            for layer, buffers in zip(layers, used, strict=True):
                layer._buffers.update(buffers)

    def _scratch_like(self, layer: nn.Module, buffers: dict[str, Tensor | None]) -> dict[str, Tensor]:
        own = {name: cast(Tensor, buffers[name]) for name in _NAMES}
        place = id(layer), own["running_mean"].shape
        if place not in self._scratch:
            self._scratch[place] = {name: torch.zeros_like(tensor) for name, tensor in own.items()}
        return self._scratch[place]

    def rest(self) -> None:
        """Point the layers back at the model's own buffers."""
        self._in_use = None
        for layer, own in zip(self._layers, self._own, strict=True):
            layer._buffers.update(own)
        for grouped in self._grouped:
            grouped.parts, grouped.samples = 1, None

    def gather(self, world: World) -> tuple[Tensor, Tensor]:
        """All workers' rows: values (V, width) in float64 and counts (V, layers). Collective: call on every rank."""
        width = sum(own[name].numel() for own in self._own for name in _NAMES[:2])
        values = torch.zeros(self._parts, width, dtype=torch.float64, device=world.device)
        counts = torch.zeros(self._parts, len(self._layers), dtype=torch.int64, device=world.device)
        for rows, table in self._tables(values, counts):
            table.copy_(rows)
        if world.size > 1 and self._layers:
            dist.all_reduce(values)  # every row comes from one worker: adding zeros is exact
            dist.all_reduce(counts)
        return values + 0.0, counts  # turn -0.0 into 0.0, as adding another worker's zero does

    def scatter(self, values: Tensor, counts: Tensor) -> None:
        """Take this worker's rows from tables of all workers' rows."""
        for rows, table in self._tables(values, counts):
            rows.copy_(table)
        self._in_use = None

    def _tables(self, values: Tensor, counts: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of this worker's rows and their place in the tables, for every layer and group."""
        start = 0
        for i, rows in enumerate(self._rows):
            for name in _NAMES[:2]:
                width = self._own[i][name].numel()
                for group, tensors in zip(self._groups, rows, strict=True):
                    yield tensors[name], values[group.start : group.stop, start : start + width]
                start += width
            for group, tensors in zip(self._groups, rows, strict=True):
                yield tensors["num_batches_tracked"], counts[group.start : group.stop, i]


_NAMES = ("running_mean", "running_var", "num_batches_tracked")


def _repeat(own: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """One row per part, in memory of the group's own: a row's place in it does not depend on the number of workers."""
    return {name: torch.stack([tensor] * count) for name, tensor in own.items()}


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.running_mean is not None and not spans_workers(module)


def spans_workers(module: nn.Module) -> bool:
    """Whether a norm layer takes its statistics over all workers."""
    return isinstance(module, SyncNorm | nn.SyncBatchNorm)
