"""A path that cannot leave its folder."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

from paceline.report.confined import ConfinedPath


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a record, links that stay inside and links that lead out."""
    root = tmp_path.resolve() / "root"
    (root / "record").mkdir(parents=True)
    (root / "record" / "file").write_text("inside")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("outside")
    (root / "link").symlink_to(root / "record")
    (root / "record" / "link").symlink_to("file")
    (root / "out").symlink_to(tmp_path / "outside")
    (root / "record" / "out").symlink_to("../../outside/file")
    (root / "record" / "dangling").symlink_to("nowhere")
    os.mkfifo(root / "record" / "pipe")
    return root


@pytest.mark.parametrize("name", ["record/file", "record/link", "link/file", "link/link"])
def test_paths_inside_are_read(root: Path, name: str) -> None:
    path = ConfinedPath(root, root) / name
    assert path.read_bytes() == b"inside"
    assert (path.exists(), path.is_file(), path.is_dir()) == (True, True, False)
    assert path.stat().st_size == 6
    assert (path.name, str(path), path.parent.name) == (Path(name).name, str(root / name), Path(name).parent.name)


@pytest.mark.parametrize(
    "name", ["out/file", "record/out", "record/dangling", "record/nothing", "../outside/file", "record/file/x"]
)
def test_paths_outside_do_not_exist(root: Path, name: str) -> None:
    path = ConfinedPath(root / name, root)
    assert (path.exists(), path.is_file(), path.is_dir(), path.is_plain_folder()) == (False,) * 4
    with pytest.raises(OSError, match=r"board's folder|No such file|Not a directory"):
        path.open()


def test_folders(root: Path) -> None:
    paths = {name: ConfinedPath(root / name, root) for name in ("record", "link", "out", "record/file")}
    assert [name for name, path in paths.items() if path.is_dir()] == ["record", "link"]
    assert [name for name, path in paths.items() if path.is_plain_folder()] == ["record"]
    assert ConfinedPath(root, root).is_plain_folder()
    found = {path.parent.name: path.is_file() for path in ConfinedPath(root, root).glob("*/file")}
    assert found == {"record": True, "link": True, "out": False}


def test_a_pipe_is_not_a_file_and_is_not_opened(root: Path) -> None:
    path = ConfinedPath(root / "record" / "pipe", root)
    assert (path.exists(), path.is_file()) == (True, False)
    with pytest.raises(OSError, match="not a regular file"):
        path.open()


def test_every_use_checks_the_path_again(root: Path, tmp_path: Path) -> None:
    path = ConfinedPath(root / "record" / "file", root)
    assert path.read_bytes() == b"inside"
    (root / "record").rename(root / "old")
    (root / "record").symlink_to(tmp_path / "outside")
    with pytest.raises(FileNotFoundError):
        path.open()
    assert not path.exists()


def test_no_file_stays_open(root: Path) -> None:
    before = os.listdir("/proc/self/fd")
    for name in ("record/file", "link/file", "out/file", "record/pipe", "record/nothing", "record", "link"):
        path = ConfinedPath(root / name, root)
        path.exists()
        path.is_plain_folder()
        with suppress(OSError):
            path.read_bytes()
    assert os.listdir("/proc/self/fd") == before
