"""Start and end the processes of a run so that none outlives its parent. Does not import torch."""

import ctypes
import os
import select
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process (SIGKILL) when the thread that started it ends. Exit now if `parent` is already gone.

    Linux only (PR_SET_PDEATHSIG, which neither Python nor psutil offers); does nothing elsewhere.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def stop_spinning_if_shared() -> str:
    """Set OMP_WAIT_POLICY=passive if other programs use our cores, and return a note about it; "" if they do not.

    Call before torch is imported: OpenMP reads the policy as it loads. By default its idle threads spin, which is fastest on
    cores of our own: 2.7 times as fast for a small model on 8 cores. But threads that spin keep out threads with work of
    another run on the same cores, and both runs collapse (`bench/shared_cores.py`). A policy of the user stays.
    """
    if has_wait_policy() or not (busy := _busy_cores()):
        return ""
    os.environ["OMP_WAIT_POLICY"] = "passive"
    cores = len(os.sched_getaffinity(0))
    return f"other programs use {busy:.1f} of {cores} cores, so idle threads sleep (OMP_WAIT_POLICY=passive)"


def has_wait_policy() -> bool:
    """Whether the environment says how idle threads of OpenMP wait."""
    return any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"))


def _busy_cores(window_s: float = 0.15) -> float:
    """How many of our cores other programs keep busy; 0 if fewer than half a core. On an idle machine this takes no time."""
    try:
        load, _, _, running, *_ = Path("/proc/loadavg").read_text().split()
        if float(load) < 0.5 and int(running.partition("/")[0]) < 2:  # one is this process
            return 0.0
        then, began, own = _busy_ticks(), time.perf_counter(), time.process_time()
        time.sleep(window_s)
        elapsed_s, own_s = time.perf_counter() - began, time.process_time() - own
        busy = ((_busy_ticks() - then) / os.sysconf("SC_CLK_TCK") - own_s) / elapsed_s
    except (OSError, ValueError):  # not Linux
        return 0.0
    return busy if busy >= 0.5 else 0.0


def _busy_ticks() -> int:
    """Clock ticks that our cores have spent on any program since they started."""
    cores, ticks = {f"cpu{core}" for core in os.sched_getaffinity(0)}, 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *times = line.split()
        if name in cores:
            user, nice, system, _, _, irq, softirq, steal = map(int, times[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks


def core_times() -> tuple[float, float]:
    """Seconds that the threads of this process ran, and seconds that they were ready but waited for a core.

    Linux only (psutil does not have it); zeros elsewhere.
    """
    ran = waited = 0
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError, ValueError):  # the thread has just ended
                times = (task / "schedstat").read_text().split()
                ran, waited = ran + int(times[0]), waited + int(times[1])
    return ran / 1e9, waited / 1e9


def group_is_running(group: int) -> bool:
    """Whether any process of this group is running. Zombies do not count: they stay if process 1 does not reap them."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    import psutil  # here: most runs end without needing it, and importing it takes 20 ms

    for process in psutil.process_iter(["status"]):
        with suppress(OSError):  # it has just ended
            if os.getpgid(process.pid) == group and process.info["status"] not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                return True
    return False


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 99` for a number without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_now(code: int) -> NoReturn:
    """End this process without shutting down the interpreter: threads of torch's backends can abort or block the shutdown.

    multiprocessing removes its temporary folder when the interpreter shuts down, so do that here.
    """
    loaded: Any = sys.modules.get("multiprocessing.process")
    folder = loaded.current_process()._config.get("tempdir") if loaded else None
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(code)


def python_command() -> list[str]:
    """The command that starts Python without the current folder on its path: a queue.py there would hide the standard one.

    The current folder stays on the path if `paceline` itself is imported from it.
    """
    root = Path(__file__).resolve().parent.parent.parent
    try:
        return [sys.executable] if root == Path.cwd() else [sys.executable, "-P"]
    except OSError:  # the current folder was removed
        return [sys.executable, "-P"]


def drop_closed_terminal() -> None:
    """After a hangup, discard output to the closed terminal: an error while printing could prevent a checkpoint."""
    for fd in (1, 2):
        poll = select.poll()
        poll.register(fd, 0)  # request no events: POLLHUP, POLLERR and POLLNVAL are always reported
        if poll.poll(0):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, fd)
            os.close(nowhere)
