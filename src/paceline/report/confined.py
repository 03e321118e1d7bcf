"""Paths that cannot leave a folder, even through links. The board reads records through these.

A path is checked each time it is used, not once: a record that was swapped for a link is not read. The folders above a file are
opened one by one without following links, so nothing can be swapped between the check and the reading either.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe would wait for its writer


@dataclass(frozen=True)
class ConfinedPath:
    """A path that only leads to what lies inside `root`; links within it are followed. The rest looks as if it did not exist.

    It has the `pathlib.Path` methods needed to read a record.
    """

    path: Path
    root: Path
    """Absolute, with no link in it."""

    def __str__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> "ConfinedPath":
        return ConfinedPath(self.path / name, self.root)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def stem(self) -> str:
        return self.path.stem

    @property
    def parent(self) -> "ConfinedPath":
        return ConfinedPath(self.path.parent, self.root)

    def resolve(self) -> "ConfinedPath":
        """Returns itself: the path is absolute, and link targets are not revealed."""
        return self

    def stat(self) -> os.stat_result:
        """Of what it leads to."""
        return self._reach(_stat)

    def exists(self) -> bool:
        return self._kind() != 0

    def is_file(self) -> bool:
        return self._kind() == stat.S_IFREG

    def is_dir(self) -> bool:
        return self._kind() == stat.S_IFDIR

    def is_plain_folder(self) -> bool:
        """Whether it is a folder and neither it nor one above it is a link."""
        try:
            return stat.S_ISDIR(self._walk(self.path, _stat).st_mode)
        except OSError:
            return False

    def open(self, mode: str = "rb") -> BinaryIO:
        """Open a regular file to read bytes."""
        assert mode == "rb"
        return self._reach(_open)

    def read_bytes(self) -> bytes:
        with self.open() as file:
            return file.read()

    def glob(self, pattern: str) -> Iterator["ConfinedPath"]:
        """Names that match; what each leads to is checked when it is used."""
        return (ConfinedPath(found, self.root) for found in self.path.glob(pattern))

    def _kind(self) -> int:
        try:
            return stat.S_IFMT(self.stat().st_mode)
        except OSError:
            return 0

    def _reach(self, act: Callable[[int, str], T]) -> T:
        """Act on what this path leads to. Most paths have no link in them, and need not be resolved."""
        try:
            return self._walk(self.path, act)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
        return self._walk(Path(os.path.realpath(self.path)), act)

    def _walk(self, path: Path, act: Callable[[int, str], T]) -> T:
        """Act on (open folder, name in it), through folders that are no links; ELOOP or ENOTDIR where one is."""
        if not path.is_relative_to(self.root) or ".." in path.parts:
            raise FileNotFoundError(errno.ENOENT, "it leads out of the board's folder", str(self.path))
        *folders, name = path.relative_to(self.root).parts or (".",)
        here = os.open(self.root, _FOLDER)
        try:
            for folder in folders:
                inner = os.open(folder, _FOLDER, dir_fd=here)
                os.close(here)
                here = inner
            return act(here, name)
        finally:
            os.close(here)


AnyPath = Path | ConfinedPath


def _stat(folder: int, name: str) -> os.stat_result:
    about = os.stat(name, dir_fd=folder, follow_symlinks=False)
    if stat.S_ISLNK(about.st_mode):
        raise OSError(errno.ELOOP, "it is a link")
    return about


def _open(folder: int, name: str) -> BinaryIO:
    fd = os.open(name, _FILE, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise
