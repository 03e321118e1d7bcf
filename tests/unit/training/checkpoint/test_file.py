"""Checkpoint files: the same bits come back, a kill at any line leaves them complete or absent, damage is always noticed."""

import errno
import json
import math
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from paceline.training.checkpoint import file as checkpoint
from paceline.training.checkpoint.file import Checkpoint, CheckpointError, Writer, load_latest

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool),
]


MakeWriter = Callable[..., Writer]


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def writer(folder: Path, notes: list[str]) -> Iterator[MakeWriter]:
    made = []

    def make(keep: int = 3) -> Writer:
        made.append(Writer(folder, keep, notes.append))
        return made[-1]

    yield make
    for each in made:
        each.close()


def of(step: int) -> tuple[int, dict[str, torch.Tensor], dict[str, Any]]:
    """The arguments of `save` at a step; all of them contain the step."""
    return step, {"weights": torch.full((300,), float(step)), "count": torch.tensor(step)}, {"epoch": step / 7}


def is_of(found: Checkpoint | None, step: int) -> bool:
    if found is None:
        return False
    number, tensors, facts = of(step)
    same = all(torch.equal(found.tensors[name], tensors[name]) for name in tensors)
    return found.step == number and found.tensors.keys() == tensors.keys() and same and found.facts == facts


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def file_of(step: int) -> str:
    return f"step-{step:09d}.safetensors"


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits, NaN payloads included."""
    if dtype == torch.bool:
        return torch.rand(shape) < 0.5
    count = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, list[int]]:
    return tensor.dtype, tensor.shape, tensor.contiguous().view(-1).view(torch.uint8).tolist()


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << (place % 8)
    path.write_bytes(data)


def test_every_dtype_and_shape_comes_back_bit_for_bit(folder, writer):
    tensors = {f"{dtype} {shape}": random_tensor(dtype, *shape) for dtype in DTYPES for shape in [(), (0, 4), (3,), (2, 3, 5)]}
    one = writer()
    one.save(7, tensors, {})
    assert one.wait()
    found = load_latest(folder, pytest.fail)
    assert found is not None
    assert {name: bits(tensor) for name, tensor in found.tensors.items()} == {k: bits(v) for k, v in tensors.items()}


def test_views_parameters_and_shared_memory_are_stored_by_value(folder, writer):
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "base": base,
        "again": base,
        "transposed": base.T,
        "part": base[1:3, ::2],
        "expanded": base[0, :1].expand(5),
        "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(base[0]),
    }
    one = writer()
    one.save(1, tensors, {})
    assert one.wait()
    found = load_latest(folder, pytest.fail)
    assert found is not None
    for name, tensor in found.tensors.items():
        assert torch.equal(tensor, tensors[name]), name
        assert tensor.is_contiguous()
        assert not tensor.requires_grad


def test_other_readers_read_the_file(folder, writer):
    tensors = {str(dtype): random_tensor(dtype, 3, 5) for dtype in DTYPES} | {"none": torch.zeros(0), "one": torch.tensor(1.5)}
    one = writer()
    one.save(7, tensors, {"a": 1})
    assert one.wait()
    data = (folder / file_of(7)).read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    for name, entry in json.loads(data[8 : 8 + length]).items():
        assert name == "__metadata__" or entry["data_offsets"][0] % tensors[name].dtype.itemsize == 0
    found = load_file(folder / file_of(7))
    assert {name: bits(tensor) for name, tensor in found.items()} == {name: bits(t) for name, t in tensors.items()}


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


anything = st.text(st.characters(categories=None), max_size=8)  # surrogates and NUL too


odd_names = anything | st.sampled_from(["__metadata__", r"\x5f_metadata__", "\ud83d\ude00", "sha256", "0" * 64, ".", "a/b"])


@settings(max_examples=40, deadline=None)
@given(facts=st.dictionaries(st.text(), values, max_size=4), known=st.sets(odd_names, max_size=4), step=st.integers(0, 10**12))
def test_any_facts_and_names_come_back(facts, known, step):
    tensors = {name: torch.tensor(float(place)) for place, name in enumerate(sorted(known))}
    with tempfile.TemporaryDirectory() as place:
        one = Writer(Path(place), 1, pytest.fail)
        one.save(step, tensors, facts)
        one.close()
        found = load_latest(Path(place), pytest.fail)
    assert found is not None
    assert found.step == step
    assert repr(found.facts) == repr(facts)  # repr tells -0.0 from 0.0, and knows that NaN is NaN
    assert {name: tensor.item() for name, tensor in found.tensors.items()} == {k: t.item() for k, t in tensors.items()}


def test_changes_after_save_are_not_stored(folder, writer, monkeypatch):
    changed, write = threading.Event(), checkpoint._write
    monkeypatch.setattr(checkpoint, "_write", lambda *args: (changed.wait(60), write(*args)))
    step, tensors, facts = of(4)
    facts["list"] = [1]
    one = writer()
    one.save(step, tensors, facts)
    tensors["weights"].zero_()
    del tensors["count"]
    facts["list"].append(2)
    facts["epoch"] = 0
    changed.set()
    assert one.wait()
    found = load_latest(folder, pytest.fail)
    assert found is not None
    assert found.facts.pop("list") == [1]
    assert is_of(found, 4)


def test_a_save_waits_for_the_previous_one(writer, monkeypatch):
    order: list[str] = []
    second, write, snapshot = threading.Event(), checkpoint._write, checkpoint._snapshot

    def slow(folder: Path, taken: Any) -> None:
        if taken.step == 1:
            second.wait(0.2)  # a save that does not wait gets here
        write(folder, taken)
        order.append(f"wrote {taken.step}")

    def noted(step: int, *args: Any) -> Any:
        order.append(f"copied {step}")
        if step == 2:
            second.set()
        return snapshot(step, *args)

    monkeypatch.setattr(checkpoint, "_write", slow)
    monkeypatch.setattr(checkpoint, "_snapshot", noted)
    one = writer()
    one.save(*of(1))
    one.save(*of(2))
    assert one.wait()
    assert order == ["copied 1", "wrote 1", "copied 2", "wrote 2"]


def test_an_empty_or_missing_folder_has_no_checkpoint(tmp_path, folder, writer):
    assert load_latest(folder, pytest.fail) is None
    assert writer().wait()
    assert load_latest(folder, pytest.fail) is None


def test_only_plain_files_with_our_names_count(tmp_path, folder, writer):
    one = writer()
    one.save(*of(1))
    assert one.wait()
    good = (folder / file_of(1)).read_bytes()
    (folder / file_of(3)).mkdir()
    os.mkfifo(folder / file_of(4))  # opening it would wait forever
    (folder / file_of(2)).symlink_to(folder / file_of(4))
    others = ["step-5.safetensors", "step-0000000006.safetensors", "step-000000007.safetensors.bak", f".{file_of(8)}.part"]
    for name in [*others, "step-٠٠٠٠٠٠٠٠٩.safetensors", "notes.txt"]:
        (folder / name).write_bytes(good)
    assert is_of(load_latest(folder, pytest.fail), 1)


def test_links_to_checkpoints_are_read_and_their_targets_never_touched(tmp_path, folder, writer):
    """The user moved them to another disk."""
    one = writer(keep=1)
    one.save(*of(1))
    assert one.wait()
    away = tmp_path / "away"
    away.mkdir()
    (folder / file_of(1)).rename(away / file_of(1))
    (folder / file_of(1)).symlink_to(away / file_of(1))
    moved = (away / file_of(1)).read_bytes()
    assert is_of(load_latest(folder, pytest.fail), 1)
    two = writer(keep=1)
    two.save(*of(1))  # the same step again replaces the link ...
    assert two.wait()
    assert not (folder / file_of(1)).is_symlink()
    (folder / file_of(1)).unlink()
    (folder / file_of(1)).symlink_to(away / file_of(1))
    two.save(*of(2))  # ... and a newer one removes it
    assert two.wait()
    assert names(folder) == [file_of(2)]
    assert (away / file_of(1)).read_bytes() == moved


def test_a_link_to_a_folder_of_checkpoints_works(tmp_path):
    away, folder = tmp_path / "away", tmp_path / "linked"
    away.mkdir()
    folder.symlink_to(away)
    one = Writer(folder, 2, pytest.fail)
    one.save(*of(1))
    one.close()
    assert is_of(load_latest(folder, pytest.fail), 1)
    assert folder.is_symlink()


def test_a_broken_link_is_an_error_and_does_not_start_over(tmp_path, folder, writer):
    """Its disk may be unmounted: starting over would lose it."""
    folder.mkdir()
    (folder / file_of(1)).symlink_to(tmp_path / "away")
    with pytest.raises(CheckpointError, match=r"step-000000001 in .*: it links to a file that does not exist; restore"):
        load_latest(folder, pytest.fail)
    (tmp_path / "linked").symlink_to(tmp_path / "away")
    with pytest.raises(CheckpointError, match="linked: it links to a folder that does not exist"):
        load_latest(tmp_path / "linked", pytest.fail)


def test_a_planted_link_is_not_written_through(tmp_path, folder, writer):
    (tmp_path / "victim").write_text("theirs")
    one = writer()
    for name in (f".{file_of(1)}.part", f".{file_of(1)}.{os.getpid()}.part"):
        (folder / name).symlink_to(tmp_path / "victim")
    one.save(*of(1))
    assert one.wait()
    assert (tmp_path / "victim").read_text() == "theirs"
    assert is_of(load_latest(folder, pytest.fail), 1)


def test_a_new_writer_removes_unfinished_writes_and_nothing_else(folder, writer, notes):
    folder.mkdir()
    mine = ["notes.txt", ".notes.part", "step-1.part", ".step-000000001.safetensors", file_of(3)]
    for name in [*mine, f".{file_of(1)}.part", f".{file_of(10**9)}.part", f".{file_of(2)}.123.part"]:
        (folder / name).write_text("x")
    writer()
    assert names(folder) == sorted(mine)
    assert not notes


def test_the_newest_are_kept(folder, writer):
    one = writer(keep=2)
    for step, expected in ((10, [10]), (20, [10, 20]), (100, [20, 100]), (1000, [100, 1000])):
        one.save(*of(step))
        assert one.wait()
        assert names(folder) == [file_of(each) for each in expected]
    again = writer(keep=1)
    again.save(*of(1001))
    assert again.wait()
    assert names(folder) == [file_of(1001)]


def test_a_later_checkpoint_is_removed_only_if_damaged_and_does_not_count(folder, writer, notes):
    one = writer(keep=5)
    for step in (50, 60, 120, 180):
        one.save(*of(step))
    one.close()
    flip(folder / file_of(180), -1)
    again = writer(keep=2)
    again.save(*of(70))
    assert again.wait()
    assert names(folder) == [file_of(60), file_of(70), file_of(120)]
    assert is_of(load_latest(folder, pytest.fail), 120)
    again.save(*of(130))  # past it: from now on it is one of the older ones
    assert again.wait()
    assert names(folder) == [file_of(120), file_of(130)]
    assert not notes


def fail_to_open(monkeypatch: pytest.MonkeyPatch, *paths: Path, error: BaseException) -> None:
    opened = Path.open

    def refuse(path: Path, mode: str = "r", **kwargs: Any) -> Any:
        if path in paths and "r" in mode:
            raise error
        return opened(path, mode, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)


UNREADABLE = [
    *(pytest.param(OSError(code, os.strerror(code)), id=errno.errorcode[code]) for code in (errno.EACCES, errno.EMFILE)),
    *(pytest.param(OSError(code, os.strerror(code)), id=errno.errorcode[code]) for code in (errno.EIO, errno.ESTALE)),
    pytest.param(MemoryError(), id="MemoryError"),
]


@pytest.mark.parametrize("error", UNREADABLE)
def test_a_checkpoint_that_cannot_be_read_is_never_removed(folder, writer, notes, monkeypatch, error):
    one = writer(keep=5)
    for step in (30, 60, 90, 120, 180):
        one.save(*of(step))
    one.close()
    flip(folder / file_of(90), -1)  # damaged, but this cannot be known yet
    again = writer(keep=1)
    with monkeypatch.context() as for_now:
        fail_to_open(for_now, *(folder / file_of(step) for step in (30, 90, 180)), error=error)
        again.save(*of(130))
        assert again.wait()
    assert names(folder) == [file_of(step) for step in (30, 90, 130, 180)]
    assert is_of(load_latest(folder, pytest.fail), 180)
    assert not notes


def test_a_damaged_checkpoint_does_not_count_toward_keep(folder, writer):
    one = writer(keep=3)
    for step in (30, 60, 120):
        one.save(*of(step))
    one.close()
    flip(folder / file_of(120), -1)
    again = writer(keep=2)
    again.save(*of(180))
    assert again.wait()
    assert names(folder) == [file_of(60), file_of(180)]


def test_saving_the_same_step_again_replaces_the_file(folder, writer):
    one = writer()
    one.save(9, {"old": torch.ones(3)}, {})
    one.save(*of(9))
    assert one.wait()
    assert is_of(load_latest(folder, pytest.fail), 9)


def sized(at: str, size: int) -> int:
    return {"0": 0, "1": 1, "8": 8, "in the header": 100, "in the tensors": size - 600, "one byte less": size - 1}[at]


@pytest.fixture
def two(folder: Path, writer: MakeWriter) -> Path:
    """A folder with good checkpoints of steps 60 and 120; returns the path of the latter, to be damaged."""
    one = writer()
    one.save(*of(60))
    one.save(*of(120))
    one.close()
    assert is_of(load_latest(folder, pytest.fail), 120)
    return folder / file_of(120)


def uses_the_one_before(folder: Path, why: str = "") -> bool:
    notes: list[str] = []
    found = load_latest(folder, notes.append)
    (line,) = notes
    begin, end = "checkpoint step-000000120 is damaged (", "): using the previous one"
    assert line.startswith(begin + why), line
    assert line.endswith(end), line
    assert "\n" not in line
    return is_of(found, 60)


@pytest.mark.parametrize("at", ["0", "1", "8", "in the header", "in the tensors", "one byte less"])
def test_a_truncated_file_is_damaged(folder, two, at):
    os.truncate(two, sized(at, two.stat().st_size))
    assert uses_the_one_before(folder, "it does not start like a checkpoint" if at in "01" else "it is cut short")


def test_a_file_with_extra_bytes_at_its_end_is_damaged(folder, two):
    two.write_bytes(two.read_bytes() + b"\0")
    assert uses_the_one_before(folder, "its checksum does not match")


def test_a_file_with_one_flipped_bit_is_damaged(folder, two):
    size = two.stat().st_size
    length = int.from_bytes(two.read_bytes()[:8], "little")
    for place in [*range(8 + length), *range(8 + length, size, 97), size - 1]:
        flip(two, place)
        assert uses_the_one_before(folder), place
        flip(two, place)
    assert is_of(load_latest(folder, pytest.fail), 120)


@pytest.mark.parametrize("hole", [512, 4096])
def test_a_file_with_a_block_of_zeros_is_damaged(folder, writer, hole):
    one = writer()
    one.save(*of(60))
    one.save(120, {"weights": torch.rand(5000)}, {})
    one.close()
    data = bytearray((folder / file_of(120)).read_bytes())
    data[8192 : 8192 + hole] = bytes(hole)
    (folder / file_of(120)).write_bytes(data)
    assert uses_the_one_before(folder, "its checksum does not match")


def test_a_renamed_file_is_damaged(folder, two):
    (folder / file_of(60)).rename(two)
    notes: list[str] = []
    assert load_latest(folder, notes.append) is None
    assert notes == ["checkpoint step-000000120 is damaged (it belongs to step 60): there is no other"]


def test_a_file_of_another_format_is_an_error_and_stays(folder, writer, notes, monkeypatch):
    one = writer(keep=1)
    one.save(*of(60))
    assert one.wait()
    with monkeypatch.context() as later:
        later.setattr(checkpoint, "_FORMAT", "2")
        later.setitem(checkpoint.CODES, torch.float32, "F32 as format 2 has it")
        one.save(*of(120))
        one.close()
    new = folder / file_of(120)
    with pytest.raises(CheckpointError) as caught:
        load_latest(folder, pytest.fail)
    assert str(caught.value) == (
        f"cannot read checkpoint step-000000120 in {folder}: it has format 2, but this version reads format 1; "
        "use the version of Paceline that wrote it, or remove it to start over"
    )
    again = writer(keep=1)
    again.save(*of(130))
    assert again.wait()
    assert names(folder) == [new.name, file_of(130)]
    (folder / file_of(130)).unlink()
    flip(new, -1)  # now it has no valid format
    assert load_latest(folder, notes.append) is None
    assert notes == ["checkpoint step-000000120 is damaged (its checksum does not match): there is no other"]


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_a_pickle_in_disguise_is_not_run(folder, two, tmp_path):
    marker = tmp_path / "marker"
    pickle.loads(pickle.dumps(Bomb(marker)))
    marker.rmdir()  # it works, so the test below means something
    bomb = Bomb(marker)
    two.write_bytes(pickle.dumps(bomb))
    assert uses_the_one_before(folder)
    torch.save({"weights": bomb}, two)
    assert uses_the_one_before(folder)
    two.write_bytes(whole({"facts": pickle.dumps(bomb).decode("latin-1")}, {}))
    assert uses_the_one_before(folder)
    assert not marker.exists()


def whole(about: dict[str, str], entries: dict[str, Any], data: bytes = b"") -> bytes:
    """A file with a header like ours."""
    header = json.dumps(
        {"__metadata__": {"sha256": "0" * 64, "format": "1", **about}, **entries}, separators=(",", ":")
    ).encode()
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize(
    "data",
    [
        b"garbage" * 1000,
        b"\xff" * 5000,
        bytes(5000),
        (5000).to_bytes(8, "little") + b"[" * 5000,
        (5000).to_bytes(8, "little") + b"\xff" * 5000,
        (99_999_999).to_bytes(8, "little") + b"{" * 5000,
        whole({}, {"x": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 1 << 62]}}),
        whole({}, {"x": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 0]}}),
        whole({}, {"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4)),
        whole({}, {"x": {"dtype": "F32", "shape": [1 << 70, 0], "data_offsets": [0, 0]}}),
        whole({}, {"x": {"dtype": "F32", "shape": "many"}}),
        whole({}, {"x": {"dtype": "F99", "shape": [1]}}, bytes(4)),
        whole({}, {"x": []}),
        whole({}, {"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)),
    ],
)
def test_garbage_is_damaged(folder, two, data):
    two.write_bytes(data)
    assert uses_the_one_before(folder)


def test_a_huge_sparse_file_is_not_read(folder, two):
    header = whole({}, {"x": {"dtype": "U8", "shape": [1 << 40]}})
    no_begin = "it does not start like a checkpoint"
    for begin, why in ((b"garbage!", no_begin), ((1 << 39).to_bytes(8, "little"), no_begin), (header, "it is cut short")):
        two.write_bytes(begin)
        os.truncate(two, (1 << 40) - 1)  # sparse: it takes no space
        assert uses_the_one_before(folder, why)


def test_a_bad_sector_counts_as_damage(folder, two, monkeypatch):
    fail_to_open(monkeypatch, two, error=OSError(errno.EIO, os.strerror(errno.EIO)))
    assert uses_the_one_before(folder, "Input/output error")


def test_a_checkpoint_that_disappears_is_skipped_silently(folder, two, monkeypatch):
    fail_to_open(monkeypatch, two, error=FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
    assert is_of(load_latest(folder, pytest.fail), 60)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE, errno.ESTALE])
@pytest.mark.parametrize(("step", "then"), [(120, "resume from the previous one"), (60, "start over")])
def test_a_file_that_cannot_be_read_is_an_error_not_damage(folder, two, monkeypatch, code, step, then):
    if step == 60:
        two.unlink()
    fail_to_open(monkeypatch, folder / file_of(step), error=OSError(code, os.strerror(code)))
    with pytest.raises(CheckpointError) as caught:
        load_latest(folder, pytest.fail)
    assert str(caught.value) == (
        f"cannot read checkpoint step-{step:09d} in {folder}: {os.strerror(code)}; make it readable, or remove it to {then}"
    )


def test_out_of_memory_in_python_is_an_error_not_damage(folder, two, monkeypatch):
    fail_to_open(monkeypatch, two, error=MemoryError())
    with pytest.raises(
        CheckpointError, match=r"^cannot read checkpoint step-000000120 in .*: out of memory; free some and resume$"
    ):
        load_latest(folder, pytest.fail)


def test_if_all_are_damaged_there_is_none_and_a_line_for_each(folder, two, notes):
    for path in folder.iterdir():
        os.truncate(path, 900)
    before = names(folder)
    assert load_latest(folder, notes.append) is None
    assert notes == [
        "checkpoint step-000000120 is damaged (it is cut short): using the previous one",
        "checkpoint step-000000060 is damaged (it is cut short): there is no other",
    ]
    assert names(folder) == before


@pytest.mark.parametrize(("code", "text"), [(errno.ENOSPC, "No space left on device"), (errno.EIO, "Input/output error")])
def test_a_failed_write_is_one_line_and_loses_nothing(folder, writer, notes, monkeypatch, code, text):
    def fail(_: int) -> None:
        raise OSError(code, os.strerror(code))

    one = writer(keep=1)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fail)
        one.save(*of(30))
        assert not one.wait()
    assert notes == [f"could not write the checkpoint at step 30: {text}; training continues, no checkpoint exists yet"]
    assert names(folder) == []
    one.save(*of(60))
    assert one.wait()
    notes.clear()
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", fail)
        one.save(*of(120))
        assert not one.wait()
    assert notes == [
        f"could not write the checkpoint at step 120: {text}; training continues, the last good checkpoint is step 60"
    ]
    assert names(folder) == [file_of(60)]
    one.save(*of(180))
    assert one.wait()
    assert names(folder) == [file_of(180)]
    assert len(notes) == 1


def test_a_damaged_checkpoint_is_not_called_the_last_good_one(folder, two, writer, notes):
    flip(two, -1)
    one = writer()
    one.save(180, {"x": torch.zeros(3, dtype=torch.complex128)}, {})
    assert not one.wait()
    (line,) = notes
    assert line == (
        "could not write the checkpoint at step 180: x has dtype torch.complex128, which the safetensors format does not"
        " support; training continues, the last good checkpoint is step 60"
    )


def test_facts_too_large_for_other_readers_are_refused(writer, notes, monkeypatch):
    monkeypatch.setattr(checkpoint, "_HEADER_LIMIT_BYTES", 1000)
    one = writer()
    one.save(1, {}, {"much": "x" * 2000})
    assert not one.wait()
    assert "keep large facts in tensors; training continues, no checkpoint exists yet" in notes[0]


def test_failing_to_remove_an_old_checkpoint_is_noted_and_the_new_one_counts(folder, writer, notes, monkeypatch):
    one = writer(keep=1)
    one.save(*of(1))
    assert one.wait()
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path.name == file_of(1):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    one.save(*of(2))
    assert one.wait()
    assert notes == ["could not remove old checkpoints after step 2: Permission denied"]
    assert is_of(load_latest(folder, pytest.fail), 2)


def test_a_failing_notify_does_not_end_the_thread(folder, monkeypatch):
    def closed(_: str) -> None:
        raise BrokenPipeError

    one = Writer(folder, 1, closed)
    one.save(1, {"x": torch.zeros(3, dtype=torch.complex128)}, {})
    assert not one.wait()
    one.save(*of(2))
    assert one.wait()
    one.close()


def test_facts_that_are_not_json_are_the_callers_mistake(writer):
    one = writer()
    with pytest.raises(TypeError, match="Tensor is not JSON"):
        one.save(1, {}, {"loss": torch.tensor(1.0)})
    one.save(*of(2))
    assert one.wait()


def test_close_ends_the_thread(folder):
    one = Writer(folder, 1, pytest.fail)
    one.save(*of(1))
    one.close()
    assert is_of(load_latest(folder, pytest.fail), 1)
    assert not one._thread.is_alive()
    one.close()
    with pytest.raises(AssertionError, match="after close"):
        one.save(*of(2))


def test_a_file_in_the_way_is_one_line(tmp_path, notes):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="it is a file, not a folder; choose another folder"):
        Writer(tmp_path / "file", 1, notes.append)
    with pytest.raises(CheckpointError, match="Not a directory; choose another folder"):
        Writer(tmp_path / "file" / "below", 1, notes.append)
    with pytest.raises(CheckpointError, match=r"cannot read checkpoints in .*file: Not a directory"):
        load_latest(tmp_path / "file", notes.append)
    assert (tmp_path / "file").read_text() == "mine"
    assert not notes


def test_a_folder_that_was_removed_is_one_line(folder, writer, notes):
    one = writer()
    folder.rmdir()
    one.save(*of(1))
    assert not one.wait()
    assert len(notes) == 1
    folder.mkdir()
    one.save(*of(2))
    assert one.wait()


def test_a_checkpoint_is_synced_before_it_is_renamed_and_before_old_ones_are_removed(folder, writer, monkeypatch):
    """For a power loss: each operation is on disk before the next one relies on it."""
    order: list[str] = []
    fsync, replace, unlink = os.fsync, Path.replace, Path.unlink

    def note_fsync(number: int) -> None:
        fsync(number)
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        order.append("sync folder" if path == folder else f"sync {path.name} of {path.stat().st_size} bytes")

    def note_replace(path: Path, target: Path) -> Path:
        order.append(f"rename to {target.name}")
        return replace(path, target)

    def note_unlink(path: Path, missing_ok: bool = False) -> None:
        if path.exists():
            order.append(f"remove {path.name}")
        unlink(path, missing_ok=missing_ok)

    one = writer(keep=1)
    one.save(*of(1))
    assert one.wait()
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "replace", note_replace)
    monkeypatch.setattr(Path, "unlink", note_unlink)
    one.save(*of(2))
    assert one.wait()
    whole = f"sync .{file_of(2)}.{os.getpid()}.part of {(folder / file_of(2)).stat().st_size} bytes"
    assert order == [whole, f"rename to {file_of(2)}", "sync folder", f"remove {file_of(1)}"]


def test_a_file_gets_its_name_only_once_it_is_complete_and_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rename is what makes a checkpoint: if the process stops just before it, no checkpoint exists."""
    synced: list[bool] = []
    fsync = os.fsync

    def watched(file: int) -> None:
        synced.append((tmp_path / "step-000000001.safetensors").exists())
        fsync(file)

    def cut_off(*_: object) -> None:
        raise OSError(errno.EIO, "the power is gone")

    monkeypatch.setattr(os, "fsync", watched)
    monkeypatch.setattr(os, "replace", cut_off)
    notes: list[str] = []
    writer = Writer(tmp_path, 2, notes.append)
    writer.save(1, {"x": torch.ones(3)}, {})
    assert not writer.wait()
    writer.close()
    assert synced == [False], "named before it was synced, or not synced at all"
    assert list(tmp_path.iterdir()) == []
    assert load_latest(tmp_path, notes.append) is None
