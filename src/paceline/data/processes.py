"""Loader processes: started before threads and locks, ended with their worker and not before."""

import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing.util import get_temp_dir
from typing import Any

from torch.utils.data import DataLoader

from paceline.dist.process import die_with_parent

_CLOSE_S = 2.0  # how long a loader process may take to finish its batch
_MOST_PATH = 70  # characters; multiprocessing adds about 32


def start_method() -> str:
    """How to start loader processes: by a fork where the system can, unless the program has chosen another way.

    Python 3.14's default would pickle the data: a Dataset with a lambda could not be sent, and arrays would be copied.
    """
    forks = "fork" in multiprocessing.get_all_start_methods()
    return multiprocessing.get_start_method(allow_none=True) or ("fork" if forks else "spawn")


def start_loader(loader: DataLoader[Any]) -> None:
    """Start the processes of a DataLoader whose sampler has no batches yet."""
    if loader.num_workers:
        _make_temp_dir()
        iter(loader)  # torch keeps the processes for later epochs


def close_loaders(loaders: Sequence[DataLoader[Any]]) -> None:
    """End the processes of these DataLoaders. None of them yields batches afterwards."""
    iterators: list[Any] = [found for loader in loaders if (found := getattr(loader, "_iterator", None)) is not None]
    for loader in loaders:
        loader._iterator = None
    if not iterators:
        return
    processes = [process for iterator in iterators for process in getattr(iterator, "_workers", ())]
    killer = threading.Timer(_CLOSE_S, _kill, [processes])
    killer.start()
    try:
        for iterator in iterators:
            with suppress(RuntimeError):  # torch raises it if a process was killed
                iterator._shutdown_workers()  # waits 5 s for each process that hangs
    finally:
        killer.cancel()
        killer.join()
        _kill(processes)
        for process in processes:
            process.join()


def begin_process(parent: int, cores: Iterable[int] | None, number: int) -> None:
    """Runs in each loader process: it ends with the worker, not before."""
    served = start_method() == "forkserver"  # then the parent is the server, which ends with the worker
    die_with_parent(os.getppid() if served else parent)
    # Terminals and schedulers send these to all processes of a run, and the worker still needs samples to finish its step.
    # Unlike SIG_IGN, a handler that does nothing is not inherited by programs that a Dataset starts.
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signal_number, lambda *_: None)
    if cores:
        os.sched_setaffinity(0, cores)  # otherwise they would compete for the cores that the worker is bound to


def _make_temp_dir() -> None:
    """Make multiprocessing's folder in this process, which removes it even if the loader processes are killed.

    It holds sockets, and their paths are limited to 107 characters: with a longer one a loader process hangs without an error.
    """
    given = tempfile.tempdir
    if len(tempfile.gettempdir()) > _MOST_PATH:
        tempfile.tempdir = "/tmp"
    try:
        get_temp_dir()
    finally:
        tempfile.tempdir = given


def _kill(processes: Iterable[Any]) -> None:
    for process in processes:
        process.kill()  # does nothing if it has ended
