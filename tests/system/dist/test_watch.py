"""Hangs are shown with their stack, requests to stop are kept within the grace period, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from paceline.dist import messages
from paceline.dist.messages import ask_to_stop, read_failures
from paceline.dist.watch import WATCHED, Watch

BEGIN = """
import os, signal, sys, time
from paceline.dist import watch
from paceline.dist.watch import Watch
watch._UNWIND_S = watch._WAIT_LONGER_S = watch._STUCK_S = 1.0

def stuck():
    print("stuck", flush=True)
    time.sleep(100)

"""
OURS = "watch.mark_own_process()\n"
TWO = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}


@pytest.fixture
def start(monkeypatch):
    """Start a Python program with a watch in it; kill what is still running at the end."""
    monkeypatch.delenv("PACELINE_MESSAGES", raising=False)
    started = []

    def begin(body, env=None):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen([sys.executable, "-c", BEGIN + body], env={**os.environ, **(env or {})}, **pipes))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_a_worker_that_hangs_shows_where(start, tmp_path):
    process = start(
        "with Watch(1, 0.5, 20) as watch:\n    watch.mark(57, 'forward'); stuck()", TWO | {"PACELINE_MESSAGES": str(tmp_path)}
    )
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "")
    (failure,) = read_failures(tmp_path)
    assert failure.text == "worker 1 hung: no progress for 0.5 s at step 57, in forward"
    last = failure.traceback.splitlines()[-1]
    assert last.strip() == "time.sleep(100)" or "in stuck" in last, failure.traceback
    assert (failure.rank, failure.exit_code, failure.lost_contact, failure.waited) == (1, 1, False, False)


def test_without_a_launcher_it_prints_the_hang_itself(start):
    process = start("with Watch(0, 0.5, 20) as watch:\n    watch.mark(3, 'data'); stuck()")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.startswith("paceline: worker 0 hung: no progress for 0.5 s at step 3, in data\n")
    assert "in stuck" in err


HANGS = """
with Watch(0, 0.5, 20) as watch:
    watch.mark(3, 'data')
    try:
        stuck()
    except Exception as error:
        time.sleep(1.5)  # longer than the timeout: it is printed once
        print(type(error).__name__, error)
"""


def test_a_callers_own_program_outlives_a_hang(start):
    process = start(HANGS)
    out, err = process.communicate(timeout=60)
    assert out == "stuck\nPacelineError worker 0 hung: no progress for 0.5 s at step 3, in data\n"
    assert (process.returncode, err.count("hung")) == (0, 1)


def test_our_own_command_line_ends_with_a_hang(start):
    process = start(OURS + HANGS)
    assert process.communicate(timeout=60)[0] == "stuck\n"
    assert process.returncode == 1


def test_the_command_line_says_that_it_is_ours(start):
    process = start(
        "from paceline.cli import main\nprint(watch._ours)\n"
        "try:\n    main(['--version'])\nexcept SystemExit:\n    print(watch._ours)"
    )
    out, _ = process.communicate(timeout=60)
    assert (out.splitlines()[0], out.splitlines()[-1]) == ("False", "True")


def test_a_worker_that_waits_lets_the_hanging_one_report_first(start, tmp_path):
    where = {"PACELINE_MESSAGES": str(tmp_path)}
    waiting = start("with Watch(1, 0.5, 20) as watch:\n    watch.mark(57, 'reduce'); stuck()", TWO | where)
    assert waiting.stdout.readline() == "stuck\n"
    hanging = start("with Watch(0, 0.5, 20) as watch:\n    watch.mark(57, 'forward'); stuck()", TWO | {"RANK": "0"} | where)
    for process in (waiting, hanging):
        process.communicate(timeout=60)
        assert process.returncode == 1
    hung, waited = read_failures(tmp_path)
    assert waited.text == "worker 1 waited 0.5 s for another worker at step 57, in reduce"
    assert (waited.lost_contact, waited.waited) == (True, True)
    assert (hung.lost_contact, hung.text.startswith("worker 0 hung")) == (False, True)
    assert hung.when < waited.when


def test_a_single_worker_waits_for_no_other(start):
    process = start("with Watch(0, 0.5, 20) as watch:\n    watch.mark(57, 'backward'); stuck()")
    assert "worker 0 hung: no progress for 0.5 s at step 57, in backward" in process.communicate(timeout=60)[1]


def test_loading_has_no_time_limit(start):
    process = start("with Watch(0, 0.3, 20) as watch:\n    watch.mark(0, 'loading'); time.sleep(1.5)", TWO | {"RANK": "0"})
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGTERM, "Stopped stopped by SIGTERM before the first step"),
        (signal.SIGHUP, "Stopped stopped by SIGHUP before the first step"),
        (signal.SIGINT, "KeyboardInterrupt "),
    ],
)
def test_loading_ends_with_the_first_signal(number, said, start):
    process = start(
        "try:\n    with Watch(0, 60, 60) as watch:\n        watch.mark(0, 'loading'); stuck()\n"
        "except BaseException as error:\n    print(type(error).__name__, error)"
    )
    assert process.stdout.readline() == "stuck\n"
    process.send_signal(number)
    assert process.communicate(timeout=60) == (f"{said}\n", "")
    assert process.returncode == 0


def test_progress_and_time_before_the_first_mark_are_not_a_hang(start):
    process = start(
        "with Watch(0, 0.5, 20) as watch:\n    time.sleep(1)\n"
        "    for step in range(15):\n        watch.mark(step, 'data'); time.sleep(0.05)"
    )
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0


@pytest.mark.parametrize(("number", "why"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP"), (signal.SIGINT, "Ctrl-C")])
def test_the_first_signal_is_only_recorded(number, why, start):
    process = start(
        "with Watch(0, 60, 60) as watch:\n    print(repr(watch.stop), flush=True)\n"
        "    while not watch.stop:\n        time.sleep(0.01)\n    print(watch.stop)"
    )
    assert process.stdout.readline() == "''\n"
    process.send_signal(number)
    assert process.communicate(timeout=60) == (f"{why}\n", "")
    assert process.returncode == 0


def test_the_second_ctrl_c_interrupts(start):
    process = start(
        "try:\n    with Watch(0, 60, 60) as watch:\n        print('ready', flush=True)\n"
        "        while not watch.stop:\n            time.sleep(0.01)\n        stuck()\n"
        "except KeyboardInterrupt:\n    print('interrupted')"
    )
    for line in ("ready\n", "stuck\n"):
        assert process.stdout.readline() == line
        process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("interrupted\n", "")
    assert process.returncode == 0


MARKS = "while True: watch.mark(1, 'data')"


@pytest.mark.parametrize(
    ("number", "code", "where"), [(signal.SIGTERM, 143, "stuck()"), (signal.SIGHUP, 143, MARKS), (signal.SIGINT, 130, MARKS)]
)
def test_after_the_grace_it_ends(number, code, where, start):
    process = start(f"with Watch(1, 60, 0.5) as watch:\n    print('ready', flush=True)\n    {where}", TWO)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert err.startswith("paceline: worker 1 did not end within 0.5 s of")


LATE = """
try:
    with Watch(0, 60, 0.5) as watch:
        print('ready', flush=True)
        {where}
except BaseException as error:
    print(type(error).__name__, flush=True)
    time.sleep(3)  # longer than an exception may take to unwind
    print('closed')
"""


@pytest.mark.parametrize(
    ("number", "name", "where"), [(signal.SIGTERM, "Stopped", "stuck()"), (signal.SIGINT, "KeyboardInterrupt", MARKS)]
)
def test_after_the_grace_a_callers_own_program_is_only_interrupted(number, name, where, start):
    process = start(LATE.format(where=where))
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert out.removeprefix("stuck\n") == f"{name}\nclosed\n"
    assert (process.returncode, err.count("\n")) == (0, 1)
    assert err.endswith(": interrupting it\n")


UNWINDS = """
with Watch(0, 60, 0.5) as watch:
    try:
        stuck()
    except BaseException as error:
        print(type(error).__name__, flush=True)
        {then}
"""


@pytest.mark.parametrize(
    ("number", "code", "name"), [(signal.SIGTERM, 143, "Stopped"), (signal.SIGINT, 130, "KeyboardInterrupt")]
)
def test_after_the_grace_our_own_command_line_unwinds_before_it_ends(number, code, name, start):
    process = start(OURS + UNWINDS.format(then="time.sleep(100)"))
    assert process.stdout.readline() == "stuck\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (code, f"{name}\n")
    assert err.splitlines()[1].endswith(": ending it now")


def test_a_callers_own_program_is_not_ended_while_it_unwinds(start):
    process = start(UNWINDS.format(then="time.sleep(3); print('closed')"))
    assert process.stdout.readline() == "stuck\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == "KeyboardInterrupt\nclosed\n"
    assert process.returncode == 0


WAITS = """
with Watch(1, 60, 60) as watch:
    for step in range({steps}):
        watch.mark(step, 'reduce'); time.sleep({each})
    watch.mark({steps}, '{stage}')
    print('ready', flush=True)
    while not watch.stop:
        time.sleep(0.01)
    time.sleep({then})
    print('done')
"""


@pytest.mark.parametrize("stage", ["reduce", "backward"])
def test_after_a_stop_request_it_does_not_wait_for_a_lost_worker(stage, start):
    """torchrun ends the others when one fails, and a collective with that one would use up the whole grace period."""
    process = start(WAITS.format(steps=0, each=0, stage=stage, then=100), TWO)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (143, "")
    assert err == f"paceline: worker 1 was asked to stop and is stuck at step 0, in {stage}: ending it now\n"


@pytest.mark.parametrize(
    "case",
    [{"steps": 0, "each": 0, "stage": "forward"}, {"steps": 1, "each": 3, "stage": "reduce"}],
    ids=["it is busy itself", "its steps take so long"],
)
def test_after_a_stop_request_a_slow_step_is_finished(case, start):
    process = start(WAITS.format(**case, then=3), TWO)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60) == ("done\n", "")
    assert process.returncode == 0


DEADLOCK = """
import ctypes
libc = ctypes.CDLL(None)
with Watch(0, 60, {grace}) as watch:
    lock = (ctypes.c_char * 64)()
    libc.pthread_mutex_lock(lock)
    print("stuck", flush=True)
    libc.pthread_mutex_lock(lock)
"""


@pytest.mark.parametrize(("grace", "signals"), [(0.5, 1), (100, 2)])
def test_the_grace_period_holds_while_the_main_thread_is_stuck(grace, signals, start):
    """Stuck outside Python, as in a collective, Python runs no signal handler. A second Ctrl-C ends it earlier."""
    process = start(OURS + DEADLOCK.format(grace=grace))
    assert process.stdout.readline() == "stuck\n"
    for _ in range(signals):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)  # the system merges pending signals of one kind
    process.communicate(timeout=40)
    assert process.returncode == 130


def test_a_worker_of_our_launcher_dies_at_once_and_learns_of_a_stop_from_it(start, tmp_path):
    process = start(
        "with Watch(0, 60, 60) as watch:\n    print(repr(watch.stop), flush=True)\n"
        "    while not watch.stop:\n        time.sleep(0.01)\n    print(watch.stop, flush=True)\n    stuck()",
        {"PACELINE_MESSAGES": str(tmp_path)},
    )
    assert process.stdout.readline() == "''\n"
    ask_to_stop(tmp_path, "Ctrl-C")
    assert process.stdout.readline() == "Ctrl-C\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM


FORK = """
with Watch(0, 60, 60) as watch:
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.write(theirs, b"x")
        time.sleep(100)
        os._exit(1)
    os.read(ours, 1)
    os.kill(child, signal.SIGINT)
    time.sleep(0.5)
    print(os.waitpid(child, os.WNOHANG), repr(watch.stop))
    os.kill(child, signal.SIGTERM)
    print(os.waitpid(child, 0)[1], repr(watch.stop))
"""


def test_children_of_the_worker_keep_their_signals(start):
    """A DataLoader's worker: SIGTERM ends it, the first Ctrl-C does not, and neither counts as the worker's own signal."""
    assert start(FORK).communicate(timeout=60) == ("(0, 0) ''\n15 ''\n", "")


def test_handlers_and_files_are_restored(monkeypatch):
    monkeypatch.delenv("PACELINE_MESSAGES", raising=False)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers, files = [signal.getsignal(number) for number in numbers], len(os.listdir("/proc/self/fd"))
    with Watch(0, 60, 60) as watch:
        assert [signal.getsignal(number) for number in numbers] == 3 * [watch._handle]
        assert any(thread.name == "paceline-watch" for thread in threading.enumerate())
    assert [signal.getsignal(number) for number in numbers] == handlers
    assert signal.set_wakeup_fd(-1) == -1
    assert not any(thread.name == "paceline-watch" for thread in threading.enumerate())
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_that_is_ignored_stays_ignored(number, monkeypatch):
    """A background job of a shell ignores Ctrl-C; nohup ignores SIGHUP."""
    monkeypatch.delenv("PACELINE_MESSAGES", raising=False)
    handler = signal.signal(number, signal.SIG_IGN)
    try:
        with Watch(0, 60, 60):
            assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, handler)


def test_outside_the_main_thread_no_handlers_are_set(monkeypatch):
    monkeypatch.delenv("PACELINE_MESSAGES", raising=False)
    handlers, seen = [signal.getsignal(signal.SIGINT)], []

    def work():
        with Watch(0, 60, 60) as watch:
            watch.mark(1, "data")
            seen.extend([signal.getsignal(signal.SIGINT), watch.stop])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [*handlers, ""]


def test_the_loop_reads_no_file(tmp_path, monkeypatch):
    """A `stat` per step would take 5 microseconds on the thread that trains."""
    monkeypatch.setenv("PACELINE_MESSAGES", str(tmp_path))
    readers = []
    monkeypatch.setattr(messages, "read_stop", lambda where: readers.append(threading.current_thread().name) or "SIGTERM")
    with Watch(0, 60, 60) as watch:
        while not watch.stop:
            time.sleep(0.01)
    assert readers == ["paceline-watch"]


def test_why_a_run_stops_is_known_before_the_thread_checks(tmp_path, monkeypatch):
    """Another worker may have seen it first: its request reaches this one with the step's metrics."""
    monkeypatch.setenv("PACELINE_MESSAGES", str(tmp_path))
    watch = Watch(0, 60, 60)
    assert watch.why_stop() == ""
    ask_to_stop(tmp_path, "SIGHUP")
    assert (watch.stop, watch.why_stop()) == ("", "SIGHUP")


def test_a_mark_costs_next_to_nothing():
    """About 0.1 microseconds. A system call, or a lock and a thread to wake, would take longer than this limit."""
    watch = Watch(0, 60, 60)
    best = min(_time_marks(watch) for _ in range(20))
    assert best < 2e-6


def _time_marks(watch):
    begin = time.perf_counter()
    for _ in range(250):
        for stage in WATCHED[:4]:
            watch.mark(1, stage)
    return (time.perf_counter() - begin) / 1000
