"""Deliberate failures: `fail_at(rank, step, kind)`, and a task that fails this way and logs which samples it saw.

    train_with([fail_at(1, 5, "kill"), fail_at(0, 9, "hang")], "--workers", "2", "--max-restarts", "2")

Every fault happens once (with `once=False`, every time its step is reached), in the middle of a step. An environment variable
passes the list to the workers; one file per fault says that it has happened.
"""

import ctypes
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.processes import paceline, tagged
from paceline import Arrays, Task, classify, models
from paceline.data.augment import Images
from paceline.training.step import TrainStep

TASK = "harness.faults:task"
SAMPLES, PARTS, EPOCHS, GLOBAL_BATCH = 97, 4, 3, 16
FLAGS = ("--virtual-workers", str(PARTS), "--global-batch", str(GLOBAL_BATCH), "--reduce", "exact", "--epochs", str(EPOCHS))
_steps: list[TrainStep] = []  # the one of this worker, once it trains
_FAULTS, _SEEN, _SLOW = "TEST_FAULTS", "TEST_SEEN", "TEST_SLOW_S"


@dataclass(frozen=True)
class Fault:
    """A failure that is going to happen."""

    rank: int
    step: int
    kind: str
    once: bool = True


def fail_at(rank: int, step: int, kind: str, once: bool = True) -> Fault:
    """The worker with this rank fails in this step (counted from 0), in one of the ways in `KINDS`."""
    assert kind in KINDS, f"unknown kind {kind!r}: {', '.join(KINDS)}"
    return Fault(rank, step, kind, once)


def train_with(faults: Sequence[Fault], *flags: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Train the task of this file, with these failures, in the current folder."""
    return paceline("train", TASK, *FLAGS, *flags, env=variables(faults), timeout_s=timeout_s)


def variables(faults: Sequence[Fault] = (), slow_s: float = 0.0) -> dict[str, str]:
    """The environment variables of a run with these failures."""
    seen = Path("seen")
    seen.mkdir(exist_ok=True)
    return {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]),
        _FAULTS: json.dumps([asdict(fault) for fault in faults]),
        _SEEN: str(seen.resolve()),
        _SLOW: str(slow_s),
    }


def samples_by_step(folder: Path = Path("seen")) -> dict[int, list[int]]:
    """The samples of every step over all workers, from the last attempt that did this step."""
    attempts: dict[str, list[dict[str, Any]]] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            attempts.setdefault(row["attempt"], []).append(row)
    steps: dict[int, list[int]] = {}
    for rows in sorted(attempts.values(), key=lambda rows: min(row["when"] for row in rows)):
        first = min(row["step"] for row in rows)
        steps = {step: samples for step, samples in steps.items() if step < first}
        for row in rows:
            steps.setdefault(row["step"], []).extend(row["samples"])
    return steps


def left_behind() -> list[int]:
    """Processes of runs in this folder that are still running, orphans included."""
    return tagged(f"{_SEEN}={Path('seen').resolve()}")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _raise() -> None:
    raise ValueError("this is what went wrong")


def _hang() -> None:
    time.sleep(1e6)


def _hang_in_c() -> None:
    """Hang outside Python with the interpreter lock held: no thread of this process can print anything."""
    ctypes.PyDLL(None).sleep(1_000_000)


def _out_of_memory() -> None:
    torch.empty(1 << 55)


def _stop() -> None:
    """What Slurm does to a preempted job: SIGTERM, to the launcher if there is one."""
    os.kill(os.getppid() if "PACELINE_MESSAGES" in os.environ else os.getpid(), signal.SIGTERM)
    _wait_for_stop_request()


def _stop_launcher() -> None:
    """SIGTERM to torchrun or mpirun, as from the user."""
    os.kill(os.getppid(), signal.SIGTERM)
    _wait_for_stop_request()


def _requeue() -> None:
    """What Slurm does to a preempted job: SIGTERM, SIGKILL after its KillWait, then start the same job again."""
    subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
    _wait_for_stop_request()


def _wait_for_stop_request() -> None:
    """Wait until this worker is asked to stop: launchers are slow, and the remaining steps could be over before."""
    watch, end = _steps[0]._mark.__self__, time.monotonic() + 60  # type: ignore[attr-defined]
    while not watch.stop:
        assert time.monotonic() < end, "this worker was never asked to stop"
        time.sleep(0.01)


def _fill_disk() -> None:
    """Files cannot grow beyond 100 KB from now on: a checkpoint does not fit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


def _free_disk() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _slow_disk() -> None:
    """From now on, writing a checkpoint to disk takes two seconds."""
    fsync = os.fsync

    def slow(file: Any) -> None:
        if "/checkpoints/" in os.readlink(f"/proc/self/fd/{file}"):
            time.sleep(2)
        fsync(file)

    os.fsync = slow  # type: ignore[assignment]


def _kill_writer() -> None:
    """Kill this worker while it writes the next checkpoint."""
    os.fsync = lambda _: _kill()  # type: ignore[assignment]


def _tear() -> None:
    """The next checkpoint loses its end, as on a disk that reports writes too early, and the power fails."""
    replace = os.replace

    def torn(source: Any, target: Any) -> None:
        if str(target).endswith(".safetensors"):
            os.truncate(source, os.path.getsize(source) - 1000)
            replace(source, target)
            _kill()
        replace(source, target)

    os.replace = torn  # type: ignore[assignment]


KINDS: dict[str, Callable[[], None]] = {
    "kill": _kill,
    "crash": _crash,
    "raise": _raise,
    "exit": lambda: os._exit(7),
    "hang": _hang,
    "hang in C": _hang_in_c,
    "out of memory": _out_of_memory,
    "stop": _stop,
    "wait": _wait_for_stop_request,
    "stop launcher": _stop_launcher,
    "requeue": _requeue,
    "disk full": _fill_disk,
    "disk free": _free_disk,
    "disk slow": _slow_disk,
    "kill writer": _kill_writer,
    "torn": _tear,
}


def task() -> Task:
    """A small real net with batch norm, dropout and augmentation, trained on noise."""

    def data(count: int, seed: int) -> Arrays:
        random = torch.Generator().manual_seed(seed)
        pixels = torch.randint(0, 256, (count, 1, 8, 8), dtype=torch.uint8, generator=random)
        return Arrays((pixels, torch.arange(count) % 3, torch.arange(count)))

    return Task(
        name="faulty",
        model=lambda: models.build("resnet:depth=8,width=8", in_channels=1, image_size=8, classes=3),
        train=lambda: data(SAMPLES, 0),
        validation=lambda: data(23, 1),
        objective=_watch(classify(0.1)),
        prepare=Images(mean=0.5, deviation=0.3, crop=1, flip=True, erase=0.5, seed=3),
        defaults={"base_lr": 0.02, "eval_batch": 7, "log_every": 2, "checkpoint_every": "3"},
    )


def _watch(objective: Any) -> Any:
    """Log the samples that are seen, and fail at the given steps."""
    begin = TrainStep.begin

    def watched_begin(self: TrainStep, number: int, *args: Any) -> None:
        _steps[:] = [self]
        begin(self, number, *args)

    TrainStep.begin = watched_begin  # type: ignore[method-assign]
    faults = [Fault(**fault) for fault in json.loads(os.environ[_FAULTS])]
    seen = os.open(Path(os.environ[_SEEN]) / f"{time.time_ns()}-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    attempt = os.environ.get("PACELINE_MESSAGES", str(os.getpid()))
    slow_s = float(os.environ[_SLOW])

    def watched(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        if model.training:
            row = {"attempt": attempt, "when": time.time(), "step": _steps[0].number, "samples": batch[2].tolist()}
            os.write(seen, (json.dumps(row) + "\n").encode())
            time.sleep(slow_s)
            for number, fault in enumerate(faults):
                if (fault.rank, fault.step) == (_steps[0].parts.world.rank, _steps[0].number) and _happens(number, fault):
                    KINDS[fault.kind]()
        values: dict[str, Tensor] = objective(model, batch[:2])
        return values

    return watched


def _happens(number: int, fault: Fault) -> bool:
    if not fault.once:
        return True
    try:
        Path(os.environ[_SEEN], f"happened-{number}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
