"""Files of predictions: rows that fit, types, and what is left of a file that could not be completed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import PacelineError, UsageError
from paceline.training import outputs


def write(path: Path, *chunks: torch.Tensor) -> None:
    with outputs.writing(path, sum(map(len, chunks))) as writer:
        for number, chunk in enumerate(chunks):
            writer.add(sum(map(len, chunks[:number])), {"outputs": chunk})


def test_rows_of_different_shapes_are_for_json_only(tmp_path: Path) -> None:
    for suffix in (".npy", ".npz", ".safetensors", ".csv"):
        says = r"outputs is float32 of shape \(2,\) per sample in one batch, .*\(3,\).*X.jsonl"
        with pytest.raises(UsageError, match=says):
            write(tmp_path / f"p{suffix}", torch.zeros(2, 2), torch.zeros(2, 3))
    assert not list(tmp_path.iterdir()), "nothing is left of a file that could not be completed"
    with outputs.writing(tmp_path / "p.jsonl", 3) as writer:
        writer.add(0, {"outputs": torch.full((2, 2), torch.nan)})
        writer.add(2, {"outputs": torch.zeros(1, 3)})
    assert (tmp_path / "p.jsonl").read_text().splitlines()[1:] == [
        '{"sample": 1, "outputs": [null, null]}',
        '{"sample": 2, "outputs": [0.0, 0.0, 0.0]}',
    ]


def test_types_that_numpy_lacks_and_many_columns(tmp_path: Path) -> None:
    with outputs.writing(tmp_path / "p.npy", 2) as writer:
        writer.add(0, {"outputs": torch.ones(2, 3, dtype=torch.bfloat16)})
    assert np.load(tmp_path / "p.npy").dtype == np.float32
    with (
        pytest.raises(UsageError, match=r"a .csv file would need 2,000 columns"),
        outputs.writing(tmp_path / "p.csv", 2) as writer,
    ):
        writer.add(0, {"outputs": torch.ones(2, 2000)})


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        (torch.ones(()), "outputs of shape .. for 2 samples: it must have one row per sample"),
        ({"a": torch.ones(3, 2)}, r"a of shape \(3, 2\) for 2 samples"),
        ({}, "a prediction holds no tensor"),
        ([torch.ones(2), "text"], "a prediction holds a str"),
    ],
)
def test_a_prediction_has_one_row_per_sample(tree: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        outputs.name_rows(tree, 2)


def test_a_full_disk_is_one_line_and_leaves_no_file(tmp_path: Path) -> None:
    says = r"cannot write .*p.jsonl: No space left on device"
    with pytest.raises(PacelineError, match=says), outputs.writing(tmp_path / "p.jsonl", 1):
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())
