"""What the workers computed for each chunk, in order: one worker, and what a tree may hold."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from harness.training import ALONE
from paceline.core.exact_mean import Chunks
from paceline.core.in_order import gather_in_order
from paceline.errors import UsageError


def test_one_worker_yields_its_own_trees_in_order_and_one_at_a_time() -> None:
    chunks, made = Chunks(5, 2, ALONE), []

    def trees() -> Iterator[Any]:
        for number, samples in zip(chunks.numbers, chunks.mine, strict=True):
            made.append(number)
            yield {"x": torch.from_numpy(samples), "more": (torch.ones(number), [None, number, "text"])}

    for number, tree in enumerate(gather_in_order(chunks, trees())):
        assert made == list(range(number + 1)), "one chunk at a time"
        assert tree["x"].tolist() == [[0, 1], [2, 3], [4]][number]
        assert isinstance(tree["more"], tuple)
        assert tree["more"][0].shape == (number,)
        assert tree["more"][1] == [None, number, "text"]
    assert made == [0, 1, 2]


def test_trees_lose_their_own_classes_on_one_worker_too() -> None:
    """On several workers they travel as JSON: one worker must yield the same."""
    (tree,) = gather_in_order(Chunks(1, 1, ALONE), [OrderedDict(a=torch.ones(1, requires_grad=True))])
    assert type(tree) is dict
    assert not tree["a"].requires_grad


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({1: torch.ones(1)}, "a dict with the key 1: use text"),
        ((torch.ones(1), {2}), "outputs hold a set: use tensors"),
        ([object()], "outputs hold a object: use tensors"),
    ],
)
def test_a_tree_that_cannot_travel_is_one_line(tree: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        list(gather_in_order(Chunks(1, 1, ALONE), [tree]))


def test_an_error_of_the_iterator_and_a_missing_tree_are_raised() -> None:
    def broken() -> Iterator[Any]:
        yield torch.ones(1)
        raise KeyError("x")

    with pytest.raises(KeyError):
        list(gather_in_order(Chunks(2, 1, ALONE), broken()))
    with pytest.raises(ValueError, match="fewer trees than chunks"):
        list(gather_in_order(Chunks(2, 1, ALONE), [torch.ones(1)]))
