"""Messages between workers and their launcher: small files in a folder that the launcher creates.

    0.json      worker 0 failed: when, why, traceback
    record      the path of rank 0's record, once it has one
    4711.pid    a worker with this process id has started
    0.running   worker 0 has started and has not finished
    stop        from the launcher: stop after this step, and why ("SIGTERM", "Ctrl-C")

The earliest failure that is not just a lost connection caused the others (law 7). Does not import torch.
"""

import os
import signal
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.dist.place import MESSAGES_VARIABLE, read_place
from paceline.dist.process import signal_name
from paceline.errors import PacelineError
from paceline.files import read_json, write_file, write_json


@dataclass(frozen=True)
class Failure:
    """Why a worker failed."""

    rank: int
    when: float
    exit_code: int
    text: str
    lost_contact: bool = False
    """The worker failed because another one was gone: a consequence, not the cause."""
    waited: bool = False
    """It lost contact because a wait timed out: no connection was closed, so the other worker may hang."""


def launcher_folder() -> Path | None:
    """The folder for messages to this worker's launcher; None if Paceline's launcher did not start it."""
    path = os.environ.get(MESSAGES_VARIABLE)
    return Path(path) if path is not None else None


def send_failure(rank: int, error: BaseException) -> bool:
    """Tell the launcher why this worker failed. False if that is not possible: the worker then prints the error itself."""
    code = error.exit_code if isinstance(error, PacelineError) else 1
    lost = is_lost_contact(error)
    if isinstance(error, PacelineError):
        text = str(error)
    else:
        what = "lost contact with another worker" if lost else "failed first"
        text = f"worker {rank} {what}: {headline(error)}\n{''.join(traceback.format_exception(error))}"
    return write_failure(Failure(rank, time.time(), code, text.rstrip(), lost, lost and _says_timeout(error)))


def write_failure(failure: Failure) -> bool:
    """Write a failure to the launcher's folder. False if that is not possible."""
    where = launcher_folder()
    if where is None:
        return False
    try:
        write_json(where / f"{failure.rank}.json", asdict(failure))
    except OSError:  # a full disk, or the launcher is gone
        return False
    return True


def send_record_path(path: Path) -> None:
    """Tell the launcher where the record is, so that it can close it if this worker cannot."""
    where = launcher_folder()
    if where is not None:
        write_file(where / "record", str(path))


def send_started() -> None:
    """Tell the launcher this worker's process id, so that it can end it even before torch elastic knows it."""
    where = launcher_folder()
    if where is not None:
        with suppress(OSError):  # elastic can still end it
            (where / f"{os.getpid()}.pid").touch()
            (where / f"{read_place().rank}.running").touch()


def send_finished() -> None:
    """Tell the launcher that this worker is done. Exit code 0 does not prove it: user code may call os._exit(0)."""
    where = launcher_folder()
    if where is not None:
        with suppress(OSError):  # the launcher is gone
            (where / f"{read_place().rank}.running").unlink()  # works on a full disk too


def read_failures(where: Path) -> list[Failure]:
    """All failures in the folder."""
    return [Failure(**read_json(path)) for path in sorted(where.glob("*.json"))]


def read_record_path(where: Path) -> Path | None:
    """Where rank 0 writes its record, if it has one yet."""
    path = where / "record"
    text = path.read_text() if path.exists() else ""
    return Path(text) if text else None  # Path("") would mean the current folder


def read_started(where: Path) -> list[int]:
    """The process ids of the workers that have started."""
    return [int(path.stem) for path in where.glob("*.pid")]


def read_unfinished(where: Path) -> set[int]:
    """The ranks of the workers that have started and are not done."""
    return {int(path.stem) for path in where.glob("*.running")}


def ask_to_stop(where: Path, why: str) -> None:
    """Ask the workers to stop after this step."""
    with suppress(OSError):  # a full disk: the launcher ends them when their grace period is over
        write_file(where / "stop", why)


def read_stop(where: Path) -> str:
    """Why the launcher asks the workers to stop; "" if it does not."""
    path = where / "stop"
    with suppress(OSError):  # the launcher and its folder are gone
        return path.read_text() if path.exists() else ""
    return ""


def first_failure(
    failures: Sequence[Failure], exits: Mapping[int, int], terminated: Collection[int] = (), *, begun: bool = True
) -> Failure:
    """The failure that caused the others: a worker's own error; else a worker that ended or hung without a message; else the
    first lost contact.

    `exits` has the exit codes of the workers that are not done. `terminated` has the ranks that the launcher ended because
    another worker had failed. A run has `begun` once it has a record: before that, a worker that others wait for may just be
    loading slowly.
    """
    own = [failure for failure in failures if not failure.lost_contact]
    if own:
        return min(own, key=lambda failure: failure.when)
    heard = {failure.rank for failure in failures}
    silent = [rank for rank in exits if rank not in heard]
    alone = [rank for rank in silent if rank not in terminated]
    if alone:
        rank = min(alone, key=lambda rank: _suspicion(rank, exits[rank]))
        return Failure(rank, 0.0, 1, _describe_exit(rank, exits[rank]))
    if silent and any(failure.waited for failure in failures):
        rank = min(silent)
        text = f"worker {rank} hung: the others waited for it, and it could not print its stack (stuck outside Python?)"
        if not begun:
            slow = "if it was still loading data, raise --timeout-s"
            text = f"worker {rank} was not ready for the first step: the others waited for it; {slow}"
        return Failure(rank, 0.0, 1, text)
    if failures:
        return min(failures, key=lambda failure: failure.when)
    return Failure(0, 0.0, 1, "the workers ended without an error message")


_HINTS: dict[int, str] = {
    signal.SIGKILL: " (often because the machine ran out of memory: try a smaller --global-batch)",
    signal.SIGILL: ": this CPU or virtual machine lacks an instruction that torch's kernels use, most likely bf16 on AMX; use"
    " --precision fp32, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16",
}


def _describe_exit(rank: int, code: int) -> str:
    """Say how a worker ended that sent no failure."""
    if code == 0:
        return f"worker {rank} ended with exit code 0 before the run was done: does the task call sys.exit or os._exit?"
    if code > 0:
        return f"worker {rank} ended with exit code {code} and no error message"
    return f"worker {rank} was killed by {signal_name(-code)}{_HINTS.get(-code, '')}"


_HEADLINE = 200  # characters, about two lines of a terminal


def headline(error: BaseException) -> str:
    """The error in one line. An error from a loader process has its whole traceback as text: use the last line."""
    text, name = str(error), type(error).__name__
    if "Original Traceback" in text:
        text = text.strip().splitlines()[-1].removeprefix(f"{name}: ")
    line = " ".join(f"{name}: {text}".split())
    return line if len(line) <= _HEADLINE else f"{line[: _HEADLINE - 3]}..."


def is_lost_contact(error: BaseException) -> bool:
    """Whether this error only says that another worker is gone or does not answer."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and (
        any(word in text for word in _LOST) or type(error).__name__ == "DistNetworkError" or _says_timeout(error)
    )


_LOST = (
    "closed by peer",
    "connection reset",
    "broken pipe",
    "remote peer",
    "connection refused",
    "remote process exit",  # NCCL's text for ncclRemoteError
    "communicator was aborted",
)


def _says_timeout(error: BaseException) -> bool:
    """Whether a collective or the store timed out.

    torch's DataLoader also says "timed out", but in a plain RuntimeError: that is this worker's own error.
    """
    text = str(error).lower()
    ours = type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError")
    return (
        "timed out waiting" in text  # gloo, as a RuntimeError
        or "collective operation timeout" in text  # NCCL's watchdog
        or (ours and any(word in text for word in ("timed out", "timeout", "timing out")))
    )


def _suspicion(rank: int, code: int) -> tuple[bool, bool, int]:
    """Sort key: first killed by a signal, then an exit code, then SIGTERM, which another launcher may send to all workers."""
    return code == -signal.SIGTERM, code >= 0, rank
