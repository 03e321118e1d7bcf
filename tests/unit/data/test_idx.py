"""`read_idx` returns what was written, and refuses every file that is damaged."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from paceline.data import idx
from paceline.data.idx import read_idx
from paceline.errors import DataError


def idx_bytes(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        read_idx(path)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    return text


VALUES = np.arange(2 * 3 * 5, dtype=np.uint8).reshape(2, 3, 5)
WHOLE = idx_bytes(VALUES)


@pytest.mark.parametrize("shape", [(), (7,), (0,), (4, 28, 28), (2, 1, 3, 1, 2)])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_round_trip_of_any_rank(tmp_path, shape, pack):
    values = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    path = tmp_path / "values"
    path.write_bytes(pack(idx_bytes(np.asarray(values))))
    found = read_idx(path)
    np.testing.assert_array_equal(found, values)
    assert found.dtype == np.uint8
    assert found.flags.writeable


def test_magic_bytes_decide_not_the_name(tmp_path):
    (tmp_path / "plain.gz").write_bytes(WHOLE)
    (tmp_path / "packed").write_bytes(gzip.compress(WHOLE))
    np.testing.assert_array_equal(read_idx(tmp_path / "plain.gz"), VALUES)
    np.testing.assert_array_equal(read_idx(tmp_path / "packed"), VALUES)


@pytest.mark.parametrize("length", range(len(WHOLE)))
def test_a_plain_file_cut_anywhere_is_refused(tmp_path, length):
    (tmp_path / "cut").write_bytes(WHOLE[:length])
    assert "damaged" in refusal(tmp_path / "cut")


@pytest.mark.parametrize("lost", [1, 4, 8, 12, 30])
def test_a_gzip_file_cut_short_is_refused(tmp_path, lost):
    (tmp_path / "cut.gz").write_bytes(gzip.compress(WHOLE)[:-lost])
    assert "damaged" in refusal(tmp_path / "cut.gz")


def test_a_wrong_gzip_crc_is_refused(tmp_path):
    packed = bytearray(gzip.compress(WHOLE))
    packed[-8] ^= 1
    (tmp_path / "crc.gz").write_bytes(packed)
    assert "CRC" in refusal(tmp_path / "crc.gz")


def test_a_broken_deflate_stream_is_refused(tmp_path):
    packed = bytearray(gzip.compress(WHOLE))
    packed[10] |= 0b110  # a block type that does not exist
    (tmp_path / "deflate.gz").write_bytes(packed)
    assert "damaged" in refusal(tmp_path / "deflate.gz")


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_trailing_bytes_are_refused(tmp_path, pack):
    (tmp_path / "long").write_bytes(pack(WHOLE + b"\0"))
    assert "more than the 30 bytes" in refusal(tmp_path / "long")


@pytest.mark.parametrize("magic", [b"\0\0\x0d\x03", b"\1\0\x08\x03", b"<htm", b"\0\0\x08\xff"])
def test_another_magic_is_refused(tmp_path, magic):
    (tmp_path / "magic").write_bytes(magic + WHOLE[4:])
    assert "starts with" in refusal(tmp_path / "magic")


def test_a_shape_that_numpy_cannot_hold_is_refused(tmp_path):
    (tmp_path / "shape").write_bytes(b"\0\0\x08\x05" + struct.pack(">5I", 0, *[2**32 - 1] * 4))
    assert "damaged" in refusal(tmp_path / "shape")


def test_a_bomb_is_read_no_further_than_its_header_claims(tmp_path, monkeypatch):
    read = []
    true_read = gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda self, size=-1: read.append(size) or true_read(self, size))
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(WHOLE + bytes(64 << 20)))
    assert "more than the 30 bytes" in refusal(tmp_path / "bomb.gz")
    assert all(size >= 0 for size in read)
    assert sum(read) == len(WHOLE) + 1


def test_a_header_that_claims_too_much_takes_no_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(idx, "_CHUNK_BYTES", 16)
    (tmp_path / "liar").write_bytes(b"\0\0\x08\x03" + struct.pack(">3I", *[2**32 - 1] * 3) + bytes(100))
    assert "100 of" in refusal(tmp_path / "liar")


def test_a_missing_file_and_a_folder_are_told_apart(tmp_path):
    assert "missing" in refusal(tmp_path / "nowhere")
    assert "cannot be read" in refusal(tmp_path)
