"""What the value of a single option may be, whatever the other options are."""

import math
import unicodedata
from pathlib import Path
from typing import Any

from paceline.errors import UsageError

_AT_LEAST: dict[str, float] = {
    **dict.fromkeys(("workers", "nodes", "reference_batch", "global_batch", "accumulate", "epochs", "patience"), 1),
    **dict.fromkeys(("log_every", "timeout_s", "virtual_workers", "min_workers", "keep"), 1),
    **dict.fromkeys(("parts_at_once", "max_restarts", "grace_s", "eval_batch"), 0),
    **dict.fromkeys(("node_id", "train_samples", "crop", "loader_workers", "base_lr", "weight_decay", "clip_norm"), 0),
    **dict.fromkeys(("warmup_epochs", "warmup_steps", "warmup_from", "max_steps", "seed", "check_every"), 0),
    **dict.fromkeys(
        ("trust_coefficient", "rest_lr", "sam_rho", "gradient_noise", "norm_part", "local_steps", "step_factor"), 0
    ),
}
_AT_MOST: dict[str, float] = {
    "seed": 2**64 - 1,  # keys have 64 bits: a larger seed would be the same as a smaller one
    "workers": 4096,  # processes on this node
    "loader_workers": 1024,  # processes of each worker
    "timeout_s": 10_000_000,  # four months
    "grace_s": 10_000_000,
}
_MOST_WHOLE, _MOST = 10**12, 1e30  # of any other whole number, which must fit in 64 bits, and number, in a float32
_FRACTIONS = ("erase", "momentum", "beta1", "beta2", "label_smoothing", "target_accuracy", "peak_at", "ema", "local_after")
_MOST_NAME = 200  # file systems allow 255 bytes, of which a few are ours


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


def check_value(name: str, value: Any) -> None:
    """Raise a UsageError if no other option could make this value right."""
    if isinstance(value, str):
        _check_text(flag(name), value)
    elif isinstance(value, int | float):
        _check_number(name, value)
    if name == "checkpoint_every":
        parse_every(value)
    if name == "step_at":
        parse_fractions(value)
    if name == "name" and value:
        check_name("--name", value, "; the folder is --runs-dir")


def check_name(what: str, name: str, hint: str = "") -> None:
    """Raise a UsageError if a name cannot be that of a folder."""
    _check_text(what, name)
    if not name or Path(name).name != name or name == ".." or name.startswith("-") or len(name.encode()) > _MOST_NAME:
        rule = f"at most {_MOST_NAME} bytes, no slash, no dash at its start"
        raise UsageError(f"{what} is {short(repr(name))}: it must be a plain name ({rule}){hint}")


def parse_every(text: str) -> tuple[int, float]:
    """`--checkpoint-every` as (steps, seconds), of which one at least is 0."""
    number, seconds = text.removesuffix("s"), text.endswith("s")
    try:
        value = float(number) if seconds else int(number)
    except ValueError:
        value = -1
    if not 0 <= value <= _MOST_WHOLE:
        raise UsageError(
            f"--checkpoint-every is {short(repr(text))}: it must be a number of steps (500) or of seconds (60s), or 0"
        )
    return (0, float(value)) if seconds else (int(value), 0.0)


def parse_fractions(text: str) -> tuple[float, ...]:
    """`--step-at` as numbers between 0 and 1, in order."""
    try:
        values = tuple(sorted(float(each) for each in text.split(",")))
    except ValueError:
        values = (-1.0,)
    if not all(0 < value < 1 for value in values):
        raise UsageError(f"--step-at is {short(repr(text))}: it must be fractions of the run such as 0.5,0.75")
    return values


def _check_number(name: str, value: float) -> None:
    low, high = _AT_LEAST.get(name), _AT_MOST.get(name, _MOST_WHOLE if isinstance(value, int) else _MOST)
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{flag(name)} is {value}: it must be a finite number")
    if low is not None and value < low:
        raise UsageError(f"{flag(name)} is {short(value)}: it must be at least {low}")
    if name in _FRACTIONS and not 0 <= value <= 1:
        raise UsageError(f"{flag(name)} is {short(value)}: it must lie between 0 and 1")
    if name in ("beta1", "beta2", "ema") and value == 1:
        raise UsageError(f"{flag(name)} is 1: it must be less than 1, or nothing new would be learned")
    if abs(value) > high:
        raise UsageError(f"{flag(name)} is {short(value)}: it must be at most {high:,}")
    if name == "base_lr" and value == 0:
        raise UsageError("--base-lr is 0: nothing would be learned")


def _check_text(what: str, text: str) -> None:
    """No control characters and nothing that is not Unicode: it is printed, and becomes names of files."""
    if any(unicodedata.category(c) in ("Cc", "Cs") for c in text):
        raise UsageError(f"{what} is {short(repr(text))}: it must not contain control characters or bytes that are not UTF-8")
