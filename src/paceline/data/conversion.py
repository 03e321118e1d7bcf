"""Convert what a user gives to tensors: whole arrays, and samples stacked into a batch. If that fails, one line says why."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from paceline.errors import UsageError
from paceline.output import plural


def to_tensors(given: Any) -> tuple[Tensor, ...]:
    """The tensors of a data set, from tensors and numpy arrays. Raises a UsageError unless they have one length."""
    if not isinstance(given, tuple | list):
        raise UsageError(f"Arrays got {name_type(given)}: it takes one tuple of arrays, as in Arrays((x, y)) or Arrays((x,))")
    if not given:
        raise UsageError("Arrays got no arrays: give a tuple with at least one, as in Arrays((x, y))")
    tensors = tuple(_to_tensor(i, array) for i, array in enumerate(given))
    lengths = [len(tensor) for tensor in tensors]
    if len(set(lengths)) > 1:
        raise UsageError(
            f"the arrays of a data set have {', '.join(map(str, lengths))} samples: they must have the same length, one entry"
            " per sample"
        )
    return tensors


def _to_tensor(i: int, given: Any) -> Tensor:
    if isinstance(given, np.ndarray):
        given = _from_numpy(i, given)
    if not isinstance(given, Tensor):
        raise UsageError(
            f"array {i} of Arrays is {name_type(given)}: give a torch tensor or a numpy array, such as torch.tensor(values)"
        )
    if given.layout != torch.strided:
        raise UsageError(f"array {i} of Arrays is a sparse tensor: convert it with .to_dense()")
    if not given.dim():
        raise UsageError(f"array {i} of Arrays is a single number: its first dimension must be the samples")
    return given.detach() if given.requires_grad else given  # data is not trained


def _from_numpy(i: int, given: np.ndarray) -> Tensor:
    """A tensor of the same type that shares memory where torch can: not with negative strides or foreign byte order."""
    array = given.astype(given.dtype.newbyteorder("=")) if not given.dtype.isnative else given
    if any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nobody writes to it
            return torch.from_numpy(array)
    except TypeError:
        raise UsageError(
            f"array {i} of Arrays has numpy type {given.dtype}, which torch does not have: convert it to numbers, as in"
            " array.astype(np.float32)"
        ) from None


def collate(items: Any) -> Any:
    """A tuple of tensors for a Dataset of tuples; a dict of them for a Dataset of dicts."""
    batch = default_collate(items)
    return tuple(batch) if isinstance(batch, list) else batch


def explain_collate(items: Sequence[Any], samples: Sequence[int], data: str) -> str:
    """Why these samples of a Dataset of this name cannot become a batch, in one line; "" if that is not known."""
    for item, sample in zip(items, samples, strict=True):
        odd = _find_odd(item, "")
        if odd:
            return (
                f"sample {sample} of {data} {odd}: samples are stacked into batches, so __getitem__ must return tensors, numpy"
                " arrays or numbers, in a tuple or a dict"
            )
    for item, sample in zip(items[1:], samples[1:], strict=True):
        differs = _find_difference(items[0], item, "")
        if differs:
            pad = "crop, pad or resize them in __getitem__, or give a function that makes a batch: Task(collate=...)"
            fix = pad if "shape" in differs else "all samples must have the same form"
            return f"samples {samples[0]} and {sample} of {data} cannot be stacked into a batch: {differs}; {fix}"
    return ""


def _find_odd(item: Any, where: str) -> str:
    """The first value in a sample that torch cannot stack, in words."""
    if isinstance(item, Mapping | tuple | list):
        found = item.items() if isinstance(item, Mapping) else enumerate(item)
        return next((odd for name, value in found if (odd := _find_odd(value, f"{where}[{name!r}]"))), "")
    holds = f"holds {name_type(item)} at item{where}" if where else f"is {name_type(item)}"
    if isinstance(item, np.ndarray | np.generic):
        return f"{holds} of type {item.dtype}" if item.dtype.kind in "OSUMmV" else ""
    if isinstance(item, Tensor | bool | int | float | complex | str | bytes):
        return ""
    return f"{holds} (is a `return` missing?)" if item is None and not where else holds


def _find_difference(one: Any, other: Any, where: str) -> str:
    """The first difference in form between two samples, in words."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            keys = [", ".join(sorted(repr(key) for key in each)) or "no keys" for each in (one, other)]
            return f"item{where} has {keys[0]} in one and {keys[1]} in the other"
        pairs = [(f"{where}[{name!r}]", value, other[name]) for name, value in one.items()]
    elif isinstance(one, tuple | list) and isinstance(other, tuple | list):
        if len(one) != len(other):
            return f"item{where} has {plural(len(one), 'value')} in one and {len(other)} in the other"
        pairs = [(f"{where}[{i}]", a, b) for i, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        forms = _describe(one), _describe(other)
        return f"item{where} has {forms[0]} in one and {forms[1]} in the other" if forms[0] != forms[1] else ""
    return next((found for path, a, b in pairs if (found := _find_difference(a, b, path))), "")


def _describe(value: Any) -> str:
    """The form of a value in a sample."""
    if isinstance(value, Tensor | np.ndarray):
        return f"shape {tuple(value.shape)}"
    return "a number" if isinstance(value, bool | int | float | complex | np.generic) else name_type(value)


def name_type(value: Any) -> str:
    """What a value is, in words: `None`, `a Tensor`, `an int`, `the class Net`."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str):
        return "text"
    name = "numpy array" if isinstance(value, np.ndarray) else type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
