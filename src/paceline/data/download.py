"""Download one file, once per node: it is complete or absent.

Many workers start at the same time and need the same file: one of them downloads it, the others wait for its lock and then find
the file. Bytes go to `<target>.part`; after a broken transfer, a Range request continues it. Only a file with the right SHA-256
is renamed to its final name, so a file with that name is always complete.

For a `.gz` the SHA-256 is that of the *decompressed* content: the published archives of one data set differ only in the time
stamp and name in their gzip header.
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

from filelock import FileLock

from paceline.errors import DataError

Progress = Callable[[int, int | None], None]
"""Called with the bytes received so far and, if the server tells it, the total."""


def fetch(
    urls: Sequence[str],
    target: Path,
    sha256: str,
    *,
    timeout_s: float = 30.0,
    attempts: int = 4,
    progress: Progress | None = None,
) -> Path:
    """Download `target`, whose content has this SHA-256 (see `content_sha256`), from the first of `urls` that delivers it.

    Does not use the network if `target` is already right. `attempts` is the total over all urls, which take turns. Each is
    tried at least once; one that refuses permanently (404 and the like) is not tried again. `timeout_s` is how long a server
    may send nothing. After an interrupt the `.part` stays, and the next call continues from there.
    """
    for url in urls:
        if urlsplit(url).scheme not in ("http", "https"):
            raise DataError(f"cannot download {url}: it must be an http or https address")
    job = _Job(target=target, sha256=sha256, timeout_s=timeout_s, progress=progress)
    if _is_right(job, target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not _is_right(job, target):  # another process may have fetched it while we waited for the lock
                _download(job, urls, attempts)
    except OSError as error:  # from the disk: network errors have become _FailedError
        if error.errno in _DISK_FULL:
            raise DataError(f"no space left for {target}: free some space, or choose a folder on another disk") from None
        raise DataError(f"cannot write {target} ({error.strerror or error}): choose a folder you can write to") from None
    return target


def content_sha256(path: Path) -> str:
    """SHA-256 in hex of the content of `path`, decompressed if it is a `.gz`."""
    return _digest(path, compressed=path.suffix == ".gz")


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_BACK_OFF_S = 0.5  # before the second try of a url; doubles every round
_CHUNK_BYTES = 1 << 16
_GZIP_MAGIC = b"\x1f\x8b"
_WORTH_ANOTHER_TRY = (408, 416, 425, 429)  # of the 4xx codes; all 5xx codes are


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
    """One attempt at one url failed; `for_good` if another attempt would fail too."""

    def __init__(self, why: str, *, for_good: bool = False) -> None:
        super().__init__(" ".join(why.split()))
        self.for_good = for_good


def _is_right(job: _Job, path: Path) -> bool:
    return os.path.isfile(path) and _fault(job, path) is None  # Path.is_file raises in a folder that we may not read


def _fault(job: _Job, path: Path) -> str | None:
    """What is wrong with the content of `path`; None if it is right."""
    try:
        found = _digest(path, compressed=job.target.suffix == ".gz")
    except DataError as error:
        return str(error)
    return None if found == job.sha256 else f"its content has SHA-256 {found[:12]}... instead of {job.sha256[:12]}..."


def _digest(path: Path, *, compressed: bool) -> str:
    try:
        with path.open("rb") as file:
            # Some proxies decompress a .gz in transit. The name then says gzip but the bytes do not; only the content matters.
            compressed = compressed and file.read(2) == _GZIP_MAGIC
            file.seek(0)
            if not compressed:
                return hashlib.file_digest(file, "sha256").hexdigest()
            digest = hashlib.sha256()
            with gzip.GzipFile(fileobj=file) as content:
                while chunk := content.read(_CHUNK_BYTES):
                    digest.update(chunk)
            return digest.hexdigest()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is not a complete gzip file ({error})") from None
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
            if error.errno in _DISK_FULL:  # now, while we hold the lock: later the .part may belong to another process
                job.part.unlink(missing_ok=True)
            raise
    reasons = "; ".join(f"{url}: {why}" for url, why in troubles.items()) or "no address to fetch it from"
    raise DataError(f"cannot download {job.target.name}: {reasons}")


def _get(job: _Job, url: str) -> None:
    """One attempt: transfer, check, rename."""
    continued = _transfer(job, url)
    if continued and _fault(job, job.part):
        # The earlier bytes may come from another archive, or a crash may have damaged them: start over once.
        job.part.unlink()
        _transfer(job, url)
    if fault := _fault(job, job.part):
        job.part.unlink()
        raise _FailedError(fault)
    with job.part.open("r+b") as file:
        os.fsync(file.fileno())  # before the rename, or a power cut could leave the name without the bytes
    os.replace(job.part, job.target)


def _transfer(job: _Job, url: str) -> bool:
    """Download the rest of the `.part`. True if it contains bytes of an earlier transfer."""
    if job.part.is_symlink():  # planted: Paceline never creates one
        job.part.unlink()
    offset = job.part.stat().st_size if job.part.exists() else 0
    headers = {"User-Agent": "paceline"} | ({"Range": f"bytes={offset}-"} if offset else {})
    try:
        response = cast(HTTPResponse, _opener().open(urllib.request.Request(url, headers=headers), timeout=job.timeout_s))
    except HTTPError as error:
        error.close()
        if error.code == 416 and offset:  # no bytes after those we have: it is complete, or another file
            return True
        for_good = 400 <= error.code < 500 and error.code not in _WORTH_ANOTHER_TRY
        raise _FailedError(f"HTTP {error.code} {error.reason}", for_good=for_good) from None
    except (OSError, HTTPException) as error:
        raise _FailedError(_why(error, job.timeout_s)) from None
    with response:
        continued = offset > 0 and response.status == 206  # a server that ignores Range answers 200 and sends everything
        if continued and not re.match(rf"bytes {offset}-", response.headers.get("Content-Range", "")):
            job.part.unlink()
            raise _FailedError("the server sent a different range than requested")
        with open(job.part, "ab" if continued else "wb", opener=_no_link) as file:
            _copy(job, response, file, offset if continued else 0)
    return continued


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _opener() -> urllib.request.OpenerDirector:
    """urllib's default opener without its file, ftp and data handlers, so that redirects cannot lead to these either."""
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
            # read1 returns what has arrived; read would wait for a full chunk and lose its start if the transfer stalls.
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
        return f"no data for {timeout_s:g} s"
    return str(cause) or type(cause).__name__
