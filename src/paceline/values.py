"""Options as text: names of flags, names of folders, and options that are written as text but mean numbers."""

import itertools
import math
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import UsageError

_MOST_STEPS = 10**12
_MOST_NAME = 200  # file systems allow 255 bytes; we add a few of our own


def flag(name: str) -> str:
    """The flag of a field: `base_lr` is `--base-lr`."""
    return "--" + name.replace("_", "-")


def short(value: Any, most: int = 60) -> str:
    """A value as text that fits in a message."""
    try:
        text = str(value)
    except (RecursionError, ValueError):  # nested too deeply; a number of thousands of digits
        text = f"a very large {type(value).__name__}"
    return text if len(text) <= most else f"{text[:most]}..."


def check_text(what: str, text: str) -> None:
    """Raise a UsageError for control characters and invalid Unicode: the text is printed and used in file names."""
    if any(unicodedata.category(c) in ("Cc", "Cs") for c in text):
        raise UsageError(f"{what} is {short(repr(text))}: it must not contain control characters or bytes that are not UTF-8")


def check_name(what: str, name: str, hint: str = "") -> None:
    """Raise a UsageError if a name cannot be that of a folder."""
    check_text(what, name)
    if not name or Path(name).name != name or name == ".." or name.startswith("-") or len(name.encode()) > _MOST_NAME:
        rule = f"at most {_MOST_NAME} bytes, without a slash, not starting with a dash"
        raise UsageError(f"{what} is {short(repr(name))}: it must be a plain name ({rule}){hint}")


def check_record_name(name: str) -> None:
    """Raise a UsageError if `--name` is neither empty nor the name of a folder."""
    if name:
        check_name("--name", name, "; --runs-dir sets the folder")


def parse_pairs(name: str, text: str, rule: str, what: str) -> tuple[tuple[float, int], ...]:
    """The (epoch, number) pairs of an option such as "0:1024 1:2048 2.5:4096". `what` begins at each of these epochs."""
    pairs = []
    for each in text.replace(",", " ").split():
        epoch, colon, number = each.partition(":")
        pairs.append((_number(epoch, float), int(_number(number, int)) if colon else -1))
    if not pairs or any(start < 0 or number < 1 for start, number in pairs):
        raise UsageError(f"{flag(name)} is {short(repr(text))}: {rule}")
    if pairs[0][0] != 0:
        raise UsageError(f"{flag(name)} starts at epoch {pairs[0][0]:g}: the first {what} must start at epoch 0")
    for (before, _), (start, count) in itertools.pairwise(pairs):
        if start <= before:
            raise UsageError(
                f"{flag(name)}: {start:g}:{count} comes after a {what} that starts at epoch {before:g}: each {what} must start"
                " later than the one before"
            )
    return tuple(pairs)


def write_pairs(pairs: Sequence[tuple[float, int]] | Mapping[Any, Any]) -> str:
    """The text of (epoch, number) pairs, also from a table as TOML has it: {"0" = 1024, "2.5" = 4096}."""
    items = pairs.items() if isinstance(pairs, Mapping) else pairs
    return " ".join(f"{_write_start(start)}:{number}" for start, number in items)


def _write_start(start: Any) -> str:
    """A time that reads back as the same number."""
    return f"{start:g}" if isinstance(start, float) and float(f"{start:g}") == start else f"{start}"


def _number(text: str, kind: type[int] | type[float]) -> float:
    """A number of at least 0 in ASCII digits; -1 for anything else."""
    try:
        value = kind(text) if text.isascii() and "_" not in text else -1
    except ValueError:
        return -1
    return value if math.isfinite(value) and 0 <= value <= _MOST_STEPS else -1


def parse_every(text: str) -> tuple[int, float]:
    """`--checkpoint-every` as (steps, seconds); at least one of them is 0."""
    number, seconds = text.removesuffix("s"), text.endswith("s")
    try:
        value = float(number) if seconds else int(number)
    except ValueError:
        value = -1
    if not 0 <= value <= _MOST_STEPS:
        raise UsageError(
            f"--checkpoint-every is {short(repr(text))}: it must be a number of steps (500) or of seconds (60s), or 0"
        )
    return (0, float(value)) if seconds else (int(value), 0.0)


def parse_milestones(text: str) -> tuple[float, ...]:
    """`--step-at` in order: numbers below 1 are fractions of the run, all others epochs; the two cannot be mixed."""
    try:
        values = tuple(sorted(float(each) for each in text.split(",")))
    except ValueError:
        values = (-1.0,)
    rule = "it must be fractions of the run (0.5,0.75) or epochs (30,60)"
    if not all(0 < value <= _MOST_STEPS for value in values):
        raise UsageError(f"--step-at is {short(repr(text))}: {rule}")
    if values[0] < 1 <= values[-1]:
        raise UsageError(
            f"--step-at is {short(repr(text))}: {rule}, not both: numbers below 1 are fractions, others are epochs"
        )
    return values
