"""What a user gives becomes tensors, or one line says why not."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from paceline.data.loaders import Arrays, Streaming
from paceline.errors import UsageError

X = np.arange(12, dtype=np.float32).reshape(4, 3)


def read_only() -> np.ndarray:
    array = X.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (X, torch.float32),
        (X.astype(np.float64), torch.float64),
        (X.astype(">f4"), torch.float32),
        (X.astype(np.uint8), torch.uint8),
        (X[::-1][::-1], torch.float32),
        (np.asfortranarray(X), torch.float32),
        (read_only(), torch.float32),
    ],
)
def test_numpy_arrays_become_tensors_of_the_same_type(given: np.ndarray, dtype: torch.dtype) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (tensor,) = Arrays((given,)).tensors
    assert tensor.dtype == dtype
    assert tensor.tolist() == X.tolist()


def test_numpy_arrays_are_not_copied() -> None:
    array = X.copy()
    (tensor,) = Arrays((array,)).tensors
    array[0, 0] = 7
    assert tensor[0, 0] == 7


def test_a_list_of_arrays_and_negative_strides() -> None:
    data = Arrays([X[::-1], torch.arange(4)])  # type: ignore[arg-type]
    assert data.tensors[0].tolist() == X[::-1].tolist()
    assert data[1][1] == 1


def test_data_is_not_trained() -> None:
    (tensor,) = Arrays((torch.zeros(3, requires_grad=True),)).tensors
    assert not tensor.requires_grad


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: Arrays(torch.zeros(3)), r"Arrays got a Tensor: it takes one tuple of arrays, as in Arrays\(\(x, y\)\)"),
        (lambda: Arrays({"x": X}), "Arrays got a dict: it takes one tuple"),
        (lambda: Arrays(()), "Arrays got no arrays: give a tuple with at least one"),
        (lambda: Arrays(X, X), "Arrays got a numpy array as its text `about`: give all arrays as one tuple"),
        (lambda: Arrays(([1, 2], [3, 4])), r"array 0 of Arrays is a list: give a torch tensor or .* torch.tensor\(values\)"),
        (lambda: Arrays((X, None)), "array 1 of Arrays is None"),
        (lambda: Arrays((torch.tensor(3),)), "array 0 of Arrays is a single number: its first dimension must be the samples"),
        (lambda: Arrays((torch.eye(3).to_sparse(),)), r"is a sparse tensor: convert it with .to_dense\(\)"),
        (lambda: Arrays((np.array([{}]),)), r"has numpy type object, which torch does not have: .* array.astype\(np.float32\)"),
        (lambda: Arrays((np.array(["cat"]),)), "has numpy type <U3, which torch does not have"),
        (lambda: Arrays((X, X[:2], X)), "have 4, 2, 4 samples: they must have the same length"),
    ],
)
def test_what_is_not_an_array_is_refused(given: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        given()


class Scripted(Dataset[Any]):
    """Four samples, as given."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def read(*items: Any) -> None:
    order = [np.array([2, 0, 3, 1])]
    list(Streaming(Scripted(*items), None, torch.device("cpu"), 0, 0).batches(order, 0))


A, B = torch.zeros(3), torch.zeros(2)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        (
            [(A, 1), (B, 1), (A, 1), (A, 1)],
            r"samples 2 and 1 of Scripted cannot be stacked into a batch: item\[0\] has shape \(3,\) in one and shape \(2,\) in"
            " the other; crop, pad or resize them .* Task\\(collate=",
        ),
        ([{"x": A}, {"x": A}, {"x": A}, {"x": B}], r"samples 2 and 3 .* item\['x'\] has shape \(3,\) in one"),
        ([np.zeros(2), np.zeros(2), np.zeros(2), np.zeros(3)], r"samples 2 and 3 .* item has shape \(2,\) in one"),
        ([{"x": A}, {"y": A}, {"x": A}, {"x": A}], "samples 2 and 1 .* item has 'x' in one and 'y' in the other; all samples"),
        ([(A,), (A, 1), (A, 1), (A, 1)], "samples 2 and 0 .* item has 2 values in one and 1 in the other"),
        ([(A, 1), (A, 1), (A, 1), (A, "cat")], r"samples 2 and 3 .* item\[1\] has a number in one and text in the other"),
        ([None, A, A, A], r"sample 0 of Scripted is None \(is a `return` missing\?\): samples are stacked"),
        ([(A, None)] * 4, r"sample 2 of Scripted holds None at item\[1\]: .* __getitem__ must return tensors"),
        ([(object(), 1)] * 4, r"sample 2 of Scripted holds an object at item\[0\]"),
        ([{"x": np.array([None])}] * 4, r"sample 2 of Scripted holds a numpy array at item\['x'\] of type object"),
    ],
)
def test_samples_that_do_not_stack_are_named(items: list[Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read(*items)


def test_samples_that_stack_are_left_alone() -> None:
    read((A, 1, "a"), (A, 2, "b"), (A, 3.0, "c"), (A, True, ""))


def test_an_error_of_the_users_own_stays_as_it_is() -> None:
    class Failing(Scripted):
        def __getitem__(self, index: int) -> Any:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        list(Streaming(Failing(A), None, torch.device("cpu"), 0, 0).batches([np.array([0])], 0))
