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
from paceline.dist.place import cores, read_place
from paceline.errors import PacelineError, RecordError, UsageError
from paceline.measure.advice import advise_scale, table
from paceline.records import environment, name_for, write_file
from paceline.toml import read_recipe

FILE = "scale.json"
_OWN = ("windows", "window_s", "mode")
_NOT_FOR_SCALE = ("resume", "profile", "max_restarts", "min_workers", "target_accuracy", "max_steps", "tracker")


def scale_verb(given: Mapping[str, Any]) -> int:
    """What the command line calls, with its flags: measure, show the table, say what to do."""
    options = dict(given)
    task, recipe = options.pop("task"), options.pop("recipe", None)
    options = {**read_recipe(recipe), **options} if recipe else options
    how = {name: options.pop(name) for name in _OWN}
    counts = parse_counts(str(options.pop("workers", "")))
    _check(options, how)
    place = read_place()
    if place.launcher != "alone":
        if len(counts) > 1:
            raise UsageError(f"--workers {counts}: {place.launcher} has started {place.size}; leave --workers out")
        from paceline.measure.windows import measure_here

        measured = measure_here(task, _mode_options(options, how["mode"], place.size), how)
        if place.rank == 0 and measured is not None:
            folder = _folder(task, options)
            _write(folder, task, how["mode"], measured)
            if place.launcher != "paceline":
                _show(folder)
        return 0
    counts = counts or [1, 2]
    options.setdefault("name", _name(task))
    _check_folder(_folder(task, options), task, how["mode"])
    nodes = int(options.get("nodes", 1))
    every = _mode_options(options, how["mode"], max(counts) * nodes)
    # Every worker of every count gets the same threads, or one worker would have all cores to itself and nothing would scale.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // max(counts))))
    for count in counts:
        print(f"measuring {count * nodes} worker(s) ...", flush=True)
        _measure_there(task, {**every, "workers": count}, how)
    if int(options.get("node_id", 0)) == 0:
        _show(_folder(task, options))
    return 0


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
    for name in _NOT_FOR_SCALE:
        if name in options:
            raise UsageError(f"--{name.replace('_', '-')} is of no use to scale, which trains some windows of steps and stops")
    if how["mode"] == "weak" and ({"global_batch", "virtual_workers"} & set(options)):
        raise UsageError(
            "--mode weak gives every worker --reference-batch samples, one part: use that flag, or --mode strong, which keeps"
            " --global-batch and --virtual-workers the same for every number of workers"
        )
    if how["windows"] < 3 or not 0.05 <= how["window_s"] <= 600:
        raise UsageError("--windows must be at least 3, and --window-s between 0.05 and 600 seconds")
    make_config(dict(options))


def _mode_options(options: Mapping[str, Any], mode: str, most: int) -> dict[str, Any]:
    """The options of every count's run, of which the largest has so many workers."""
    if mode == "weak":
        return dict(options)
    parts = int(options.get("virtual_workers") or most)
    batch = options.get("global_batch") or int(options.get("reference_batch", Config.reference_batch)) * parts
    return {**options, "virtual_workers": parts, "global_batch": batch}


def _measure_there(task: str, options: Mapping[str, Any], how: Mapping[str, Any]) -> None:
    """As so many workers, each running this command again."""
    where = make_config({name: value for name, value in options.items() if name in _WHERE})
    own = [f"--{name.replace('_', '-')}={value}" for name, value in how.items()]
    outcome = launch(["scale", task, *to_flags(options), *own], where)
    if outcome.exit_code == 0:
        return
    if outcome.report is None:
        raise KeyboardInterrupt
    error = PacelineError(outcome.report.text)
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


def _write(folder: Path, task: str, mode: str, measured: Mapping[str, Any]) -> None:
    """Put a count into the record, in the place of an earlier one of the same workers."""
    found = _check_folder(folder, task, mode)
    counts = [count for count in found.get("counts", []) if count["workers"] != measured["count"]["workers"]]
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
