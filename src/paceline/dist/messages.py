"""What workers and their launcher tell each other, as small files in a folder of the launcher's.

    0.json      why worker 0 failed: when, what, traceback
    record      where rank 0 writes its record, once there is one
    4711.pid    a worker with this process id has begun
    0.running   worker 0 has begun and has not finished
    stop        from the launcher: end after this step, and why ("SIGTERM", "Ctrl-C")

The earliest report that is not merely about a lost connection is the cause of the others (law 7). Nothing here imports torch.
"""

import os
import signal
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.dist.place import REPORTS_VARIABLE, read_place
from paceline.dist.process import signal_name
from paceline.errors import PacelineError
from paceline.files import read_json, write_file, write_json


@dataclass(frozen=True)
class Report:
    """What a failing worker leaves behind."""

    rank: int
    when: float
    exit_code: int
    text: str
    lost_contact: bool = False
    """The worker failed because another one was gone: a consequence, not a cause."""
    waited: bool = False
    """It lost contact by waiting in vain: no connection was closed, so the other one may hang."""


def folder() -> Path | None:
    """The launcher's folder for this worker; None where Paceline did not start it."""
    path = os.environ.get(REPORTS_VARIABLE)
    return Path(path) if path is not None else None


def report_failure(rank: int, error: BaseException) -> bool:
    """Leave this worker's report for the launcher. False where there is none: the worker then speaks for itself."""
    code = error.exit_code if isinstance(error, PacelineError) else 1
    lost = is_lost_contact(error)
    if isinstance(error, PacelineError):
        text = str(error)
    else:
        what = "lost contact with another worker" if lost else "failed first"
        text = f"worker {rank} {what}: {headline(error)}\n{''.join(traceback.format_exception(error))}"
    return leave(Report(rank, time.time(), code, text.rstrip(), lost, lost and _says_timeout(error)))


def leave(report: Report) -> bool:
    """Leave a report for the launcher; False where that cannot be."""
    where = folder()
    if where is None:
        return False
    try:
        write_json(where / f"{report.rank}.json", asdict(report))
    except OSError:  # a full disk, or the launcher is gone
        return False
    return True


def report_record(path: Path) -> None:
    """Tell the launcher where the record is, so that it can close it if this worker cannot."""
    where = folder()
    if where is not None:
        write_file(where / "record", str(path))


def report_begun() -> None:
    """Tell the launcher that this worker lives, so that it can be ended even where torch elastic does not know it yet."""
    where = folder()
    if where is not None:
        with suppress(OSError):  # it can still be ended by elastic
            (where / f"{os.getpid()}.pid").touch()
            (where / f"{read_place().rank}.running").touch()


def report_done() -> None:
    """Tell the launcher that this worker is done. Exit code 0 does not prove it: user code may call os._exit(0)."""
    where = folder()
    if where is not None:
        with suppress(OSError):  # the launcher is gone
            (where / f"{read_place().rank}.running").unlink()  # needs no room on a full disk


def read_reports(where: Path) -> list[Report]:
    """All reports in the folder."""
    return [Report(**read_json(path)) for path in sorted(where.glob("*.json"))]


def read_record(where: Path) -> Path | None:
    """Where rank 0 writes its record, if it came that far."""
    path = where / "record"
    text = path.read_text() if path.exists() else ""
    return Path(text) if text else None  # Path("") would be the folder we are in


def read_begun(where: Path) -> list[int]:
    """The process ids of the workers that have begun."""
    return [int(path.stem) for path in where.glob("*.pid")]


def read_unfinished(where: Path) -> set[int]:
    """The ranks of the workers that have begun and are not done."""
    return {int(path.stem) for path in where.glob("*.running")}


def ask_to_stop(where: Path, why: str) -> None:
    """Ask the workers to end after this step."""
    with suppress(OSError):  # a full disk: they are then ended when their grace has passed
        write_file(where / "stop", why)


def read_stop(where: Path) -> str:
    """Why the launcher asks the workers to stop, or ""."""
    path = where / "stop"
    with suppress(OSError):  # the launcher and its folder are gone
        return path.read_text() if path.exists() else ""
    return ""


def first_failure(
    reports: Sequence[Report], exits: Mapping[int, int], terminated: Collection[int] = (), *, begun: bool = True
) -> Report:
    """The failure that caused the others: a worker's own error, else one that ended or hung without a report, else the first
    lost contact.

    `exits` has the exit codes of the workers that are not done; `terminated`, the ranks that the launcher ended because another
    worker had failed. Before the run has `begun` (it has a record), a worker that others waited for may just be loading slowly.
    """
    own = [report for report in reports if not report.lost_contact]
    if own:
        return min(own, key=lambda report: report.when)
    reported = {report.rank for report in reports}
    silent = [rank for rank in exits if rank not in reported]
    alone = [rank for rank in silent if rank not in terminated]
    if alone:
        rank = min(alone, key=lambda rank: _suspicion(rank, exits[rank]))
        return Report(rank, 0.0, 1, _describe_exit(rank, exits[rank]))
    if silent and any(report.waited for report in reports):
        rank = min(silent)
        text = f"worker {rank} hung: the others waited for it, and it could not say where it is (stuck outside Python?)"
        if not begun:
            slow = "if it was still loading data, raise --timeout-s"
            text = f"worker {rank} was not ready for the first step: the others waited for it; {slow}"
        return Report(rank, 0.0, 1, text)
    if reports:
        return min(reports, key=lambda report: report.when)
    return Report(0, 0.0, 1, "the workers ended without saying why")


_HINTS: dict[int, str] = {
    signal.SIGKILL: " (often because the system is out of memory: try a smaller global batch)",
    signal.SIGILL: ": this CPU or virtual machine lacks an instruction that torch's kernels use, most likely bf16 on AMX; use"
    " --precision fp32, or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16",
}


def _describe_exit(rank: int, code: int) -> str:
    """Say how a worker without a report ended."""
    if code == 0:
        return f"worker {rank} ended with exit code 0 before the run was done: does the task call sys.exit or os._exit?"
    if code > 0:
        return f"worker {rank} ended with exit code {code} and left no report"
    return f"worker {rank} was killed by {signal_name(-code)}{_HINTS.get(-code, '')}"


_HEADLINE = 200  # characters, about two lines of a terminal


def headline(error: BaseException) -> str:
    """The error in one line. The text of an error in a loader process is its whole traceback: use the last line."""
    text, name = str(error), type(error).__name__
    if "Original Traceback" in text:
        text = text.strip().splitlines()[-1].removeprefix(f"{name}: ")
    line = " ".join(f"{name}: {text}".split())
    return line if len(line) <= _HEADLINE else f"{line[: _HEADLINE - 3]}..."


def is_lost_contact(error: BaseException) -> bool:
    """Whether this error only says that another worker is gone, or does not answer."""
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
    "remote process exit",  # NCCL's words for ncclRemoteError
    "communicator was aborted",
)


def _says_timeout(error: BaseException) -> bool:
    """Whether a collective or the store ran out of time.

    torch's DataLoader says "timed out", too, but with a plain RuntimeError: its own error, of no other worker.
    """
    text = str(error).lower()
    ours = type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError")
    return (
        "timed out waiting" in text  # gloo, as a RuntimeError
        or "collective operation timeout" in text  # NCCL's watchdog
        or (ours and any(word in text for word in ("timed out", "timeout", "timing out")))
    )


def _suspicion(rank: int, code: int) -> tuple[bool, bool, int]:
    """Sort key: killed by a signal, then a bare exit code, then SIGTERM, which another launcher may send to all workers."""
    return code == -signal.SIGTERM, code >= 0, rank
