"""Atomic writes, JSON files and locks: the only module that implements them."""

import errno
import fcntl
import json
import math
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Protocol

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No room: the disk, the user's quota, or the limit on a file's size. Later writes may succeed."""

MOST_JSON_BYTES = 200_000_000
"""`read_json` refuses larger files."""

_ABANDONED_S = 3600.0  # a live writer touches its file more often
_BUSY = (errno.EWOULDBLOCK, errno.EACCES)


@contextmanager
def replacing(path: Path, *, sync_folder: bool = False) -> Iterator[Path]:
    """Yield a new, empty temporary file next to `path`; rename it to `path` if the block succeeds, remove it if it fails.

    A link planted under the temporary name is removed, not followed. The file gets the permissions of the umask, even if
    the code in the block replaces it with a private one, as safetensors does. With `sync_folder` the rename itself is on
    disk when this returns, and survives a power loss.
    """
    _remove_abandoned(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    temporary.unlink(missing_ok=True)
    created = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    mode = stat.S_IMODE(os.fstat(created).st_mode)
    os.close(created)
    try:
        yield temporary
        with temporary.open("rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) != mode:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if sync_folder:
        opened = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def write_file(path: Path, text: str) -> None:
    """Write a text file that is either complete or absent. A device or a pipe is written to directly. Raises OSError."""
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_text(text, encoding="utf-8")
        return
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, *, indent: int = 2) -> None:
    """Write a JSON file that is either complete or absent; NaN and infinities become null. Raises OSError."""
    write_file(path, json.dumps(finite(value), indent=indent, allow_nan=False) + "\n")


class ReadablePath(Protocol):
    """What `read_json` needs of a path: a `pathlib.Path`, or one of the board's."""

    def is_file(self) -> bool: ...
    def stat(self) -> os.stat_result: ...
    def read_bytes(self) -> bytes: ...


def read_json(path: ReadablePath, *, most_bytes: int = MOST_JSON_BYTES) -> dict[str, Any]:
    """Read the object in a JSON file. Raises OSError, or a ValueError that says in a few words what is wrong."""
    size = path.stat().st_size
    if not path.is_file():  # reading a pipe could wait forever
        raise ValueError("it is not a file")
    if size > most_bytes:
        raise ValueError(f"it is larger than {most_bytes // 1_000_000} MB")
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ValueError("it is not valid JSON, or was cut short" if size else "it is empty") from None
    if not isinstance(found, dict):
        raise ValueError("it does not hold a JSON object")
    return found


def finite(value: Any, *, as_text: bool = False) -> Any:
    """Replace NaN and infinities, at any depth, by None, or by text such as "nan": JSON cannot express them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value) if as_text else None
    if isinstance(value, Mapping):
        return {str(name): finite(inner, as_text=as_text) for name, inner in value.items()}
    return [finite(inner, as_text=as_text) for inner in value] if isinstance(value, list | tuple) else value


@contextmanager
def lock(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold a lock file for the block, or until this process dies; yields False if `wait` is off and another process has it."""
    from filelock import FileLock, Timeout  # here: it takes 20 ms to import, and most commands lock nothing

    held = FileLock(path)
    try:
        held.acquire(timeout=-1 if wait else 0)
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        held.release()


def lock_open(file: IO[bytes], patience_s: float = 0.0) -> bool:
    """Lock an open data file until it is closed or this process dies. False if another process still has it after `patience_s`.

    Not filelock: that has no shared lock, which lets any number of readers ask `is_locked` without hindering each other, and
    it locks a file of its own, while this lock must go with the data file. True on file systems without locks.
    """
    end = time.monotonic() + patience_s
    while not _try_flock(file, fcntl.LOCK_EX):
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def is_locked(file: IO[bytes]) -> bool:
    """Whether a process holds `lock_open` on this file. Closing the file releases the shared lock this takes."""
    return not _try_flock(file, fcntl.LOCK_SH)


def _try_flock(file: IO[bytes], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _BUSY
    return True


def _remove_abandoned(path: Path) -> None:
    """Remove temporary files left by killed writers."""
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            ours = entry.name.startswith(f".{path.name}.") and entry.name.endswith("part")
            if ours and time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_S:
                os.unlink(entry.path)
