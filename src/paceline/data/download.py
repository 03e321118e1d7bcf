"""Fetch one file, once per node, whole or not at all.

Many workers start at the same moment and want the same file: one of them downloads, the others wait for its lock and find the
file. Bytes go to `<target>.part`, which a broken transfer continues with a Range request; only a file whose SHA-256 is right is
renamed to its final name, so that whoever sees that name sees a whole file.

For a `.gz` the SHA-256 is that of the *decompressed* content: the published archives of one data set differ in the time stamp
and name in their gzip header, and in nothing else.
"""

import errno
import gzip
import hashlib
import os
import re
import time
import urllib.request
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, cast
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from paceline.errors import DataError
from paceline.files import lock

Progress = Callable[[int, int | None], None]
"""Called with the bytes there so far and, where the server says, the bytes in all."""


def fetch(
    urls: Sequence[str],
    target: Path,
    sha256: str,
    *,
    timeout_s: float = 30.0,
    attempts: int = 4,
    progress: Progress | None = None,
) -> Path:
    """Make `target` the file whose content has this SHA-256 (see `content_sha256`), from the first of `urls` that delivers it.

    A `target` that is already right costs no network. `attempts` counts over all urls, which take turns; each is tried at least
    once, and one that says no for good (404 and its like) is not asked again. `timeout_s` is the longest silence of a server.
    After an interrupt the `.part` stays, and the next call goes on from there.
    """
    for url in urls:
        if urlsplit(url).scheme not in ("http", "https"):
            raise DataError(f"cannot download {url}: only http and https addresses are allowed")
    job = _Job(target=target, sha256=sha256, timeout_s=timeout_s, progress=progress)
    if _is_right(job, target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with lock(target.with_name(f"{target.name}.lock")):
            if not _is_right(job, target):  # who had the lock before us may have fetched it
                _download(job, urls, attempts)
    except OSError as error:  # the disk's: those of the network are _FailedError by now
        if error.errno in _DISK_FULL:
            raise DataError(f"no space left for {target}: free some, or choose a folder on another disk") from None
        raise DataError(f"cannot write {target} ({error.strerror or error}): choose a folder you can write to") from None
    return target


def content_sha256(path: Path) -> str:
    """SHA-256 in hex of what `path` holds: of the decompressed content if it is a `.gz`, of its bytes otherwise."""
    return _digest(path, packed=path.suffix == ".gz")


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_BACK_OFF_S = 0.5  # before a url's second try; doubles with every round
_CHUNK_BYTES = 1 << 16
_GZIP_MAGIC = b"\x1f\x8b"
_WORTH_ANOTHER_TRY = (408, 416, 425, 429)  # of the 4xx; every 5xx is


@dataclass(frozen=True, kw_only=True)
class _Job:
    target: Path
    sha256: str
    timeout_s: float
    progress: Progress | None

    @property
    def part(self) -> Path:
        return self.target.with_name(f"{self.target.name}.part")


class _FailedError(Exception):
    """One attempt at one url came to nothing; `for_good` if another would too."""

    def __init__(self, why: str, *, for_good: bool = False) -> None:
        super().__init__(" ".join(why.split()))
        self.for_good = for_good


def _is_right(job: _Job, path: Path) -> bool:
    return os.path.isfile(path) and _fault(job, path) is None  # Path.is_file would raise in a folder we may not look into


def _fault(job: _Job, path: Path) -> str | None:
    """What is wrong with `path` as the content of the target; None if nothing is."""
    try:
        found = _digest(path, packed=job.target.suffix == ".gz")
    except DataError as error:
        return str(error)
    return None if found == job.sha256 else f"the content has SHA-256 {found[:12]}..., not {job.sha256[:12]}..."


def _digest(path: Path, *, packed: bool) -> str:
    try:
        with path.open("rb") as file:
            # Some proxies unpack a .gz on its way. Then the name says gzip and the bytes do not; the content is what counts.
            packed = packed and file.read(2) == _GZIP_MAGIC
            file.seek(0)
            if not packed:
                return hashlib.file_digest(file, "sha256").hexdigest()
            digest = hashlib.sha256()
            with gzip.GzipFile(fileobj=file) as content:
                while chunk := content.read(_CHUNK_BYTES):
                    digest.update(chunk)
            return digest.hexdigest()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is not a whole gzip file ({error})") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from None


def _download(job: _Job, urls: Sequence[str], attempts: int) -> None:
    waiting = deque(dict.fromkeys(urls))
    count = len(waiting)
    troubles: dict[str, str] = {}
    tries = 0
    while waiting and tries < max(attempts, count):
        url = waiting.popleft()
        if url in troubles:
            time.sleep(_BACK_OFF_S * 2 ** (tries // count - 1))
        tries += 1
        try:
            return _get(job, url)
        except _FailedError as failure:
            troubles[url] = str(failure)
            if not failure.for_good:
                waiting.append(url)
        except OSError as error:
            if error.errno in _DISK_FULL:  # here, while the lock is ours: later the .part may be another's
                job.part.unlink(missing_ok=True)
            raise
    reasons = "; ".join(f"{url}: {why}" for url, why in troubles.items()) or "no address to fetch it from"
    raise DataError(f"cannot download {job.target.name}: {reasons}")


def _get(job: _Job, url: str) -> None:
    """One attempt: transfer, check, rename."""
    continued = _transfer(job, url)
    if continued and _fault(job, job.part):
        # The earlier bytes may be another archive's, or were damaged by a crash: that is not this server's fault.
        job.part.unlink()
        _transfer(job, url)
    if fault := _fault(job, job.part):
        job.part.unlink()
        raise _FailedError(fault)
    with job.part.open("r+b") as file:
        os.fsync(file.fileno())  # before the rename, or a power cut could leave the name without the bytes
    os.replace(job.part, job.target)  # not files.replacing: a later call continues a partial download


def _transfer(job: _Job, url: str) -> bool:
    """Bring the `.part` to its full length. True if bytes of an earlier transfer are in it."""
    if job.part.is_symlink():  # planted: Paceline never creates one
        job.part.unlink()
    offset = job.part.stat().st_size if job.part.exists() else 0
    headers = {"User-Agent": "paceline"} | ({"Range": f"bytes={offset}-"} if offset else {})
    try:
        response = cast(HTTPResponse, _opener().open(urllib.request.Request(url, headers=headers), timeout=job.timeout_s))
    except HTTPError as error:
        error.close()
        if error.code == 416 and offset:  # nothing lies beyond what we have: it is whole, or not the same file
            return True
        for_good = 400 <= error.code < 500 and error.code not in _WORTH_ANOTHER_TRY
        raise _FailedError(f"HTTP {error.code} {error.reason}", for_good=for_good) from None
    except (OSError, HTTPException) as error:
        raise _FailedError(_why(error, job.timeout_s)) from None
    with response:
        continued = offset > 0 and response.status == 206  # a server that ignores Range answers 200 and sends everything
        if continued and not re.match(rf"bytes {offset}-", response.headers.get("Content-Range", "")):
            job.part.unlink()
            raise _FailedError("the server sent another range than the one asked for")
        with open(job.part, "ab" if continued else "wb", opener=_no_link) as file:
            _copy(job, response, file, offset if continued else 0)
    return continued


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _opener() -> urllib.request.OpenerDirector:
    """urllib's usual opener less its file, ftp and data handlers, so that no redirect leads there either."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.UnknownHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
    ):
        opener.add_handler(handler())
    return opener


def _copy(job: _Job, response: HTTPResponse, file: IO[bytes], done: int) -> None:
    total = None if response.length is None else done + response.length
    while True:
        try:
            # read1 gives what has arrived; read would wait for a full chunk and lose its beginning to a stall.
            chunk = response.read1(_CHUNK_BYTES)
        except (OSError, HTTPException) as error:
            raise _FailedError(f"{_why(error, job.timeout_s)}, after {done:,} bytes") from None
        if not chunk:
            break
        file.write(chunk)
        done += len(chunk)
        if job.progress:
            job.progress(done, total)
    if total is not None and done < total:
        raise _FailedError(f"the transfer broke off after {done:,} of {total:,} bytes")


def _why(error: Exception, timeout_s: float) -> str:
    cause = error.reason if isinstance(error, URLError) else error
    if isinstance(cause, TimeoutError):
        return f"silence for {timeout_s:g} s"
    return str(cause) or type(cause).__name__
