"""Models by name: `cnn`, `resnet:depth=20,skip=false`, `wide_resnet:depth=16,width=4,norm=part,part_size=32`.

Owns the built-in networks, one file per family, and how a spec is read.
May import: core, errors. Start reading at `build`, then `resnet.py`.
To add a model, write a file with a function of the same name, and add the name to `_NAMES`.

A spec is `name` or `name:key=value,key=value`. The keys of a model are the keyword parameters of its function, and their
annotations say which values are allowed (`spec.py`). In names and keys, `-` and `_` are the same. A model's file is imported
only when a spec names it, so `names()` and the error for an unknown model never import torch.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, get_type_hints

from paceline import errors
from paceline.models.spec import convert

if TYPE_CHECKING:
    from torch import nn

__all__ = ["build", "check", "names"]

# Each is a file in this package with a function of the same name, small to large.
_NAMES = ("linear", "mlp", "cnn", "resnet", "wide_resnet", "course_wide_resnet")

# `build` passes these to every model. The data determines them, so a spec may not.
_FROM_DATA = ("in_channels", "image_size", "classes")


def names() -> tuple[str, ...]:
    """All model names, small to large."""
    return _NAMES


def check(spec: str) -> None:
    """Raise `UsageError` if `spec` has an unknown model or key, or a value that is not allowed. Builds nothing."""
    _parse(spec)


def build(spec: str, *, in_channels: int, image_size: int, classes: int) -> nn.Module:
    """Build the model of `spec` for square images: (n, in_channels, image_size, image_size) -> (n, classes) logits.

    Initial weights come from torch's global random state: seed it first.
    """
    for what, number in zip(_FROM_DATA, (in_channels, image_size, classes), strict=True):
        if number < 1:
            raise errors.UsageError(f"model {spec}: {what} is {number}: it must be 1 or more")
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
            raise errors.UsageError(f"model {spec}: found {pair!r} instead of key=value{_such_as(name, known)}")
        if key not in known:
            if not known:
                raise errors.UsageError(f"model {name} has no keys, but {pair!r} was given: use {name}")
            raise errors.unknown(f"key of model {name}", given_key, known)
        if key in values:
            raise errors.UsageError(f"model {spec}: {key} is given twice")
        try:
            values[key] = convert(text, known[key])
        except ValueError as error:
            raise errors.UsageError(f"model {name}: {key} is {text!r}: it must be {error}") from None
    return function, values


def _such_as(name: str, known: dict[str, Any]) -> str:
    return f"; keys of {name}: {', '.join(known)}" if known else f"; {name} has no keys"
