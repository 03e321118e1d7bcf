"""The shapes that the values of a batch may have: its loss, its metrics and their weight."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from paceline.errors import UsageError


def check_shapes(values: Mapping[str, Any], size: int, source: str) -> None:
    """Raise a UsageError unless each value is a tensor with one number per sample of the batch, or one number in all.

    With a weight that is one number, all values must be: it belongs to the mean over the batch. `source` begins the message, as
    in "the task's objective returned".
    """
    for name, value in values.items():
        if not isinstance(value, Tensor):
            hint = "; leave out .item() or float(), which wait for the device" if isinstance(value, int | float) else ""
            raise UsageError(f"{source} {name!r} as {_name_type(value)}: it must be a tensor{hint}")
        if value.shape not in ((), (size,)):
            raise UsageError(
                f"{source} {name!r} as a tensor of shape {tuple(value.shape)}: it must hold one value per sample, shape"
                f" ({size},), or one number for the batch, shape (){_hint(name, value)}"
            )
    weight = values.get("weight")
    wide = next((name for name, value in values.items() if value.dim()), None)
    if weight is not None and not weight.dim() and wide is not None:
        raise UsageError(
            f"{source} 'weight' as one number for the batch, and {wide!r} with one value per sample: return one weight"
            f" per sample, shape ({size},), or only means over the batch"
        )


def _hint(name: str, value: Tensor) -> str:
    """How to get there from several values per sample."""
    if value.dim() < 2:
        return ""
    return "; use .flatten(1).sum(1)" if name == "weight" else "; use .flatten(1).mean(1), or .mean()"


def _name_type(value: Any) -> str:
    kind = type(value).__name__
    return "None" if value is None else f"{'an' if kind[:1].lower() in tuple('aeiou') else 'a'} {kind}"
