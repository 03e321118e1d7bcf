"""`paceline study`: arms x seeds, each an ordinary run with a record of its own, and a table that says who ended where.

    task = "fashion-mnist"
    seeds = 3                     # 0, 1, 2; or a list
    reference = "nesterov 128"    # the arm that the others are compared with (default: the first)
    margin = 0.005                # of accuracy (or loss, where a task reports no accuracy): what counts as equal
    target_accuracy = 0.94        # for "time to target"; no run stops there
    about = "one sentence"
    [options]                     # Config's fields, for all arms
    epochs = 10
    [arms."nesterov 128"]         # of this arm; `recipe` names a base below them, `about` is a sentence
    [arms."lars 8192"]
    recipe = "batch-8192"

What a study knows lies in its folder, RUNS_DIR/study-<file>: a run called NAME has its record in NAME/, what it printed in
NAME.log, and in NAME.run.json its options and how it ended. A run is claimed by a lock that ends with its process, so slots of
one study, and studies on several machines that share the folder, never do a run twice, and what was cut short is taken up
again. Nothing at the top of this file imports torch: a table is there at once.
"""

import ctypes
import fcntl
import gc
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.config import Config, check_options, flag, read_recipe
from paceline.dist.place import read_place, threads_per_worker
from paceline.dist.reports import headline
from paceline.errors import DataError, PacelineError, RecordError, Stopped, UsageError, unknown
from paceline.measure.spread import LEGEND, Comparison, compare, deviation, mean, median
from paceline.records import environment, read_metrics, read_result

GOOD = ("done", "target reached")
ENDED = (*GOOD, "diverged")
"""How a run can end that would end so again."""

NOT_ITS_OWN = ("seed", "name", "runs_dir", "resume", "nodes", "node_id", "rendezvous")
"""Options that are the study's to give, not an arm's."""

_INDIFFERENT = (
    *(*NOT_ITS_OWN, "backend", "timeout_s", "max_restarts", "min_workers", "grace_s", "loader_workers"),
    *("check_every", "log_every", "tracker", "checkpoint_every", "keep"),
)
"""Options that may change without a run having to be done anew."""

_TRIES = 2  # of a run whose process dies
_FACTS = (
    *("virtual_workers", "global_batch", "reference_batch", "base_lr", "k", "lr_rule", "peak_lr", "optimizer", "schedule"),
    *("warmup", "steps_per_epoch", "precision", "model", "parameters", "devices", "data"),
)
"""What of a run's contract goes into the results."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train."""

    name: str
    options: Mapping[str, Any]
    about: str = ""

    @property
    def slug(self) -> str:
        """The name as a part of a file's name."""
        return re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-.")[:80]


@dataclass(frozen=True, kw_only=True)
class Study:
    """Arms and seeds of one task."""

    name: str
    """Of its folder."""
    source: str
    """What errors call it: its file."""
    task: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    reference: str = ""
    margin: float = 0.005
    target_accuracy: float | None = None
    about: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reference", self.reference or self.arms[0].name)

    def as_dict(self) -> dict[str, Any]:
        """For the results."""
        arms = {arm.name: {"about": arm.about, "options": dict(arm.options)} for arm in self.arms}
        return {**asdict(self), "arms": arms, "seeds": list(self.seeds)}


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


def study_verb(
    file: str,
    *,
    runs_dir: str = "runs",
    out: str = "",
    seeds: str = "",
    settings: Sequence[str] = (),
    only: Sequence[str] = (),
    per_device: int = 1,
    mini: bool = False,
    show: bool = False,
    slot: str = "",
) -> int:
    """What the command line calls. `slot` is for the processes that a study starts itself: whose they are."""
    if slot:
        return _work_as_slot(Path(file), Path(runs_dir), slot)
    if show:
        suffix = "-mini" if mini else ""
        path = Path(out) if out else Path(file)
        if path.suffix != ".json":
            path = Path(runs_dir) / f"study-{path.stem}{suffix}" / "study.json"
        print(table(read_results(path)), end="")
        return 0
    study = read_study(Path(file), seeds=seeds, settings=settings)
    study = shrink(study) if mini else study
    for name in only:
        if name not in {arm.name for arm in study.arms}:
            raise unknown("arm for --only", name, [arm.name for arm in study.arms])
    results = run_study(study, Path(runs_dir), per_device=per_device, only=only, out=out)
    print(f"\n{table(results)}", end="")
    return 0


# --- the definition ---------------------------------------------------------------------------------------------------------


def read_study(path: Path, *, seeds: str = "", settings: Sequence[str] = ()) -> Study:
    """The study in a TOML file; a UsageError of one line for whatever is wrong with it. Runs nothing, imports no torch."""
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except OSError as error:
        raise UsageError(f"cannot read study {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"study {path} is not valid TOML: {error}") from None
    given = parse_settings(settings)
    with _naming(f"study {path}"):
        _check_keys(found)
        arms = tuple(_read_arm(path, name, found.get("options", {}), arm, given) for name, arm in found["arms"].items())
        check_arms(arms)
        if found.get("reference", arms[0].name) not in {arm.name for arm in arms}:
            raise unknown("reference", found["reference"], [arm.name for arm in arms])
        return Study(
            name=f"study-{path.stem}",
            source=f"study {path}",
            task=_beside(path, found["task"]),
            arms=arms,
            seeds=parse_seeds(seeds) if seeds else _seeds(found.get("seeds", 3)),
            reference=found.get("reference", ""),
            margin=float(found.get("margin", 0.005)),
            target_accuracy=found.get("target_accuracy"),
            about=found.get("about", ""),
        )


def check_arms(arms: Sequence[Arm]) -> None:
    """Every arm has a folder of its own."""
    slugs: dict[str, str] = {}
    for arm in arms:
        if not arm.slug:
            raise UsageError(f"arm {arm.name!r}: its name needs a letter or a digit")
        if arm.slug in slugs:
            raise UsageError(f"arms {slugs[arm.slug]!r} and {arm.name!r} would share the folder name {arm.slug}: rename one")
        slugs[arm.slug] = arm.name


def parse_seeds(text: str) -> tuple[int, ...]:
    """`3` is 0, 1, 2; `0,5,7` are these."""
    try:
        return _seeds([int(each) for each in text.split(",")] if "," in text else int(text))
    except ValueError:
        raise UsageError(f"--seeds is {text!r}: it must be a number of seeds (3) or a list of them (0,5,7)") from None


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """`--set key=value` as options."""
    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip().removeprefix("--").replace("-", "_")
        if not equals:
            raise UsageError(f"--set {setting}: it must be key=value, such as --set epochs=3")
        is_flag = isinstance(getattr(Config, key, None), bool)
        options[key] = {"true": True, "false": False}.get(text.lower(), text) if is_flag else text
    with _naming("--set"):
        return _own(options)


def merge(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Layers of options, the later ones winning, as `make_config` has it: one way to say the warm-up replaces the other."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, other in (("warmup_epochs", "warmup_steps"), ("warmup_steps", "warmup_epochs")):
            if name in layer or layer.get("schedule") == "one-cycle":
                merged.pop(other, None)
        merged |= layer
    return merged


def shrink(study: Study) -> Study:
    """A rehearsal of the study itself, in a minute on a CPU: every arm's options are used once, and nothing is learned from it.

    One seed, one epoch of the mini data, a small conv net. All batches are divided by 32, so k stays; a part has 4 samples at
    least, so V stays, too; and there are 3 steps an epoch where 6,000 images suffice. A task of the user's own keeps its data
    and model, and makes 4 steps.
    """
    own = ".py" in study.task or ":" in study.task
    batches = {arm.name: _small_batches(arm.options) for arm in study.arms}
    samples = min(6000, max(256, 3 * max(each["global_batch"] for each in batches.values())))
    arms = []
    for arm in study.arms:
        options = {name: value for name, value in arm.options.items() if name not in ("workers", "data_dir", "max_steps")}
        options |= {**batches[arm.name], "epochs": 1, "checkpoint_every": "0", "precision": "auto", "fast": "auto"}
        options |= {"max_steps": 4} if own else {"model": "cnn:width=8", "train_samples": samples}
        if options.get("warmup_steps"):
            options["warmup_steps"] = 1
        if options.get("warmup_epochs"):
            options["warmup_epochs"] = min(0.3, float(options["warmup_epochs"]))
        if options.get("norm_part"):
            options["norm_part"] = min(int(options["norm_part"]), 4)
        arms.append(replace(arm, options=options))
    task = study.task if own else "fashion-mnist-mini"
    return replace(study, name=f"{study.name}-mini", task=task, seeds=study.seeds[:1], arms=tuple(arms))


def _small_batches(options: Mapping[str, Any]) -> dict[str, int]:
    config = check_options({"reference_batch": Config.reference_batch, **options})
    parts = int(config.get("virtual_workers") or config.get("workers") or 1)
    reference = int(config["reference_batch"])
    large = int(config.get("global_batch") or reference * parts)
    small = parts * max(4, int(config.get("accumulate", 1)), large // 32 // parts)
    return {"virtual_workers": parts, "global_batch": small, "reference_batch": max(1, round(reference * small / large))}


def _check_keys(found: Mapping[str, Any]) -> None:
    kinds: dict[str, Any] = {"task": str, "seeds": (int, list), "reference": str, "about": str, "options": dict, "arms": dict}
    kinds |= {"margin": (int, float), "target_accuracy": (int, float)}
    for key, value in found.items():
        if key not in kinds:
            raise unknown("key", key, kinds)
        if not isinstance(value, kinds[key]) or isinstance(value, bool):
            raise UsageError(f"{key} is {value!r}: {_MEANT[key]}")
    if "task" not in found:
        raise UsageError('it names no task: add task = "fashion-mnist"')
    if not found.get("arms"):
        raise UsageError('it has no arms: add [arms."a name"] with its options')
    for key in ("margin", "target_accuracy"):
        if key in found and not 0 < found[key] < (math.inf if key == "margin" else 1.000001):
            raise UsageError(f"{key} is {found[key]!r}: {_MEANT[key]}")


_MEANT = {
    "task": "it must be a name, a file or module:function",
    "seeds": "it must be a number of seeds, or a list of them",
    "reference": "it must be the name of an arm",
    "about": "it must be text",
    "options": "it must be a table of options",
    "arms": "it must be a table of arms",
    "margin": "it must be a positive number, such as 0.005",
    "target_accuracy": "it must be a number between 0 and 1",
}


def _read_arm(path: Path, name: str, common: Mapping[str, Any], arm: Any, given: Mapping[str, Any]) -> Arm:
    with _naming("[options]"):
        _own(common)
    with _naming(f"arm {name!r}"):
        if not isinstance(arm, dict):
            raise UsageError(f"it is {arm!r}: it must be a table of options")
        own = dict(arm)
        recipe, about = own.pop("recipe", ""), own.pop("about", "")
        if not isinstance(recipe, str) or not isinstance(about, str):
            raise UsageError("recipe and about must be text")
        base = read_recipe(_beside(path, recipe)) if recipe else {}
        base = {key: value for key, value in base.items() if key not in NOT_ITS_OWN}  # a record's config.toml holds these
        return Arm(name=name, options=merge(common, base, _own(own), given), about=about)


def _own(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that an arm may set, with values that fit."""
    for key in options:
        if key in NOT_ITS_OWN:
            raise UsageError(f"{key} is the study's to give, not an arm's" + (": use seeds" if key == "seed" else ""))
    return check_options(options)


def _seeds(given: Any) -> tuple[int, ...]:
    seeds = list(range(given)) if isinstance(given, int) else given
    if not seeds or any(not isinstance(seed, int) or isinstance(seed, bool) or seed < 0 for seed in seeds):
        raise UsageError(f"seeds is {given!r}: it must be a number of seeds, 1 or more, or a list of whole numbers")
    return tuple(dict.fromkeys(seeds))


def _beside(path: Path, name: str) -> str:
    """A file that a study names lies where the command runs, or beside the study."""
    beside = path.parent / name
    return str(beside) if not Path(name).exists() and beside.is_file() else name


@contextmanager
def _naming(where: str) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{where}{', ' if str(error).startswith(('arm ', '[opt')) else ': '}{error}") from None


# --- the engine -------------------------------------------------------------------------------------------------------------


def run_study(
    study: Study, runs_dir: Path, *, per_device: int = 1, only: Sequence[str] = (), out: str = "", again: str = ""
) -> dict[str, Any]:
    """Do what is not done yet, one run a slot at a time; returns the results, which are on disk after every run.

    `again` is the command that goes on where this one was stopped.
    """
    place = read_place()
    if place.launcher != "alone":
        raise UsageError(f"a study starts its own runs: start it by itself, not with {place.launcher}")
    if per_device < 1:
        raise UsageError(f"--per-device is {per_device}: it must be at least 1")
    folder, call = runs_dir / study.name, uuid.uuid4().hex
    plan = plan_runs(study)
    todo = [run for run in plan if not only or run.arm in only]
    slots = _slots(todo, per_device)
    with _explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".claims").mkdir(exist_ok=True)
    teller = _Teller(study, plan, todo, folder, call, out)
    teller.begin(len(slots))
    if per_device > len(slots):
        print("an arm has workers of its own: runs are done one after the other", flush=True)
    try:
        with _sigterm_raises():
            if len(slots) > 1 and len(teller.left()) > 1:
                _run_slots(todo, folder, call, slots[: len(teller.left())], teller)
            else:
                with _Ticker(teller):
                    _work(todo, folder, call, teller, waits=True)
    except (KeyboardInterrupt, Stopped) as error:
        teller.tell()
        why = "SIGTERM" if isinstance(error, Stopped) and error.exit_code != 130 else "Ctrl-C"
        done = len(todo) - len(teller.left())
        raise Stopped(
            f"stopped by {why}: {done} of {len(todo)} runs are done; {again or 'the same command'} goes on from there", why
        ) from None
    return teller.tell()


def plan_runs(study: Study) -> list[Planned]:
    """All runs, seed by seed, so that a study cut short has all arms. What is wrong with an arm shows here, before any run."""
    from paceline.data.sampler import check_divides
    from paceline.training import tasks
    from paceline.training.contract import check_parts

    resolved: dict[str, dict[str, Any]] = {}
    for arm in study.arms:
        with _naming(f"{study.source}, arm {arm.name!r}"):
            tasks.check(study.task, arm.options)
            _, config = tasks.resolve(study.task, arm.options)
            workers = config.workers or 1
            parts = config.virtual_workers or workers
            check_parts(parts, workers)
            check_divides(config.global_batch or config.reference_batch * parts, parts)
            resolved[arm.name] = vars(config)
    return [
        Planned(arm.name, seed, f"{arm.slug}-seed{seed}", study.task, dict(arm.options), {**resolved[arm.name], "seed": seed})
        for seed in study.seeds
        for arm in study.arms
    ]


def _slots(runs: Sequence[Planned], per_device: int) -> list[dict[str, str]]:
    """What each slot's environment holds besides ours: its device, or its share of the cores."""
    import torch

    if any((run.resolved.get("workers") or 1) > 1 for run in runs):
        return [{}]  # such a run takes the devices it needs itself
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        share = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads_per_worker(per_device))}
        return [share] * per_device
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    devices = [each.strip() for each in visible.split(",")][:count] if visible else [str(i) for i in range(count)]
    return [{"CUDA_VISIBLE_DEVICES": device} for _ in range(per_device) for device in devices]


def _work(runs: Sequence[Planned], folder: Path, call: str, teller: "_Teller | None" = None, waits: bool = False) -> None:
    """Do the runs that nobody else does, one after the other; with `waits`, until those of others have ended, too."""
    while True:
        busy = False
        for run in runs:
            if _settled(folder, run, call):
                continue
            with _claim(folder, run) as mine:
                busy |= not mine
                if mine and not _settled(folder, run, call):
                    _perform(folder, run, call)
            if mine and teller:
                teller.tell()
        if not busy or not waits:
            return
        if teller:
            teller.wait()
        time.sleep(1)


def _perform(folder: Path, run: Planned, call: str) -> None:
    """One run, claimed. How it ended is in its state; raises only what ends the study: a mistake, or a wish to stop."""
    state = _read_state(folder, run)
    again = state.get("call") == call and state.get("status") == "running"  # the process that had it has died
    tries = int(state.get("tries", 0)) + 1 if again else 1
    note = "" if again else _make_way(folder, run, state)
    about = {"arm": run.arm, "seed": run.seed, "task": run.task, "options": run.resolved}
    begin = time.time()

    def write(status: str, why: str = "") -> None:
        wall_s = round(time.time() - begin, 3)
        ended = {"status": status, "why": why, "note": note, "call": call, "tries": tries, "begin": begin, "wall_s": wall_s}
        _write_json(_state_path(folder, run), {**about, **ended})

    if tries > _TRIES:
        write("failed", f"its process died {_TRIES} times")
        return
    write("running")
    try:
        with _quiet(folder / f"{run.name}.log"):
            _train(folder, run)
        write(read_result(folder / run.name)["status"])
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
        with (folder / f"{run.name}.log").open("a", encoding="utf-8") as log:
            traceback.print_exc(file=log)
        write("diverged" if code == 3 else "failed", why)
        if "CUDA error" in why and "out of memory" not in why:  # no later run of this process could use the device
            raise PacelineError(f"arm {run.arm!r}, seed {run.seed}: {why}; the same command goes on with the others") from None
    finally:
        _tidy()


def _train(folder: Path, run: Planned) -> None:
    """From the record's last checkpoint where there is one; anew where that cannot be."""
    from paceline.training.keeper import REFUSED
    from paceline.training.run import train

    options = {**run.options, "seed": run.seed, "runs_dir": str(folder), "name": run.name}
    record = folder / run.name
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


def _make_way(folder: Path, run: Planned, state: Mapping[str, Any]) -> str:
    """Move a record aside that is not this run's any more; says so."""
    record = folder / run.name
    if not record.exists():
        return ""
    changed = _changed(state, run)
    if not changed and state.get("status") not in ENDED:
        return ""
    why = f"its options changed ({'; '.join(changed)})" if changed else "its record was incomplete"
    return f"{why}: done anew; the old record is in {_move_aside(record)}"


def _move_aside(record: Path) -> Path:
    for number in range(1, 10_000):
        aside = record.with_name(f"{record.name}.old-{number}")
        if not aside.exists():
            record.rename(aside)
            return aside
    raise RecordError(f"{record.parent} holds 10,000 old records of {record.name}")


def _changed(state: Mapping[str, Any], run: Planned) -> list[str]:
    """What of a run's options is not as it was."""
    old = {**vars(Config()), **state.get("options", {})}
    differ = [
        f"{flag(name)} was {old.get(name)}, is {value}"
        for name, value in run.resolved.items()
        if name not in _INDIFFERENT and old.get(name) != value
    ]
    task = state.get("task", run.task)
    return differ if task == run.task else [f"the task was {task}", *differ]


def _settled(folder: Path, run: Planned, call: str) -> bool:
    """Whether there is nothing to do: it came to its end, or failed in this very call."""
    state = _read_state(folder, run)
    if not state or _changed(state, run):
        return False
    if state["status"] in ENDED:
        return (folder / run.name / "result.json").exists()
    return state["status"] == "failed" and state.get("call") == call


def _state_path(folder: Path, run: Planned) -> Path:
    return folder / f"{run.name}.run.json"


def _read_state(folder: Path, run: Planned) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads(_state_path(folder, run).read_text())
    except (OSError, ValueError):
        return {}
    return state


def _write_json(path: Path, value: Any) -> None:
    """Whole or not at all, and without NaN, which JSON does not have."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with _explained(path.parent):
        try:
            temporary.write_text(json.dumps(_plain(value), indent=1, allow_nan=False) + "\n", encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecordError(f"cannot write the study in {folder}: {error.strerror or error}; choose another --runs-dir") from None


@contextmanager
def _claim(folder: Path, run: Planned) -> Iterator[bool]:
    """Whether this run is ours alone, while the block lasts or until this process ends."""
    with (folder / ".claims" / run.name).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


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


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM between two runs is a wish to stop, too."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped("stopped by SIGTERM", "SIGTERM")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# --- slots ------------------------------------------------------------------------------------------------------------------


def _run_slots(runs: Sequence[Planned], folder: Path, call: str, slots: Sequence[Mapping[str, str]], teller: "_Teller") -> None:
    """Each slot is a process that takes run after run. One that dies in the middle of a run is started again."""
    grace_s = max(float(run.resolved["grace_s"]) for run in runs) + 10
    with tempfile.TemporaryDirectory(prefix="paceline-") as place:
        plan = Path(place) / "plan.json"
        _write_json(plan, [asdict(run) for run in runs])
        processes = [_start_slot(plan, folder, call, number, env) for number, env in enumerate(slots)]
        try:
            with _Ticker(teller):
                while any(process.poll() is None for process in processes) or _orphans(runs, folder, call):
                    for number, process in enumerate(processes):
                        if process.poll() == UsageError.exit_code:
                            raise UsageError(_refusal(runs, folder, call, number))
                        if process.poll() is not None and _orphans(runs, folder, call):
                            processes[number] = _start_slot(plan, folder, call, number, slots[number])
                    teller.tell()
                    time.sleep(0.2)
        finally:
            _end(processes, grace_s)
    teller.tell()
    if teller.left():
        raise PacelineError(_refusal(runs, folder, call, 0))


def _start_slot(plan: Path, folder: Path, call: str, number: int, env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    slot = f"{call}/{os.getpid()}"
    command = [sys.executable, "-m", "paceline", "study", str(plan), "--runs-dir", str(folder), "--slot", slot]
    with (folder / f"slot-{number}.log").open("ab") as log:
        return subprocess.Popen(command, env={**os.environ, **env}, stdout=log, stderr=log, start_new_session=True)


def _orphans(runs: Sequence[Planned], folder: Path, call: str) -> bool:
    """Whether there is a run of this call that nobody does and that did not end."""
    for run in runs:
        state = _read_state(folder, run)
        if state.get("call") == call and state.get("status") == "running":
            with _claim(folder, run) as mine:
                if mine and _read_state(folder, run).get("status") == "running":
                    return True
    return False


def _refusal(runs: Sequence[Planned], folder: Path, call: str, number: int) -> str:
    """Why a slot ended before all was done."""
    states = [_read_state(folder, run) for run in runs]
    said = [str(state["why"]) for state in states if state.get("status") == "refused" and state.get("call") == call]
    return said[0] if said else f"a slot ended before all was done: see {folder}/slot-{number}.log; the same command goes on"


def _end(processes: Sequence["subprocess.Popen[bytes]"], grace_s: float) -> None:
    """Let each finish its step and write a checkpoint; then end it."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + grace_s
    for process in processes:
        try:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _work_as_slot(plan: Path, folder: Path, slot: str) -> int:
    """The process of a slot: it ends with the study's, by SIGTERM, which a run answers with a checkpoint."""
    call, _, parent = slot.partition("/")
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    if str(os.getppid()) != parent:
        return 1  # it was already gone
    runs = [Planned(**each) for each in json.loads(plan.read_text())]
    with _sigterm_raises():
        _work(runs, folder, call)
    return 0


# --- what is said meanwhile -------------------------------------------------------------------------------------------------


class _Teller:
    """Says which runs have ended, once each, and keeps the results on disk."""

    def __init__(self, study: Study, plan: list[Planned], todo: list[Planned], folder: Path, call: str, out: str) -> None:
        self._study, self._plan, self._todo, self._folder, self._call, self._out = study, plan, todo, folder, call, out
        self._environment = environment()
        self._told = {run.name for run in todo if _settled(folder, run, call)}
        self._entries: dict[str, dict[str, Any]] = {}
        self._slots = 1
        self._waits = False
        self._last: dict[str, Any] = {}

    def begin(self, slots: int) -> None:
        """Before the first run."""
        study, self._slots = self._study, slots
        before = f", {len(self._told)} of them done before" if self._told else ""
        at_once = f"; {slots} at once" if slots > 1 else ""
        arms = f"{len(study.arms)} arm{'s' * (len(study.arms) != 1)} x {len(study.seeds)} seed{'s' * (len(study.seeds) != 1)}"
        runs = f"{len(self._todo)} run{'s' * (len(self._todo) != 1)}"
        print(f"{study.name}: {arms} on {study.task}, {runs}{before}{at_once}; records in {self._folder}", flush=True)

    def left(self) -> list[Planned]:
        """Runs that are still to do."""
        return [run for run in self._todo if not _settled(self._folder, run, self._call)]

    def wait(self) -> None:
        """Others have the rest."""
        if not self._waits:
            self._waits = True
            self._line("the runs that are left are being done by another process: waiting for it")

    def tell(self) -> dict[str, Any]:
        """A line for each run that has ended since; the results, written anew if there was one."""
        new = [run for run in self._todo if run.name not in self._told and _settled(self._folder, run, self._call)]
        for run in new:
            self._told.add(run.name)
            count = f"[{len(self._told)}/{len(self._todo)}]"
            self._line(f"{count} {run.arm}, seed {run.seed}: {self._words(run)}{self._left_words()}")
        if new or not self._last:
            self._last = self._results()
            for path in (self._folder / "study.json", *([Path(self._out)] if self._out else [])):
                _write_json(path, self._last)
        return self._last

    def now(self) -> str:
        """What is going on, for a terminal's last line."""
        running = []
        for run in self._todo:
            state = _read_state(self._folder, run)
            if state.get("status") == "running" and run.name not in self._told:
                epoch = _last_epoch(self._folder / run.name)
                running.append(f"{run.arm}, seed {run.seed} (epoch {epoch} of {run.resolved['epochs']})")
        more = f" and {len(running) - 2} more" if len(running) > 2 else ""
        return f"{len(self._told)} of {len(self._todo)} done; now {'; '.join(running[:2])}{more}{self._left_words()}"

    def _results(self) -> dict[str, Any]:
        for run in self._plan:
            state = _read_state(self._folder, run)
            ended = state.get("status") in (*ENDED, "failed") and not _changed(state, run)
            if not ended:
                self._entries.pop(run.name, None)
            elif run.name not in self._entries or self._entries[run.name]["status"] != state["status"]:
                self._entries[run.name] = read_run(self._folder / run.name, state, self._study.target_accuracy)
        runs = [self._entries[run.name] for run in self._plan if run.name in self._entries]
        accuracy = not runs or any("accuracy" in run["metrics"] for run in runs) or not any(run["metrics"] for run in runs)
        devices = sorted({run["contract"]["devices"] for run in runs if "devices" in run["contract"]})
        about = {"metric": "accuracy" if accuracy else "loss", "environment": {**self._environment, "devices": devices}}
        return dict(_plain({"study": self._study.as_dict(), **about, "runs": runs}))

    def _words(self, run: Planned) -> str:
        state, entry = _read_state(self._folder, run), read_run(self._folder / run.name, _read_state(self._folder, run), None)
        note = f" ({state['note']})" if state.get("note") else ""
        if entry["status"] not in GOOD:
            why = entry["why"].partition("; try ")[0].removeprefix(f"{entry['status']}: ")
            return f"{entry['status']}: {why}{note}"
        metrics = ", ".join(f"{name} {value:.4f}" for name, value in entry["metrics"].items())
        return f"{metrics}, {entry['train_time_s']:.1f} s of training, {entry['samples_per_s']:,.0f} samples/s{note}"

    def _left_words(self) -> str:
        """How long it will take, by what each arm's runs took, or all of them; before one has ended, by its epochs so far."""
        took: dict[str, list[float]] = {}
        running: dict[str, float] = {}
        for run in self._todo:
            state = _read_state(self._folder, run)
            if run.name in self._told and state.get("wall_s"):
                took.setdefault(run.arm, []).append(state["wall_s"])
            elif run.name not in self._told and state.get("status") == "running":
                running[run.name] = time.time() - state["begin"]
                done = _last_epoch(self._folder / run.name) - 1
                if not took and done > 0:
                    took[run.arm] = [running[run.name] * run.resolved["epochs"] / done]
        rest = [run for run in self._todo if run.name not in self._told]
        if not took or not rest:
            return ""
        usual = mean([mean(times) for times in took.values()])
        each = [mean(took.get(run.arm, [usual])) - running.get(run.name, 0.0) for run in rest]
        left_s = sum(max(0.0, left) for left in each) / min(self._slots, len(rest))
        return f"; about {f'{left_s:.0f} s' if left_s < 100 else f'{left_s / 60:.0f} min'} left"

    def _line(self, text: str) -> None:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        print(text, flush=True)


class _Ticker:
    """On a terminal, a line that says every second what is going on."""

    def __init__(self, teller: _Teller) -> None:
        self._teller, self._stop = teller, threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-ticker", daemon=True) if sys.stderr.isatty() else None

    def __enter__(self) -> None:
        if self._thread:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _run(self) -> None:
        while not self._stop.wait(1):
            with suppress(Exception):  # a line on the screen is no reason to end a study
                print(f"\r{self._teller.now()[: _columns() - 1]}\x1b[K", end="", file=sys.stderr, flush=True)


def _columns() -> int:
    try:
        return os.get_terminal_size(2).columns or 80
    except OSError:
        return 80


def _last_epoch(record: Path) -> int:
    """The epoch of the record's last row."""
    try:
        with (record / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            return int(json.loads(file.read().splitlines()[-1])["epoch"])
    except (OSError, ValueError, KeyError, IndexError):
        return 1


# --- results ----------------------------------------------------------------------------------------------------------------


def read_run(record: Path, state: Mapping[str, Any], target: float | None) -> dict[str, Any]:
    """A run as the results tell it, from its state and its record."""
    result, rows, about = {}, [], {}
    if state["status"] != "failed" or (record / "result.json").exists():
        with suppress(RecordError, OSError, ValueError):
            result, rows = read_result(record), read_metrics(record)
            about = json.loads((record / "environment.json").read_text())
    epochs = [row for row in rows if row["kind"] == "epoch"]
    reached = [row["time_s"] for row in epochs if target and row.get("val_accuracy", 0) >= target]
    noise = [row["noise_scale"] for row in rows if isinstance(row.get("noise_scale"), int | float)]
    contract = about.get("contract", {})
    series = {name: [row.get(name) for row in epochs] for name in ("time_s", "val_accuracy", "val_loss")}
    return {
        "arm": state["arm"],
        "seed": state["seed"],
        "status": state["status"],
        "why": state.get("why", ""),
        "metrics": {k: v for k, v in result.get("metrics", {}).items() if isinstance(v, int | float) and math.isfinite(v)},
        **{name: values for name, values in series.items() if any(value is not None for value in values)},
        "epochs": result.get("epochs", 0),
        "steps": result.get("steps", 0),
        "train_time_s": result.get("train_time_s", 0.0),
        "wall_s": state.get("wall_s"),
        "samples_per_s": result.get("samples_per_s", 0.0),
        "time_to_target_s": min(reached) if reached else None,
        "noise_scale": noise[-1] if noise else None,
        "model_sha256": result.get("model_sha256", ""),
        "contract": {name: contract[name] for name in _FACTS if name in contract},
        "when": about.get("when"),
        "git": about.get("git"),
        "torch": about.get("versions", {}).get("torch"),
        "record": str(record),
    }


def read_results(path: Path) -> dict[str, Any]:
    """The results of a study, from its JSON."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read results {path}: {error.strerror}; has the study been run?") from None
    except ValueError as error:
        raise UsageError(f"results {path} are not valid JSON: {error}") from None
    if not isinstance(found, dict) or not {"study", "runs", "metric"} <= found.keys():
        raise UsageError(f"{path} holds no results of a study")
    return found


def compare_arm(results: Mapping[str, Any], arm: str) -> Comparison:
    """An arm's final values against the reference's (see `spread.compare`), with what failed taken into account:

    an arm of which a run diverged is worse; one of which a run failed otherwise, or whose reference lost a run, has no verdict.
    """
    study, metric = results["study"], results["metric"]
    reference = study["reference"]
    found = compare(
        final_values(results, arm), final_values(results, reference), study["margin"], lower_is_better=metric == "loss"
    )
    lost, lost_there = (_lost(results, name) for name in (arm, reference))
    if lost_there:
        return replace(found, verdict="no verdict", why=f"{len(lost_there)} of the reference's runs failed")
    diverged = lost.count("diverged")
    if diverged:
        return replace(found, verdict="worse", why=f"{diverged} of {_count(results, arm)} diverged")
    if lost:
        return replace(found, verdict="no verdict", why=f"{len(lost)} of {_count(results, arm)} failed")
    return found


def final_values(results: Mapping[str, Any], arm: str) -> list[float]:
    """The last validation's metric of the arm's runs that came to their end."""
    metric = results["metric"]
    good = [run for run in results["runs"] if run["arm"] == arm and run["status"] in GOOD]
    return [run["metrics"][metric] for run in good if metric in run["metrics"]]


def table(results: Mapping[str, Any]) -> str:
    """The results as a table in Markdown, and what its words mean."""
    study, metric = results["study"], results["metric"]
    reference, target = study["reference"], study["target_accuracy"]
    heads = ["arm", "global batch", "V", "peak lr", f"{metric}, mean ± sd (n)", "failed"]
    heads += [f"median time to {target:g}"] if target else []
    heads += [f"against {reference}"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for arm in study["arms"]:
        runs = [run for run in results["runs"] if run["arm"] == arm]
        values = final_values(results, arm)
        facts: Mapping[str, Any] = next((run["contract"] for run in runs if run["contract"]), {})
        cells = [arm.replace("|", "\\|"), _number(facts.get("global_batch"), ","), _number(facts.get("virtual_workers"), "")]
        cells += [_number(facts.get("peak_lr"), ".4g"), spread_words(values), str(len(_lost(results, arm)))]
        if target:
            good = [run for run in runs if run["status"] in GOOD]
            times = [run["time_to_target_s"] for run in good if run["time_to_target_s"] is not None]
            cells.append(f"{f'{median(times):.3g} s' if times else '-'} ({len(times)} of {len(runs)})")
        cells.append("-" if arm == reference else difference_words(compare_arm(results, arm), metric))
        lines.append(f"| {' | '.join(cells)} |")
    margin = f"{100 * study['margin']:g} points" if metric == "accuracy" else f"{study['margin']:g}"
    about = f"{metric.capitalize()} of the last validation, failed runs left out. Difference [90% interval], margin {margin}."
    return "\n".join([*lines, "", f"{about} {LEGEND[0].upper()}{LEGEND[1:]}."]) + "\n"


def spread_words(values: Sequence[float], n: str = "") -> str:
    """`0.9412 ± 0.0011 (3)`; `n` goes before the count."""
    if not values:
        return f"- ({n}0)"
    spread = f" ± {deviation(values):.4f}" if len(values) > 1 else ""
    return f"{mean(values):.4f}{spread} ({n}{len(values)})"


def difference_words(found: Comparison, metric: str, joint: str = ": ") -> str:
    """`-0.12 points [-0.31, +0.07]: equal`; a loss is not in points."""
    if found.difference is None:
        return found.words()
    scale, unit, digits = (100, " points", 2) if metric == "accuracy" else (1, "", 4)
    interval = ""
    if found.low is not None and found.high is not None:
        interval = f" [{scale * found.low:+.{digits}f}, {scale * found.high:+.{digits}f}]"
    return f"{scale * found.difference:+.{digits}f}{unit}{interval}{joint}{found.words()}"


def _lost(results: Mapping[str, Any], arm: str) -> list[str]:
    """How the arm's runs ended that did not come to their end."""
    return [run["status"] for run in results["runs"] if run["arm"] == arm and run["status"] not in GOOD]


def _count(results: Mapping[str, Any], arm: str) -> int:
    return sum(run["arm"] == arm for run in results["runs"])


def _number(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)
