"""The code of docs/data.md runs."""

import io
import random
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import Stream, Weighted, balanced, tar_stream
from paceline.core.stream import StreamReader

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "data.md").read_text(), re.S)
NAMES = {"Stream": Stream, "Weighted": Weighted, "balanced": balanced, "tar_stream": tar_stream, "torch": torch, "Path": Path}


def run_block(word: str, **names: Any) -> dict[str, Any]:
    """The fields that the block with this word gives to Task."""
    (block,) = [block for block in BLOCKS if word in block]
    given = {**NAMES, "random": random, "Task": lambda *_, **fields: fields, **names}
    exec(block, given)
    return dict(given["task"]) if "task" in given else given


def test_every_block_is_tested() -> None:
    assert len(BLOCKS) == 4


def test_collate() -> None:
    tokens, labels = run_block("def collate")["collate"]([(torch.ones(2), 0), (torch.ones(3), 1)])
    assert tokens.shape == (2, 3)
    assert labels.tolist() == [0, 1]


def test_sampling() -> None:
    run_block("sampling=weights", weights=[1.0, 2.0], labels=[0, 1, 1])


def test_a_stream_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for file in range(4):
        Path("data", f"{file}.jsonl").write_text("".join(f"{file * 3 + line}\n" for line in range(3)))
    reader = StreamReader(run_block("def read", parse=int)["train"], 2, 0)
    assert sorted(reader.read(0, number) for number in range(12)) == list(range(12))


def test_a_stream_of_tar_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    with tarfile.open("data/a.tar", "w") as tar:
        for name, content in (("1.jpg", b"image"), ("1.json", b'{"label": 3}')):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    assert StreamReader(run_block("def decode", decode_image=len)["train"], 1, 0)[0] == (5, 3)
