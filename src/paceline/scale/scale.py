"""`paceline scale TASK --workers 1,2,4`: images/s at each number of workers, against linear, and where the rest went.

For each number N, the same command is started as N workers. They train in windows of steps: first as usual, to measure speed,
then with every step timed (`training/timing/`), to measure the components of a step's time. Then all-reduces are timed by
themselves. Under torchrun, srun or mpirun N is the size of the world; runs with the same --name go into the same record. The
measurements are written to scale.json in a record of their own. Nothing at the top of this file imports torch.
"""

import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from paceline.config import Config, check_options, flag, make_config, merge_options, names_with
from paceline.dist.launch import WorkerFailed, launch
from paceline.dist.place import core_count, read_place
from paceline.errors import RecordError, UsageError, reason
from paceline.files import read_json, write_json
from paceline.flags import to_flags
from paceline.options import Role
from paceline.output import is_terminal, plural
from paceline.phases import check_largest, largest_batch, parse_batch_schedule
from paceline.records import environment, name_for
from paceline.scale.verdict import table, verdict
from paceline.toml import read_recipe

FILE = "scale.json"
_OWN = ("windows", "window_s", "mode")
_STEP = ("global_batch", "virtual_workers")


def scale_verb(given: Mapping[str, Any]) -> int:
    """What the command line calls, with its flags: measure, show the table, say what to do."""
    options = dict(given)
    task, recipe = options.pop("task"), options.pop("recipe", None)
    how = {name: options.pop(name) for name in _OWN}
    options = merge_options(_of_recipe(read_recipe(recipe), how["mode"]), options) if recipe else options
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
    _say_batch(options, every)
    os.environ.setdefault("OMP_NUM_THREADS", str(_threads(max(counts), found, folder)))
    with _bar(counts) as each:
        for count in each:
            print(f"measuring {plural(count * nodes, 'worker')} ...", flush=True)
            try:
                _measure_there(task, {**every, "workers": count}, how)
            except KeyboardInterrupt:
                if count != counts[0]:
                    print(f"the measurements so far are in {folder}", flush=True)
                raise
    if int(options.get("node_id", 0)) == 0:
        _show(folder)
    return 0


@contextmanager
def _bar(counts: Sequence[int]) -> Iterator[Iterable[int]]:
    """The counts to loop over. If stderr is a terminal, a progress bar shows how many are done and the time left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns,
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        refresh_per_second=1,  # rarely: it takes time from the workers that are measured
        redirect_stdout=is_terminal(sys.stdout),  # lines go above the bar, but a pipe still gets them
        disable=not is_terminal(sys.stderr),
    ) as bar:
        yield bar.track(counts, description="counts measured", update_period=1)


def _measure_world(task: str, options: Mapping[str, Any], how: Mapping[str, Any], counts: Sequence[int]) -> int:
    """Measure in a world that another launcher, or our own, has started. This process is one of its workers."""
    from paceline.scale.windows import measure_here

    place = read_place()
    ours = place.launcher == "paceline"
    if counts and list(counts) != [place.size] and not ours:
        said = ",".join(map(str, counts))
        raise UsageError(f"--workers is {said}, but {place.launcher} has started {place.size}: leave it out")
    folder = _folder(task, options)
    found = {} if ours else _check_folder(folder, task, how["mode"])
    every = _mode_options(options, how["mode"], place.size, found)
    if place.rank == 0:
        _say_batch(options, every)
    measured = measure_here(task, every, how)
    if place.rank == 0 and measured is not None:
        _write(folder, task, how["mode"], measured)
        if not ours:
            _show(folder)
    return 0


def _of_recipe(options: Mapping[str, Any], mode: str) -> dict[str, Any]:
    """The options of a training recipe that apply to scale."""
    without = names_with(Role.WHOLE_RUN).union((*_STEP, "batch_schedule") if mode == "weak" else ())
    return {name: value for name, value in options.items() if name not in without}


def _threads(most: int, found: Mapping[str, Any], folder: Path) -> int:
    """Threads per CPU worker, the same for every count: one worker that used all cores would leave nothing to scale to.

    A record that is continued keeps its number of threads.
    """
    before = next((int(count["threads"]) for count in found.get("counts", []) if count.get("threads")), None)
    if before is not None and most * before > core_count() and before > 1:
        raise UsageError(
            f"{folder} measured workers of {before} threads each, too many for {plural(most, 'worker')} on"
            f" {plural(core_count(), 'core')}: measure all counts in one command, under another --name"
        )
    return before or max(1, core_count() // most)


def parse_counts(text: str) -> list[int]:
    """Parse `--workers 1,2,4` into sorted numbers; an empty list for an empty text."""
    try:
        counts = sorted({int(each) for each in text.split(",")}) if text else []
    except ValueError:
        counts = [0]
    if any(count < 1 for count in counts):
        raise UsageError(f"--workers is {text!r}: it must be numbers of workers such as 1,2,4")
    return counts


def _check(options: Mapping[str, Any], how: Mapping[str, Any]) -> None:
    """Check the options before anything is started."""
    for name in options:
        if name in names_with(Role.WHOLE_RUN):
            raise UsageError(f"{flag(name)} does not apply to scale, which only trains a few windows: remove it")
    if how["mode"] == "weak" and (set(_STEP) & set(options)):
        raise UsageError(
            "--mode weak gives each worker one part of --reference-batch samples: use that flag, or --mode strong, which keeps"
            " --global-batch and --virtual-workers the same for every number of workers"
        )
    if how["mode"] == "weak" and check_options(options).get("batch_schedule"):
        raise UsageError(
            "--mode weak gives each worker the same number of samples in every step: leave out --batch-schedule, or use"
            " --mode strong, which measures its largest batch"
        )
    if how["windows"] < 3:
        raise UsageError(f"--windows is {how['windows']}: it must be at least 3")
    if not 0.05 <= how["window_s"] <= 600:
        raise UsageError(f"--window-s is {how['window_s']:g}: it must be between 0.05 and 600 seconds")
    make_config(dict(options))


def _mode_options(options: Mapping[str, Any], mode: str, most: int, found: Mapping[str, Any]) -> dict[str, Any]:
    """The options of each count's run: a constant batch, the largest one of a schedule.

    `most` is the largest number of workers; a record that is continued keeps its batch.
    """
    if mode == "weak":
        return dict(options)
    before = found["counts"][0] if found.get("counts") else {}
    parts = int(options.get("virtual_workers") or before.get("virtual_workers") or most)
    reference = int(options.get("reference_batch", Config.reference_batch))
    given = check_options(options)
    pairs = parse_batch_schedule(given.get("batch_schedule", ""))
    check_largest(pairs, given.get("global_batch"))
    batch = given.get("global_batch") or largest_batch(pairs) or before.get("global_batch") or reference * parts
    kept = {name: value for name, value in options.items() if name != "batch_schedule"}
    return {**kept, "virtual_workers": parts, "global_batch": batch}


def _say_batch(options: Mapping[str, Any], every: Mapping[str, Any]) -> None:
    """Say which batch of a schedule is measured."""
    schedule = check_options(options).get("batch_schedule")
    if schedule:
        batch = every["global_batch"]
        print(f"measuring a constant global batch of {batch}, the largest of --batch-schedule {schedule}", flush=True)


def _measure_there(task: str, options: Mapping[str, Any], how: Mapping[str, Any]) -> None:
    """Start N workers, each running this command again."""
    where = make_config({name: value for name, value in options.items() if name in names_with(Role.LAUNCH)})
    own = [f"--{name.replace('_', '-')}={value}" for name, value in how.items()]
    outcome = launch(["scale", task, *to_flags(options), *own], where)
    if outcome.exit_code == 0:
        return
    if outcome.failure is None:
        raise KeyboardInterrupt
    raise WorkerFailed(outcome.failure.explain(), outcome.exit_code)


def _name(task: str) -> str:
    return f"scale-{name_for(task)}-{time.strftime('%Y%m%d-%H%M%S')}"


def _folder(task: str, options: Mapping[str, Any]) -> Path:
    return Path(options.get("runs_dir", Config.runs_dir)) / (options.get("name") or _name(task))


def _check_folder(folder: Path, task: str, mode: str) -> dict[str, Any]:
    """The measurements of an earlier run with this name. Raises a UsageError if it measured something else."""
    if not folder.exists():
        return {}
    found: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        found = read_json(folder / FILE)
    if found.get("task") != task or found.get("mode") != mode:
        raise UsageError(f"{folder} exists and is not a record of {mode} scaling of {task}: choose another --name")
    return found


def _check_alike(folder: Path, mode: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Check that two counts of one record differ only in their workers. Raises a UsageError that names another difference."""
    step = ("part_batch",) if mode == "weak" else _STEP
    same = ("model", "parameters", "precision", "reduce", "optimizer", "accumulate", *step)
    pairs = [(name, one["contract"].get(name), other["contract"].get(name)) for name in same]
    pairs.append(("threads", one.get("threads"), other.get("threads")))
    for name, before, now in pairs:
        if before != now and before is not None:
            what = name.replace("_", " ")
            raise UsageError(f"{folder} was measured with {what} {before}, but this run has {now}: choose another --name")


def _write(folder: Path, task: str, mode: str, measured: Mapping[str, Any]) -> None:
    """Put a count into the record; it replaces an earlier one with the same number of workers."""
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
        write_json(folder / FILE, {**result, "verdict": verdict(result)}, indent=1)
    except OSError as error:
        raise RecordError(f"cannot write the record in {folder}: {reason(error)}; choose another --runs-dir") from error


def _show(folder: Path) -> None:
    result = read_json(folder / FILE)
    print(f"\n{table(result)}\n\n{result['verdict']}\nrecord in {folder}; see it with: paceline report {folder}", flush=True)


def summarize(windows: Sequence[float]) -> dict[str, Any]:
    """The median, lowest and highest images/s of some windows, and all of them."""
    return {
        "samples_per_s": statistics.median(windows),
        "low": min(windows),
        "high": max(windows),
        "windows": list(windows),
    }
