"""Read IDX files, the format of MNIST and its descendants, with numpy alone.

An IDX file is two zero bytes, a type code, the rank, one big-endian uint32 a dimension, then the values in row-major order. It
may be packed with gzip; which it is, its first bytes say, not its name. A file that is damaged in any way is refused whole: a
data set with a few wrong images would train, and nobody would notice.
"""

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt

from paceline.errors import DataError


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The array of unsigned bytes in `path`, writable; a `DataError` if the file is missing, damaged or of another kind."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == _GZIP_MAGIC
            file.seek(0)
            if not packed:
                return _parse(file)
            with gzip.GzipFile(fileobj=file) as content:
                return _parse(cast(BinaryIO, content))
    except FileNotFoundError:
        raise DataError(f"{path} is missing: fetch it, or copy it there") from None
    except EOFError:
        raise DataError(f"{path} is damaged (the gzip stream ends early): {_FIX}") from None
    except (gzip.BadGzipFile, zlib.error, _DamagedError) as error:  # before OSError, which BadGzipFile is
        raise DataError(f"{path} is damaged ({error}): {_FIX}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}): check the path and its permissions") from None


class _DamagedError(Exception):
    """What is wrong with the content, for the brackets of the message."""


_GZIP_MAGIC = b"\x1f\x8b"
_UNSIGNED_BYTE = 0x08
_MAX_RANK = 32  # what every numpy we support can hold
_CHUNK_BYTES = 1 << 20
_FIX = "delete it, then fetch or copy it again"


def _parse(content: BinaryIO) -> npt.NDArray[np.uint8]:
    zeros, kind, rank = struct.unpack(">HBB", _read_exactly(content, 4, "header"))
    if zeros != 0 or kind != _UNSIGNED_BYTE or rank > _MAX_RANK:
        raise _DamagedError(f"it starts with {zeros:04x}{kind:02x}{rank:02x}, not with 000008 and a rank up to {_MAX_RANK}")
    shape = struct.unpack(f">{rank}I", _read_exactly(content, 4 * rank, "header"))
    values = _read_exactly(content, math.prod(shape), "content")
    # Asking for one byte more finds trailing bytes, and brings gzip to its end, where it checks its CRC.
    if content.read(1):
        raise _DamagedError(f"bytes follow after the {len(values):,} that its header promises")
    try:
        return np.frombuffer(values, dtype=np.uint8).reshape(shape)
    except ValueError as error:  # a dimension of 0 beside ones that numpy cannot index
        raise _DamagedError(f"shape {shape}: {error}") from None


def _read_exactly(content: BinaryIO, size: int, what: str) -> bytearray:
    """`size` bytes, in chunks: memory follows what is there, not what a damaged header promises (up to 4 GiB a dimension)."""
    found = bytearray()
    while len(found) < size:
        chunk = content.read(min(_CHUNK_BYTES, size - len(found)))
        if not chunk:
            raise _DamagedError(f"its {what} ends after {len(found):,} of {size:,} bytes")
        found += chunk
    return found
