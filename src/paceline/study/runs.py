"""One run of a study: who may do it, doing it, and how it ended.

A run called NAME has its record in NAME/, what it printed in NAME.log, and in NAME.run.json its state: its options and how it
ended. It is claimed by a lock that ends with its process. Nothing at the top of this file imports torch.
"""

import fcntl
import gc
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import Config, flag, names_with
from paceline.dist.messages import headline
from paceline.errors import DataError, PacelineError, RecordError, Stopped, UsageError
from paceline.files import write_file
from paceline.options import Role
from paceline.records import read_result
from paceline.study.results import GOOD

ENDED = (*GOOD, "diverged")
"""How a run can end that would end so again."""

_TRIES = 2  # of a run whose process dies


@dataclass(frozen=True)
class Planned:
    """A run that is to be."""

    arm: str
    seed: int
    name: str
    task: str
    options: Mapping[str, Any]
    """As given; the task's own defaults are below them."""
    resolved: Mapping[str, Any]
    """Every field of the Config they come to: what a run's options are compared by."""


@dataclass(frozen=True)
class Call:
    """One call of a study, as each of its runs knows it."""

    folder: Path
    id: str
    per_device: int = 1
    """How many of its runs share a device at once."""


def perform(call: Call, run: Planned) -> None:
    """One run, claimed. How it ended is in its state; raises only what ends the study: a mistake, or a wish to stop."""
    state = read_state(call, run)
    again = state.get("call") == call.id and state.get("status") == "running"  # the process that had it has died
    tries = int(state.get("tries", 0)) + 1 if again else 1
    note = "" if again else _make_way(call, run, state)
    about = {"arm": run.arm, "seed": run.seed, "task": run.task, "options": run.resolved, "per_device": call.per_device}
    begin = time.time()

    def write(status: str, why: str = "") -> None:
        wall_s = round(time.time() - begin, 3)
        ended = {"status": status, "why": why, "note": note, "call": call.id, "tries": tries, "begin": begin, "wall_s": wall_s}
        write_json(_state_path(call, run), {**about, **ended})

    if tries > _TRIES:
        write("failed", f"its process died {_TRIES} times")
        return
    write("running")
    try:
        with _quiet(call.folder / f"{run.name}.log"):
            _train(call, run)
        status = read_result(call.folder / run.name)["status"]
    except (KeyboardInterrupt, Stopped) as error:
        write("interrupted", str(error) or "Ctrl-C")
        raise
    except Exception as error:
        code = getattr(error, "exit_code", 1) if isinstance(error, PacelineError) else 1
        why = str(error).partition("\n")[0] if isinstance(error, PacelineError) else headline(error)
        if code == UsageError.exit_code or isinstance(error, DataError):
            why = f"arm {run.arm!r}, seed {run.seed}: {why}"
            write("refused", why)
            raise (DataError(why) if isinstance(error, DataError) else UsageError(why)) from None
        with (call.folder / f"{run.name}.log").open("a", encoding="utf-8") as log:
            traceback.print_exc(file=log)
        write("diverged" if code == 3 else "failed", why)
        if "CUDA error" in why and "out of memory" not in why:  # no later run of this process could use the device
            raise PacelineError(f"arm {run.arm!r}, seed {run.seed}: {why}; the same command goes on with the others") from None
    else:
        write(status)  # not in the block above: a signal that comes now must not turn it into "interrupted"
    finally:
        _tidy()


def _train(call: Call, run: Planned) -> None:
    """From the record's last checkpoint where there is one; anew where that cannot be."""
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
            print(f"{error}; it starts anew")
        else:
            return
    if record.exists():
        _move_aside(record)
    train(run.task, **options)


def _make_way(call: Call, run: Planned, state: Mapping[str, Any]) -> str:
    """Move a record aside that is not this run's any more; says so."""
    record = call.folder / run.name
    if not record.exists():
        return ""
    differ = changed(state, run)
    if not differ and state.get("status") not in ENDED:
        return ""
    why = f"its options changed ({'; '.join(differ)})" if differ else "its record was incomplete"
    return f"{why}: done anew; the old record is in {_move_aside(record)}"


def _move_aside(record: Path) -> Path:
    for number in range(1, 10_000):
        aside = record.with_name(f"{record.name}.old-{number}")
        if not aside.exists():
            record.rename(aside)
            return aside
    raise RecordError(f"{record.parent} holds 10,000 old records of {record.name}")


def changed(state: Mapping[str, Any], run: Planned) -> list[str]:
    """What of a run's options is not as it was."""
    old = {**vars(Config()), **state.get("options", {})}
    may_change = names_with(Role.OPERATION, Role.STUDY)
    differ = [
        f"{flag(name)} was {old.get(name)}, is {value}"
        for name, value in run.resolved.items()
        if name not in may_change and old.get(name) != value
    ]
    task = state.get("task", run.task)
    return differ if task == run.task else [f"the task was {task}", *differ]


def settled(call: Call, run: Planned) -> bool:
    """Whether there is nothing to do: it came to its end, or failed in this very call."""
    state = read_state(call, run)
    if not state or changed(state, run):
        return False
    if state["status"] in ENDED:
        return (call.folder / run.name / "result.json").exists()
    return state["status"] == "failed" and state.get("call") == call.id


@contextmanager
def claim(call: Call, run: Planned) -> Iterator[bool]:
    """Whether this run is ours alone, while the block lasts or until this process ends."""
    with (call.folder / ".claims" / run.name).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _state_path(call: Call, run: Planned) -> Path:
    return call.folder / f"{run.name}.run.json"


def read_state(call: Call, run: Planned) -> dict[str, Any]:
    """How far it is, or how it ended; empty where nobody has begun it."""
    try:
        state: dict[str, Any] = json.loads(_state_path(call, run).read_text())
    except (OSError, ValueError):
        return {}
    return state


def write_json(path: Path, value: Any, option: str = "--runs-dir") -> None:
    """Whole or not at all, and without NaN, which JSON does not have."""
    with explained(path.parent, option):
        write_file(path, json.dumps(_plain(value), indent=1, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def explained(folder: Path, option: str = "--runs-dir") -> Iterator[None]:
    """A disk's refusal as one line; `option` is what says where the folder is."""
    try:
        yield
    except OSError as error:
        raise RecordError(f"cannot write the study in {folder}: {error.strerror or error}; choose another {option}") from None


@contextmanager
def _quiet(log: Path) -> Iterator[None]:
    """What a run prints, and what its workers print, goes to a file."""
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
    """What a run leaves in this process must not reach the next: its memory, and the compiler's count of its versions.

    `torch._dynamo.reset()` would do the latter, and make every run compile anew: 25 s instead of 1.
    """
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and "torch._dynamo" in sys.modules:
        limits = torch._dynamo.config
        limits.recompile_limit = limits.accumulated_recompile_limit = 1 << 20  # of 8: it would then compile no more
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
