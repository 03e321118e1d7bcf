"""Start local workers through torch elastic, end them all when one fails (law 7), and start again where that is asked for.

A worker is the same command once more (`python -m paceline train ...`) with a rank in its environment. Each runs in a session
of its own, so that Ctrl-C reaches only the launcher, which asks them to stop and ends those that do not. What they tell each
other is in `reports.py`, who takes part in the next attempt in `restarts.py`.
"""

import gc
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from paceline.config import Config
from paceline.dist.messages import (
    Report,
    ask_to_stop,
    first_failure,
    folder,
    headline,
    is_lost_contact,
    read_begun,
    read_record,
    read_reports,
    read_stop,
    read_unfinished,
    report_begun,
)
from paceline.dist.place import REPORTS_VARIABLE, check_port, threads_per_worker
from paceline.dist.process import die_with_parent, has_members, let_go_of_terminal, python_command
from paceline.dist.restarts import Crew, Failure, command_again, newest_checkpoint, next_crew
from paceline.errors import UsageError
from paceline.loading import resume_collector
from paceline.output import is_terminal, warn

if TYPE_CHECKING:  # it imports torch
    from paceline.dist.agent import Exits, Meeting

INTERRUPTED = 130  # the shell's code for a program ended by Ctrl-C
STOPPED = 143  # ... and by SIGTERM; a run that SIGHUP stopped uses it, too
STOPPING = "paceline: stopping after this step (Ctrl-C again to stop now)"

_AGENT_VARIABLE = "PACELINE_AGENT"
_KILL_AFTER_S = 5  # from SIGTERM to SIGKILL
_LEFT_S = 2.0  # after success, for what workers started: to end on its own, and again after SIGTERM
_NOT_WORTH_ANOTHER = (0, 2, 3)  # done, the user's mistake, diverged: the next attempt would end in the same way


@dataclass(frozen=True)
class Outcome:
    """How a launch ended."""

    exit_code: int
    report: Report | None = None
    """Who failed first. None where all went well or the launch was asked to stop (INTERRUPTED or STOPPED)."""
    record: Path | None = None
    """Where rank 0 was writing its record, if it came that far."""
    why: str = ""
    """Why it stopped, if it was asked to: "Ctrl-C", or the signal's name."""


def launch(command: Sequence[str], config: Config) -> Outcome:
    """Run `python -m paceline COMMAND` as `config.workers` local workers, up to 1 + `config.max_restarts` times, to the end."""
    command, crew = list(command), Crew(config.workers or 1)
    record, before = None, None
    with _wish_to_stop() as wish, tempfile.TemporaryDirectory(prefix="paceline-") as place:
        for restart in range(1, config.max_restarts + 2):
            reports = Path(place) / str(restart)
            reports.mkdir()
            outcome = _attempt(command, crew, config, reports, wish)
            record = outcome.record or record
            outcome = replace(outcome, record=record)
            report = outcome.report
            if report is None or report.exit_code in _NOT_WORTH_ANOTHER or restart > config.max_restarts:
                break
            after = Failure(report.rank, newest_checkpoint(record))
            last, (crew, why) = crew, next_crew(crew, before, after, config)
            if crew.workers < (config.min_workers or 1):
                left = f"{crew.workers} device{'s' * (crew.workers != 1)} left, fewer than --min-workers {config.min_workers}"
                outcome = replace(outcome, report=replace(report, text=f"{report.text}\nnot restarted: {left}"))
                break
            before = after if crew == last else None  # ranks move up when one is taken out
            total = crew.workers * config.nodes
            said = f"restart {restart} of {config.max_restarts} on {total} worker{'s' * (total > 1)}{why}"
            warn(f"paceline: {report.text.splitlines()[0]}; {said}")
            command = command_again(command, crew, config, record)
            if config.nodes > 1:
                _meet_anew(config)
    return outcome


@dataclass
class Wish:
    """What the signals that reached the launcher ask for."""

    why: str = ""
    exit_code: int = 0
    times: int = 0


def start_as_worker() -> None:
    """First thing in a process the launcher started: die with the launcher, and at once when asked to."""
    where = folder()
    if where is None:
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of an interrupted import
    die_with_parent(int(os.environ.get(_AGENT_VARIABLE, "0")))  # a launcher killed with -9 leaves no orphans
    report_begun()
    if read_stop(where):
        os._exit(STOPPED)  # asked to stop before it began


@contextmanager
def _wish_to_stop() -> Iterator[Wish]:
    """Note SIGINT, SIGTERM and SIGHUP from here on; off the main thread there is nothing to note."""
    wish, handlers = Wish(), {}

    def note(number: int, frame: FrameType | None) -> None:
        wish.times += 1
        if wish.times == 1:
            wish.exit_code = INTERRUPTED if number == signal.SIGINT else STOPPED
            wish.why = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if number == signal.SIGHUP:
            let_go_of_terminal()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):  # nohup, and background jobs
                handlers[number] = signal.signal(number, note)
    try:
        yield wish
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _attempt(command: Sequence[str], crew: Crew, config: Config, reports: Path, wish: Wish) -> Outcome:
    """Start the workers once and wait for their end."""
    import paceline.dist.agent  # noqa: F401  # imports torch: here, not in the thread, so that Ctrl-C is noticed meanwhile

    resume_collector()
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # its news reach the user in our words
    ended: list[Exits | Exception] = []
    with _environment(crew, reports):
        if not wish.why:
            # In a thread of its own elastic leaves the signals alone, and they reach us even while it waits for other nodes.
            # A worker's PR_SET_PDEATHSIG is about this thread: it must not end before them, and elastic sees to that.
            thread = threading.Thread(
                target=_run_elastic, args=(command, crew, config, reports, ended), name="elastic", daemon=True
            )
            thread.start()
            _wait(thread, config, reports, wish)
    record, unfinished = read_record(reports), read_unfinished(reports)
    exits = ended[0].codes if ended and not isinstance(ended[0], Exception) else None
    codes = {rank: code for rank, code in (exits or {}).items() if code != 0 or rank in unfinished}
    if exits is not None and not codes:  # done, even if a request to stop came too late
        _end_leftovers(reports)
        return Outcome(0, None, record)
    _signal_workers(reports, signal.SIGKILL)  # also what they started: the next attempt must not meet it
    if wish.why:
        return Outcome(wish.exit_code, None, record, wish.why)
    (end,) = ended
    if isinstance(end, Exception):
        if config.nodes == 1 or not is_lost_contact(end):
            raise end
        text = f"node {config.node_id} lost contact with the others: {headline(end)}"
        return Outcome(1, Report(0, time.time(), 1, text, lost_contact=True), record)
    report = first_failure(read_reports(reports), codes, end.terminated, begun=record is not None)
    return Outcome(report.exit_code, report, record)


def _run_elastic(command: Sequence[str], crew: Crew, config: Config, reports: Path, ended: "list[Exits | Exception]") -> None:
    """Let elastic run the workers. Appends their exits to `ended`, or the error that kept them from running."""
    from paceline.dist.agent import run_workers

    again = [*python_command(), "-m", "paceline", *command]
    try:
        ended.append(run_workers(again, crew.workers, _meeting(config), reports / "elastic", _KILL_AFTER_S))
    except Exception as error:
        ended.append(error)


def _wait(thread: threading.Thread, config: Config, reports: Path, wish: Wish) -> None:
    """Until the workers have ended: by themselves, or by us when they were asked to stop and did not within their grace."""
    while thread.is_alive() and not wish.why:
        thread.join(0.1)
    if not thread.is_alive():
        return
    ask_to_stop(reports, wish.why)
    # Before rank 0 has a record nobody looks for a wish to stop, and nothing would be lost. Other nodes' launchers have none.
    begun = read_record(reports) is not None or (config.node_id > 0 and bool(read_begun(reports)))
    if begun and wish.why == "Ctrl-C" and is_terminal(sys.stderr):
        warn(STOPPING)
    end = time.monotonic() + (config.grace_s if begun else 0)
    while thread.is_alive() and wish.times == 1 and time.monotonic() < end:
        thread.join(0.1)
    for number in (signal.SIGTERM, signal.SIGKILL):
        if thread.is_alive():
            _signal_workers(reports, number)
            # Several nodes that have not met yet have no workers, and the thread may wait for the others for very long.
            thread.join(_KILL_AFTER_S if config.nodes == 1 or read_begun(reports) else 0.5)


def _signal_workers(reports: Path, number: signal.Signals) -> None:
    for pid in read_begun(reports):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)  # each leads a session of its own: this reaches its children, too


def _end_leftovers(reports: Path) -> None:
    """End what successful workers started and left running, such as a tracker's uploader that is about to finish."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        left = [pid for pid in read_begun(reports) if has_members(pid)]
        if not left:
            return
        if number is not None:
            _signal_workers(reports, number)
        end = time.monotonic() + _LEFT_S
        while number != signal.SIGKILL and any(map(has_members, left)) and time.monotonic() < end:
            time.sleep(0.05)


@contextmanager
def _environment(crew: Crew, reports: Path) -> Iterator[None]:
    """What the workers find in their environment; ours is left as it was: elastic and we change it, and a program may go on."""
    environ = dict(os.environ)
    os.environ[REPORTS_VARIABLE] = str(reports)
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


def _meet_anew(config: Config) -> None:
    """Before nodes meet again at the same port: let go of the last meeting's store, and do not take it for the next one's."""
    if config.node_id == 0:
        gc.collect()  # elastic's agent, which holds the store, is part of a cycle
        time.sleep(1)  # long enough for the others to find nobody there
        return
    meeting = _meeting(config)
    for _ in range(150):  # 15 s: after that it is the next one already, which node 0 opened before we looked
        try:
            socket.create_connection((meeting.host, meeting.port), timeout=1).close()
        except OSError:
            return
        time.sleep(0.1)


def _meeting(config: Config) -> "Meeting":
    """Where this node's agent meets the others: a port of node 0, or a free loopback port if there is only one node."""
    from paceline.dist.agent import Meeting
    from paceline.dist.store import LOOPBACK

    if config.nodes == 1:
        return Meeting(host=LOOPBACK, port=0, node=0, nodes=1, timeout_s=config.timeout_s)
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    endpoint = config.rendezvous or (f"{address}:{port}" if address and port else "")
    host, _, port = endpoint.rpartition(":")
    if not (host and port.isascii() and port.isdigit()):
        raise UsageError(
            f"--nodes {config.nodes} needs to know where node 0 is: give --rendezvous HOST:PORT, or set MASTER_ADDR and"
            " MASTER_PORT"
        )
    number = check_port(int(port), f"--rendezvous {endpoint}" if config.rendezvous else f"MASTER_PORT is {port}")
    return Meeting(host=host.strip("[]"), port=number, node=config.node_id, nodes=config.nodes, timeout_s=config.timeout_s)
