"""Checked fields of records. A record may be cut short, edited or foreign; each mistake is reported in one line."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import RecordError, reason
from paceline.files import read_json
from paceline.models import names

_MOST = 1e18  # seconds, bytes or samples per second; anything above is not a measurement


class BadField(ValueError):
    """A field with an impossible value; the text names it and says what it must be."""


def load(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot read {path}: {reason(error)}") from None


def table_of(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A field that is a table; empty if it is missing."""
    value = found.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadField(f"{name} is {short(value)}: it must be a table")
    return value


def whole(found: Mapping[str, Any], name: str, *, least: int = 1) -> int:
    """A field that is a whole number, at least `least`; a KeyError if it is missing."""
    value = found[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1 or not least <= value < 2**62:
        raise BadField(f"{name} is {short(value)}: it must be a whole number, {least} or above")
    return int(value)


def number(found: Mapping[str, Any], name: str, *, above: bool = False) -> float:
    """A field that is a number, at least 0; with `above`, not 0. A KeyError if it is missing.

    Records write nan and inf as text.
    """
    value = found[name]
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST
    if not good or (above and value == 0):
        raise BadField(f"{name} is {short(value)}: it must be a number{' above 0' if above else ', 0 or above'}")
    return float(value)


def words(error: Exception) -> str:
    """What is wrong with a record, in a few words."""
    if isinstance(error, KeyError):
        return f"no {error}"
    return str(error) if isinstance(error, BadField) else "it does not have the format of a record"


def task_of(about: Mapping[str, Any]) -> str:
    """The TASK for a command line: as it was given, or the contract's name for it if that is unknown."""
    contract = about.get("contract")
    named = contract.get("task") if isinstance(contract, Mapping) else None
    task = next((each for each in (about.get("task"), named) if isinstance(each, str) and each), "TASK")
    return shlex.quote(task)


def own_flags(contract: Any) -> str:
    """The flags that train the same model again, after a space: ` --model resnet`; empty if TASK is enough.

    A contract names the model that `--model` built, or the class of the task's own model, which needs no flag.
    """
    model = contract.get("model") if isinstance(contract, Mapping) else None
    if not isinstance(model, str) or model == _DEFAULT_MODEL:
        return ""
    known = model.partition(":")[0].strip().replace("-", "_") in names()
    return f" --model {shlex.quote(model)}" if known else ""


_DEFAULT_MODEL = "cnn"  # the default of the built-in tasks


def short(value: Any) -> str:
    """A value as an error shows it, cut if it is long."""
    try:
        text = "a table or a list" if isinstance(value, Mapping | list) else repr(value)
    except ValueError:  # Python does not print numbers with thousands of digits
        text = "a number with thousands of digits"
    return text if len(text) <= 40 else f"{text[:37]}..."
