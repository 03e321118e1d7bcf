"""Write a file so that it is either complete or absent."""

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No room: the disk, the user's quota, or the limit on a file's size. Later writes may succeed."""

_ABANDONED_S = 3600.0  # a writer that is alive touches its file more often


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new, empty temporary file next to `path`; it takes that name if the block succeeds, and is removed if it fails.

    A link planted under the temporary name is removed, not followed. The file gets the permissions of the umask, even if
    the code in the block replaces it with a private one, as safetensors does.
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


def write_file(path: Path, text: str) -> None:
    """Write a text file that is either complete or absent. Raises OSError."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _remove_abandoned(path: Path) -> None:
    """Remove temporary files of writers that were killed."""
    with suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            ours = entry.name.startswith(f".{path.name}.") and entry.name.endswith("part")
            if ours and time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_S:
                os.unlink(entry.path)
