"""Batches of any structure."""

from collections import UserDict, namedtuple
from types import MappingProxyType
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from paceline.core.trees import leaves, map_tensors, move, tensors_in

X, Y, META = torch.ones(4, 2), torch.zeros(4), torch.device("meta")


def test_a_batch_of_any_structure_is_moved() -> None:
    pair = namedtuple("pair", "x y")
    moved = move({"a": [X, (Y,)], "b": pair(X, "text"), "c": 3}, META)
    assert (moved["a"][0].device, moved["a"][1][0].device, moved["b"].x.device) == (META, META, META)
    assert (type(moved["b"]), moved["b"].y, moved["c"]) == (pair, "text", 3)


def test_mappings_that_are_not_dicts() -> None:
    """A collator of Hugging Face returns a BatchEncoding, which is a UserDict."""
    batch: Any = UserDict({"ids": X, "text": "a"})
    for moved in (move((batch,), META)[0], map_tensors(lambda tensor: tensor.to(META), (batch,))[0]):
        assert type(moved) is UserDict
        assert moved["ids"].device == META
    assert list(tensors_in(batch)) == [X]
    assert list(leaves(batch)) == [X, "a"]
    assert batch["ids"].device.type == "cpu"
    assert move(MappingProxyType({"ids": X}), META)["ids"].device == META  # made from a dict, too


def test_the_batch_sizes_of_a_packed_sequence_stay_on_the_cpu() -> None:
    packed = pack_sequence([X[0], Y, X[1, :1]], enforce_sorted=False)
    moved = move([packed], META)[0]
    assert type(moved) is PackedSequence
    assert (moved.data.device, moved.batch_sizes.device.type) == (META, "cpu")
    assert moved.unsorted_indices.device == META


def test_an_object_with_a_method_of_its_own_is_moved_by_it() -> None:
    class Graph:
        def to(self, device: Any) -> Any:
            return ("moved to", str(device))

    assert move([Graph()], META) == [("moved to", "meta")]
