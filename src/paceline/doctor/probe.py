"""Try torch in two child processes: import it, all-reduce over gloo, load batches, use the GPUs.

Each of these can crash or hang, so only a child process tries it. The child prints one JSON object per stage, as soon as the
stage is done: a stage without one did not finish. `run_probe` is the parent's side; `main` runs in the children.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from paceline.dist.process import die_with_parent, python_command, signal_name

LIMIT_S = 60.0
_LOADER_S = 20.0
STAGES = ("torch", "all-reduce", "loader", "gpus")
"""In this order: loader processes must be forked before CUDA is used."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What the first child reported, by stage, and why it ended."""

    stages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    """The errors that stages raised."""
    failure: str = ""
    """Why the child ended in a stage without an answer; empty if it did not."""

    @property
    def ended_in(self) -> str:
        """The stage in which the child ended; empty if it did all."""
        return next((stage for stage in STAGES if stage not in self.stages and stage not in self.errors), "")

    def was_tried(self, stage: str) -> bool:
        """Whether a stage began."""
        return stage in self.stages or stage in self.errors or stage == self.ended_in

    def why(self, stage: str) -> str:
        """Why a stage has no result."""
        if not self.was_tried(stage):
            return f"not tried, because the check of {self.ended_in} failed"
        return self.errors.get(stage, self.failure)


def run_probe(limit_s: float | None = None) -> Probe:
    """Start two workers, as a run would, and collect what rank 0 reports."""
    limit_s = LIMIT_S if limit_s is None else limit_s
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"} if sys.platform.startswith("linux") else dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        begin = "import sys; from paceline.doctor.probe import main; main(*sys.argv[1:])"
        command = [*python_command(), "-c", begin, f"{folder}/store", str(os.getpid()), str(limit_s)]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        pair: list[subprocess.Popen[str]] = []
        try:
            pair.extend(subprocess.Popen([*command, rank], env=env, text=True, **pipes) for rank in "01")
            end = time.monotonic() + limit_s
            ended = [_collect(process, end) for process in pair]
        except OSError as error:
            return Probe(failure=f"Python did not start: {error.strerror}")
        finally:
            for process in pair:
                process.kill()
                with suppress(subprocess.TimeoutExpired):  # a process that hangs in a driver cannot be killed
                    process.wait(timeout=2)
    return read_probe(ended[0].out, _why(ended, limit_s))


def read_probe(text: str, failure: str) -> Probe:
    """The stages in the child's output. Other lines come from libraries."""
    stages: dict[str, Mapping[str, Any]] = {}
    errors: dict[str, str] = {}
    for each in text.splitlines():
        with suppress(ValueError, AttributeError):
            said = json.loads(each)
            stage = said.get("stage")
            if stage in STAGES and "error" in said:
                errors[stage] = str(said["error"])
            elif stage in STAGES:
                stages[stage] = said
    return Probe(stages=stages, errors=errors, failure="" if len(stages) + len(errors) == len(STAGES) else failure)


@dataclass(frozen=True)
class _Ended:
    """How a child ended: its exit code (None: it had to be killed), and what it printed."""

    code: int | None
    out: str
    error: str


def _collect(process: subprocess.Popen[str], end: float) -> _Ended:
    try:
        out, error = process.communicate(timeout=max(0.1, end - time.monotonic()))
        return _Ended(process.returncode, out, error)
    except subprocess.TimeoutExpired:
        process.kill()
    try:
        return _Ended(None, *process.communicate(timeout=2))
    except subprocess.TimeoutExpired:
        return _Ended(None, "", "")


def _why(ended: Sequence[_Ended], limit_s: float) -> str:
    """Why the children failed: a signal says more than the error of a worker that lost the other one."""
    for each in ended:
        if each.code is not None and each.code < 0:
            return f"it was killed by {signal_name(-each.code)}"
    for each in ended:
        if each.code:
            last = each.error.strip().splitlines()
            return last[-1] if last else f"exit code {each.code}"
    return f"it did not finish within {limit_s:g} s"


def main(store: str, parent: str, limit_s: str, rank: str) -> None:
    """Runs in each child. Rank 1 is only there for the all-reduce."""
    die_with_parent(int(parent))
    stages: dict[str, Callable[[], dict[str, Any]]] = {
        "torch": _try_torch,
        "all-reduce": lambda: _try_all_reduce(store, int(rank), float(limit_s)),
    }
    if rank == "0":
        stages |= {"loader": _try_loader, "gpus": _try_gpus}
    for stage, try_it in stages.items():
        begin = time.perf_counter()
        try:
            found = try_it()
        except Exception as error:
            if stage == "torch":
                raise
            found = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"stage": stage, "s": time.perf_counter() - begin, **found}), flush=True)
    sys.stdout.flush()
    os._exit(0)


def _try_torch() -> dict[str, Any]:
    import torch
    import torch.multiprocessing

    from paceline.dist.world import backends

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "backends": backends(),
        "threads": torch.get_num_threads(),
        "start": torch.multiprocessing.get_start_method(),
        "sharing": torch.multiprocessing.get_sharing_strategy(),  # type: ignore[no-untyped-call]
    }


def _try_all_reduce(store: str, rank: int, limit_s: float) -> dict[str, Any]:
    """Add 1 and 2 on two workers; the addresses on which this worker listens."""
    import psutil
    import torch
    import torch.distributed as dist

    timeout = timedelta(seconds=0.9 * limit_s)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
    value = torch.full((1000,), float(rank) + 1)
    dist.all_reduce(value)
    listening: list[str] = []
    with suppress(psutil.Error, OSError):
        here = psutil.Process().net_connections("inet")
        listening = [each.laddr.ip for each in here if each.status == psutil.CONN_LISTEN]
    dist.destroy_process_group()
    if value.mean().item() != 3:
        raise RuntimeError(f"the sum of 1 and 2 was {value.mean().item()}")
    return {"listening": sorted(set(listening))}


def _try_loader() -> dict[str, Any]:
    """Read a few batches of 3 MB in two processes, with the loader of a run."""
    import numpy as np
    import torch

    from paceline.data.loaders import Arrays, Streaming

    loader = Streaming(Arrays((torch.ones(64, 3, 64, 64),)), None, torch.device("cpu"), 2, seed=0)
    loader.start()
    sums: list[float] = []
    errors: list[Exception] = []

    def load() -> None:
        try:
            sums.extend(float(batch[0].sum()) for batch in loader.batches([np.arange(64)] * 4, 0))
        except Exception as error:
            errors.append(error)

    begin, thread = time.perf_counter(), threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(_LOADER_S)  # without shared memory, torch waits forever for a batch
    seconds = time.perf_counter() - begin
    if thread.is_alive():
        raise TimeoutError(f"batches did not arrive within {_LOADER_S:g} s")
    loader.close()
    if errors:
        raise errors[0]
    if sums != [64 * 3 * 64 * 64] * 4:
        raise RuntimeError("batches arrived with wrong values")
    return {"batches_s": seconds}


def _try_gpus() -> dict[str, Any]:
    """Each GPU's memory, and matrix products in fp32 and bf16."""
    import torch

    if not torch.cuda.is_available():
        return {"gpus": []}
    return {"gpus": [_try_gpu(index) for index in range(torch.cuda.device_count())]}


def _try_gpu(index: int) -> dict[str, Any]:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    about = {"name": torch.cuda.get_device_name(index), "free": free, "total": total}
    about["capability"] = list(torch.cuda.get_device_capability(index))
    with torch.cuda.device(index):
        for name, dtype in (("fp32_s", torch.float32), ("bf16_s", torch.bfloat16)):
            matrix = torch.ones(2048, 2048, device="cuda", dtype=dtype)
            for count in (3, 10):  # the first round warms up
                torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(count):
                    matrix @ matrix
                torch.cuda.synchronize()
                about[name] = (time.perf_counter() - begin) / count
    return about
