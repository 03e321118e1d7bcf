"""Messages between workers and their launcher: small files in a folder that the launcher creates.

    0.json      worker 0 failed: when, why, the user's frame, traceback
    record      the path of rank 0's record, once it has one
    4711.pid    a worker with this process id has started
    0.running   worker 0 has started and has not finished
    join        from rank 0, as it ends: go on with another number of workers
    stop        from the launcher: stop after this step, and why ("SIGTERM", "Ctrl-C")
    handover    from the launcher: which workers these ones take over from, and when

The earliest failure that is not just a lost connection caused the others (law 7). Does not import torch.
"""

import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.dist.place import MESSAGES_VARIABLE, read_place
from paceline.dist.process import signal_name
from paceline.errors import PacelineError, Stopped, text_of
from paceline.explanation import Explanation, explain, is_from_loader
from paceline.files import read_json, write_file, write_json


@dataclass(frozen=True)
class Failure:
    """Why a worker failed."""

    rank: int
    when: float
    exit_code: int
    text: str
    """One line."""
    lost_contact: bool = False
    """The worker failed because another one was gone: a consequence, not the cause."""
    waited: bool = False
    """It lost contact because a wait timed out: no connection was closed, so the other worker may hang."""
    where: str = ""
    """The user's own frame, or "" (see `Explanation`)."""
    traceback: str = ""
    unexplained: bool = False
    """Only the traceback explains it."""

    def explain(self, record: Path | None = None) -> Explanation:
        """What to tell the user. `record` has the traceback too, if there is one."""
        return Explanation(self.text, self.where, self.traceback, self.unexplained, str(record or ""))


@dataclass(frozen=True)
class Join:
    """What rank 0 asks for as its workers end (`--workers-schedule`): go on with this many."""

    workers: int
    left_s: float
    """When they took their last step (`time.time()`)."""


@dataclass(frozen=True)
class Handover:
    """What the launcher tells workers that take over from others."""

    was: int
    """How many workers there were before."""
    left_s: float
    """When they took their last step."""
    ended_s: float
    """When all of them had ended."""


def launcher_folder() -> Path | None:
    """The folder for messages to this worker's launcher; None if Paceline's launcher did not start it."""
    path = os.environ.get(MESSAGES_VARIABLE)
    return Path(path) if path is not None else None


def send_failure(rank: int, error: BaseException) -> bool:
    """Tell the launcher why this worker failed. False if that is not possible: the worker then prints the error itself."""
    code = error.exit_code if isinstance(error, PacelineError) else 1
    lost, about, when = is_lost_contact(error), explain(error), time.time()
    text, traceback = about.why.rstrip(), about.traceback
    if lost:
        text, waited = f"worker {rank} lost contact with another worker: {text}", _says_timeout(error)
        return write_failure(Failure(rank, when, code, text, lost_contact=True, waited=waited, traceback=traceback))
    text = text if isinstance(error, PacelineError) else f"worker {rank} failed first: {text}"
    unexplained = about.unexplained
    return write_failure(Failure(rank, when, code, text, where=about.where, traceback=traceback, unexplained=unexplained))


def claim_first(store: Any, error: BaseException) -> None:
    """Mark an error as the first in this world, or not. `store` is shared by workers that another launcher started.

    If this worker is the last one alive, or is cut off from the store, its error counts as the first.
    """
    if isinstance(error, Stopped | KeyboardInterrupt) or is_lost_contact(error):
        return
    place: list[int] = []

    def claim() -> None:
        with suppress(RuntimeError):  # the store is gone
            place.append(store.add("paceline/failed", 1))
            if place == [1]:
                about = explain(error)
                store.set(_FAILURE, json.dumps([about.why, about.where, about.traceback]))

    _call_store(claim)
    with suppress(AttributeError):  # the user's error class has __slots__
        setattr(error, _FIRST, not place or place[0] == 1)


def failed_first(error: BaseException) -> bool | None:
    """Whether no other worker had failed before. None if that is not known."""
    return getattr(error, _FIRST, None)


def read_first(store: Any) -> Explanation | None:
    """The error of the worker that failed first, if it has claimed that."""
    found: list[Explanation] = []

    def read() -> None:
        with suppress(RuntimeError, ValueError, TypeError):
            if store.check([_FAILURE]):
                found.append(Explanation(*json.loads(store.get(_FAILURE))))

    _call_store(read)
    return found[0] if found else None


def _call_store(call: Callable[[], None]) -> None:
    """Let another thread use the store: its calls have no timeout, and the network may be down."""
    thread = threading.Thread(target=call, name="paceline-claim", daemon=True)
    thread.start()
    thread.join(_CLAIM_S)


_FIRST, _FAILURE = "_paceline_first", "paceline/failure"
_CLAIM_S = 2.0


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


def send_join(join: Join) -> None:
    """Ask the launcher to go on with other workers. Rank 0 calls this as the last thing."""
    where = launcher_folder()
    assert where is not None, "only Paceline's launcher can start other workers"
    write_json(where / "join", asdict(join))


def read_join(where: Path) -> Join | None:
    """What the workers that have ended ask for; None if the run is over."""
    with suppress(OSError, ValueError, TypeError):
        return Join(**read_json(where / "join"))
    return None


def send_handover(where: Path, handover: Handover) -> None:
    """Tell the workers that will start with this folder which ones they take over from."""
    with suppress(OSError):  # a full disk: only the line about it is missing
        write_json(where / "handover", asdict(handover))


def read_handover() -> Handover | None:
    """Which workers this one takes over from; None if it does not."""
    where = launcher_folder()
    with suppress(OSError, ValueError, TypeError):
        return Handover(**read_json(where / "handover")) if where is not None else None
    return None


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


def is_lost_contact(error: BaseException) -> bool:
    """Whether this error only says that another worker is gone or does not answer.

    Torch raises such errors. An error of the user's own code or of another library is this worker's own, whatever it says.
    """
    text = text_of(error).lower()
    lost = any(word in text for word in _LOST) or type(error).__name__ == "DistNetworkError" or _says_timeout(error)
    return isinstance(error, RuntimeError) and lost and not is_from_loader(error) and _is_from_torch(error)


def _is_from_torch(error: BaseException) -> bool:
    """Whether torch raised this error, called by anyone; or C++, called by us."""
    file = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
    own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return not file or f"{os.sep}torch{os.sep}" in file or os.path.abspath(file).startswith(own + os.sep)


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
    text = text_of(error).lower()
    ours = type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError")
    return (
        "timed out waiting" in text  # gloo, as a RuntimeError
        or "collective operation timeout" in text  # NCCL's watchdog
        or (ours and any(word in text for word in ("timed out", "timeout", "timing out")))
    )


def _suspicion(rank: int, code: int) -> tuple[bool, bool, int]:
    """Sort key: first killed by a signal, then an exit code, then SIGTERM, which another launcher may send to all workers."""
    return code == -signal.SIGTERM, code >= 0, rank
