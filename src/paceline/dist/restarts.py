"""What the next attempt looks like after one that failed: who takes part, with which command. Nothing here imports torch."""

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
    """Who takes part in an attempt."""

    workers: int
    devices: tuple[str, ...] | None = None
    """CUDA_VISIBLE_DEVICES, where GPUs were taken out of it."""


@dataclass(frozen=True)
class Failure:
    """How an attempt failed: who was first, and the step of the newest checkpoint (-1: there is none)."""

    rank: int
    step: int


def newest_checkpoint(record: Path | None) -> int:
    """The step of a record's newest checkpoint; -1 where there is none."""
    files = record.glob("checkpoints/step-*.safetensors") if record is not None else ()
    return max((int(found[1]) for path in files if (found := re.match(r"step-(\d+)", path.name))), default=-1)


def next_crew(crew: Crew, before: Failure | None, after: Failure, config: Config) -> tuple[Crew, str]:
    """Who takes part in the next attempt, and why, where that is a change.

    A device is gone for good when it no longer answers, or when its worker was the first to fail twice running and the run came
    no further in between.
    """
    if config.min_workers is None or config.nodes > 1:
        return crew, ""
    gpus = () if config.backend == "gloo" else _gpus(crew)  # under gloo workers may share one
    answering = tuple(name for name, answers in gpus if answers)
    if gpus and (len(answering) < crew.workers or len(answering) < len(gpus)):
        why = f": {len(answering)} GPU{'s' * (len(answering) != 1)} left that answer"
        return Crew(min(crew.workers, len(answering)), answering), why
    if before is None or before.rank != after.rank or after.step > before.step:
        return crew, ""
    left = tuple(name for i, name in enumerate(answering) if i != after.rank)
    why = f": worker {after.rank}'s device counts as gone"
    return (Crew(min(crew.workers, len(left)), left) if gpus else Crew(crew.workers - 1, crew.devices)), why


def command_again(command: Sequence[str], crew: Crew, config: Config, record: Path | None) -> list[str]:
    """The command of the next attempt: it goes on with the record, on this many workers, with as many parts as before."""
    again = list(command)
    if record is not None:
        again = _with_flag(again, "--resume", record)
    if crew.workers != (config.workers or 1):
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
    """The GPUs the workers see, by their names in CUDA_VISIBLE_DEVICES, and whether each answers; none where nobody can tell.

    Asked in a process of its own: the launcher itself never touches a GPU, and a broken one may take the process with it.
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
    return [*(part for part in command if not part.startswith(f"{flag}=")), f"{flag}={value}"]


def _recorded_parts(record: Path | None) -> int | None:
    """The V a record was made with, where it says so: a task may have one of its own."""
    if record is None:
        return None
    try:
        parts = tomllib.loads((record / "config.toml").read_text()).get("virtual_workers")
    except (OSError, ValueError):
        return None
    return parts if isinstance(parts, int) else None
