"""Samples from tar files: grouped by name, decoded without running anything, dealt to shards."""

import gzip
import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.core.stream import StreamReader
from paceline.data.tar import tar_stream
from paceline.errors import UsageError


def write_tar(path: Path, samples: dict[str, dict[str, bytes]]) -> Path:
    """A tar file with these samples: name -> ending -> content."""
    with tarfile.open(path, "w") as tar:
        for name, fields in samples.items():
            for ending, content in fields.items():
                member = tarfile.TarInfo(f"{name}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def numbered(folder: Path, sizes: list[int]) -> list[Path]:
    """Files with these numbers of samples. A sample's class is its number, counted over all files."""
    paths, first = [], 0
    for number, size in enumerate(sizes):
        samples = {f"part/{i:04d}": {"cls": str(i).encode(), "txt": b"text"} for i in range(first, first + size)}
        paths.append(write_tar(folder / f"{number}.tar", samples))
        first += size
    return paths


def classes(stream: Any, shards: int, epoch: int = 0) -> list[int]:
    reader = StreamReader(stream, shards, 0)
    return [reader.read(epoch, number)["cls"] for number in range(len(stream))]


def npy(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, value, **options)
    return file.getvalue()


def test_members_are_decoded_by_their_ending(tmp_path: Path) -> None:
    fields = {
        "json": b'{"a": 1}',
        "txt": b"hello",
        "cls": b"7\n",
        "npy": npy(np.arange(3)),
        "seg.png": b"\x89PNG",
        "PKL": b"?",
    }
    (found,) = [StreamReader(tar_stream([write_tar(tmp_path / "a.tar", {"one": fields})]), 1, 0)[0]]
    assert found["npy"].tolist() == [0, 1, 2]
    del found["npy"]
    assert found == {"__key__": "one", "json": {"a": 1}, "txt": "hello", "cls": 7, "seg.png": b"\x89PNG", "pkl": b"?"}


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    evil = npy(np.array([Evil()], dtype=object), allow_pickle=True)
    path = write_tar(tmp_path / "a.tar", {"one": {"npy": evil, "pkl": pickle.dumps(Evil())}})
    with pytest.raises(UsageError, match=r"cannot decode one.npy in .*a.tar as npy: "):
        StreamReader(tar_stream([path]), 1, 0)[0]
    assert not EVIL


EVIL: list[int] = []


class Evil:
    def __reduce__(self) -> Any:
        return EVIL.append, (1,)


@pytest.mark.parametrize(("sizes", "shards"), [([4, 4, 4, 4], 2), ([4, 4, 4, 4], 3), ([5, 1, 3], 3), ([5, 1, 3], 2), ([9], 4)])
def test_each_sample_once_in_another_order_of_files(tmp_path: Path, sizes: list[int], shards: int) -> None:
    stream = tar_stream(numbered(tmp_path, sizes))
    assert len(stream) == sum(sizes)
    orders = [classes(stream, shards, epoch) for epoch in range(5)]
    assert all(sorted(order) == list(range(sum(sizes))) for order in orders)
    assert orders[0] == classes(stream, shards, 0)
    assert len(sizes) == 1 or len(set(map(tuple, orders))) > 1
    assert classes(stream, 1, -1) == list(range(sum(sizes))), "validation keeps the order of the files"


def test_decode_makes_the_sample(tmp_path: Path) -> None:
    stream = tar_stream(numbered(tmp_path, [3]), lambda fields: (fields["cls"], fields["txt"]))
    assert StreamReader(stream, 1, 0)[2] == (2, "text")


def test_mistakes(tmp_path: Path) -> None:
    (path,) = numbered(tmp_path, [2])
    broken, empty = tmp_path / "b.tar", write_tar(tmp_path / "c.tar", {})
    broken.write_bytes(b"no tar at all")
    for files, words in (
        ([], "tar_stream got no files"),
        (str(path), "tar_stream got one path, .*: give a list of files"),
        ([broken], "cannot read the tar file .*b.tar"),
        ([tmp_path / "none.tar"], "cannot read the tar file .*No such file"),
        ([empty], "the tar files have no samples: the first of 1 file is"),
    ):
        with pytest.raises(UsageError, match=words):
            tar_stream(files)
    with pytest.raises(UsageError, match="decode is int"):
        tar_stream([path], 3)  # type: ignore[arg-type]


def test_hidden_files_are_not_samples_and_names_lead_nowhere(tmp_path: Path) -> None:
    """macOS adds such members; nothing is extracted, so a path is only a name."""
    file = tmp_path / "a.tar"
    with tarfile.open(file, "w") as tar:
        for name in (".DS_Store", "../up/._1.cls", "..", "../up/1.cls", "../up/1.txt"):
            member = tarfile.TarInfo(name)
            member.size = 1
            tar.addfile(member, io.BytesIO(b"7"))
    stream = tar_stream([file])
    assert list(stream.open(0, 1, -1, 0)) == [{"__key__": "../up/1", "cls": 7, "txt": "7"}]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar"]


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    (file,) = numbered(tmp_path, [20])
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(UsageError, match=r"cannot read the tar file .*damaged"):
        tar_stream([file])


def test_a_compressed_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Going back in it would read it from its beginning: 3,000 small samples took 16 s instead of 1.5 s."""
    (plain,) = numbered(tmp_path, [20])
    file = tmp_path / "b.tar.gz"
    file.write_bytes(gzip.compress(plain.read_bytes()))
    stream, back = tar_stream([file]), list[int]()
    rewind = gzip._GzipReader._rewind  # type: ignore[attr-defined]
    monkeypatch.setattr(gzip._GzipReader, "_rewind", lambda self: (back.append(1), rewind(self)))  # type: ignore[attr-defined]
    assert len(list(stream.open(0, 1, -1, 0))) == 20
    assert len(back) <= 1  # opening looks at the first block twice
