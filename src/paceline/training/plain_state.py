"""State of a user's objects as plain values in a checkpoint: only what has changed since they were made.

What a constructor sets (functions, settings) is made again by a resumed run, so it need not be stored. What changes must be
numbers, text, and lists and dicts of them: nothing in a checkpoint is pickled.
"""

import copy
from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from paceline.errors import UsageError

_MISSING = object()


def snapshot(value: Any) -> Any:
    """A copy of all dicts and lists in it; everything else as it is."""
    if type(value) is dict:
        return {key: snapshot(item) for key, item in value.items()}
    if type(value) is list:
        return [snapshot(item) for item in value]
    return copy.copy(value) if isinstance(value, Mapping) else value  # MultiStepLR has a Counter


def find_changes(before: Mapping[str, Any], now: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The entries that differ from a snapshot, as plain values. Raises a UsageError, about `what`, if one is not plain."""
    found: dict[str, Any] = {}
    for name, value in now.items():
        old = before.get(name, _MISSING)
        if isinstance(value, Tensor):
            raise _not_plain(what, name, value)  # a comparison could not see that it changes in place
        if _is_named(value) and _is_named(old):
            inner: Any = find_changes(old, value, what)
        elif _are_named(value) and _are_named(old) and len(value) == len(old):
            inner = [find_changes(a, b, what) for a, b in zip(old, value, strict=True)]
            inner = inner if any(inner) else []
        elif _is_same(old, value):
            continue
        else:
            found[name] = plain_value(value, what, name)
            continue
        if inner:
            found[name] = inner
    return found


def merge(into: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Put changes into a snapshot of the same object, made again."""
    for name, value in changes.items():
        old: Any = into.get(name)
        if _is_named(value) and _is_named(old):
            merge(old, value)
        elif value and _are_named(value) and _are_named(old) and len(value) == len(old):
            for a, b in zip(old, value, strict=True):
                merge(a, b)
        else:
            into[name] = tuple(value) if isinstance(old, tuple) else value


def _is_same(old: Any, value: Any) -> bool:
    try:
        return old is value or bool(old == value)
    except (TypeError, ValueError):  # arrays of numpy compare element by element
        return False


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(key, str) for key in value)


def _are_named(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_named, value))


def plain_value(value: Any, what: str, name: str) -> Any:
    """A value as numbers, text, and lists and dicts of them. Raises a UsageError, about `what`, if it is something else."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Real):  # numpy's
        return float(value)
    if isinstance(value, list | tuple):
        return [plain_value(item, what, name) for item in value]
    if _is_named(value):
        return {key: plain_value(item, what, name) for key, item in value.items()}
    raise _not_plain(what, name, value)


def _not_plain(what: str, name: str, value: Any) -> UsageError:
    return UsageError(
        f"{what} keeps {name!r} as {type(value).__name__}: what changes must be numbers, text or lists of them, so that a"
        " checkpoint can hold it"
    )
