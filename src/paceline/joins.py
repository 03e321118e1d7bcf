"""How many workers train at which time of a run (`--workers-schedule`): more of them can join as the batch grows.

A schedule is text such as "0:1 1:2 2.5:4": one worker from epoch 0 on, two from epoch 1 on, and so on. "auto:4" follows the
global batch: four workers at the largest one, and fewer at smaller ones, so that a worker has about as many samples in every
step. The workers change between two steps, through a checkpoint. The trained model depends on V only. Nothing here imports
torch.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import UsageError
from paceline.output import plural
from paceline.phases import place_of
from paceline.values import parse_pairs, short, write_pairs

AUTO = "auto"
_MOST = 4096
_RULE = 'it must be epoch:workers pairs, such as "0:1 1:2 2.5:4", or auto, or auto:4 for at most 4 workers'


@dataclass(frozen=True, kw_only=True)
class Spot:
    """A place between two steps of a run: what decides how many workers go on from there."""

    done: int
    """Samples that are used before it, since the start of the run."""
    samples: int
    """Samples in an epoch."""
    global_batch: int
    """Of the next step."""
    parts: int
    """Of the next step."""
    largest_batch: int

    @property
    def epoch(self) -> float:
        """When this is, in epochs."""
        return self.done / self.samples


def is_auto(text: str) -> bool:
    """Whether the number of workers follows the global batch."""
    return text.partition(":")[0] == AUTO


@functools.cache
def parse_workers_schedule(text: str) -> tuple[tuple[float, int], ...]:
    """The (epoch, workers) pairs of a `--workers-schedule`; empty for "" and "auto"."""
    if not text:
        return ()
    if is_auto(text):
        _limit(text)
        return ()
    pairs = parse_pairs("workers_schedule", text, _RULE, "count")
    if most_workers(text) > _MOST:
        raise UsageError(f"--workers-schedule has {most_workers(text):,} workers: it must be at most {_MOST:,}")
    return pairs


def write_workers_schedule(given: str | Sequence[tuple[float, int]] | Mapping[Any, Any]) -> str:
    """A schedule as text in one form, from any text, pairs or a table as TOML has it: {"0" = 1, "2.5" = 4}."""
    if isinstance(given, str):
        return write_pairs(parse_workers_schedule(given)) or given
    text = write_pairs(given)
    if not parse_workers_schedule(text):
        raise UsageError(f"--workers-schedule has no workers: {_RULE}")
    return text


def most_workers(text: str) -> int:
    """The largest number of workers of a schedule; 0 if it does not say: for "" and "auto"."""
    if not text:
        return 0
    return _limit(text) if is_auto(text) else max(count for _, count in parse_pairs("workers_schedule", text, _RULE, "count"))


def count_workers(text: str, spot: Spot) -> int:
    """How many workers a schedule wants from this spot on. "auto" must have its limit ("auto:4")."""
    if is_auto(text):
        count = _limit(text) * spot.global_batch // spot.largest_batch
        return max(1, min(count, spot.parts))  # a worker without a part would be idle
    return max((start, count) for start, count in parse_workers_schedule(text) if place_of(start, spot.samples) <= spot.done)[1]


def check_fits(text: str, parts: int, epochs: int | None = None) -> None:
    """Raise a UsageError if a schedule has more workers than V parts, or a count that begins after the run's last epoch."""
    for start, count in parse_workers_schedule(text):
        if count > parts:
            raise UsageError(
                f"--workers-schedule has {plural(count, 'worker')} from epoch {start:g} on, but there"
                f" {'is' if parts == 1 else 'are'} {plural(parts, 'virtual worker')}: use at most {parts:,}, or more"
                " --virtual-workers"
            )
        if epochs is not None and start >= epochs:
            raise UsageError(
                f"--workers-schedule has {plural(count, 'worker')} from epoch {start:g} on, but the run has"
                f" {plural(epochs, 'epoch')}: give more --epochs, or remove that entry"
            )


def describe_schedule(text: str) -> str:
    """`1 worker, 2 from epoch 1, 4 from epoch 2.5`."""
    if is_auto(text):
        return f"up to {plural(most_workers(text), 'worker')}, in proportion to the global batch"
    (_, first), *later = parse_workers_schedule(text)
    return ", ".join([plural(first, "worker"), *(f"{count:,} from epoch {start:g}" for start, count in later)])


def _limit(text: str) -> int:
    _, colon, limit = text.partition(":")
    if not colon:
        return 0
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= _MOST):
        raise UsageError(f"--workers-schedule is {short(repr(text))}: {_RULE}")
    return int(limit)
