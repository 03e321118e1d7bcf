"""Start real processes in tests: workers of one world, and the command line."""

import faulthandler
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil


def run_workers(
    function: Callable[..., Any], n: int, *args: Any, timeout_s: float = 90, method: str = "forkserver"
) -> list[Any]:
    """Call `function(world, *args)` in n new workers of one gloo world; returns every worker's result.

    They meet in a file, not at a port, and use one thread each. The first failure ends the others and is raised here with its
    traceback. A hang is a failure too, with every worker's stack on stderr. Workers are forked from a process that has only
    imported modules, so they start in a tenth of the time. With `method="fork"` they are forks of the test's own process: for
    libraries that take seconds to import.
    """
    context: Any = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["torch._dynamo", "torch.distributed", "paceline.training.run", "pytest"])
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(n):
            ours, theirs = context.Pipe(duplex=False)
            settings = (rank, n, f"{folder}/store", dict(os.environ), timeout_s)
            process = context.Process(target=_worker, args=(function, settings, theirs, args))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _collect(pipes, processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def paceline(*args: str, env: Mapping[str, str] | None = None, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run `python -m paceline ARGS` in the current folder, as a user would."""
    return run([sys.executable, "-m", "paceline", *args], env=env, timeout_s=timeout_s)


def run(command: list[str], env: Mapping[str, str] | None = None, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and capture its output."""
    return subprocess.run(
        command, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def children(pid: int) -> dict[int, str]:
    """All running descendants of a process, with their command lines."""
    found: dict[int, str] = {}
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has just ended, or is a zombie
                command = " ".join(child.cmdline())
                if not re.search("resource_tracker|forkserver", command) and alive(child.pid):  # multiprocessing's own stay
                    found[child.pid] = command
    return found


def alive(pid: int) -> bool:
    """Whether a process is running. A zombie is not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def tagged(tag: str) -> list[int]:
    """Running processes with this text in an environment variable (`NAME=value`), orphans included."""
    found = []
    for process in psutil.process_iter(["environ"]):  # no environment: a zombie, or another user's process
        environ = process.info["environ"] or {}
        if any(tag in f"{name}={value}" for name, value in environ.items()) and alive(process.pid):
            found.append(process.pid)
    return found


def _collect(pipes: list[Connection], processes: list[Any], end: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = dict(enumerate(pipes))
    while waiting:
        ready = wait(list(waiting.values()), timeout=max(0.0, end - time.monotonic()))
        if not ready:
            raise TimeoutError(f"workers {sorted(waiting)} did not finish in time; their stacks are on stderr")
        for rank, pipe in list(waiting.items()):
            if pipe not in ready:
                continue
            del waiting[rank]
            try:
                ok, value = pipe.recv()
            except EOFError:
                processes[rank].join()
                raise RuntimeError(f"worker {rank} died with exit code {processes[rank].exitcode}") from None
            if not ok:
                raise RuntimeError(f"worker {rank} failed:\n{value}")
            results[rank] = value
    for rank, process in enumerate(processes):
        process.join(timeout=30)
        if process.exitcode != 0:
            raise RuntimeError(f"worker {rank} ended with exit code {process.exitcode}")
    return [results[rank] for rank in range(len(pipes))]


def _worker(
    function: Callable[..., Any], settings: tuple[int, int, str, dict[str, str], float], pipe: Connection, args: Any
) -> None:
    rank, size, store, environ, timeout_s = settings
    os.environ.clear()
    os.environ.update(environ)
    multiprocessing.set_start_method("fork", force=True)  # otherwise its loader would start a fork server that outlives it
    faulthandler.dump_traceback_later(max(1, timeout_s - 5), exit=False)
    import torch
    import torch.distributed as dist

    from paceline.dist.world import World

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    world = World(
        rank=rank,
        local_rank=rank,
        node=0,
        size=size,
        local_size=size,
        nodes=1,
        device=torch.device("cpu"),
        backend="gloo",
        launcher="test",
    )
    try:
        pipe.send((True, function(world, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    pipe.close()
    os._exit(0)
