"""Paths that cannot leave a folder, even through links. The board reads records through these.

A path is checked each time it is used: a record that was swapped for a link is not read. The folders above a file are opened
one by one without following links, so nothing can be swapped between the check and the read.
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
    """A path that only reaches what is inside `root`. Links within `root` are followed; anything else seems not to exist.

    It has the `pathlib.Path` methods needed to read a record.
    """

    path: Path
    root: Path
    """Absolute, without links."""

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
        """The status of what the path leads to."""
        return self._reach(_stat)

    def exists(self) -> bool:
        return self._kind() != 0

    def is_file(self) -> bool:
        return self._kind() == stat.S_IFREG

    def is_dir(self) -> bool:
        return self._kind() == stat.S_IFDIR

    def is_plain_folder(self) -> bool:
        """Whether it is a folder and neither it nor any folder above it is a link."""
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
        """The paths that match. Each is checked when it is used."""
        return (ConfinedPath(found, self.root) for found in self.path.glob(pattern))

    def _kind(self) -> int:
        try:
            return stat.S_IFMT(self.stat().st_mode)
        except OSError:
            return 0

    def _reach(self, act: Callable[[int, str], T]) -> T:
        """Act on what this path leads to. Most paths contain no links and need not be resolved."""
        try:
            return self._walk(self.path, act)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
        return self._walk(Path(os.path.realpath(self.path)), act)

    def _walk(self, path: Path, act: Callable[[int, str], T]) -> T:
        """Act on (open folder, name in it), without following links. Raises ELOOP or ENOTDIR at a link."""
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
