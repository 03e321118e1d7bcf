"""Samples from tar files, as webdataset writes them: neighboring members with the same name up to the first dot are a sample.

Members are decoded by their ending: json, txt, npy (never pickled arrays) and cls (a whole number). All others stay bytes, such
as images, for the user's `decode`. Nothing in a tar file is ever unpickled or extracted to disk.
"""

import io
import json
import random
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from os import PathLike, fspath
from pathlib import PurePosixPath
from typing import Any, cast

import numpy as np

from paceline.core.stream import Stream
from paceline.errors import UsageError
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
    counts = [sum(1 for _ in _headers(path)) for path in paths] if samples is None else []
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
        found = ((path, members) for path in paths for members in _headers(path))
        for path, (name, tar, members) in islice(found, first, None, every):
            fields: dict[str, Any] = {"__key__": name}
            for ending, member in members.items():
                content = cast(Any, tar.extractfile(member)).read()
                fields[ending] = _decode_member(path, member.name, ending, content)
            yield fields if self.decode is None else self.decode(fields)


def _headers(path: str) -> Iterator[tuple[str, tarfile.TarFile, dict[str, tarfile.TarInfo]]]:
    """For each sample: its name, the open file, and its members by their ending."""
    try:
        tar = tarfile.open(path)  # noqa: SIM115  # closed below
    except (OSError, tarfile.TarError) as error:
        raise UsageError(f"cannot read the tar file {path}: {error}") from None
    with tar:
        name, members = "", dict[str, tarfile.TarInfo]()
        for member in tar:
            cast(Any, tar).members = []  # or it keeps all headers that it has read
            if not member.isfile():
                continue
            place = PurePosixPath(member.name)
            stem, _, ending = place.name.partition(".")
            here = str(place.with_name(stem))
            if members and (here != name or ending.lower() in members):
                yield name, tar, members
                members = {}
            name = here
            members[ending.lower()] = member
        if members:
            yield name, tar, members


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
        raise UsageError(f"cannot decode {name} in {path} as {kind}: {error}") from None
    return content
