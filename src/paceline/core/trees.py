"""Batches of any structure: trees of tuples, lists and mappings whose leaves are tensors and other values."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def leaves(value: Any) -> Iterator[Any]:
    """The leaves of a tree, in order."""
    if isinstance(value, tuple | list | Mapping):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from leaves(item)
    else:
        yield value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors among the leaves of a tree."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """The same tree, with `function` applied to every leaf."""
    if isinstance(value, PackedSequence):  # its batch sizes stay on the CPU
        indices = [None if each is None else function(each) for each in (value.sorted_indices, value.unsorted_indices)]
        return PackedSequence(function(value.data), value.batch_sizes, *indices)
    if isinstance(value, Mapping):
        items = {name: map_leaves(function, item) for name, item in value.items()}
        with suppress(TypeError):  # a type that is not made from a dict becomes a dict
            return items if isinstance(value, dict) else type(value)(items)  # type: ignore[call-arg]
        return items
    if isinstance(value, tuple | list):
        made = [map_leaves(function, item) for item in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)  # keep a NamedTuple's type
    return function(value)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same tree, with `function` applied to every tensor."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value)


def move(value: Any, device: torch.device) -> Any:
    """A batch on a device: its tensors, and objects of other types that have a method `to`."""

    def to_device(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=leaf.device.type == "cpu" and leaf.is_pinned())
        return leaf.to(device) if hasattr(leaf, "to") else leaf

    return map_leaves(to_device, value)
