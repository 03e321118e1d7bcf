"""Samples from tar files, as webdataset writes them: neighboring members with the same name up to the first dot are a sample.

Members are decoded by their ending: json, txt, npy (never pickled arrays) and cls (a whole number). All others stay bytes, such
as images, for the user's `decode`. Nothing in a tar file is ever unpickled or extracted to disk.
"""

import io
import json
import random
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, repeat
from os import PathLike, fspath
from typing import Any, cast

import numpy as np

from paceline.core.stream import Stream
from paceline.errors import UsageError, first_line
from paceline.output import plural

Decode = Callable[[dict[str, Any]], Any]
"""From a sample's fields, by their endings, to the sample that is collated."""


def tar_stream(
    files: Iterable[str | PathLike[str]],
    decode: Decode | None = None,
    *,
    samples: int | None = None,
    shuffle: int = 0,
) -> Stream:
    """A stream of the samples in these tar files. Every epoch reads the files in another order.

    decode: turns a sample's fields, such as {"__key__": "0001", "npy": array, "cls": 3}, into what is collated. samples: the
    number of samples in an epoch (default: all; counting them reads every member's header). shuffle: the size of a buffer in
    which the samples of a shard are mixed. If V divides the number of files, and the files have equally many samples, each part
    reads its own files. Otherwise each part reads the headers of all files, and one sample in V.
    """
    if isinstance(files, str | PathLike):
        raise UsageError(
            f"tar_stream got one path, {fspath(files)}: give a list of files, such as sorted(folder.glob('*.tar'))"
        )
    paths = tuple(fspath(each) for each in files)
    if not paths:
        raise UsageError("tar_stream got no files: check the folder and the pattern")
    if decode is not None and not callable(decode):
        raise UsageError(f"tar_stream: decode is {type(decode).__name__}: give a function of a dict with a sample's fields")
    counts = [sum(1 for _ in _samples(path, repeat(False))) for path in paths] if samples is None else []
    found = sum(counts) if samples is None else samples
    if not found:
        raise UsageError(f"the tar files have no samples: the first of {plural(len(paths), 'file')} is {paths[0]}")
    source = _TarFiles(paths, decode, even=len(set(counts)) <= 1)
    return Stream(source, found, shuffle=shuffle, about=plural(len(paths), "tar file"))


@dataclass(frozen=True)
class _TarFiles:
    """The function of a tar stream."""

    paths: tuple[str, ...]
    decode: Decode | None
    even: bool
    """The files have equally many samples, as far as is known."""

    def __call__(self, shard: int, shards: int, epoch: int) -> Iterator[Any]:
        # The same order in all shards: Stream seeds without the shard. Validation keeps the order of the files.
        paths = list(self.paths) if epoch < 0 else random.sample(self.paths, len(self.paths))
        if self.even and len(paths) % shards == 0:
            return self._read(paths[shard::shards], 0, 1)
        return self._read(paths, shard, shards)

    def _read(self, paths: list[str], first: int, every: int) -> Iterator[Any]:
        """Every n-th sample of these files. Of the others only the headers are read."""
        wanted = (number % every == first for number in count())
        for path in paths:
            for name, contents in _samples(path, wanted):
                if contents is not None:
                    decoded = {ending: _decode_member(path, name, ending, content) for ending, content in contents.items()}
                    fields = {"__key__": name, **decoded}
                    yield fields if self.decode is None else self.decode(fields)


def _samples(path: str, wanted: Iterator[bool]) -> Iterator[tuple[str, dict[str, bytes] | None]]:
    """The name of each sample, and the contents of its members by their ending, or None if it is not wanted.

    A member is read when its header is: in a compressed file, going back to it would read the file from its beginning.
    """
    try:
        with tarfile.open(path) as tar:
            name, endings = "", set[str]()
            contents: dict[str, bytes] | None = None
            for member in tar:
                cast(Any, tar).members = []  # or it keeps all headers that it has read
                folder, _, file = member.name.rpartition("/")
                stem, _, ending = file.partition(".")
                if not member.isfile() or not stem:  # a hidden file, such as .DS_Store or ._0001.jpg, is not a sample
                    continue
                here, ending = f"{folder}/{stem}" if folder else stem, ending.lower()
                if not endings or here != name or ending in endings:
                    if endings:
                        yield name, contents
                    name, endings, contents = here, set(), {} if next(wanted) else None
                endings.add(ending)
                if contents is not None:
                    contents[ending] = cast(Any, tar.extractfile(member)).read()
            if endings:
                yield name, contents
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        why = first_line(error).rstrip(":")
        raise UsageError(f"cannot read the tar file {path}, or it is damaged: {why}") from None


def _decode_member(path: str, name: str, ending: str, content: bytes) -> Any:
    kind = ending.rpartition(".")[2]
    try:
        match kind:
            case "json":
                return json.loads(content)
            case "txt":
                return content.decode()
            case "cls":
                return int(content)
            case "npy":
                return np.load(io.BytesIO(content), allow_pickle=False)
    except ValueError as error:
        raise UsageError(f"cannot decode {name}.{ending} in {path} as {kind}: {error}") from None
    return content
