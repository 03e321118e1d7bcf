"""Checkpoint files: named tensors and JSON facts, written in the background while training continues, complete or absent.

    step-000000120.safetensors            one file per checkpoint, readable by any safetensors reader
    .step-000000120.safetensors.PID.part  a write in progress, or one that was cut short: never read

A file is written under a temporary name, synced and renamed, and then the folder is synced. After a SIGKILL or a power loss at
any moment, the old checkpoints are there and the new one is complete or absent. Disks still lose bits, so the header begins
with a SHA-256 of the whole file (computed with 64 zeros in place of the digest), and a file that does not match is not used.

The format is written and read here, in sixty lines, and not by the safetensors package. That package builds the header itself,
too late for the digest to cover it, and maps files into memory, so a bad sector would kill the process (SIGBUS) where we can go
back to the previous checkpoint. There is no pickle: loading runs no code from the file.
"""

import errno
import hashlib
import json
import math
import os
import queue
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import PacelineError, reason
from paceline.files import replacing

Notify = Callable[[str], None]
"""Called with one line for the user."""


class CheckpointError(PacelineError):
    """A checkpoint cannot be written or read."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What was saved at a step."""

    step: int
    tensors: dict[str, Tensor]
    """On the CPU, contiguous."""
    facts: dict[str, Any]
    """As Python's JSON returns them: tuples become lists; floats keep every bit, including NaN and infinities."""


class Writer:
    """Writes the checkpoints of one run in the background. Only rank 0 has one, and calls it from one thread."""

    def __init__(self, folder: Path, keep: int, notify: Notify) -> None:
        assert keep >= 1
        self._folder, self._keep, self._notify = folder, keep, notify
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                if _LEFTOVER.fullmatch(path.name) and not path.is_dir():
                    path.unlink()
            if not os.access(folder, os.W_OK | os.X_OK):  # fail now, not after the first hour
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            why = "it is a file, not a folder" if isinstance(error, FileExistsError) else reason(error)
            raise CheckpointError(f"cannot write checkpoints in {folder}: {why}; choose another folder") from None
        self._good: dict[int, bool | None] = {}  # by step, whether a file is good, once known; None: it could not be read
        self._saved = True
        self._idle = threading.Event()
        self._idle.set()
        self._queue: queue.SimpleQueue[_Snapshot | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        self._thread.start()

    def save(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Copy everything now and write it in the background; later changes to the tensors are not saved.

        Waits for the previous write, so there is at most one copy in memory. A write that fails is reported to `notify`, not
        raised.
        """
        assert self._thread.is_alive(), "save() after close()"
        self.wait()
        snapshot = _snapshot(step, tensors, facts)
        self._idle.clear()
        self._queue.put(snapshot)

    def wait(self) -> bool:
        """Wait until every `save` is on disk or has failed. True if the last one succeeded, or there was none."""
        self._idle.wait()
        return self._saved

    def close(self) -> None:
        """Wait for the last write and end the thread."""
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
                snapshot = None  # free its memory before reading older files
                self._prune(step)
            except Exception as error:  # any: otherwise the thread would end silently and training would wait forever
                with suppress(Exception):  # notify() may print to a pipe without a reader
                    self._notify_failure(step, error)
            finally:
                snapshot = None  # do not keep it until the next one: that would take twice the memory
                self._idle.set()

    def _notify_failure(self, step: int, error: Exception) -> None:
        if self._saved:
            self._notify(f"could not remove old checkpoints after step {step}: {reason(error)}")
            return
        good = None
        with suppress(OSError):  # the folder itself may be missing
            good = next((other for other in _steps(self._folder) if self._is_good(other)), None)
        last = "no checkpoint exists yet" if good is None else f"the last good checkpoint is step {good}"
        self._notify(f"could not write the checkpoint at step {step}: {reason(error)}; training continues, {last}")

    def _prune(self, step: int) -> None:
        """Remove damaged checkpoints, and all but the newest `keep` good ones up to this step; keep those that cannot be read.

        A good one of a later step stays and does not count toward `keep`: it could not be read when the run was resumed, and
        it is the same run (law 5), further along.
        """
        kept = 0
        for other in _steps(self._folder):
            good = self._is_good(other)
            kept += good is True and other <= step
            if good is False or (good and other <= step and kept > self._keep):
                path_of(self._folder, other).unlink(missing_ok=True)
                del self._good[other]

    def _is_good(self, step: int) -> bool | None:
        """Whether a checkpoint is good; None if it cannot be read now. Reads a file of an earlier run once.

        A damaged file must not count toward `keep`, or a good one would be removed for it.
        """
        if step not in self._good:
            try:
                _read(self._folder, step)
                self._good[step] = True
            except _Damaged:
                self._good[step] = False
            except (OSError, MemoryError, CheckpointError):
                self._good[step] = None
        return self._good[step]


def load_latest(folder: Path, notify: Notify) -> Checkpoint | None:
    """Load the newest good checkpoint, or None. Notifies about each damaged one that it skips, and leaves the file in place.

    A newer one that may be good but cannot be read now is an error: resuming from an older one would overwrite it.
    """
    try:
        steps = _steps(folder)
    except FileNotFoundError:
        if folder.is_symlink():
            raise CheckpointError(f"cannot read checkpoints in {folder}: it links to a folder that does not exist") from None
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read checkpoints in {folder}: {reason(error)}") from None
    for place, step in enumerate(steps, start=1):
        name = path_of(folder, step).stem
        try:
            return _read(folder, step)
        except FileNotFoundError:
            if path_of(folder, step).is_symlink():
                raise CheckpointError(
                    f"cannot read checkpoint {name} in {folder}: it links to a file that does not exist; restore the file, or"
                    " remove the link"
                ) from None
            continue
        except MemoryError:
            raise CheckpointError(f"cannot read checkpoint {name} in {folder}: out of memory; free some and resume") from None
        except (OSError, CheckpointError, _Damaged) as error:
            if not isinstance(error, _Damaged) and getattr(error, "errno", None) != errno.EIO:  # EIO: most likely a bad sector
                fix = "make it readable" if isinstance(error, OSError) else "use the version of Paceline that wrote it"
                fix += ", or remove it to " + ("resume from the previous one" if place < len(steps) else "start over")
                raise CheckpointError(f"cannot read checkpoint {name} in {folder}: {reason(error)}; {fix}") from None
            then = "using the previous one" if place < len(steps) else "there is no other"
            notify(f"checkpoint {name} is damaged ({reason(error)}): {then}")
    return None


def read_facts(folder: Path) -> dict[str, Any] | None:
    """The facts of the newest checkpoint, from its header alone, which is not verified; None if they cannot be read."""
    try:
        with path_of(folder, _steps(folder)[0]).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            facts = json.loads(json.loads(file.read(min(length, _HEADER_LIMIT_BYTES)))["__metadata__"]["facts"])
    except (OSError, IndexError, ValueError, KeyError, TypeError):  # damaged, or not there
        return None
    return facts if isinstance(facts, dict) else None


def copy_latest(source: Path, target: Path, notify: Notify) -> bool:
    """Copy the newest good checkpoint to another folder, complete or not at all. False if no good one was found."""
    found = load_latest(source, notify)
    if found is None:
        return False
    try:
        target.mkdir(parents=True, exist_ok=True)
        with replacing(path_of(target, found.step), sync_folder=True) as temporary:
            shutil.copyfile(path_of(source, found.step), temporary)
    except OSError as error:
        raise CheckpointError(f"cannot copy a checkpoint from {source} to {target}: {reason(error)}") from None
    return True


def copy_then_write(folder: Path, step: int, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
    """Copy the tensors now. The returned function writes them to a file of their own, from any thread; it raises what fails."""
    return partial(_write, folder, _snapshot(step, tensors, {}))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, on the CPU. Raises a CheckpointError if it is missing, damaged or not one of ours."""
    step = step_of(path)
    if step is None:
        raise CheckpointError(f"it is not named like {path_of(Path(), 120).name}")
    try:
        if not path.is_file():  # opening a pipe would wait for its writer
            raise CheckpointError("there is no such file")
        return _read(path.parent, step).tensors
    except MemoryError:
        raise CheckpointError("out of memory") from None
    except (OSError, _Damaged) as error:
        raise CheckpointError(reason(error) if isinstance(error, OSError) else f"it is damaged ({error})") from None


class _Damaged(Exception):
    """A file was read, but its content is not what was written."""


_FORMAT = "1"
_NAME = re.compile(r"step-([0-9]+)\.safetensors")
_LEFTOVER = re.compile(r"\.step-[0-9]+\.safetensors(\.[0-9]+)?\.part")
_BEGIN = b'{"__metadata__":{"sha256":"'  # the digest comes first, so its position is known before anything is parsed
_DIGEST = slice(8 + len(_BEGIN), 8 + len(_BEGIN) + 64)
_HEADER_LIMIT_BYTES = 100_000_000  # other readers of the format refuse more
CODES = {
    **{getattr(torch, f"{kind}int{bits}"): f"{kind or 'i'}{bits}".upper() for kind in ("", "u") for bits in (8, 16, 32, 64)},
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"},
    **{torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
}
_DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True, kw_only=True)
class _Snapshot:
    step: int
    tensors: dict[str, Tensor]
    facts: str
    copied: list[torch.cuda.Event]
    """Copies from the GPUs are complete once these have happened."""


def _snapshot(step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> _Snapshot:
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.is_cuda:  # into pinned memory, in stream order: the GPU copies between two steps, and training does not wait
            copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            copies[name].copy_(tensor.detach(), non_blocking=True)
        else:
            copies[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    copied = []
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        copied.append(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]  # the writer sleeps and uses no core
        copied[-1].record(torch.cuda.current_stream(device))
    return _Snapshot(step=step, tensors=copies, facts=json.dumps(dict(facts)), copied=copied)


def _write(folder: Path, snapshot: _Snapshot) -> None:
    for event in snapshot.copied:
        event.synchronize()
    path = path_of(folder, snapshot.step)
    # Large elements first, so that each tensor starts at a multiple of its element size, as readers that map the file need.
    tensors = dict(sorted(snapshot.tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))
    head = _head(snapshot, tensors)
    digest = hashlib.sha256(head)
    for tensor in tensors.values():
        digest.update(_bytes(tensor))
    head[_DIGEST] = digest.hexdigest().encode()
    with replacing(path, sync_folder=True) as temporary, temporary.open("wb") as file:
        file.write(head)
        for tensor in tensors.values():
            file.write(_bytes(tensor))


def _head(snapshot: _Snapshot, tensors: Mapping[str, Tensor]) -> bytearray:
    """The file up to its tensors: the length of the header in 8 bytes, then the header, with 64 zeros for the digest."""
    about = {"sha256": "0" * 64, "format": _FORMAT, "step": str(snapshot.step), "facts": snapshot.facts}
    entries: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in CODES:
            raise CheckpointError(f"{name} has dtype {tensor.dtype}, which the safetensors format does not support")
        begin, end = end, end + tensor.nbytes
        entries[_key(name)] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > _HEADER_LIMIT_BYTES:
        raise CheckpointError(
            f"its names and facts take {len(header):,} bytes, the limit is {_HEADER_LIMIT_BYTES:,}: keep large facts in tensors"
        )
    return bytearray(len(header).to_bytes(8, "little") + header)


def _read(folder: Path, step: int) -> Checkpoint:
    """Read a checkpoint. Raises _Damaged if it does not match its digest; after any other error the file may still be good."""
    try:
        with path_of(folder, step).open("rb") as file:
            return _parse(file, step)
    except (OSError, MemoryError, CheckpointError, _Damaged):
        raise
    except Exception:  # any: a damaged header can hold anything
        raise _Damaged("it is not a checkpoint") from None


def _parse(file: BufferedReader, step: int) -> Checkpoint:
    left = os.fstat(file.fileno()).st_size - 8
    length = int.from_bytes(file.read(8), "little")
    if not len(_BEGIN) + 64 <= length <= _HEADER_LIMIT_BYTES:
        raise _Damaged("it does not start like a checkpoint")
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
        if not 0 <= size <= left:  # check before allocating memory
            raise _Damaged("it is cut short")
        left -= size
        try:
            data = torch.empty(size, dtype=torch.uint8, device="cpu")
        except RuntimeError:  # what torch raises when memory runs out
            raise MemoryError from None
        file.readinto(_bytes(data))
        digest.update(_bytes(data))
        tensors[_name(key)] = data.view(dtype).view(shape)
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    if not head.startswith(_BEGIN, 8) or digest.hexdigest().encode() != stated:
        raise _Damaged("its checksum does not match")
    if about["format"] != _FORMAT:
        raise CheckpointError(f"it has format {about['format']}, but this version reads format {_FORMAT}")
    if about["step"] != str(step):
        raise _Damaged(f"it belongs to step {about['step']}")
    return Checkpoint(step=step, tensors=tensors, facts=json.loads(about["facts"]))


def _steps(folder: Path) -> list[int]:
    """The steps that have a file or a link, newest first. A broken link counts: its disk may be unmounted."""
    with os.scandir(folder) as entries:
        found = [_NAME.fullmatch(entry.name) for entry in entries if entry.is_file() or not os.path.exists(entry.path)]
    steps = [int(name[1]) for name in found if name is not None and path_of(folder, int(name[1])).name == name[0]]
    return sorted(steps, reverse=True)


def path_of(folder: Path, step: int) -> Path:
    """The file of a checkpoint."""
    return folder / f"step-{step:09d}.safetensors"


def step_of(path: Path) -> int | None:
    """The step of a file, from its name; None if it has another name."""
    found = _NAME.fullmatch(path.name)
    return int(found[1]) if found is not None and path_of(path.parent, int(found[1])).name == path.name else None


def _key(name: str) -> str:
    """A tensor's name as a key of the format: without surrogates, and never the reserved key. Plain names stay the same."""
    return name.encode("unicode_escape").decode().replace("__metadata__", r"\x5f_metadata__")


def _name(key: str) -> str:
    return key.encode().decode("unicode_escape")


def _bytes(tensor: Tensor) -> Any:
    """A tensor's memory, as a numpy array of bytes."""
    return tensor.view(-1).view(torch.uint8).numpy()
