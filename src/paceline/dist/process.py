"""Start and end the processes of a run so that none outlives its parent. Does not import torch."""

import ctypes
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


@contextmanager
def delay_interrupts(*, raise_later: bool) -> Iterator[None]:
    """Let a short cleanup finish in spite of Ctrl-C. Raise it afterwards, or drop it if another error is already on its way."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    times: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: times.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if times and raise_later:
        raise KeyboardInterrupt


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
