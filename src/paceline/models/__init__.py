"""The models by name: `cnn`, `resnet:depth=20,skip=false`, `wide_resnet:depth=16,width=4,norm=part,part_size=32`.

A spec is `name` or `name:key=value,key=value`. The keys of a model are the keyword parameters of its function; their
annotations say what a value may be (`options.py`), so a new key needs no line here and a new model only one. In names and keys
`-` and `_` are the same.

Model files are imported when a spec asks for them: `names()` and the complaint about an unknown model never load torch.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_type_hints

from paceline import errors
from paceline.models import options

if TYPE_CHECKING:
    from torch import nn

__all__ = ["build", "check", "names"]

# Each is a file of this package that holds a function of the same name.
_NAMES = ("linear", "mlp", "cnn", "resnet", "wide_resnet", "course_wide_resnet")

# What `build` gives every model: the data decides these, so a spec may not.
_FROM_DATA = ("in_channels", "image_size", "classes")


def names() -> tuple[str, ...]:
    """The models there are, small to large."""
    return _NAMES


def check(spec: str) -> None:
    """Raise `UsageError` where `spec` names no model, an unknown key or a value that is not allowed; build nothing."""
    _parse(spec)


def build(spec: str, *, in_channels: int, image_size: int, classes: int) -> nn.Module:
    """The model of `spec` for square images of `image_size` pixels a side: (n, in_channels, side, side) -> (n, classes) logits.

    Initial weights come from torch's global random state: seed it first.
    """
    for what, number in zip(_FROM_DATA, (in_channels, image_size, classes), strict=True):
        if number < 1:
            raise errors.UsageError(f"model {spec}: {what} is {number}, must be 1 or more")
    function, values = _parse(spec)
    net: nn.Module = function(in_channels=in_channels, image_size=image_size, classes=classes, **values)
    return net


def _parse(spec: str) -> tuple[Callable[..., Any], dict[str, object]]:
    """The model's function and its keyword values, all checked."""
    given_name, colon, pairs = spec.partition(":")
    name = given_name.strip().replace("-", "_")
    if name not in _NAMES:
        raise errors.unknown("model", given_name, _NAMES)
    function: Callable[..., Any] = getattr(importlib.import_module(f"{__name__}.{name}"), name)
    hints = get_type_hints(function, include_extras=True)
    known = {key: hints[key] for key in inspect.signature(function).parameters if key not in _FROM_DATA}
    values: dict[str, object] = {}
    for pair in pairs.split(",") if colon else ():
        given_key, equals, text = (piece.strip() for piece in pair.partition("="))
        key = given_key.replace("-", "_")
        if not equals:
            raise errors.UsageError(f"model {spec}: found {pair!r} where key=value belongs{_such_as(name, known)}")
        if key not in known:
            if not known:
                raise errors.UsageError(f"model {name} has no keys, found {pair!r}")
            raise errors.unknown(f"key of model {name}", given_key, known)
        if key in values:
            raise errors.UsageError(f"model {spec}: {key} is given twice")
        try:
            values[key] = options.convert(text, known[key])
        except ValueError as error:
            raise errors.UsageError(f"model {name}: {key} is {text!r}, must be {error}") from None
    return function, values


def _such_as(name: str, known: dict[str, Any]) -> str:
    return f"; keys of {name}: {', '.join(known)}" if known else f"; {name} has no keys"
