"""Files that are complete or absent: who may read them, and what a temporary name may hit."""

import os
import stat
from pathlib import Path

import pytest

from paceline.files import replacing, write_file


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_the_umask_decides_who_reads_a_file(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_file(tmp_path / "plain", "text")
        with replacing(tmp_path / "private") as path:  # safetensors writes a file of its own, for the owner alone
            path.unlink()
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    finally:
        os.umask(before)
    for name in ("plain", "private"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("planted", [".page.part", f".page.{os.getpid()}.part"], ids=["old name", "this process's name"])
def test_a_planted_link_is_not_followed(tmp_path: Path, planted: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    (tmp_path / planted).symlink_to(victim)
    write_file(tmp_path / "page", "ours")
    assert victim.read_text() == "theirs"
    assert (tmp_path / "page").read_text() == "ours"
    assert not (tmp_path / "page").is_symlink()


def test_what_killed_writers_left_goes_and_what_others_write_stays(tmp_path: Path) -> None:
    names = [".page.part", ".page.7.part", ".page.8.part", ".other.9.part"]
    for name in names:
        (tmp_path / name).write_text("half")
    for name in names[:2]:
        os.utime(tmp_path / name, (1e9, 1e9))
    os.utime(tmp_path / ".other.9.part", (1e9, 1e9))
    write_file(tmp_path / "page", "whole")
    assert {path.name for path in tmp_path.iterdir()} == {"page", ".page.8.part", ".other.9.part"}
