"""Plan the next attempt after a failed one: its workers, devices and command. Does not import torch."""

import os
import re
import subprocess
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.config import Config
from paceline.dist.process import python_command

_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Crew:
    """The workers and devices of one attempt."""

    workers: int
    devices: tuple[str, ...] | None = None
    """CUDA_VISIBLE_DEVICES, if GPUs were removed from it."""


@dataclass(frozen=True)
class FailedAttempt:
    """How an attempt failed: the rank that failed first, and the step of the newest checkpoint (-1: no checkpoint)."""

    rank: int
    step: int


def newest_checkpoint(record: Path | None) -> int:
    """The step of a record's newest checkpoint; -1 without one."""
    files = record.glob("checkpoints/step-*.safetensors") if record is not None else ()
    return max((int(found[1]) for path in files if (found := re.match(r"step-(\d+)", path.name))), default=-1)


def next_crew(crew: Crew, before: FailedAttempt | None, after: FailedAttempt, config: Config) -> tuple[Crew, str]:
    """The crew of the next attempt, and the reason if it changes.

    A device is given up if it no longer answers, or if its worker was the first to fail twice in a row and the run made no
    progress in between.
    """
    if config.min_workers is None or config.nodes > 1:
        return crew, ""
    gpus = () if config.backend == "gloo" else _gpus(crew)  # with gloo, workers may share a GPU
    answering = tuple(name for name, answers in gpus if answers)
    if gpus and (len(answering) < crew.workers or len(answering) < len(gpus)):
        why = f": {len(answering)} GPU{'s' * (len(answering) != 1)} still working"
        return Crew(min(crew.workers, len(answering)), answering), why
    if before is None or before.rank != after.rank or after.step > before.step:
        return crew, ""
    left = tuple(name for i, name in enumerate(answering) if i != after.rank)
    why = f": worker {after.rank}'s device failed twice and is no longer used"
    return (Crew(min(crew.workers, len(left)), left) if gpus else Crew(crew.workers - 1, crew.devices)), why


def restart_command(command: Sequence[str], crew: Crew, config: Config, record: Path | None) -> list[str]:
    """The command of the next attempt: it resumes the record on the crew's workers, with as many virtual workers as before."""
    again = list(command)
    if record is not None:
        again = _with_flag(again, "--resume", record)
    if crew.workers != (config.workers or 1) and not config.workers_schedule:
        again = _with_flag(again, "--workers", crew.workers)
        if config.virtual_workers is None:
            again = _with_flag(again, "--virtual-workers", _recorded_parts(record) or (config.workers or 1))
    return again


_PROBE = """
import torch
for i in range(torch.cuda.device_count()):
    try:
        print(i, int(torch.ones(1, device=f"cuda:{i}").sum().item() == 1), flush=True)
    except Exception:
        print(i, 0, flush=True)
"""


def _gpus(crew: Crew) -> tuple[tuple[str, bool], ...]:
    """The GPUs that the workers see, by their names in CUDA_VISIBLE_DEVICES, and whether each works; empty if unknown.

    A separate process checks them: the launcher itself never touches a GPU, and a broken GPU may crash the process.
    """
    env = dict(os.environ) if crew.devices is None else {**os.environ, _DEVICES: ",".join(crew.devices)}
    try:
        done = subprocess.run(
            [*python_command(), "-c", _PROBE], env=env, capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    answers = [line.split()[1] == "1" for line in done.stdout.splitlines()]
    names = env[_DEVICES].split(",") if env.get(_DEVICES) else [str(i) for i in range(len(answers))]
    return tuple(zip(names, answers, strict=False))


def _with_flag(command: list[str], flag: str, value: object) -> list[str]:
    return [*(word for word in command if not word.startswith(f"{flag}=")), f"{flag}={value}"]


def _recorded_parts(record: Path | None) -> int | None:
    """The number of virtual workers in a record's configuration, if it is there: a task may set its own."""
    if record is None:
        return None
    try:
        parts = tomllib.loads((record / "config.toml").read_text()).get("virtual_workers")
    except (OSError, ValueError):
        return None
    return parts if isinstance(parts, int) else None
