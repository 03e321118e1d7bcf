"""Phases of a run: the global batch and its parts may change as training goes on (`--batch-schedule`).

A schedule is text such as "0:1024 1:2048 2.5:4096": from epoch 0 on a global batch of 1,024, from epoch 1 on 2,048, and so on.
What the parts of a phase are follows from the schedule, V and `--smallest-part`, never from the number of workers. Nothing here
imports torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import UsageError
from paceline.output import plural
from paceline.values import parse_pairs, short, write_pairs

AUTO = "auto"
_HALVINGS = 5
_MOST_BATCH = 10**12
_RULE = 'it must be epoch:batch pairs, such as "0:1024 1:2048 2.5:4096", or auto, or auto:512 to start at 512'


@dataclass(frozen=True)
class Phase:
    """A stretch of a run in which all full steps have the same global batch and the same number of parts."""

    start: float
    """In epochs, from 0. The phase begins with the first step that starts there or later."""
    global_batch: int
    parts: int

    @property
    def part_batch(self) -> int:
        """Samples in a part of a full step."""
        return self.global_batch // self.parts


def is_auto(text: str) -> bool:
    """Whether a `--batch-schedule` follows the noise scale. Raises a UsageError for a start that is not a batch."""
    word, colon, start = text.partition(":")
    if word == AUTO and colon and not (start.isdecimal() and start.isascii() and 0 < int(start[:20]) <= _MOST_BATCH):
        raise UsageError(f"--batch-schedule is {short(repr(text))}: {_RULE}")
    return word == AUTO


def first_of_auto(text: str, global_batch: int) -> int:
    """The batch that `--batch-schedule auto` starts at: the one given, or global_batch / 32, or less often halved if odd."""
    given = text.partition(":")[2]
    if given:
        doubled = int(given)
        while doubled < global_batch:
            doubled *= 2
        if doubled != global_batch:
            raise UsageError(
                f"--batch-schedule {text}: doubling {given} does not lead to the global batch of {global_batch}: use"
                f" --global-batch {doubled}"
            )
        return int(given)
    halvings = next((n for n in range(_HALVINGS) if global_batch % (2 << n)), _HALVINGS)
    return global_batch >> halvings


def parse_batch_schedule(text: str) -> tuple[tuple[float, int], ...]:
    """The (epoch, global batch) pairs of a `--batch-schedule`; empty for "" and "auto"."""
    if not text or is_auto(text):
        return ()
    return parse_pairs("batch_schedule", text, _RULE, "phase")


def write_batch_schedule(pairs: Sequence[tuple[float, int]] | Mapping[Any, Any]) -> str:
    """The text of a schedule, from pairs or from a table as TOML has it: {"0" = 1024, "2.5" = 4096}."""
    text = write_pairs(pairs)
    parse_batch_schedule(text)
    return text


def make_phases(pairs: Sequence[tuple[float, int]], parts: int, smallest_part: int) -> tuple[Phase, ...]:
    """The phases of a schedule. `parts` is V: what the largest batch is cut into.

    A smaller batch is cut into V parts too, unless they would have fewer than `smallest_part` samples: then into fewer parts.
    Raises a UsageError for a batch that does not divide into its parts.
    """
    phases = []
    largest = max((batch for _, batch in pairs), default=0)
    for start, batch in pairs:
        count = parts if batch == largest else min(parts, max(1, batch // smallest_part))
        if batch % count:
            below, above = batch // count * count, (batch // count + 1) * count
            raise UsageError(
                f"--batch-schedule: the global batch of {batch} from epoch {start:g} on does not divide into"
                f" {plural(count, 'equal part')}: use {f'{below} or {above}' if below else above}"
            )
        phases.append(Phase(start, batch, count))
    return tuple(phases)


def check_largest(pairs: Sequence[tuple[float, int]], global_batch: int | None) -> None:
    """Raise a UsageError if a global batch is given besides a schedule, and is not its largest."""
    largest = max((batch for _, batch in pairs), default=global_batch)
    if global_batch is not None and largest != global_batch:
        raise UsageError(
            f"--global-batch is {global_batch}, but the largest batch of --batch-schedule is {largest}: give the same, or leave"
            " --global-batch out"
        )
