"""Read IDX files, the format of MNIST and its descendants, with numpy alone.

An IDX file is two zero bytes, a type code, the rank, one big-endian uint32 per dimension, then the values in row-major order.
It may be compressed with gzip: its first bytes decide, not its name. A file that is damaged in any way is refused: training
with a few wrong images would work, and the error would go unnoticed.
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
    """The array of unsigned bytes in `path`, writable. `DataError` if the file is missing, damaged or of another type."""
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == _GZIP_MAGIC
            file.seek(0)
            if not compressed:
                return _parse(file)
            with gzip.GzipFile(fileobj=file) as content:
                return _parse(cast(BinaryIO, content))
    except FileNotFoundError:
        raise DataError(f"{path} is missing: fetch it, or copy it there") from None
    except EOFError:
        raise DataError(f"{path} is damaged (the gzip stream ends early): {_FIX}") from None
    except (gzip.BadGzipFile, zlib.error, _DamagedError) as error:  # before OSError, the base class of BadGzipFile
        raise DataError(f"{path} is damaged ({error}): {_FIX}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}): check the path and its permissions") from None


class _DamagedError(Exception):
    """What is wrong with the content; shown in parentheses in the error message."""


_GZIP_MAGIC = b"\x1f\x8b"
_UNSIGNED_BYTE = 0x08
_MAX_RANK = 32  # the limit of the oldest numpy we support
_CHUNK_BYTES = 1 << 20
_FIX = "delete it, then fetch or copy it again"


def _parse(content: BinaryIO) -> npt.NDArray[np.uint8]:
    zeros, kind, rank = struct.unpack(">HBB", _read_exactly(content, 4, "header"))
    if zeros != 0 or kind != _UNSIGNED_BYTE or rank > _MAX_RANK:
        raise _DamagedError(f"it starts with {zeros:04x}{kind:02x}{rank:02x}, not with 000008 and a rank up to {_MAX_RANK}")
    shape = struct.unpack(f">{rank}I", _read_exactly(content, 4 * rank, "header"))
    values = _read_exactly(content, math.prod(shape), "content")
    # Reading one more byte finds trailing bytes, and takes gzip to the end of the stream, where it checks the CRC.
    if content.read(1):
        raise _DamagedError(f"it has more than the {len(values):,} bytes that its header announces")
    try:
        return np.frombuffer(values, dtype=np.uint8).reshape(shape)
    except ValueError as error:  # a dimension of 0 next to dimensions that numpy cannot index
        raise _DamagedError(f"shape {shape}: {error}") from None


def _read_exactly(content: BinaryIO, size: int, what: str) -> bytearray:
    """`size` bytes, in chunks: memory grows with the file, not with a damaged header's claim (up to 4 GiB per dimension)."""
    found = bytearray()
    while len(found) < size:
        chunk = content.read(min(_CHUNK_BYTES, size - len(found)))
        if not chunk:
            raise _DamagedError(f"its {what} ends after {len(found):,} of {size:,} bytes")
        found += chunk
    return found
