"""Fields of records, checked: a record may be cut short, edited or somebody else's, and what is wrong with it is one line."""

import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import RecordError


class Odd(ValueError):
    """A field is not what a record holds; the text says which and what it must be."""


def load(path: Path) -> dict[str, Any]:
    """The table in a JSON file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise RecordError(f"{path} is not valid JSON: it was cut short, or is not a record's") from None
    if not isinstance(found, dict):
        raise RecordError(f"{path} holds no table: it is not a record's")
    return found


def table_of(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A field that is a table; an empty one where there is none."""
    value = found.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise Odd(f"{name} is {_short(value)}: it must be a table")
    return value


def whole(found: Mapping[str, Any], name: str, *, least: int = 1) -> int:
    """A field that is a whole number, `least` or above; a KeyError where there is none."""
    value = found[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or not least <= value < 2**62:
        raise Odd(f"{name} is {_short(value)}: it must be a whole number, {least} or above")
    return int(value)


def number(found: Mapping[str, Any], name: str, *, above: bool = False) -> float:
    """A field that is a number, not below 0, or above it; a KeyError where there is none. Records write nan and inf as text."""
    value = found[name]
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    if not good or (above and value == 0):
        raise Odd(f"{name} is {_short(value)}: it must be a number{' above 0' if above else ', 0 or above'}")
    return float(value)


def words(error: Exception) -> str:
    """What is wrong, in our words."""
    if isinstance(error, KeyError):
        return f"no {error}"
    return str(error) if isinstance(error, Odd) else "it does not hold what a record does"


def task_of(about: Mapping[str, Any]) -> str:
    """The TASK that a command line takes: as it was given, or, where that is not known, the contract's name for it."""
    contract = about.get("contract")
    named = contract.get("task") if isinstance(contract, Mapping) else None
    task = next((each for each in (about.get("task"), named) if isinstance(each, str) and each), "TASK")
    return shlex.quote(task)


def _short(value: Any) -> str:
    text = "a table or a list" if isinstance(value, Mapping | list) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
