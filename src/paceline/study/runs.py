"""One run of a study: claim it, train it, and save its state.

The run NAME has its record in NAME/, its output in NAME.log, and its state in NAME.run.json: its options, status and the reason
for that. A process claims a run with a lock that ends with the process. Nothing at the top of this file imports torch.
"""

import gc
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import Config, flag, names_with
from paceline.errors import DataError, PacelineError, RecordError, Stopped, UsageError, reason
from paceline.explanation import explain
from paceline.files import lock, read_json, write_json
from paceline.options import Role
from paceline.records import read_result
from paceline.status import Status

_TRIES = 2  # for a run that kills its process


@dataclass(frozen=True)
class RunSpec:
    """A run of a study, by its arm and seed."""

    arm: str
    seed: int
    name: str
    task: str
    options: Mapping[str, Any]
    """As given: the task's own defaults apply to the rest."""
    resolved: Mapping[str, Any]
    """Every field of the resulting Config. Comparing these shows whether a run's options have changed."""


@dataclass(frozen=True)
class Call:
    """One invocation of `paceline study`."""

    folder: Path
    id: str
    per_device: int = 1
    """How many of its runs share a device at the same time."""


def perform(call: Call, run: RunSpec) -> None:
    """Train a claimed run and save its state. Raises only what ends the study: a user's mistake, or a request to stop."""
    state = read_state(call, run)
    again = state.get("call") == call.id and state.get("status") == Status.RUNNING  # its process has died
    tries = int(state.get("tries", 0)) + 1 if again else 1
    note = "" if again else _make_way(call, run, state)
    about = {"arm": run.arm, "seed": run.seed, "task": run.task, "options": run.resolved, "per_device": call.per_device}
    begin = time.time()

    def write(status: str, why: str = "", where: str = "") -> None:
        wall_s = round(time.time() - begin, 3)
        ended = {"status": status, "why": why, "where": where, "note": note, "call": call.id, "tries": tries}
        ended |= {"begin": begin, "wall_s": wall_s}
        with explained(call.folder):
            write_json(_state_path(call, run), {**about, **ended}, indent=1)

    if tries > _TRIES:
        write(Status.FAILED, f"its process died {_TRIES} times")
        return
    write(Status.RUNNING)
    try:
        with _quiet(call.folder / f"{run.name}.log"):
            _train(call, run)
        status = read_result(call.folder / run.name)["status"]
    except (KeyboardInterrupt, Stopped) as error:
        write(Status.INTERRUPTED, str(error) or "Ctrl-C")
        raise
    except Exception as error:
        code = getattr(error, "exit_code", 1) if isinstance(error, PacelineError) else 1
        said = explain(error)
        why = said.why.partition("\n")[0]
        if code == UsageError.exit_code or isinstance(error, DataError):
            why = f"arm {run.arm!r}, seed {run.seed}: {why}"
            write(Status.REFUSED, why, said.where)
            raise (DataError(why) if isinstance(error, DataError) else UsageError(why)) from error
        with (call.folder / f"{run.name}.log").open("a", encoding="utf-8") as log:
            log.write(f"{said.describe(whole=True)}\n")
        write(Status.DIVERGED if code == 3 else Status.FAILED, why, said.where)
        if "CUDA error" in why and "out of memory" not in why:  # no later run of this process could use the device
            then = "run the same command again to continue with the others"
            raise PacelineError(f"arm {run.arm!r}, seed {run.seed}: {why}; {then}") from None
    else:
        write(status)  # not in the try block: a signal that arrives now must not turn it into "interrupted"
    finally:
        _tidy()


def _train(call: Call, run: RunSpec) -> None:
    """Train from the record's last checkpoint, or from the start if no checkpoint can be used."""
    from paceline.training.checkpoint.keeper import REFUSED
    from paceline.training.run import train

    options = {**run.options, "seed": run.seed, "runs_dir": str(call.folder), "name": run.name}
    record = call.folder / run.name
    if (record / "metrics.jsonl").exists():
        try:
            train(run.task, **{**options, "resume": str(record)})
        except PacelineError as error:
            if not str(error).startswith(REFUSED):
                raise
            print(f"{error}; starting over")
        else:
            return
    if record.exists():
        _move_aside(record)
    train(run.task, **options)


def _make_way(call: Call, run: RunSpec, state: Mapping[str, Any]) -> str:
    """Move away a record that this run cannot continue; returns a note about it, or ""."""
    record = call.folder / run.name
    if not record.exists():
        return ""
    differ = changed(state, run)
    if not differ and not Status(state.get("status", "")).final:
        return ""
    why = f"its options changed ({'; '.join(differ)})" if differ else "its record was incomplete"
    return f"run again because {why}; the old record is in {_move_aside(record)}"


def _move_aside(record: Path) -> Path:
    for number in range(1, 10_000):
        aside = record.with_name(f"{record.name}.old-{number}")
        if not aside.exists():
            record.rename(aside)
            return aside
    raise RecordError(f"{record.parent} holds 10,000 old records of {record.name}")


def changed(state: Mapping[str, Any], run: RunSpec) -> list[str]:
    """The options that differ from those in a run's saved state, in words."""
    old = {**vars(Config()), **state.get("options", {})}
    may_change = names_with(Role.OPERATION, Role.STUDY)
    differ = [
        f"{flag(name)} was {old.get(name)}, is {value}"
        for name, value in run.resolved.items()
        if name not in may_change and old.get(name) != value
    ]
    task = state.get("task", run.task)
    return differ if task == run.task else [f"the task was {task}", *differ]


def settled(call: Call, run: RunSpec) -> bool:
    """Whether there is nothing left to do: the run finished or diverged, or failed in this call."""
    state = read_state(call, run)
    if not state or changed(state, run):
        return False
    status = Status(state["status"])
    if status.final:
        return (call.folder / run.name / "result.json").exists()
    return status is Status.FAILED and state.get("call") == call.id


def claim(call: Call, run: RunSpec) -> AbstractContextManager[bool]:
    """Claim this run for the block, or until this process dies; gives False if another process has it."""
    return lock(call.folder / ".claims" / run.name, wait=False)


def _state_path(call: Call, run: RunSpec) -> Path:
    return call.folder / f"{run.name}.run.json"


def read_state(call: Call, run: RunSpec) -> dict[str, Any]:
    """The saved state of a run; empty if no process has started it."""
    with suppress(OSError, ValueError):
        return read_json(_state_path(call, run))
    return {}


@contextmanager
def explained(folder: Path, option: str = "--runs-dir") -> Iterator[None]:
    """Turn an OSError into a one-line RecordError; `option` is the flag that chose the folder."""
    try:
        yield
    except OSError as error:
        raise RecordError(f"cannot write the study in {folder}: {reason(error)}; choose another {option}") from None


@contextmanager
def _quiet(log: Path) -> Iterator[None]:
    """Send what a run and its workers print to a file."""
    sys.stdout.flush()
    with log.open("a", encoding="utf-8", buffering=1) as file:
        kept = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            with redirect_stdout(file):
                yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)


def _tidy() -> None:
    """Free what a run leaves in this process: its memory, and the compiler's count of recompilations.

    `torch._dynamo.reset()` would reset that count, but make every run compile from scratch: 25 s instead of 1.
    """
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and "torch._dynamo" in sys.modules:
        limits = torch._dynamo.config
        limits.recompile_limit = limits.accumulated_recompile_limit = 1 << 20  # at the default of 8 it would stop compiling
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
