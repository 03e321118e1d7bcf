"""Checkpoints: named tensors and plain facts, written while training goes on, complete or absent whatever happens.

    step-000000120.safetensors        one file a checkpoint, readable by every safetensors reader
    .step-000000120.safetensors.PID.part  a write under way, or one that was cut short: nobody reads it

A file is written under its temporary name, synced, renamed, and the folder synced: after a SIGKILL or a power loss at any
moment the old ones are there and the new one is whole or missing. Disks still lose bits, so the header begins with a SHA-256 of
the whole file (64 zeros stand in for the digest itself), and nothing is taken from a file that does not match.

The format is written and read here, in sixty lines, and not by the safetensors package: that makes the header itself, too late
for the digest to cover it, and maps files, so that a bad sector ends the process (SIGBUS) where we go back to the checkpoint
before. No pickle: loading runs no code from the file.
"""

import errno
import hashlib
import json
import math
import os
import queue
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import PacelineError
from paceline.files import replacing

Tell = Callable[[str], None]


class CheckpointError(PacelineError):
    """A checkpoint cannot be written, or is not what it should be."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What was saved at a step."""

    step: int
    tensors: dict[str, Tensor]
    """On the CPU, contiguous."""
    facts: dict[str, Any]
    """As JSON gives them back: tuples as lists, every float with its bits, NaN and infinities too."""


class Writer:
    """Writes the checkpoints of one run in the background. Rank 0 alone has one, and calls it from one thread."""

    def __init__(self, folder: Path, keep: int, tell: Tell) -> None:
        assert keep >= 1
        self._folder, self._keep, self._tell = folder, keep, tell
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                if _LEFTOVER.fullmatch(path.name) and not path.is_dir():
                    path.unlink()
            if not os.access(folder, os.W_OK | os.X_OK):  # found now, not after the first hour
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            why = "it is a file, not a folder" if isinstance(error, FileExistsError) else _why(error)
            raise CheckpointError(f"cannot write checkpoints in {folder}: {why}; choose another folder") from None
        self._good: dict[int, bool | None] = {}  # by step, what this writer wrote or looked at; None: could not be read
        self._saved = True
        self._idle = threading.Event()
        self._idle.set()
        self._queue: queue.SimpleQueue[_Snapshot | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        self._thread.start()

    def save(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Copy everything now and write it later; what training changes from here on does not show.

        Waits for the write before this one, so that one copy is in memory at most. A write that fails is told, not raised.
        """
        assert self._thread.is_alive(), "save() after close()"
        self.wait()
        snapshot = _snapshot(step, tensors, facts)
        self._idle.clear()
        self._queue.put(snapshot)

    def wait(self) -> bool:
        """Wait until what was handed in is on disk or has failed; True if the last of it is on disk, or nothing ever was."""
        self._idle.wait()
        return self._saved

    def close(self) -> None:
        """Wait, and end the thread."""
        self.wait()
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (snapshot := self._queue.get()) is not None:
            step = snapshot.step
            try:
                self._saved = False
                _write(self._folder, snapshot)
                self._saved = True
                self._good[step] = True
                snapshot = None  # its memory, before older files are read
                self._prune(step)
            except Exception as error:  # any: it would end this thread in silence, and training would wait for it for ever
                with suppress(Exception):  # tell() may print to a pipe that nobody reads any more
                    self._tell_failure(step, error)
            finally:
                snapshot = None  # or it would live on here until the next one: twice the memory
                self._idle.set()

    def _tell_failure(self, step: int, error: Exception) -> None:
        if self._saved:
            self._tell(f"could not remove old checkpoints after step {step}: {_why(error)}")
            return
        good = None
        with suppress(OSError):  # the folder itself may be what is lost
            good = next((other for other in _steps(self._folder) if self._is_good(other)), None)
        last = "there is none yet" if good is None else f"the last good one is step {good}"
        self._tell(f"could not write the checkpoint at step {step}: {_why(error)}; training goes on, {last}")

    def _prune(self, step: int) -> None:
        """Remove the damaged, and good ones up to this step beyond the newest `keep`; what cannot be read now stays.

        A later good one stays and does not count: it could not be read at the start, and is the same run (law 5), further on.
        """
        kept = 0
        for other in _steps(self._folder):
            good = self._is_good(other)
            kept += good is True and other <= step
            if good is False or (good and other <= step and kept > self._keep):
                _path(self._folder, other).unlink(missing_ok=True)
                del self._good[other]

    def _is_good(self, step: int) -> bool | None:
        """Read a file of an earlier run once: a damaged one is no reason to delete a good one. None: nothing is known of it."""
        if step not in self._good:
            try:
                _read(self._folder, step)
                self._good[step] = True
            except _Damaged:
                self._good[step] = False
            except (OSError, MemoryError, CheckpointError):
                self._good[step] = None
        return self._good[step]


def load_latest(folder: Path, tell: Tell) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None. Tells of each damaged one on the way and leaves it where it is.

    One that may be good and cannot be read now is an error: to go on from an older one would be to lose it.
    """
    try:
        steps = _steps(folder)
    except FileNotFoundError:
        if folder.is_symlink():
            raise CheckpointError(f"cannot read checkpoints in {folder}: it links to a folder that does not exist") from None
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoints in {folder}: {_why(error)}") from None
    for place, step in enumerate(steps, start=1):
        name = _path(folder, step).stem
        try:
            return _read(folder, step)
        except FileNotFoundError:
            if _path(folder, step).is_symlink():
                raise CheckpointError(
                    f"cannot read checkpoint {name} in {folder}: it links to a file that does not exist; bring the file back,"
                    " or remove the link"
                ) from None
            continue
        except MemoryError:
            raise CheckpointError(f"cannot read checkpoint {name} in {folder}: out of memory; free some and resume") from None
        except (OSError, CheckpointError, _Damaged) as error:
            if not isinstance(error, _Damaged) and getattr(error, "errno", None) != errno.EIO:  # EIO: most likely a bad sector
                fix = "make it readable" if isinstance(error, OSError) else "use the Paceline that wrote it"
                fix += ", or remove it to " + ("go on from the one before" if place < len(steps) else "start over")
                raise CheckpointError(f"cannot read checkpoint {name} in {folder}: {_why(error)}; {fix}") from None
            then = "using the one before it" if place < len(steps) else "no other is there"
            tell(f"checkpoint {name} is damaged ({_why(error)}): {then}")
    return None


class _Damaged(Exception):
    """A file was read and is not what was written."""


_FORMAT = "1"
_NAME = re.compile(r"step-([0-9]+)\.safetensors")
_LEFTOVER = re.compile(r"\.step-[0-9]+\.safetensors(\.[0-9]+)?\.part")
_BEGIN = b'{"__metadata__":{"sha256":"'  # the digest comes first, so its place is known before anything is parsed
_DIGEST = slice(8 + len(_BEGIN), 8 + len(_BEGIN) + 64)
_HEADER_LIMIT_BYTES = 100_000_000  # of the format's other readers
_CODES = {
    **{getattr(torch, f"{kind}int{bits}"): f"{kind or 'i'}{bits}".upper() for kind in ("", "u") for bits in (8, 16, 32, 64)},
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"},
    **{torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    step: int
    tensors: dict[str, Tensor]
    facts: str
    copied: list[torch.cuda.Event]
    """Until these have happened, copies from the GPUs may still be under way."""


def _snapshot(step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> _Snapshot:
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.is_cuda:  # into pinned memory, in stream order: the GPU does it between two steps, and nobody waits here
            copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            copies[name].copy_(tensor.detach(), non_blocking=True)
        else:
            copies[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    copied = []
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        copied.append(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]  # the writer sleeps on it and takes no core
        copied[-1].record(torch.cuda.current_stream(device))
    return _Snapshot(step=step, tensors=copies, facts=json.dumps(dict(facts)), copied=copied)


def _write(folder: Path, snapshot: _Snapshot) -> None:
    for event in snapshot.copied:
        event.synchronize()
    path = _path(folder, snapshot.step)
    # Large elements first: each tensor lies at a multiple of its element's size, as readers that map the file need it.
    tensors = dict(sorted(snapshot.tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    head = _head(snapshot, tensors)
    digest = hashlib.sha256(head)
    for tensor in tensors.values():
        digest.update(_bytes(tensor))
    head[_DIGEST] = digest.hexdigest().encode()
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(head)
        for tensor in tensors.values():
            file.write(_bytes(tensor))
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)  # the rename itself
    finally:
        os.close(opened)


def _head(snapshot: _Snapshot, tensors: Mapping[str, Tensor]) -> bytearray:
    """The file up to its tensors: the length of the header in 8 bytes and the header, with 64 zeros for the digest."""
    about = {"sha256": "0" * 64, "format": _FORMAT, "step": str(snapshot.step), "facts": snapshot.facts}
    entries: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _CODES:
            raise CheckpointError(f"{name} is of {tensor.dtype}, which the safetensors format has no name for")
        begin, end = end, end + tensor.nbytes
        entries[_key(name)] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > _HEADER_LIMIT_BYTES:
        raise CheckpointError(
            f"its names and facts take {len(header):,} bytes of {_HEADER_LIMIT_BYTES:,}: keep large facts in tensors"
        )
    return bytearray(len(header).to_bytes(8, "little") + header)


def _read(folder: Path, step: int) -> Checkpoint:
    """A checkpoint that matches its digest; _Damaged if it does not. Any other error says nothing against the file."""
    try:
        with _path(folder, step).open("rb") as file:
            return _parse(file, step)
    except (OSError, MemoryError, CheckpointError, _Damaged):
        raise
    except Exception:  # any: there is no end to what a damaged header can hold
        raise _Damaged("it is not a checkpoint") from None


def _parse(file: BufferedReader, step: int) -> Checkpoint:
    left = os.fstat(file.fileno()).st_size - 8
    length = int.from_bytes(file.read(8), "little")
    if not len(_BEGIN) + 64 <= length <= _HEADER_LIMIT_BYTES:
        raise _Damaged("it does not begin like a checkpoint")
    if length > left:
        raise _Damaged("it is cut short")
    head = bytearray(length.to_bytes(8, "little") + file.read(length))
    stated, head[_DIGEST] = head[_DIGEST], b"0" * 64
    left -= length
    entries = json.loads(head[8:])
    about = entries.pop("__metadata__")
    digest = hashlib.sha256(head)
    tensors: dict[str, Tensor] = {}
    for key, entry in entries.items() if about["format"] == _FORMAT else ():  # in the order of their bytes
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        size = math.prod(shape) * dtype.itemsize
        if not 0 <= size <= left:  # before the memory is asked for
            raise _Damaged("it is cut short")
        left -= size
        try:
            data = torch.empty(size, dtype=torch.uint8, device="cpu")
        except RuntimeError:  # torch's word for it
            raise MemoryError from None
        file.readinto(_bytes(data))
        digest.update(_bytes(data))
        tensors[_name(key)] = data.view(dtype).view(shape)
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    if not head.startswith(_BEGIN, 8) or digest.hexdigest().encode() != stated:
        raise _Damaged("its checksum does not match")
    if about["format"] != _FORMAT:
        raise CheckpointError(f"it has format {about['format']}, and this Paceline reads {_FORMAT}")
    if about["step"] != str(step):
        raise _Damaged(f"it is of step {about['step']}")
    return Checkpoint(step=step, tensors=tensors, facts=json.loads(about["facts"]))


def _steps(folder: Path) -> list[int]:
    """The steps that have a file, or a link to one, newest first. A link to nothing counts: its disk may be away."""
    with os.scandir(folder) as entries:
        found = [_NAME.fullmatch(entry.name) for entry in entries if entry.is_file() or not os.path.exists(entry.path)]
    steps = [int(name[1]) for name in found if name is not None and _path(folder, int(name[1])).name == name[0]]
    return sorted(steps, reverse=True)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:09d}.safetensors"


def _key(name: str) -> str:
    """A name as the format can hold it: plain ones stay; no surrogates, and never the one key that is taken."""
    return name.encode("unicode_escape").decode().replace("__metadata__", r"\x5f_metadata__")


def _name(key: str) -> str:
    return key.encode().decode("unicode_escape")


def _bytes(tensor: Tensor) -> Any:
    """A tensor's memory, as a numpy array of bytes."""
    return tensor.view(-1).view(torch.uint8).numpy()


def _why(error: Exception) -> str:
    """An error in a few words on one line."""
    text = error.strerror if isinstance(error, OSError) else str(error)
    return " ".join((text or type(error).__name__).split())
