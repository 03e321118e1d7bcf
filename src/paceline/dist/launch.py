"""Start local workers through torch elastic, end them all when one fails, and say which failed first (law 7).

A worker is the same command once more (`python -m paceline train ...`) with a rank in its environment. Each runs in a session
of its own, so that Ctrl-C reaches only the launcher, which then ends them. A failing worker leaves a report (when, what, traceback) in
a folder of the launcher's; the earliest report that is not merely about a lost connection is the cause.
"""

import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.config import Config
from paceline.dist.place import REPORTS_VARIABLE, threads_per_worker
from paceline.errors import PacelineError, UsageError

_AGENT_VARIABLE = "PACELINE_AGENT"
INTERRUPTED = 130  # the shell's code for a program ended by Ctrl-C


@dataclass(frozen=True)
class Report:
    """What a failing worker leaves behind."""

    rank: int
    when: float
    exit_code: int
    text: str
    lost_contact: bool = False
    """The worker failed because another one was gone: a consequence, not a cause."""


@dataclass(frozen=True)
class Outcome:
    """How a launch ended."""

    exit_code: int
    report: Report | None = None
    record: Path | None = None
    """Where rank 0 was writing its record, if it came that far."""


def launch(command: Sequence[str], config: Config) -> Outcome:
    """Run `python -m paceline COMMAND` as `config.workers` local workers and wait for them."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # its news reach the user in our words
    workers = config.workers or 1
    with _as_before(), tempfile.TemporaryDirectory(prefix="paceline-") as reports:
        os.environ[REPORTS_VARIABLE] = reports
        os.environ[_AGENT_VARIABLE] = str(os.getpid())
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_worker(workers)))
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        agent = elastic_launch(
            LaunchConfig(
                min_nodes=config.nodes,
                max_nodes=config.nodes,
                nproc_per_node=workers,
                max_restarts=0,
                run_id=uuid.uuid4().hex if config.nodes == 1 else "paceline",
                **_rendezvous(config),
            ),
            sys.executable,
        )
        try:
            agent("-m", "paceline", *command)
        except ChildFailedError as error:
            exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
            report = first_failure(read_reports(Path(reports)), exits)
            return Outcome(report.exit_code, report, _record(Path(reports)))
        except (SignalException, KeyboardInterrupt):
            return Outcome(INTERRUPTED, None, _record(Path(reports)))
        return Outcome(0, None, _record(Path(reports)))


@contextmanager
def _as_before() -> Iterator[None]:
    """Leave the environment and the signal handlers as they were: elastic and we change both, and a program may go on."""
    environ = dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environ)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def first_failure(reports: Sequence[Report], exits: Mapping[int, int]) -> Report:
    """The failure that caused the others: a worker's own error, else a worker killed by a signal, else the first lost contact."""
    own = [report for report in reports if not report.lost_contact]
    if own:
        return min(own, key=lambda report: report.when)
    reported = {report.rank for report in reports}
    for rank, code in sorted(exits.items(), key=_suspicion):
        if rank not in reported:
            if code < 0:
                name = signal.Signals(-code).name if -code in list(signal.Signals) else f"signal {-code}"
                hint = " (often the system out of memory: try a smaller global batch)" if -code == signal.SIGKILL else ""
                return Report(rank, 0.0, 1, f"worker {rank} was killed by {name}{hint}")
            return Report(rank, 0.0, 1, f"worker {rank} ended with exit code {code} and left no report")
    if reports:
        return min(reports, key=lambda report: report.when)
    return Report(0, 0.0, 1, "the workers ended without saying why")


def _suspicion(item: tuple[int, int]) -> tuple[bool, bool, int]:
    """Killed by a signal before a bare exit code; last of all SIGTERM, which is how elastic ends the others."""
    rank, code = item
    return code == -signal.SIGTERM, code >= 0, rank


def start_as_worker() -> None:
    """First thing in a process the launcher started: die with the launcher, and at once when asked to."""
    if REPORTS_VARIABLE not in os.environ:
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of an interrupted import
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a launcher killed with -9 leaves no orphans
        if str(os.getppid()) != os.environ.get(_AGENT_VARIABLE):
            os._exit(1)  # it was already gone


def report_failure(rank: int, error: BaseException) -> bool:
    """Leave this worker's report for the launcher. False where there is none: the worker then speaks for itself."""
    folder = os.environ.get(REPORTS_VARIABLE)
    if folder is None:
        return False
    known = isinstance(error, PacelineError)
    text = str(error) if known else f"worker {rank} failed first: {headline(error)}\n{''.join(traceback.format_exception(error))}"
    code = error.exit_code if isinstance(error, PacelineError) else 1
    report = Report(rank, time.time(), code, text.rstrip(), is_lost_contact(error))
    path = Path(folder) / f"{rank}.json"
    try:
        path.with_suffix(".part").write_text(json.dumps(asdict(report)))
        path.with_suffix(".part").replace(path)
    except OSError:  # a full disk, or the launcher is gone
        return False
    return True


def report_record(path: Path) -> None:
    """Tell the launcher where the record is, so that it can close it if this worker cannot."""
    folder = os.environ.get(REPORTS_VARIABLE)
    if folder is not None:
        (Path(folder) / "record").write_text(str(path))


def read_reports(folder: Path) -> list[Report]:
    """All reports in the folder."""
    return [Report(**json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]


def headline(error: BaseException) -> str:
    """The error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def is_lost_contact(error: BaseException) -> bool:
    """Whether this error only says that another worker is gone."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        word in text for word in ("closed by peer", "connection reset", "broken pipe", "remote peer", "connection refused")
    )


def _record(reports: Path) -> Path | None:
    path = reports / "record"
    return Path(path.read_text()) if path.exists() else None


def _rendezvous(config: Config) -> dict[str, Any]:
    """Where this node's agent meets the others: alone, on a free port of this machine; else at a port of node 0."""
    if config.nodes == 1:
        return {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "127.0.0.1"}
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    endpoint = config.rendezvous or (f"{address}:{port}" if address and port else "")
    if not endpoint.rpartition(":")[2].isdigit() or not endpoint.rpartition(":")[0]:
        raise UsageError(
            f"--nodes {config.nodes} needs to know where node 0 is: give --rendezvous HOST:PORT, or set MASTER_ADDR and MASTER_PORT"
        )
    return {"rdzv_backend": "static", "rdzv_endpoint": endpoint, "rdzv_configs": {"rank": config.node_id, "timeout": config.timeout_s}}

