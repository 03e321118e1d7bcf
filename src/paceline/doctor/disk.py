"""How fast records and checkpoints are written: a child process writes and syncs a few megabytes where runs are kept."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.doctor.finding import Finding

_FREE_BYTES = 2 * 1024**3
_WRITE_S, _LIMIT_S = 1.0, 15.0
_SLOW_BYTES_PER_S = 30e6
_CHECKPOINT_BYTES = 100e6  # the example in the text: 25 million parameters in fp32
_NETWORK = ("nfs", "cifs", "smb", "9p", "lustre", "gpfs", "beegfs", "ceph", "gluster", "afs", "fuse.sshfs")


@dataclass(frozen=True, kw_only=True)
class Disk:
    """A folder as the doctor found it."""

    folder: Path
    free_bytes: int | None = None
    system: str = ""
    """The type of the file system, such as ext4; empty if unknown."""
    bytes_per_s: float | None = None
    """None: nothing could be written."""
    failure: str = ""


def measure_disk(runs_dir: Path) -> Disk:
    """Write to the folder of the runs, or to the nearest folder above it that exists."""
    folder = next((each for each in (runs_dir.absolute(), *runs_dir.absolute().parents) if each.is_dir()), Path.cwd())
    try:
        free, (speed, failure) = shutil.disk_usage(folder).free, write_some(folder)
    except OSError as error:
        return Disk(folder=folder, failure=error.strerror or str(error))
    return Disk(folder=folder, free_bytes=free, system=_system(folder), bytes_per_s=speed, failure=failure)


def write_some(folder: Path, limit_s: float = _LIMIT_S) -> tuple[float | None, str]:
    """(bytes per second, why there is no speed). A disk that hangs would hang this process, so a child writes."""
    command = [sys.executable, "-I", "-S", "-c", _CODE, str(folder), str(_WRITE_S)]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        with suppress(subprocess.TimeoutExpired):  # a process that waits for a dead file server cannot be killed
            child.communicate(timeout=1)
        return None, f"a few megabytes were not written within {limit_s:g} s"
    try:
        written, seconds = json.loads(out)
        return written / seconds, ""
    except (ValueError, TypeError, ZeroDivisionError):
        last = err.strip().splitlines()
        return None, last[-1] if last else f"exit code {child.returncode}"


def judge_disk(disk: Disk) -> Iterator[Finding]:
    """Whether runs can be kept in this folder, and what a checkpoint costs there."""
    other = "use a --runs-dir on a local disk"
    network = any(disk.system.startswith(each) for each in _NETWORK)
    where = f"{disk.folder}{f' ({disk.system})' if disk.system else ''}"
    if disk.bytes_per_s is None:
        yield Finding("wrong", "disk", f"cannot write to {where}: {disk.failure}", "use a --runs-dir that you can write to")
    else:
        checkpoint = _CHECKPOINT_BYTES / disk.bytes_per_s
        text = f"{disk.bytes_per_s / 1e6:,.0f} MB/s: a checkpoint of 100 MB takes {checkpoint:.2g} s"
        slow = disk.bytes_per_s < _SLOW_BYTES_PER_S
        yield Finding("slow" if slow else "ok", "disk", text, other if slow else "")
    if network:
        yield Finding("note", "disk", f"{where} is a network file system", other)
    if disk.free_bytes is not None:
        yield _judge_space(disk.folder, disk.free_bytes)
    temporary = Path(tempfile.gettempdir())
    yield replace(_judge_space(temporary, shutil.disk_usage(temporary).free), detail=True)


def _judge_space(folder: Path, free_bytes: int) -> Finding:
    low = free_bytes < _FREE_BYTES
    text = f"{free_bytes / 2**30:.1f} GiB free in {folder}"
    return Finding("wrong" if low else "ok", "disk", text, "free some space" if low else "")


def _system(folder: Path) -> str:
    """The type of the file system: that of the longest mount point above the folder."""
    import psutil

    with suppress(OSError, RuntimeError):
        real = os.path.realpath(folder)
        mounts = [each for each in psutil.disk_partitions(all=True) if Path(real).is_relative_to(each.mountpoint)]
        return str(max(mounts, key=lambda each: len(each.mountpoint)).fstype) if mounts else ""
    return ""


_CODE = """
import json, os, sys, tempfile, time
data, written = os.urandom(1 << 20) * 8, 0
try:
    with tempfile.TemporaryFile(dir=sys.argv[1]) as file:
        begin = time.perf_counter()
        while written < 8 * len(data) and time.perf_counter() < begin + float(sys.argv[2]):
            written += os.write(file.fileno(), data)
            os.fsync(file.fileno())
        print(json.dumps([written, time.perf_counter() - begin]))
except OSError as error:
    sys.exit(error.strerror or str(error))
"""
