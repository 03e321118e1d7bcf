"""Phases of a run: the global batch and its parts may change as training goes on (`--batch-schedule`).

A schedule is text such as "0:1024 1:2048 2.5:4096": from epoch 0 on a global batch of 1,024, from epoch 1 on 2,048, and so on.
What the parts of a phase are follows from the schedule, V and `--smallest-part`, never from the number of workers. Nothing here
imports torch.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.errors import UsageError
from paceline.output import plural
from paceline.values import parse_pairs, short, write_pairs

AUTO = "auto"
PLACES = 8
"""Places in an epoch where `--batch-schedule auto` may double the batch, at most one after each step."""
_FLAG = re.compile(r"--([a-z][a-z-]*)")
_HALVINGS = 5
_MOST_BATCH = 10**12
_ROUNDING = 0.01
"""In samples: more than the rounding of a time in epochs (10^-16 of its value), for up to 10^12 samples in all."""
_GROWTH = ((0.0, 8), (0.1, 4), (0.3, 2), (0.6, 1))  # (share of the epochs, divisor of the largest batch)
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


def noise_ratio(optimizer: str, given: float | None = None) -> float:
    """The batch doubles when the noise scale is more than this many times the batch: as given, or by the optimizer."""
    return _NOISE_RATIOS.get(optimizer, _NOISE_RATIO) if given is None else given


_NOISE_RATIO = 2.0
_NOISE_RATIOS = {"muon": 0.25}  # it makes good use of large batches


def check_starts(pairs: Sequence[tuple[float, int]], epochs: float) -> None:
    """Raise a UsageError for a phase that would start after the run."""
    late = next((start for start, _ in pairs if start >= epochs), None)
    if late is not None:
        raise UsageError(
            f"--batch-schedule has a phase from epoch {late:g} on, but the run has {plural(int(epochs), 'epoch')}: give more"
            f" --epochs, or change --batch-schedule {write_pairs(pairs)!r}"
        )


def phases_of_auto(text: str, global_batch: int, parts: int, smallest_part: int) -> tuple[Phase, ...]:
    """Every phase that `--batch-schedule auto` may have, all from epoch 0: the first batch, then its doublings.

    It starts at the batch given, or at global_batch / 32. Without a given one it starts higher if that batch would not divide
    into at least two parts of `smallest_part` samples: their gradients are compared. Raises a UsageError for a given start
    that cannot be used.
    """
    first, given = global_batch, text.partition(":")[2]
    for _ in range(_HALVINGS):
        count = _count_parts(first // 2, global_batch, parts, smallest_part)
        if first % 2 or count < 2 or first // 2 % count:
            break
        first //= 2
    if given:
        first, usual = int(given), first
        batches = _doublings(first, global_batch)
        if first > global_batch:
            raise UsageError(
                f"--batch-schedule {text} starts above the global batch of {global_batch}: use a larger --global-batch"
            )
        if batches[-1] != global_batch:
            raise UsageError(
                f"--batch-schedule {text}: the global batch of {global_batch} is not {given} times a power of 2: use"
                f" --global-batch {batches[-1]}"
            )
        counts = [_count_parts(batch, global_batch, parts, smallest_part) for batch in batches]
        wrong = next((pair for pair in zip(batches, counts, strict=True) if pair[0] % pair[1]), None)
        if counts[0] < 2 <= parts or wrong:
            batch, count = wrong or (first, counts[0])
            why = f"does not divide into {count} equal parts" if wrong else "has one part, and gradients of parts are compared"
            raise UsageError(f"--batch-schedule {text}: a batch of {batch} {why}: start at {usual}, or change --smallest-part")
    if parts < 2:
        raise UsageError(f"--batch-schedule {text} compares the gradients of parts: use --virtual-workers 2 or more")
    return tuple(
        Phase(0.0, batch, _count_parts(batch, global_batch, parts, smallest_part)) for batch in _doublings(first, global_batch)
    )


def _doublings(first: int, global_batch: int) -> list[int]:
    batches = [first]
    while batches[-1] < global_batch:
        batches.append(2 * batches[-1])
    return batches


def parse_batch_schedule(text: str) -> tuple[tuple[float, int], ...]:
    """The (epoch, global batch) pairs of a `--batch-schedule`; empty for "" and "auto"."""
    if not text or is_auto(text):
        return ()
    return parse_pairs("batch_schedule", text, _RULE, "phase")


def largest_batch(pairs: Sequence[tuple[float, int]], default: int = 0) -> int:
    """The largest batch of a schedule's (epoch, global batch) pairs; `default` if there are none."""
    return max((batch for _, batch in pairs), default=default)


def write_batch_schedule(given: str | Sequence[tuple[float, int]] | Mapping[Any, Any]) -> str:
    """A schedule as text in one form, from any text, pairs or a table as TOML has it: {"0" = 1024, "2.5" = 4096}."""
    if isinstance(given, str):
        return write_pairs(parse_batch_schedule(given)) or given
    text = write_pairs(given)
    if not parse_batch_schedule(text):
        raise UsageError(f"--batch-schedule has no phases: {_RULE}")
    return text


def make_phases(pairs: Sequence[tuple[float, int]], parts: int, smallest_part: int) -> tuple[Phase, ...]:
    """The phases of a schedule. `parts` is V: what the largest batch is cut into.

    A smaller batch is cut into V parts too, unless they would have fewer than `smallest_part` samples: then into fewer parts. A
    `smallest_part` above the largest batch / V counts as that. Raises a UsageError for a batch that does not divide into its
    parts.
    """
    phases = []
    largest = largest_batch(pairs)
    for start, batch in pairs:
        count = _count_parts(batch, largest, parts, smallest_part)
        if batch % count:
            below, above = batch // count * count, (batch // count + 1) * count
            if _count_parts(above, largest, parts, smallest_part) != count:  # it would have more parts
                above = (count + 1) * min(smallest_part, largest // parts)
            raise UsageError(
                f"--batch-schedule: the global batch of {batch} from epoch {start:g} on does not divide into"
                f" {plural(count, 'equal part')}: use {f'{below} or {above}' if below else above}"
            )
        phases.append(Phase(start, batch, count))
    return tuple(phases)


def grow_batch(global_batch: int, epochs: float, parts: int, smallest_part: int, least: int) -> str:
    """A schedule that doubles the batch three times up to global_batch: at 10%, 30% and 60% of the epochs.

    As in the arm "muon to 8192, 4 parts, 196 steps" of studies/growth.toml. Batches below `least` are left out.
    "" if fewer than two phases are left: then the batch cannot grow.
    """
    pairs: list[tuple[float, int]] = []
    for share, divisor in _GROWTH:
        batch = _whole_parts(global_batch // divisor, global_batch, parts, smallest_part)
        if batch >= least and (not pairs or batch > pairs[-1][1]):
            pairs.append((round(share * epochs, 9) if pairs else 0.0, batch))
    return write_batch_schedule(pairs) if len(pairs) > 1 else ""


def resize_batch_schedule(text: str, global_batch: int, parts: int, smallest_part: int, *, stretch: float = 1.0) -> str:
    """A schedule with `global_batch` as its largest batch, the others in proportion, and its epochs times `stretch`.

    Each batch is rounded down so that it divides into its parts. For auto the first batch is chosen again.
    """
    if is_auto(text):
        return AUTO
    pairs = parse_batch_schedule(text)
    largest = largest_batch(pairs)
    resized = []
    for start, batch in pairs:
        small = max(1, batch * global_batch // largest)
        resized.append((round(start * stretch, 9), _whole_parts(small, global_batch, parts, smallest_part)))
    return write_batch_schedule(resized) if resized else ""


def batch_words(batches: Sequence[int]) -> str:
    """The batches of a run's phases: `1,024 to 8,192 in 4 phases`; `1,024` for a single one, "" for none. If the batch goes up
    and down: `between 1,024 and 8,192 in 4 phases`."""
    if len(batches) < 2:
        return "".join(f"{batch:,}" for batch in batches)
    count = plural(len(batches), "phase")
    if list(batches) in (sorted(batches), sorted(batches, reverse=True)):
        return f"{batches[0]:,} to {batches[-1]:,} in {count}"
    return f"between {min(batches):,} and {max(batches):,} in {count}"


def place_of(start: float, samples: int) -> int:
    """A time in epochs, in samples since the start of the run, rounded up. One written as samples / all samples is exact."""
    whole = int(start)
    return whole * samples + math.ceil((start - whole) * samples - _ROUNDING)


def start_of(done: int, samples: int) -> float:
    """The place after this many samples, in epochs: the shortest number that `place_of` turns back into it."""
    rounded = (round(done / samples, digits) for digits in range(17))
    return next((start for start in rounded if place_of(start, samples) == done), done / samples)


def check_largest(pairs: Sequence[tuple[float, int]], global_batch: int | None) -> None:
    """Raise a UsageError if a global batch is given besides a schedule, and is not its largest."""
    largest = largest_batch(pairs, global_batch or 0)
    if global_batch is not None and largest != global_batch:
        raise UsageError(
            f"--global-batch is {global_batch}, but the largest batch of --batch-schedule {write_pairs(pairs)!r} is {largest}:"
            " change one of them, or give --batch-schedule none for a constant batch"
        )


def as_phases(
    given: str | Mapping[Any, Any] | Sequence[Phase], global_batch: int | None, parts: int, smallest_part: int
) -> tuple[Phase, ...]:
    """The phases of `Parts(batch_schedule=...)`; empty for a constant batch. Errors name flags: see `naming_arguments`."""
    if not isinstance(given, str | Mapping):
        phases = [phase for phase in given if isinstance(phase, Phase)] if isinstance(given, Sequence) else None
        if phases is None or len(phases) != len(given):
            raise UsageError(
                f'batch_schedule is {given!r}: give text such as "0:256 1:512", or a dict such as {{0: 256, 1: 512}}'
            )
        return tuple(phases)
    text = given if isinstance(given, str) else write_batch_schedule(given)
    if is_auto(text):
        raise UsageError("batch_schedule='auto' is for paceline train: in a loop of your own, give the epochs and batches")
    pairs = parse_batch_schedule(text)
    largest = largest_batch(pairs, global_batch or 0)
    if global_batch is not None and largest != global_batch:
        raise UsageError(
            f"the largest batch of batch_schedule is {largest}, but the global batch (global_batch, or the loader's batch_size)"
            f" is {global_batch}: they must be equal"
        )
    return make_phases(pairs, parts, smallest_part)


@contextmanager
def naming_arguments() -> Iterator[None]:
    """Let errors that name flags name the arguments of `Parts` instead."""
    try:
        yield
    except UsageError as error:
        raise UsageError(_FLAG.sub(lambda flag: flag[1].replace("-", "_"), str(error))) from None


def _count_parts(batch: int, largest: int, parts: int, smallest_part: int) -> int:
    """How many parts a batch is cut into. `largest` is the largest batch, with all the parts."""
    return parts if batch == largest else min(parts, max(1, batch // max(1, min(smallest_part, largest // parts))))


def _whole_parts(batch: int, largest: int, parts: int, smallest_part: int) -> int:
    """The batch, rounded down to a multiple of the parts that `make_phases` cuts it into; the largest one as it is."""
    count = _count_parts(batch, largest, parts, smallest_part)
    return batch if batch == largest else batch // count * count
