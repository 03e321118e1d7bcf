"""Start local workers with torch elastic, end them all when one fails (law 7), and restart them if `--max-restarts` allows it,
or on another number of workers if `--workers-schedule` wants that.

A worker runs the same command again (`python -m paceline train ...`) with a rank in its environment. Each has its own session,
so Ctrl-C reaches only the launcher, which asks the workers to stop and ends those that do not. `messages.py` has what launcher
and workers tell each other, `restarts.py` chooses the workers of the next attempt.
"""

import gc
import itertools
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from paceline.config import Config
from paceline.dist.forward import Forward, forward_output
from paceline.dist.messages import (
    Failure,
    Handover,
    Join,
    ask_to_stop,
    first_failure,
    is_lost_contact,
    launcher_folder,
    read_failures,
    read_join,
    read_record_path,
    read_started,
    read_stop,
    read_unfinished,
    send_handover,
    send_started,
)
from paceline.dist.place import MESSAGES_VARIABLE, check_port, threads_per_worker
from paceline.dist.process import die_with_parent, drop_closed_terminal, group_is_running, python_command
from paceline.dist.restarts import Crew, FailedAttempt, newest_checkpoint, next_crew, restart_command
from paceline.errors import ShownAlone, UsageError
from paceline.explanation import Explanation, headline
from paceline.loading import resume_collector
from paceline.output import is_terminal, plural, warn

if TYPE_CHECKING:  # it imports torch
    from paceline.dist.agent import Exits, Meeting

INTERRUPTED = 130  # the shell's code for a program ended by Ctrl-C
STOPPED = 143  # ... and by SIGTERM; also used after SIGHUP
STOPPING = "paceline: stopping after this step (Ctrl-C again to stop now)"

_AGENT_VARIABLE = "PACELINE_AGENT"
_KILL_AFTER_S = 5  # from SIGTERM to SIGKILL
_LEFT_S = 2.0  # after success, how long processes that workers started may take to end: on their own, then after SIGTERM
_FINAL_EXIT_CODES = (0, 2, 3)  # done, the user's mistake, diverged: a restart would end the same way


class WorkerFailed(ShownAlone):
    """A worker started by this process failed. The explanation comes from the worker that failed first."""

    def __init__(self, explanation: Explanation, exit_code: int) -> None:
        super().__init__(explanation.describe(hint=False))  # a Python program has no flags
        self.explanation, self.exit_code = explanation, exit_code


@dataclass(frozen=True)
class Outcome:
    """How a launch ended."""

    exit_code: int
    failure: Failure | None = None
    """The first failure. None after success, and if the launch was asked to stop (INTERRUPTED or STOPPED)."""
    record: Path | None = None
    """Where rank 0 was writing its record, if it had one yet."""
    why: str = ""
    """Why it stopped, if it was asked to: "Ctrl-C", or the signal's name."""
    join: Join | None = None
    """The workers ended so that others go on. Never after the last attempt."""


def launch(
    command: Sequence[str], config: Config, prepare: Callable[[Path], None] | None = None, workers: int | None = None
) -> Outcome:
    """Run `python -m paceline COMMAND` as local workers, with up to `config.max_restarts` restarts.

    There are `config.workers` of them or, with `--workers-schedule`, `workers` at first and then as many as rank 0 asks for.
    `prepare` may write files for the workers into a folder that only this user can read. The folder is removed at the end.
    """
    command, crew = list(command), Crew(workers or config.workers or 1)
    record, before, failures = None, None, 0
    with _catch_stop_signals() as request, tempfile.TemporaryDirectory(prefix="paceline-") as place:
        if prepare is not None:
            prepare(Path(place))
        handover: Handover | None = None
        for number in itertools.count(1):
            folder = Path(place) / str(number)
            folder.mkdir()
            if handover is not None:
                send_handover(folder, handover)
            outcome = _attempt(command, crew, config, folder, request)
            record = outcome.record or record
            outcome = replace(outcome, record=record)
            if outcome.join is not None:
                handover = Handover(crew.workers, outcome.join.left_s, time.time())
                crew, before = Crew(outcome.join.workers), None
                command = restart_command(command, crew, config, record)
                continue
            failures, failure, handover = failures + 1, outcome.failure, None
            if failure is None or failure.exit_code in _FINAL_EXIT_CODES or failures > config.max_restarts:
                break
            after = FailedAttempt(failure.rank, newest_checkpoint(record))
            last, (crew, why) = crew, next_crew(crew, before, after, config)
            if crew.workers < (config.min_workers or 1):
                left = f"{plural(crew.workers, 'device')} left, fewer than --min-workers {config.min_workers}"
                outcome = replace(outcome, failure=replace(failure, text=f"{failure.text}; not restarted: {left}"))
                break
            before = after if crew == last else None  # without one worker, the ranks above it move down
            total = crew.workers * config.nodes
            news = f"restart {failures} of {config.max_restarts} on {plural(total, 'worker')}{why}"
            warn(f"paceline: {failure.text.splitlines()[0]}; {news}")
            command = restart_command(command, crew, config, record)
            if config.nodes > 1:
                _leave_old_meeting(config)
    return outcome


@dataclass
class StopRequest:
    """What the signals that the launcher received ask for."""

    why: str = ""
    exit_code: int = 0
    times: int = 0


def start_as_worker() -> None:
    """Call first in a process that may be a worker of our launcher: it then dies with the launcher, and at once on signals."""
    where = launcher_folder()
    if where is None:
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of an interrupted import
    die_with_parent(int(os.environ.get(_AGENT_VARIABLE, "0")))  # a launcher killed with -9 leaves no orphans
    forward_output(where)
    send_started()
    if read_stop(where):
        os._exit(STOPPED)  # asked to stop before it started


@contextmanager
def _catch_stop_signals() -> Iterator[StopRequest]:
    """Record SIGINT, SIGTERM and SIGHUP while the block runs. Only the main thread can: elsewhere the request stays empty."""
    request, handlers = StopRequest(), {}

    def record_signal(number: int, frame: FrameType | None) -> None:
        request.times += 1
        if request.times == 1:
            request.exit_code = INTERRUPTED if number == signal.SIGINT else STOPPED
            request.why = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if number == signal.SIGHUP:
            drop_closed_terminal()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):  # nohup, and background jobs
                handlers[number] = signal.signal(number, record_signal)
    try:
        yield request
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _attempt(command: Sequence[str], crew: Crew, config: Config, folder: Path, request: StopRequest) -> Outcome:
    """Start the workers once and wait until they have ended."""
    import paceline.dist.agent  # noqa: F401  # imports torch: not in the thread, so that Ctrl-C is noticed meanwhile

    resume_collector()
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # we print our own messages instead
    ended: list[Exits | Exception] = []
    with _environment(crew, folder):
        if not request.why:
            # Outside the main thread elastic does not handle signals, so they reach us even while it waits for other nodes.
            # A worker's PR_SET_PDEATHSIG refers to this thread, which must outlive the workers: elastic ensures that.
            thread = threading.Thread(
                target=_run_elastic, args=(command, crew, config, folder, ended), name="elastic", daemon=True
            )
            with _ended_on_error(folder), closing(Forward(folder)) as output:
                thread.start()
                _wait(thread, config, folder, request, output)
    record, unfinished = read_record_path(folder), read_unfinished(folder)
    exits = ended[0].codes if ended and not isinstance(ended[0], Exception) else None
    codes = {rank: code for rank, code in (exits or {}).items() if code != 0 or rank in unfinished}
    if exits is not None and not codes:  # done, even if a request to stop came too late
        _end_leftovers(folder)
        return Outcome(0, None, record, join=read_join(folder))
    _kill_workers(folder)
    if request.why:
        return Outcome(request.exit_code, None, record, request.why)
    (end,) = ended
    if isinstance(end, Exception):
        if config.nodes == 1 or not is_lost_contact(end):
            raise end
        text = f"node {config.node_id} lost contact with the others: {headline(end)}"
        return Outcome(1, Failure(0, time.time(), 1, text, lost_contact=True), record)
    failure = first_failure(read_failures(folder), codes, end.terminated, begun=record is not None)
    return Outcome(failure.exit_code, failure, record)


def _run_elastic(command: Sequence[str], crew: Crew, config: Config, folder: Path, ended: "list[Exits | Exception]") -> None:
    """Let elastic run the workers. Append their exits to `ended`, or the error that kept them from running."""
    from paceline.dist.agent import run_workers

    again = [*python_command(), "-m", "paceline", *command]
    try:
        ended.append(run_workers(again, crew.workers, _meeting(config), folder / "elastic", _KILL_AFTER_S))
    except Exception as error:
        ended.append(error)


@contextmanager
def _ended_on_error(folder: Path) -> Iterator[None]:
    """Kill the workers if waiting for them raises: the caller's program goes on and must not keep them."""
    try:
        yield
    except BaseException:
        _kill_workers(folder)
        raise


def _wait(thread: threading.Thread, config: Config, folder: Path, request: StopRequest, output: Forward) -> None:
    """Wait until the workers have ended. After a request to stop, end those that have not stopped after `config.grace_s`."""
    while thread.is_alive() and not request.why:
        output.join(thread, 0.1)
    if not thread.is_alive():
        return
    ask_to_stop(folder, request.why)
    # Before rank 0 has a record, workers do not check for this request and have nothing to lose, so do not wait for them. The
    # launchers of other nodes never learn of a record.
    begun = read_record_path(folder) is not None or (config.node_id > 0 and bool(read_started(folder)))
    if begun and request.why == "Ctrl-C" and is_terminal(sys.stderr):
        warn(STOPPING)
    end = time.monotonic() + (config.grace_s if begun else 0)
    while thread.is_alive() and request.times == 1 and time.monotonic() < end:
        output.join(thread, 0.1)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if thread.is_alive():
            _signal_workers(folder, number)
            # Nodes that have not met yet have no workers, and the thread may wait a very long time for the other nodes.
            output.join(thread, _KILL_AFTER_S if config.nodes == 1 or read_started(folder) else 0.5)


def _kill_workers(folder: Path) -> None:
    """Kill the workers and all that they started, so that none is left. Look again: a loader process may just be starting."""
    for _ in range(20):
        _signal_workers(folder, signal.SIGKILL)
        if not any(map(group_is_running, read_started(folder))):
            return
        time.sleep(0.05)


def _signal_workers(folder: Path, number: signal.Signals) -> None:
    for pid in read_started(folder):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)  # each worker leads its own session, so this also reaches its children


def _end_leftovers(folder: Path) -> None:
    """End processes that successful workers left running, such as a tracker's uploader; first give them time to finish."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        left = [pid for pid in read_started(folder) if group_is_running(pid)]
        if not left:
            return
        if number is not None:
            _signal_workers(folder, number)
        end = time.monotonic() + _LEFT_S
        while number != signal.SIGKILL and any(map(group_is_running, left)) and time.monotonic() < end:
            time.sleep(0.05)


@contextmanager
def _environment(crew: Crew, folder: Path) -> Iterator[None]:
    """Set the workers' environment variables, and restore ours afterwards: the calling program may go on after the launch."""
    environ = dict(os.environ)
    os.environ[MESSAGES_VARIABLE] = str(folder)
    os.environ[_AGENT_VARIABLE] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_worker(crew.workers)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if crew.devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(crew.devices)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environ)


def _leave_old_meeting(config: Config) -> None:
    """Before nodes meet again at the same port: node 0 closes the old store, and the other nodes wait until it is closed."""
    if config.node_id == 0:
        gc.collect()  # elastic's agent holds the store and is part of a reference cycle
        time.sleep(1)  # long enough for the others to see that it is closed
        return
    meeting = _meeting(config)
    for _ in range(150):  # 15 s: a store that still answers is the new one, which node 0 opened before we looked
        try:
            socket.create_connection((meeting.host, meeting.port), timeout=1).close()
        except OSError:
            return
        time.sleep(0.1)


def _meeting(config: Config) -> "Meeting":
    """Where this node's agent meets the others: a port on node 0, or a free loopback port if there is only one node."""
    from paceline.dist.agent import Meeting
    from paceline.dist.store import LOOPBACK

    if config.nodes == 1:
        return Meeting(host=LOOPBACK, port=0, node=0, nodes=1, timeout_s=config.timeout_s)
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    endpoint = config.rendezvous or (f"{address}:{port}" if address and port else "")
    host, _, port = endpoint.rpartition(":")
    if not (host and port.isascii() and port.isdigit()):
        raise UsageError(
            f"--nodes {config.nodes} needs the address of node 0: use --rendezvous HOST:PORT, or set MASTER_ADDR and"
            " MASTER_PORT"
        )
    number = check_port(int(port), f"--rendezvous {endpoint}" if config.rendezvous else f"MASTER_PORT is {port}")
    return Meeting(host=host.strip("[]"), port=number, node=config.node_id, nodes=config.nodes, timeout_s=config.timeout_s)
