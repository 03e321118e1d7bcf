"""`paceline scale TASK --workers 1,2,4`: images/s at each number of workers, against linear, and where the rest went.

For each number the same command is started as so many workers, which train in windows: some as always, for the speed, and then
some with every step timed (`training/timing.py`), for the parts. Then all-reduces are timed by themselves. Under
torchrun, srun or mpirun there is one number of workers, the world's own; runs of one --name go into one record. What was found
is scale.json in a record of its own. Nothing at the top of this file imports torch.
"""

import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from paceline.config import Config, make_config, to_flags
from paceline.dist.launch import launch
from paceline.dist.place import core_count, read_place
from paceline.errors import PacelineError, RecordError, UsageError
from paceline.files import write_file
from paceline.records import environment, name_for
from paceline.scale.verdict import advise_scale, table
from paceline.toml import read_recipe

FILE = "scale.json"
_OWN = ("windows", "window_s", "mode")
_STEP = ("global_batch", "virtual_workers")
NOT_FOR_SCALE = ("resume", "profile", "max_restarts", "min_workers", "target_accuracy", "max_steps", "tracker")


def scale_verb(given: Mapping[str, Any]) -> int:
    """What the command line calls, with its flags: measure, show the table, say what to do."""
    options = dict(given)
    task, recipe = options.pop("task"), options.pop("recipe", None)
    how = {name: options.pop(name) for name in _OWN}
    options = {**_of_recipe(read_recipe(recipe), how["mode"]), **options} if recipe else options
    counts = parse_counts(str(options.pop("workers", "")))
    _check(options, how)
    place = read_place()
    if place.launcher != "alone":
        return _measure_world(task, options, how, counts)
    counts = counts or [1, 2]
    options.setdefault("name", _name(task))
    folder = _folder(task, options)
    found = _check_folder(folder, task, how["mode"])
    nodes = int(options.get("nodes", 1))
    every = _mode_options(options, how["mode"], max(counts) * nodes, found)
    os.environ.setdefault("OMP_NUM_THREADS", str(_threads(max(counts), found, folder)))
    for count in counts:
        print(f"measuring {count * nodes} worker(s) ...", flush=True)
        try:
            _measure_there(task, {**every, "workers": count}, how)
        except KeyboardInterrupt:
            if count != counts[0]:
                print(f"what was measured before is in {folder}", flush=True)
            raise
    if int(options.get("node_id", 0)) == 0:
        _show(folder)
    return 0


def _measure_world(task: str, options: Mapping[str, Any], how: Mapping[str, Any], counts: Sequence[int]) -> int:
    """The number of workers that somebody has started, of whom this is one."""
    from paceline.scale.windows import measure_here

    place = read_place()
    ours = place.launcher == "paceline"
    if counts and list(counts) != [place.size] and not ours:
        said = ",".join(map(str, counts))
        raise UsageError(f"--workers is {said}, but {place.launcher} has started {place.size}: leave it out")
    folder = _folder(task, options)
    found = {} if ours else _check_folder(folder, task, how["mode"])
    measured = measure_here(task, _mode_options(options, how["mode"], place.size, found), how)
    if place.rank == 0 and measured is not None:
        _write(folder, task, how["mode"], measured)
        if not ours:
            _show(folder)
    return 0


def _of_recipe(options: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """What of a recipe, which is made for training, is of use here."""
    without = NOT_FOR_SCALE + (_STEP if mode == "weak" else ())
    return {name: value for name, value in options.items() if name not in without}


def _threads(most: int, found: Mapping[str, Any], folder: Path) -> int:
    """Of every CPU worker of every count: one with all cores to itself would have nothing to scale to. A record that is gone on
    with keeps those it has.
    """
    before = next((int(count["threads"]) for count in found.get("counts", []) if count.get("threads")), None)
    if before is not None and most * before > core_count() and before > 1:
        raise UsageError(
            f"{folder} measured workers of {before} threads each, too many for {most} workers on {core_count()} cores:"
            " measure all counts in one command, under another --name"
        )
    return before or max(1, core_count() // most)


def parse_counts(text: str) -> list[int]:
    """`--workers 1,2,4` as numbers in order; nothing for nothing."""
    try:
        counts = sorted({int(each) for each in text.split(",")}) if text else []
    except ValueError:
        counts = [0]
    if any(count < 1 for count in counts):
        raise UsageError(f"--workers is {text!r}: it must be numbers of workers such as 1,2,4")
    return counts


def _check(options: Mapping[str, Any], how: Mapping[str, Any]) -> None:
    """What can be wrong before anything is started."""
    for name in NOT_FOR_SCALE:
        if name in options:
            raise UsageError(f"--{name.replace('_', '-')} is of no use to scale, which trains some windows of steps and stops")
    if how["mode"] == "weak" and (set(_STEP) & set(options)):
        raise UsageError(
            "--mode weak gives every worker --reference-batch samples, one part: use that flag, or --mode strong, which keeps"
            " --global-batch and --virtual-workers the same for every number of workers"
        )
    if how["windows"] < 3 or not 0.05 <= how["window_s"] <= 600:
        raise UsageError("--windows must be at least 3, and --window-s between 0.05 and 600 seconds")
    make_config(dict(options))


def _mode_options(options: Mapping[str, Any], mode: str, most: int, found: Mapping[str, Any]) -> dict[str, Any]:
    """The options of each count's run; the largest has so many workers, a record that is gone on with its step."""
    if mode == "weak":
        return dict(options)
    before = found["counts"][0] if found.get("counts") else {}
    parts = int(options.get("virtual_workers") or before.get("virtual_workers") or most)
    reference = int(options.get("reference_batch", Config.reference_batch))
    batch = options.get("global_batch") or before.get("global_batch") or reference * parts
    return {**options, "virtual_workers": parts, "global_batch": batch}


def _measure_there(task: str, options: Mapping[str, Any], how: Mapping[str, Any]) -> None:
    """As so many workers, each running this command again."""
    where = make_config({name: value for name, value in options.items() if name in _WHERE})
    own = [f"--{name.replace('_', '-')}={value}" for name, value in how.items()]
    outcome = launch(["scale", task, *to_flags(options), *own], where)
    if outcome.exit_code == 0:
        return
    if outcome.failure is None:
        raise KeyboardInterrupt
    error = PacelineError(outcome.failure.text)
    error.exit_code = outcome.exit_code
    raise error


_WHERE = ("workers", "nodes", "node_id", "rendezvous", "backend", "timeout_s", "grace_s")


def _name(task: str) -> str:
    return f"scale-{name_for(task)}-{time.strftime('%Y%m%d-%H%M%S')}"


def _folder(task: str, options: Mapping[str, Any]) -> Path:
    return Path(options.get("runs_dir", Config.runs_dir)) / (options.get("name") or _name(task))


def _check_folder(folder: Path, task: str, mode: str) -> dict[str, Any]:
    """What an earlier run of this name found; a UsageError where it was of something else."""
    if not folder.exists():
        return {}
    found: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        found = json.loads((folder / FILE).read_text())
    if found.get("task") != task or found.get("mode") != mode:
        raise UsageError(f"{folder} is there, and no {mode} scaling of {task}: choose another --name")
    return found


def _check_alike(folder: Path, mode: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Two counts of one record must differ in workers alone: a UsageError says in what else they do."""
    step = ("part_batch",) if mode == "weak" else _STEP
    same = ("model", "parameters", "precision", "reduce", "optimizer", "accumulate", *step)
    pairs = [(name, one["contract"].get(name), other["contract"].get(name)) for name in same]
    pairs.append(("threads", one.get("threads"), other.get("threads")))
    for name, before, now in pairs:
        if before != now and before is not None:
            what = name.replace("_", " ")
            raise UsageError(f"{folder} has measured {what} {before}, and this is {now}: choose another --name")


def _write(folder: Path, task: str, mode: str, measured: Mapping[str, Any]) -> None:
    """Put a count into the record, in the place of an earlier one of the same workers."""
    found = _check_folder(folder, task, mode)
    counts = [count for count in found.get("counts", []) if count["workers"] != measured["count"]["workers"]]
    for count in counts:
        _check_alike(folder, mode, count, measured["count"])
    counts = sorted([*counts, measured["count"]], key=lambda count: int(count["workers"]))
    first = counts[0]
    for count in counts:
        count["speed_up"] = count["samples_per_s"] / first["samples_per_s"] * first["workers"]
        count["efficiency"] = count["speed_up"] / count["workers"]
    workers = measured["count"]["workers"]
    links = [link for link in found.get("links", []) if link["workers"] != workers] + measured["links"]
    result = {
        "kind": "scale",
        "task": task,
        "mode": mode,
        "unit": measured["unit"],
        "environment": environment(),
        "counts": counts,
        "links": sorted(links, key=lambda link: (link["workers"], link["bytes"])),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / FILE, json.dumps({**result, "advice": advise_scale(result)}, indent=1) + "\n")
    except OSError as error:
        raise RecordError(f"cannot write the record in {folder}: {error.strerror}; choose another --runs-dir") from error


def _show(folder: Path) -> None:
    result = json.loads((folder / FILE).read_text())
    print(f"\n{table(result)}\n\n{result['advice']}\nrecord in {folder}; paceline report {folder} shows it", flush=True)


def summarise(windows: Sequence[float]) -> dict[str, Any]:
    """Images/s of some windows: the median, the smallest and the largest, and all of them."""
    return {
        "samples_per_s": statistics.median(windows),
        "low": min(windows),
        "high": max(windows),
        "windows": list(windows),
    }
