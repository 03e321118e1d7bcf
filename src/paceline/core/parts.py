"""Parts: which of them a worker computes, in which passes, and the batch-norm statistics that each keeps as its own.

A step is cut into V parts; worker r of P takes a run of them. It runs them *together*, several in one forward pass with batch
norm apart for each, or *in turn*. A part is what one GPU would have had, so each has running statistics of its own; those of
the model are their mean, taken only when they are needed: for validation and at the end.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from paceline.config import Config
from paceline.core.norms import PartNorm, can_group
from paceline.core.sampler import Sampler
from paceline.core.sync_norm import SyncNorm
from paceline.dist.world import World
from paceline.errors import UsageError


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass: a micro-batch of one part, or of all parts of a group at once."""

    group: int
    """Which of this worker's groups."""
    parts: range
    micro: int
    last: bool
    """The last micro-batch of these parts."""
    samples: np.ndarray
    """Sample j of part p stands at j * len(parts) + p."""


@dataclass(frozen=True)
class Grouping:
    """How many parts run in one pass, and why."""

    at_once: int
    why: str
    one_pass: bool = False
    """All parts must share a pass, whatever their sizes: a norm looks at the whole step."""


def choose_grouping(model: nn.Module, config: Config, parts: int, workers: int) -> Grouping:
    """What `--parts-at-once` comes to for this model. A UsageError where it cannot be."""
    grouping = _choose_grouping(model, config, parts, workers)
    if not measures_noise(config) or workers > 1 or grouping.at_once < parts:
        return grouping
    if config.parts_at_once:
        raise UsageError(
            f"--parts-at-once {config.parts_at_once} leaves one gradient a step, and no noise to measure: use less"
        )
    return Grouping(-(-parts // 2), "together, in two halves to compare")


def measures_noise(config: Config) -> bool:
    """Whether the gradients of parts are compared."""
    return config.measure_noise or config.lr_rule == "adascale"


def _choose_grouping(model: nn.Module, config: Config, parts: int, workers: int) -> Grouping:
    most, asked = -(-parts // workers), config.parts_at_once
    spanning = next((_called(name) for name, module in model.named_modules() if _spans_workers(module)), None)
    if spanning is not None:
        if config.reduce == "exact":
            raise UsageError(
                f"--reduce exact: {spanning} takes its statistics over all workers, by float sums that depend on"
                " how many there are; use norm=part or batch, or --reduce fast"
            )
        if config.sam_rho or measures_noise(config):
            option = "--sam-rho" if config.sam_rho else "--measure-noise" if config.measure_noise else "--lr-rule adascale"
            raise UsageError(
                f"{option} takes each part's own gradient, and {spanning} has its statistics of the whole step: use norm=batch"
            )
        if 0 < asked < most:
            raise UsageError(
                f"--parts-at-once {asked}: {spanning} takes its statistics over the whole step, so a worker's"
                f" {most} parts must run at once; leave --parts-at-once out"
            )
        return Grouping(most, "together: one norm over the whole step", one_pass=True)
    apart = "climbs by itself" if config.sam_rho else "has its own gradient" if config.lr_rule == "adascale" else ""
    if apart:
        if asked > 1:
            option = "--sam-rho" if config.sam_rho else "--lr-rule adascale"
            raise UsageError(f"--parts-at-once {asked}: with {option} every part {apart}; use --parts-at-once 1")
        return Grouping(1, f"in turn: each {apart}" if most > 1 else "one a worker")
    cannot = can_group(model)
    if asked > 1:
        if cannot:
            raise UsageError(
                f"--parts-at-once {asked}: {cannot}, which cannot keep parts apart in a pass; use --parts-at-once 1"
            )
        groups = -(-parts // asked)
        if config.reduce == "exact" and workers > groups:
            raise UsageError(
                f"--reduce exact with --parts-at-once {asked} makes {groups} groups of the {parts} parts, too few for {workers}"
                f" workers: use at most {groups} workers, or a smaller --parts-at-once"
            )
        return Grouping(asked, f"{asked} at once")
    if asked == 1 or most == 1:
        return Grouping(1, "in turn" if most > 1 else "one a worker")
    if config.reduce == "exact":
        return Grouping(1, "in turn, for exact sums")
    if cannot:
        return Grouping(1, f"in turn: {cannot}")
    random = next((_called(name) for name, module in model.named_modules() if _draws(module)), None)
    if random is not None:
        return Grouping(1, f"in turn: {random} draws random numbers by part")
    return Grouping(most, "together")


def deal_parts(parts: int, workers: int, rank: int, at_once: int, whole_groups: bool) -> list[range]:
    """A worker's parts, in groups that run in one pass. With `whole_groups` (exact sums) the groups do not depend on the number
    of workers.
    """
    if whole_groups:
        groups = _cut(range(parts), at_once)
        return groups[len(groups) * rank // workers : len(groups) * (rank + 1) // workers]
    return _cut(range(parts * rank // workers, parts * (rank + 1) // workers), at_once)


def plan_epoch(
    sampler: Sampler, order: np.ndarray, steps: range, groups: Sequence[range], accumulate: int, one_pass: bool = False
) -> list[list[Pass]]:
    """The passes of these steps of an epoch: `plan_step` of each, but full steps are cut all at once."""
    size = sampler.global_batch
    full = range(steps.start, max(steps.start, min(steps.stop, sampler.full_steps)))
    part = size // sampler.parts
    micros = max(1, min(accumulate, part // 2))
    cuts = [part // micros + (i < part % micros) for i in range(micros)]
    laid_out = order[full.start * size : full.stop * size].reshape(len(full), sampler.parts, part)
    passes: list[list[Pass]] = [[] for _ in full]
    for number, group in enumerate(groups):
        of_group, start = laid_out[:, group.start : group.stop], 0
        for micro, cut in enumerate(cuts):
            rows = of_group[:, :, start : start + cut].transpose(0, 2, 1).reshape(len(full), cut * len(group))
            start += cut
            for i, samples in enumerate(rows):
                passes[i].append(Pass(number, group, micro, micro == micros - 1, samples))
    rest = range(full.stop, steps.stop)
    return passes + [plan_step(sampler, order, i, groups, accumulate, one_pass) for i in rest]


def plan_step(
    sampler: Sampler, order: np.ndarray, step: int, groups: Sequence[range], accumulate: int, one_pass: bool = False
) -> list[Pass]:
    """The passes of one step of an epoch. Where parts differ in size, as they may in the last two steps, they run in turn."""
    bounds = sampler.part_bounds(step)
    sizes = np.diff(bounds)
    micros = max(1, min(accumulate, int(sizes.min()) // 2))  # of at least two samples, which batch norm needs
    passes = []
    for number, group in enumerate(groups):
        equal = len({int(sizes[part]) for part in group}) == 1
        for together in [group] if equal or one_pass else [range(part, part + 1) for part in group]:
            pieces = [np.array_split(order[bounds[part] : bounds[part + 1]], micros) for part in together]
            for micro in range(micros):
                here = [piece[micro] for piece in pieces]
                samples = np.stack(here, axis=1).reshape(-1) if equal else np.concatenate(here)
                passes.append(Pass(number, together, micro, micro == micros - 1, samples))
    return passes


class Statistics:
    """The running statistics of every part this worker has, one row a part.

    Layers are pointed at the rows of the parts they are about to see, and update them in place; the model's own buffers hold
    the mean over all parts after `average`.
    """

    def __init__(self, model: nn.Module, groups: Sequence[range], parts: int) -> None:
        self._groups, self._parts = groups, parts
        self._layers = [module for module in model.modules() if _has_statistics(module)]
        self._own = [{name: cast(Tensor, layer._buffers[name]) for name in _NAMES} for layer in self._layers]
        self._rows = [[_repeat(own, len(group)) for group in groups] for own in self._own]
        self._grouped = [module for module in model.modules() if isinstance(module, PartNorm)]
        self.over_workers = any(_spans_workers(module) for module in model.modules())
        """Whether some layer's statistics are those of the whole step."""
        self._views: dict[tuple[int, range], list[dict[str, Tensor]]] = {}  # one of them a pass: cut only once
        self._in_use: tuple[int, range] | None = None

    def names(self, model: nn.Module) -> set[str]:
        """The buffers that every part has for itself."""
        paths = [path for path, module in model.named_modules(remove_duplicate=False) if module in self._layers]
        return {f"{path}.{name}".lstrip(".") for path in paths for name in _NAMES}

    def tensors(self) -> list[Tensor]:
        """All that passes change here."""
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
        """Put the mean over all parts of all workers into the model's buffers. Every worker reaches this."""
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
        """Passes in here change copies of the statistics in use."""
        used = [dict(layer._buffers) for layer in self._layers]
        for layer in self._layers:
            layer._buffers.update({name: cast(Tensor, layer._buffers[name]).clone() for name in _NAMES})
        try:
            yield
        finally:
            for layer, buffers in zip(self._layers, used, strict=True):
                layer._buffers.update(buffers)

    def rest(self) -> None:
        """Point the layers back at the model's own buffers."""
        self._in_use = None
        for layer, own in zip(self._layers, self._own, strict=True):
            layer._buffers.update(own)
        for grouped in self._grouped:
            grouped.parts, grouped.samples = 1, None

    def gather(self, world: World) -> tuple[Tensor, Tensor]:
        """Everybody's rows: (V, values) float64 and the counts (V, layers). Every worker reaches this."""
        width = sum(own[name].numel() for own in self._own for name in _NAMES[:2])
        values = torch.zeros(self._parts, width, dtype=torch.float64, device=world.device)
        counts = torch.zeros(self._parts, len(self._layers), dtype=torch.int64, device=world.device)
        for where, view in self._tables(values, counts):
            view.copy_(where)
        if world.size > 1 and self._layers:
            dist.all_reduce(values)  # every row comes from one worker: adding zeros is exact
            dist.all_reduce(counts)
        return values + 0.0, counts  # a worker's own -0.0 would stay; one that met a zero would not

    def scatter(self, values: Tensor, counts: Tensor) -> None:
        """Take this worker's rows from a table of everybody's."""
        for where, view in self._tables(values, counts):
            where.copy_(view)
        self._in_use = None

    def _tables(self, values: Tensor, counts: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(this worker's rows, their place in the tables) for every layer and group."""
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
    """A row a part, in memory of the group's own: where a row lies in it does not depend on the number of workers."""
    return {name: torch.stack([tensor] * count) for name, tensor in own.items()}


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, _NormBase) and module.running_mean is not None and not _spans_workers(module)


def _called(name: str) -> str:
    return f"layer {name}" if name else "the model"


def _spans_workers(module: nn.Module) -> bool:
    return isinstance(module, SyncNorm | nn.SyncBatchNorm)


def _draws(module: nn.Module) -> bool:
    """Whether a layer is known to draw random numbers in training."""
    if isinstance(module, _DropoutNd):
        return module.p > 0
    dropout = getattr(module, "dropout", 0)  # attention and recurrent layers hold a number
    return isinstance(module, nn.RReLU) or (isinstance(dropout, float) and dropout > 0)


def _cut(parts: range, at_once: int) -> list[range]:
    return [parts[i : i + at_once] for i in range(0, len(parts), at_once)]
