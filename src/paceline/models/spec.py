"""The allowed values of a model's keys, and how they are read from a spec.

A model function annotates each keyword: `bool`, `str`, a `Literal`, or a number with a `Rule` (`Count`, `Fraction`). Only the
annotation says what is allowed: `convert` uses it to read the text and to write the error message.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from paceline import errors


@dataclass(frozen=True)
class Rule:
    """A limit on a number. Attach with `Annotated[int, Rule(...)]`."""

    text: str
    """Completes "must be ...", including the type: "a whole number, 1 or more"."""
    holds: Callable[[Any], bool]


Count = Annotated[int, Rule("a whole number, 1 or more", lambda n: n >= 1)]
Fraction = Annotated[float, Rule("a number from 0 to below 1", lambda x: 0 <= x < 1)]

_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_NUMBERS = {int: "a whole number", float: "a number"}


def convert(text: str, annotation: Any) -> object:
    """`text` as a value of `annotation`. The text of a `ValueError` completes "must be ..."."""
    if get_origin(annotation) is Annotated:
        plain, rule = get_args(annotation)
        try:
            value = convert(text, plain)
        except ValueError:
            raise ValueError(rule.text) from None
        if not rule.holds(value):
            raise ValueError(rule.text)
        return value
    if get_origin(annotation) is Literal:
        if text not in get_args(annotation):
            raise ValueError(f"one of {', '.join(get_args(annotation))}")
        return text
    if annotation is bool:
        if text.lower() not in _BOOLS:
            raise ValueError("true or false (or yes, no, 1, 0)")
        return _BOOLS[text.lower()]
    if annotation in _NUMBERS:
        try:
            return annotation(text)
        except ValueError:
            raise ValueError(_NUMBERS[annotation]) from None
    assert annotation is str, f"a model key is annotated {annotation}: options.convert cannot read that yet"
    return text


def require_image_size(model: str, image_size: int, least: int) -> None:
    """Raise `UsageError` if images are too small to be halved as often as the net does."""
    if image_size < least:
        raise errors.UsageError(f"model {model}: images are {image_size}x{image_size}: they must be {least}x{least} or larger")
