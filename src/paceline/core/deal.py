"""Which parts of a step a worker computes, and in which forward passes.

A step is cut into V parts. Worker r of P takes a contiguous run of them. It computes them *together*, several in one forward
pass, or *in turn*, one after the other. Each pass may be cut further into micro-batches (gradient accumulation).
"""

from collections.abc import Callable, Sequence
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


def deal_all(parts: int, workers: int, at_once: int, whole_groups: bool, compares: bool) -> list[list[range]]:
    """Every worker's groups (`deal_parts`). `compares`: the gradients of passes are compared, for the noise scale."""
    if compares and (whole_groups or workers == 1):
        at_once = min(at_once, max(1, -(-parts // 2)))  # one pass would leave nothing to compare
    return [deal_parts(parts, workers, rank, at_once, whole_groups) for rank in range(workers)]


def count_parts(dealt: Sequence[Sequence[range]]) -> list[int]:
    """How many parts each worker has."""
    return [sum(map(len, groups)) for groups in dealt]


def deal_parts(parts: int, workers: int, rank: int, at_once: int, whole_groups: bool) -> list[range]:
    """This worker's parts, in groups that run in one pass. Workers of high rank get none if there are too few for all.

    With `whole_groups` (exact sums) the groups do not depend on the number of workers.
    """
    if not whole_groups and parts >= workers:
        return _cut(range(parts * rank // workers, parts * (rank + 1) // workers), at_once)
    groups = _cut(range(parts), at_once if whole_groups else 1)
    if len(groups) < workers:
        return groups[rank : rank + 1]
    return groups[len(groups) * rank // workers : len(groups) * (rank + 1) // workers]


def cut_epoch(
    sampler: Sampler, epoch: int, steps: range, groups_of: Callable[[int], list[range]], accumulate: int, one_pass: bool = False
) -> list[list[Pass]]:
    """The passes of these steps of an epoch. `groups_of`: this worker's groups, by the number of parts of the step."""
    cut, order = sampler.cut(epoch), sampler.order(epoch)
    passes: list[list[Pass]] = []
    while len(passes) < len(steps):
        begin = steps.start + len(passes)
        phase = sampler.phases[cut.phases[begin]]
        groups = groups_of(phase.parts)
        other = np.flatnonzero(
            (cut.phases[begin : steps.stop] != cut.phases[begin])
            | (np.diff(cut.bounds[begin : steps.stop + 1]) != phase.global_batch)
        )
        full = range(begin, begin + int(other[0]) if len(other) else steps.stop)
        if full:
            laid_out = order[cut.bounds[begin] : cut.bounds[full.stop]].reshape(len(full), phase.parts, phase.part_batch)
            passes += _cut_full(laid_out, groups, accumulate)
        else:
            passes.append(cut_step(sampler.part_bounds(epoch, begin), order, groups, accumulate, one_pass))
    return passes


def _cut_full(laid_out: np.ndarray, groups: Sequence[range], accumulate: int) -> list[list[Pass]]:
    """The passes of full steps, all at once. `laid_out`: samples by step, part and place in the part."""
    steps, _, part = laid_out.shape
    micros = count_micros(accumulate, part)
    cuts = [part // micros + (i < part % micros) for i in range(micros)]
    passes: list[list[Pass]] = [[] for _ in range(steps)]
    for number, group in enumerate(groups):
        of_group, start = laid_out[:, group.start : group.stop], 0
        for micro, size in enumerate(cuts):
            rows = of_group[:, :, start : start + size].transpose(0, 2, 1).reshape(steps, size * len(group))
            start += size
            for i, samples in enumerate(rows):
                passes[i].append(Pass(number, group, micro, micro == micros - 1, samples))
    return passes


def cut_step(
    bounds: np.ndarray, order: np.ndarray, groups: Sequence[range], accumulate: int, one_pass: bool = False
) -> list[Pass]:
    """The passes of one step, from the bounds of its parts. Parts of different sizes, which only an epoch's last two steps can
    have, run in turn."""
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
