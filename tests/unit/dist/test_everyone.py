"""`paceline.print`, `save` and `total` in one process; tests/ranks/test_rounds.py has several workers."""

from pathlib import Path

import pytest
import torch

import paceline
from paceline.errors import UsageError


def as_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun starts it, before it has joined a world."""
    for name, value in {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))


def test_rank_0_alone_prints_and_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    paceline.print("alone")
    for rank in (0, 1):
        as_rank(rank, monkeypatch)
        paceline.print("rank", rank, end="!\n")
        paceline.save({"weight": torch.ones(2)}, tmp_path / f"{rank}.pt")
    assert capsys.readouterr().out == "alone\nrank 0!\n"
    assert [path.name for path in tmp_path.iterdir()] == ["0.pt"]
    assert torch.load(tmp_path / "0.pt")["weight"].tolist() == [1, 1]


def test_equal_states_make_equal_files(tmp_path: Path) -> None:
    for name in ("one.pt", "two.pt"):
        paceline.save({"weight": torch.ones(2)}, tmp_path / name)
    assert (tmp_path / "one.pt").read_bytes() == (tmp_path / "two.pt").read_bytes()


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    paceline.save([1], tmp_path / "file.pt")
    with pytest.raises((AttributeError, TypeError, RuntimeError)):
        paceline.save((part for part in "no pickle has these"), tmp_path / "file.pt")
    assert torch.load(tmp_path / "file.pt") == [1]
    assert len(list(tmp_path.iterdir())) == 1


def test_the_total_of_one_worker_is_its_value() -> None:
    assert paceline.total(3) == 3
    assert paceline.total(0.5, 2) == (0.5, 2)
    assert paceline.total(torch.ones(2)).tolist() == [1, 1]
    with pytest.raises(UsageError, match="total got str: it adds numbers and tensors"):
        paceline.total("3")
    with pytest.raises(UsageError, match="at least one"):
        paceline.total()
