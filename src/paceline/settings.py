"""`--set key=value`: values for the parameters of the function that makes a task.

A value from the command line is text. What it means depends on the parameter, so it is converted when the function is known.
"""

import difflib
import inspect
import json
import math
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from paceline.errors import UsageError
from paceline.values import check_text, short


class Text(str):
    """A value as typed on the command line, still to be converted."""

    __slots__ = ()


class Settings(dict[str, Any]):
    """A dict that cannot change: a Config that holds it is frozen and hashable."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self))  # values may be lists

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("settings cannot be changed: make a new Config")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse


def parse_setting(text: str) -> dict[str, Text]:
    """`width=64` as {"width": "64"}."""
    key, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set {short(text)}: it must be key=value, such as --set width=64")
    return {key.strip().replace("-", "_"): Text(value)}


def make_settings(values: Any) -> Settings:
    """Settings from a mapping. A UsageError for values that a record cannot hold."""
    if not isinstance(values, Mapping):
        raise UsageError(f"--set is {short(values)}: it must be a table of settings, such as {{width = 64}}")
    for key in values:
        if not isinstance(key, str) or not key.isidentifier():
            raise UsageError(f"--set {short(key)}: a setting is the name of a parameter: letters, digits and _")
    return Settings({key: _clean(key, value) for key, value in values.items()})


def write_setting(key: str, value: Any) -> str:
    """The text of `--set` that gives this value again."""
    return f"{key}={value if isinstance(value, Text) else _write(value)}"


def fit_settings(make: Callable[..., Any], what: str, given: Mapping[str, Any]) -> Settings:
    """The settings, converted to what the parameters of `make` expect. `what` is its name in errors.

    Raises a UsageError for a setting that `make` does not take, and for a parameter without a value.
    """
    try:
        signature = _signature(make)
    except (TypeError, ValueError):  # a function in C may not say what it takes
        return make_settings({key: _convert(key, value, None) for key, value in given.items()})
    parameters = {
        name: parameter
        for name, parameter in signature.parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    for key in given:
        if key not in parameters and not takes_all:
            near = difflib.get_close_matches(key, parameters, n=1, cutoff=0.6)
            known = f"its parameters are {', '.join(parameters)}" if parameters else "it has no parameters"
            raise UsageError(f"--set {key}: {what} has no such parameter; " + (f"did you mean {near[0]}?" if near else known))
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in given:
            raise UsageError(f"{what} needs a value for {name}: add --set {name}=VALUE")
    return make_settings({key: _convert(key, value, parameters.get(key)) for key, value in given.items()})


def _signature(make: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(make, eval_str=True)
    except Exception:  # an annotation may name what exists only for type checkers
        return inspect.signature(make)


_KINDS: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _convert(key: str, value: Any, parameter: inspect.Parameter | None) -> Any:
    annotated = _kind(parameter.annotation) if parameter else None
    kind = annotated or (type(parameter.default) if parameter and type(parameter.default) in _KINDS else None)
    if isinstance(value, Text):
        found = _read(value, kind)
        if kind is int and annotated is None and found is None:
            found = _read(value, float)  # task(scale=1) may well take 0.5
        if found is None:
            raise UsageError(f"--set {key} is {short(repr(str(value)))}: it must be {_KINDS[kind]}")
        return found
    if kind is float and type(value) is int:
        return float(value)
    if annotated and type(value) is not annotated and not (value is None or _is_union(parameter)):
        raise UsageError(f"--set {key} is {short(repr(value))}: it must be {_KINDS[annotated]}")
    return value


def _kind(annotation: Any) -> Any:
    """int, float, bool or str if the annotation is one of these, alone or with None; None for any other."""
    members = [member for member in _members(annotation) if member is not type(None)]
    return members[0] if len(members) == 1 and members[0] in list(_KINDS) else None


def _is_union(parameter: inspect.Parameter | None) -> bool:
    return parameter is not None and len(_members(parameter.annotation)) > 1


def _members(annotation: Any) -> tuple[Any, ...]:
    """`int | None` as (int, NoneType); any other annotation, `list[int]` too, by itself."""
    return typing.get_args(annotation) if typing.get_origin(annotation) in (typing.Union, types.UnionType) else (annotation,)


def _read(text: str, kind: Any) -> Any:
    """The value of a text from the command line; None if it is not of this kind. Without a kind: a TOML value or text."""
    try:
        match kind:
            case None:
                return _read_toml(text, str(text))
            case _ if kind is str:
                found = _read_toml(text, None) if text[:1] in ("'", '"') else None
                return found if isinstance(found, str) else str(text)
            case _ if kind is bool:
                return {"true": True, "false": False, "1": True, "0": False}.get(text.strip().lower())
            case _:
                number = kind(text)
                return number if math.isfinite(number) else None
    except (ValueError, OverflowError):
        return None


def _read_toml(text: str, otherwise: str | None) -> Any:
    if "\n" in text or ("#" in text and text[:1] not in ("'", '"', "[", "{")):  # more than a value, or a comment
        return otherwise
    try:
        found = tomllib.loads(f"value = {text}")["value"]
        _clean("value", found)
    except (ValueError, RecursionError, UsageError):
        return otherwise
    return found


def _clean(key: str, value: Any) -> Any:
    """The value as TOML and JSON give it back: lists for tuples. A UsageError if they cannot hold it."""
    if isinstance(value, str):
        check_text(f"--set {key}", value)
        return value
    if isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, list | tuple):
        return [_clean(key, each) for each in value]
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: _clean(key, each) for name, each in value.items()}
    rule = "it must be text, a finite number, true or false, or a list or table of these"
    raise UsageError(f"--set {key} is {short(repr(value))}: {rule}")


def _write(value: Any) -> str:
    """A value as TOML in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(name, ensure_ascii=False)} = {_write(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_write, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
