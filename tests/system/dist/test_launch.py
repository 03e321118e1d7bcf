"""Attempts, restarts and stops: the policy with simulated attempts, and torch elastic with tiny real workers."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from harness.engines import end_family, free_ports, wait_for
from harness.processes import alive
from paceline.config import Config
from paceline.dist import launch as module
from paceline.dist import restarts
from paceline.dist.agent import Meeting
from paceline.dist.forward import Forward
from paceline.dist.launch import INTERRUPTED, STOPPED, Outcome, _catch_stop_signals, _meeting, launch, start_as_worker
from paceline.dist.messages import Failure, Join
from paceline.errors import PacelineError, UsageError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_MESSAGES", str(tmp_path))
    return tmp_path


@pytest.fixture
def attempts(monkeypatch):
    """Simulated attempts that end as the test says; yields what each was started with."""
    endings, started = [], []

    def attempt(command, crew, config, folder, request):
        started.append((list(command), crew.workers))
        ending = endings.pop(0)
        return ending() if callable(ending) else ending

    monkeypatch.setattr(module, "_attempt", attempt)
    monkeypatch.setattr(restarts, "_gpus", lambda crew: ())
    return endings, started


def failed(rank=1, code=1, record=None):
    return Outcome(code, Failure(rank, 1.0, code, f"worker {rank} was killed by SIGKILL\nand more"), record)


def test_a_failed_attempt_is_restarted_from_the_record(attempts, capsys):
    endings, started = attempts
    endings += [failed(record=Path("/runs/x")), failed(rank=0), Outcome(0, None, Path("/runs/x"))]
    assert launch(["train", "t.py"], Config(workers=2, max_restarts=3)) == Outcome(0, None, Path("/runs/x"))
    assert started == [(["train", "t.py"], 2)] + 2 * [(["train", "t.py", "--resume=/runs/x"], 2)]
    assert capsys.readouterr().err.splitlines() == [
        "paceline: worker 1 was killed by SIGKILL; restart 1 of 3 on 2 workers",
        "paceline: worker 0 was killed by SIGKILL; restart 2 of 3 on 2 workers",
    ]


def test_workers_that_join_are_no_restart(attempts, capsys):
    endings, started = attempts
    record, config = Path("/runs/x"), Config(workers_schedule="0:1 1:2 2:4", max_restarts=1)
    endings += [Outcome(0, None, record, join=Join(2, 1.0)), failed(record=record), Outcome(0, None, record, join=Join(4, 1.0))]
    endings += [Outcome(0, None, record)]
    assert launch(["train", "t.py"], config, workers=1) == Outcome(0, None, record)
    assert started == [(["train", "t.py"], 1)] + [(["train", "t.py", "--resume=/runs/x"], workers) for workers in (2, 2, 4)]
    assert capsys.readouterr().err == "paceline: worker 1 was killed by SIGKILL; restart 1 of 1 on 2 workers\n"


def test_the_last_failure_is_the_outcome(attempts):
    endings, started = attempts
    endings += [failed(record=Path("/runs/x")), failed(rank=0)]
    outcome = launch(["train"], Config(workers=2, max_restarts=1))
    assert outcome == failed(rank=0, record=Path("/runs/x"))
    assert len(started) == 2


@pytest.mark.parametrize(
    "ending", [failed(code=2), failed(code=3), Outcome(0), Outcome(INTERRUPTED), Outcome(STOPPED, None, Path("/runs/x"))]
)
def test_mistakes_divergence_and_stops_are_not_restarted(ending, attempts, capsys):
    endings, started = attempts
    endings.append(ending)
    assert launch(["train"], Config(workers=2, max_restarts=3)) == ending
    assert len(started) == 1
    assert capsys.readouterr().err == ""


def test_a_worker_that_keeps_failing_is_left_out(attempts, capsys):
    endings, started = attempts
    endings += 5 * [failed(rank=1)]
    outcome = launch(["train", "--workers=3"], Config(workers=3, min_workers=2, max_restarts=9))
    assert [workers for _, workers in started] == [3, 3, 2, 2], (
        "the new worker 1 is not the old one; it ends where too few are left"
    )
    first = failed(rank=1)
    text = f"{first.failure.text}; not restarted: 1 device left, fewer than --min-workers 2"
    assert outcome == replace(first, failure=replace(first.failure, text=text))
    assert started[-1][0] == ["train", "--workers=2", "--virtual-workers=3"]
    why = "worker 1's device failed twice and is no longer used"
    assert capsys.readouterr().err.splitlines()[1].endswith(f"; restart 2 of 9 on 2 workers: {why}")


def test_progress_in_between_keeps_the_worker(attempts, tmp_path):
    endings, started = attempts
    (tmp_path / "checkpoints").mkdir()

    def comes_further():
        (tmp_path / "checkpoints" / f"step-{len(started)}.safetensors").touch()
        return failed(record=tmp_path)

    endings += 4 * [comes_further]
    launch(["train"], Config(workers=2, min_workers=1, max_restarts=3))
    assert [workers for _, workers in started] == [2, 2, 2, 2]


WORKER = """#!{python}
import os, signal, sys, time
from pathlib import Path
from paceline.dist.launch import start_as_worker
start_as_worker()
from paceline.dist.messages import launcher_folder, read_stop, send_finished, send_failure, send_record_path
rank, here, folder = int(os.environ["RANK"]), Path({here!r}), Path(os.environ["PACELINE_MESSAGES"])
attempt = int(folder.name)
launcher = os.getppid()
with (here / f"{{rank}}.log").open("a") as log:
    print(os.environ["OMP_NUM_THREADS"], *sys.argv[1:], file=log)

def begin():
    if rank == 0:
        send_record_path(here / "record")

def wait_for(path):
    while not path.exists():
        time.sleep(0.01)

def end(code):
    (here / "ended").symlink_to(str(os.getpid()))
    os._exit(code)

def lose_contact():
    while not os.path.lexists(here / "ended"):
        time.sleep(0.01)
    try:
        while ") Z " not in Path("/proc", os.readlink(here / "ended"), "stat").read_text():
            time.sleep(0.01)
    except OSError:  # its launcher has seen it end
        pass
    send_failure(rank, RuntimeError("Connection closed by peer"))
    sys.exit(1)

def ask(number):
    wait_for(here / "1.log")  # a worker that begins after a request to stop ends by itself
    os.kill(launcher, number)

{body}
send_finished()
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Make launch start this instead of Python: a worker without torch that starts within 0.1 s."""

    def write(body):
        path = tmp_path / "worker"
        path.write_text(WORKER.format(python=sys.executable, here=str(tmp_path), body=body))
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))
        return path

    return write


@pytest.fixture(autouse=True)
def handlers():
    """Check that every test restores the signal handlers."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    assert [signal.getsignal(number) for number in numbers] == before


@contextmanager
def soon():
    """Well within the 30 s that elastic would take, and the 100 s of a worker."""
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < 25


def log(folder, rank):
    return [line.split() for line in (folder / f"{rank}.log").read_text().splitlines()]


def test_workers_that_succeed(worker, tmp_path):
    worker("begin()")
    assert launch(["train", "t.py"], Config(workers=2)) == Outcome(0, None, tmp_path / "record")
    assert [line[1:] for line in log(tmp_path, 0) + log(tmp_path, 1)] == 2 * [["-P", "-m", "paceline", "train", "t.py"]]


def test_a_killed_worker_is_restarted(worker, tmp_path, capsys):
    wait = "attempt == 1 and wait_for(launcher_folder() / 'record')"  # or there would be nothing to resume
    die = "attempt == 1 and rank == 1 and os.kill(os.getpid(), signal.SIGKILL); attempt == 1 and time.sleep(100)"
    worker(f"begin()\n{wait}\n{die}")
    assert launch(["train"], Config(workers=2, max_restarts=1)) == Outcome(0, None, tmp_path / "record")
    (first, second) = log(tmp_path, 1)
    assert second == [*first, f"--resume={tmp_path / 'record'}"]
    err = capsys.readouterr().err
    assert err.startswith("paceline: worker 1 was killed by SIGKILL (")
    assert err.endswith("; restart 1 of 1 on 2 workers\n")


def test_a_single_worker_is_restarted(worker, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    worker("attempt == 1 and sys.exit(7)")
    assert launch(["train"], Config(max_restarts=1)).exit_code == 0
    assert len(log(tmp_path, 0)) == 2


def test_fewer_workers_have_more_threads_each(worker, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(restarts, "_gpus", lambda crew: ())
    monkeypatch.setattr(module, "threads_per_worker", lambda workers: 8 // workers)
    worker(
        "if rank == 1:\n    wait_for(here / '0.log')\n"
        "    while len((here / '0.log').read_text().splitlines()) < attempt:\n        time.sleep(0.01)\n    sys.exit(7)\n"
        "os.environ['WORLD_SIZE'] == '2' and time.sleep(100)"
    )
    assert launch(["train"], Config(workers=2, max_restarts=2, min_workers=1)).exit_code == 0
    assert [line[0] for line in log(tmp_path, 0)] == ["4", "4", "8"]
    assert log(tmp_path, 0)[-1][-2:] == ["--workers=1", "--virtual-workers=2"]


def test_a_worker_that_ignores_sigterm_does_not_delay_the_end(worker, tmp_path, monkeypatch):
    """elastic alone would wait 30 s for it."""
    monkeypatch.setattr(module, "_KILL_AFTER_S", 1)
    worker(
        "if rank == 0:\n    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    (here / 'deaf').touch()\n    time.sleep(100)\n"
        "wait_for(here / 'deaf')\nsys.exit(7)"
    )
    with soon():
        outcome = launch(["train"], Config(workers=2))
    assert outcome.failure is not None


@pytest.mark.parametrize(
    ("number", "code", "why"),
    [(signal.SIGTERM, STOPPED, "SIGTERM"), (signal.SIGHUP, STOPPED, "SIGHUP"), (signal.SIGINT, INTERRUPTED, "Ctrl-C")],
)
def test_workers_that_are_asked_to_stop_end_by_themselves(number, code, why, worker, tmp_path):
    worker(
        f"begin()\nif rank == 0:\n    ask({int(number)})\n    wait_for(folder / 'stop')\n"
        "    (here / 'checkpoint').write_text(read_stop(folder))\n    sys.exit(1)\ntime.sleep(100)"
    )
    with soon():
        assert launch(["train"], Config(workers=2, max_restarts=3, grace_s=100)) == Outcome(
            code, None, tmp_path / "record", why
        )
    assert (tmp_path / "checkpoint").read_text() == why
    assert len(log(tmp_path, 0)) == 1


def test_a_run_that_is_done_before_it_could_stop_is_done(worker, tmp_path):
    """As in the last validation, where workers no longer check for a request to stop."""
    worker("begin()\nrank or ask(signal.SIGTERM)\nwait_for(folder / 'stop')")
    with soon():
        assert launch(["train"], Config(workers=2, grace_s=100)) == Outcome(0, None, tmp_path / "record")


WAITED = """
if rank == 0:
    {begin}
    (here / "ready").touch()
    time.sleep(100)
wait_for(here / "ready")
send_failure(1, RuntimeError("Timed out waiting 11000ms for recv operation to complete"))
sys.exit(1)
"""


@pytest.mark.parametrize(
    ("begin", "what"), [("", "if it was still loading data, raise --timeout-s"), ("begin()", "worker 0 hung")]
)
def test_a_worker_that_others_wait_for_may_still_be_loading(begin, what, worker, tmp_path):
    worker(WAITED.format(begin=begin))
    with soon():
        failure = launch(["train"], Config(workers=2)).failure
    assert failure.rank == 0
    assert what in failure.text


def test_a_stop_waits_no_longer_than_the_grace_period(worker, tmp_path):
    worker("begin()\nrank or ask(signal.SIGTERM)\ntime.sleep(100)")
    with soon():
        assert launch(["train"], Config(workers=2, grace_s=0.5)) == Outcome(STOPPED, None, tmp_path / "record", "SIGTERM")


def test_a_second_signal_ends_them_at_once(worker, tmp_path):
    worker(
        "begin()\nif rank == 0:\n    ask(signal.SIGINT)\n    wait_for(folder / 'stop')\n    ask(signal.SIGINT)\ntime.sleep(100)"
    )
    with soon():
        assert launch(["train"], Config(workers=2, grace_s=100)) == Outcome(INTERRUPTED, None, tmp_path / "record", "Ctrl-C")


def test_before_the_first_step_there_is_nothing_to_wait_for(worker):
    worker("rank or ask(signal.SIGTERM)\ntime.sleep(100)")
    with soon():
        assert launch(["train"], Config(workers=2, grace_s=100)) == Outcome(STOPPED, why="SIGTERM")


def test_a_worker_that_ends_before_the_run_is_done_is_named(worker):
    """With exit code 0, by sys.exit or os._exit in user code: the others lose contact, and torch elastic sees no failure."""
    worker("begin()\nrank == 1 and end(0)\nlose_contact()")
    failure = launch(["train"], Config(workers=2)).failure
    assert failure.rank == 1
    assert failure.text == ("worker 1 ended with exit code 0 before the run was done: does the task call sys.exit or os._exit?")


def test_workers_that_all_end_before_the_run_is_done_have_failed(worker):
    worker("begin()\nos._exit(0)")
    outcome = launch(["train"], Config(workers=2))
    assert outcome.exit_code == 1
    assert "ended with exit code 0 before the run was done" in outcome.failure.text


def test_a_worker_terminated_from_outside_is_named(worker):
    """Not worker 0, which torch elastic terminates because of it."""
    worker("begin()\nif rank == 1:\n    wait_for(here / '0.log')\n    os.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(100)")
    with soon():
        assert launch(["train"], Config(workers=2)).failure.text == "worker 1 was killed by SIGTERM"


LEAVES_A_CHILD = """
if attempt == 1 and rank == 1:
    child = os.fork()
    if not child:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (here / "child").write_text(str(os.getpid()))
        time.sleep(100)
    wait_for(here / "child")
    os._exit(7)
if attempt == 2 and rank == 0:
    (here / "left").write_text(str(os.path.exists("/proc/" + (here / "child").read_text())))
attempt == 1 and time.sleep(100)
"""


def test_what_a_worker_has_started_ends_before_the_next_attempt(worker, tmp_path):
    worker(LEAVES_A_CHILD)
    with soon():
        assert launch(["train"], Config(workers=2, max_restarts=1)).exit_code == 0
    wait_for(lambda: not alive(int((tmp_path / "child").read_text())), 10, lambda: "the child still runs")
    # It was killed earlier: at most it is still a zombie.
    assert (tmp_path / "left").exists()


LEAVES_AN_UPLOADER = """
if rank == 0 and not os.fork():
    signal.signal(signal.SIGTERM, {on_term})
    (here / "child").write_text(str(os.getpid()))
    {then}
    (here / "uploaded").touch()
    os._exit(0)
if rank == 0:
    wait_for(here / "child")
"""


def test_what_a_worker_left_behind_may_finish_after_success(worker, tmp_path, monkeypatch):
    """A tracker's uploader: it is still busy when the launcher has seen that the workers ended."""
    monkeypatch.setattr(module, "_LEFT_S", 30.0)
    wait = "while os.getppid() == worker_pid:\n        time.sleep(0.01)\n    time.sleep(1)"
    worker("worker_pid = os.getpid()\n" + LEAVES_AN_UPLOADER.format(on_term="signal.SIG_DFL", then=wait))
    with soon():
        assert launch(["train"], Config(workers=2)).exit_code == 0
    assert (tmp_path / "uploaded").exists()


def test_what_a_worker_left_behind_is_terminated_first(worker, tmp_path):
    worker(LEAVES_AN_UPLOADER.format(on_term="lambda *_: ((here / 'uploaded').touch(), os._exit(0))", then="time.sleep(100)"))
    with soon():
        assert launch(["train"], Config(workers=2)).exit_code == 0
    assert (tmp_path / "uploaded").exists()


def test_what_a_worker_left_behind_is_finally_killed(worker, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LEFT_S", 0.1)
    worker(LEAVES_AN_UPLOADER.format(on_term="signal.SIG_IGN", then="time.sleep(100)"))
    with soon():
        assert launch(["train"], Config(workers=2)).exit_code == 0
    wait_for(lambda: not alive(int((tmp_path / "child").read_text())), 10, lambda: "the child still runs")


def test_nothing_is_left_in_the_temporary_folder(worker, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    worker("attempt == 1 and sys.exit(7)")
    launch(["train"], Config(workers=2, max_restarts=1))
    assert list((tmp_path / "temporary").iterdir()) == []


def test_the_launcher_unpickles_nothing(worker, tmp_path, monkeypatch):
    """torch elastic's c10d rendezvous unpickles a value of a store that anyone who can connect may have written."""
    unpickled = []
    monkeypatch.setattr("pickle.loads", lambda data, **_: unpickled.append(data))
    worker("begin()")
    assert launch(["train"], Config(workers=2)).exit_code == 0
    assert not unpickled


def test_a_taken_port_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(PacelineError, match=f"node 0 cannot listen at {where}: Address already in use; choose another"):
            launch(["train"], Config(workers=1, nodes=2, rendezvous=where))


def test_workers_can_be_launched_outside_the_main_thread(worker, tmp_path):
    worker("begin()")
    outcomes = []
    thread = threading.Thread(target=lambda: outcomes.append(launch(["train"], Config(workers=2))))
    thread.start()
    thread.join()
    assert outcomes == [Outcome(0, None, tmp_path / "record")]


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_the_workers_output_goes_to_the_programs_own_streams(unbuffered, worker, capsys, monkeypatch):
    """pytest's streams, like those of a notebook, are not files that a worker inherits. Lines of two workers do not mix."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    worker("for _ in range(300): print('out', rank, end='\\r'); print('of', rank); print('err', rank, file=sys.stderr)")
    assert launch(["train"], Config(workers=2)).exit_code == 0
    shown = capsys.readouterr()
    assert Counter(shown.out.splitlines()) == dict.fromkeys(["of 0", "of 1", "out 0", "out 1"], 300)
    assert Counter(shown.err.splitlines()) == dict.fromkeys(["err 0", "err 1"], 300)


def test_workers_end_if_waiting_for_them_fails(worker, tmp_path, monkeypatch):
    """The program goes on, and so would they."""
    worker("(here / f'{rank}.pid').write_text(str(os.getpid())); time.sleep(100)")
    pids = []

    def fail(self, thread, timeout_s):
        logs = [tmp_path / f"{rank}.pid" for rank in (0, 1)]
        wait_for(lambda: all(path.exists() and path.read_text() for path in logs), 20, lambda: "no workers")
        pids.extend(int(path.read_text()) for path in logs)
        raise RuntimeError("an error in the waiting thread")

    monkeypatch.setattr(Forward, "join", fail)
    with soon(), pytest.raises(RuntimeError, match="in the waiting thread"):
        launch(["train"], Config(workers=2))
    wait_for(lambda: not any(map(alive, pids)), 10, lambda: "the workers still run")


@pytest.mark.parametrize("fails", [False, True])
def test_files_for_the_workers_are_in_a_private_folder(fails, worker, tmp_path):
    worker("(here / f'{rank}.read').write_text((launcher_folder().parent / 'given').read_text())")
    folders = []

    def prepare(folder):
        folders.append((folder, folder.stat().st_mode & 0o777))
        (folder / "given").write_text("text")
        if fails:
            raise UsageError("cannot be written")

    with pytest.raises(UsageError) if fails else nullcontext():
        launch(["train"], Config(workers=2), prepare)
    ((folder, mode),) = folders
    assert mode == 0o700
    assert not folder.exists()
    assert [path.read_text() for path in tmp_path.glob("*.read")] == ([] if fails else ["text", "text"])


NODE = """
import sys
from paceline.config import Config
from paceline.dist.launch import launch
python, sys.executable = sys.executable, sys.argv[1]
config = Config(workers=1, nodes=2, node_id=int(sys.argv[2]), rendezvous=sys.argv[3], max_restarts=1, timeout_s=60)
sys.exit(launch(["train"], config).exit_code)
"""


def test_two_nodes_meet_again_at_the_same_port(worker, tmp_path):
    python = sys.executable
    script = worker("if attempt == 1:\n    rank == 1 and end(7)\n    lose_contact()")
    (port,) = free_ports(1)
    started = [
        subprocess.Popen([python, "-c", NODE, script, str(i), f"127.0.0.1:{port}"], stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    try:
        said = [process.communicate(timeout=90)[1] for process in started]
    finally:
        for process in started:
            end_family(process)
    assert [process.returncode for process in started] == [0, 0], said
    assert said[1] == "paceline: worker 1 ended with exit code 7 and no error message; restart 1 of 1 on 2 workers\n"
    assert [len(log(tmp_path, rank)) for rank in range(2)] == [2, 2]


def test_one_node_meets_on_a_free_port_of_its_loopback():
    meeting = _meeting(Config(workers=4))
    assert (meeting.host, meeting.port, meeting.node, meeting.nodes) == ("127.0.0.1", 0, 0, 1)


def test_nodes_meet_where_the_user_says(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "other")
    monkeypatch.setenv("MASTER_PORT", "1")
    meeting = _meeting(Config(nodes=2, node_id=1, rendezvous="node0:29500", timeout_s=5))
    assert meeting == Meeting(host="node0", port=29500, node=1, nodes=2, timeout_s=5)


def test_nodes_meet_at_the_master(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29500")
    meeting = _meeting(Config(nodes=2))
    assert (meeting.host, meeting.port) == ("node0", 29500)


@pytest.mark.parametrize("rendezvous", ["", "node0", "node0:", ":29500", "node0:http", "node0:\u00b2"])
def test_several_nodes_need_the_address_of_node_0(rendezvous, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(UsageError, match="--nodes 2 needs the address of node 0: use --rendezvous HOST:PORT"):
        _meeting(Config(nodes=2, rendezvous=rendezvous))


@pytest.mark.parametrize("port", ["0", "65536", "99999", "184467440737095516150"])
def test_a_port_out_of_range_is_refused(port, monkeypatch):
    with pytest.raises(UsageError, match=f"^--rendezvous node0:{port}: a port must be a number from 1 to 65535$"):
        _meeting(Config(nodes=2, rendezvous=f"node0:{port}"))
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(UsageError, match=f"^MASTER_PORT is {port}: a port must be a number from 1 to 65535$"):
        _meeting(Config(nodes=2))


def test_a_worker_without_its_launcher_ends_at_once(folder, monkeypatch):
    """Its parent is not the agent that started it, so the agent is already gone."""
    ended: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setenv("PACELINE_AGENT", str(os.getpid()))
    monkeypatch.setattr("paceline.dist.process.ctypes.CDLL", lambda _: type("C", (), {"prctl": lambda *_: 0}))
    monkeypatch.setattr(os, "_exit", ended.append)
    try:
        start_as_worker()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert ended == [1]


def test_a_worker_asked_to_stop_before_it_began_ends_at_once(folder, monkeypatch):
    ended: list[int] = []
    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setenv("PACELINE_AGENT", str(os.getppid()))
    monkeypatch.setattr("paceline.dist.process.ctypes.CDLL", lambda _: type("C", (), {"prctl": lambda *_: 0}))
    monkeypatch.setattr(os, "_exit", ended.append)
    try:
        start_as_worker()
        assert ended == []
        (folder / "stop").write_text("SIGTERM")
        start_as_worker()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert ended == [STOPPED]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_the_launcher_keeps_an_ignored_signal_ignored(number):
    """A shell's background job ignores Ctrl-C, nohup SIGHUP."""
    handler = signal.signal(number, signal.SIG_IGN)
    try:
        with _catch_stop_signals():
            assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, handler)
