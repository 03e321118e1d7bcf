"""Which parts of a step a worker computes, and in which forward passes.

A step is cut into V parts. Worker r of P takes a contiguous run of them. It computes them *together*, several in one forward
pass, or *in turn*, one after the other. Each pass may be cut further into micro-batches (gradient accumulation).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.core.sampler import Sampler
from paceline.errors import UsageError
from paceline.output import plural


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass: a micro-batch of one part, or of all parts of a group."""

    group: int
    """Index of the group among this worker's groups."""
    parts: range
    micro: int
    last: bool
    """This is the last micro-batch of these parts."""
    samples: np.ndarray
    """Sample j of part p is at position j * len(parts) + p."""


def check_parts(parts: int, workers: int) -> None:
    """Raise a UsageError unless every worker has at least one part."""
    if workers > parts:
        raise UsageError(
            f"{workers} workers for {plural(parts, 'virtual worker')}: use at most {plural(parts, 'worker')}, or more virtual"
            " workers"
        )


def count_micros(accumulate: int, part_batch: int) -> int:
    """The number of micro-batches per part: `accumulate`, or fewer, because batch norm needs at least two samples in each."""
    return max(1, min(accumulate, part_batch // 2))


def deal_parts(parts: int, workers: int, rank: int, at_once: int, whole_groups: bool) -> list[range]:
    """This worker's parts, in groups that run in one pass.

    With `whole_groups` (exact sums) the groups do not depend on the number of workers.
    """
    if whole_groups:
        groups = _cut(range(parts), at_once)
        return groups[len(groups) * rank // workers : len(groups) * (rank + 1) // workers]
    return _cut(range(parts * rank // workers, parts * (rank + 1) // workers), at_once)


def cut_epoch(
    sampler: Sampler, order: np.ndarray, steps: range, groups: Sequence[range], accumulate: int, one_pass: bool = False
) -> list[list[Pass]]:
    """The passes of these steps of an epoch: `cut_step` of each, but all full steps are cut at once."""
    size = sampler.global_batch
    full = range(steps.start, max(steps.start, min(steps.stop, sampler.full_steps)))
    part = size // sampler.parts
    micros = count_micros(accumulate, part)
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
    return passes + [cut_step(sampler, order, i, groups, accumulate, one_pass) for i in rest]


def cut_step(
    sampler: Sampler, order: np.ndarray, step: int, groups: Sequence[range], accumulate: int, one_pass: bool = False
) -> list[Pass]:
    """The passes of one step of an epoch. Parts of different sizes, which only the last two steps can have, run in turn."""
    bounds = sampler.part_bounds(step)
    sizes = np.diff(bounds)
    micros = count_micros(accumulate, int(sizes.min()))
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


def _cut(parts: range, at_once: int) -> list[range]:
    return [parts[i : i + at_once] for i in range(0, len(parts), at_once)]
