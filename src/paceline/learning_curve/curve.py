"""Train a task on subsets of its data, each with several seeds (as a study, see `study/`), and fit error against size.

Sizes halve. Each seed has its own nested subsets (`--subset random`), so the spread of the seeds includes that of the choice of
samples; the validation data are the same for all. Nothing at the top of this file imports torch or numpy.

A smaller size needs more epochs. With the same number of epochs its runs end before they have learned what their data can
teach, and the curve looks steeper than it is; the same number of steps costs as much for every size. So the number of steps
falls with the square root of the size (measured in docs/learning-curve.md). A batch is at most a quarter of the subset.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.config import Config, check_options, flag, merge_options
from paceline.dist.place import read_place
from paceline.errors import UsageError
from paceline.files import read_json, write_json
from paceline.learning_curve.verb import SET_HERE
from paceline.output import is_terminal, plural, stages
from paceline.records import name_for
from paceline.study.runs import explained
from paceline.study.study import Arm, Study, parse_seeds, read_base, run_study
from paceline.values import check_record_name, parse_milestones

if TYPE_CHECKING:
    from paceline.training.task import Task

FILE = "learning-curve.json"
LEAST_SIZES = 3
_HALVINGS = 5
_MOST_EPOCHS = 100
"""A size trains for more epochs than this only if the square-root rule says so."""


def learning_curve(
    task: str,
    *,
    options: dict[str, Any],
    recipe: str | None = None,
    sizes: str = "",
    smallest: int | None = None,
    seeds: str = "3",
    least_steps: int = 200,
    target_error: float | None = None,
    per_device: int = 1,
    name: str = "",
) -> int:
    """What the command line calls."""
    asked = _check(merge_options(read_base(recipe), options) if recipe else options)
    given, numbers = parse_sizes(sizes), parse_seeds(str(seeds))
    _check_numbers(given, smallest, least_steps, target_error)
    check_record_name(name)
    place = read_place()
    if place.launcher != "alone":
        raise UsageError(f"learning-curve starts its own runs: start it by itself, not with {place.launcher}")
    runs_dir = Path(str(asked.pop("runs_dir", Config.runs_dir)))
    found, total, chance, labels = _read_data(task, asked)
    config = _check_config(found, asked)
    chosen = choose_sizes(total, given, smallest)
    study = make_study(task, asked, config, chosen, total, seeds=numbers, least_steps=least_steps, name=name)
    _check_folder(runs_dir / study.name, task)
    print(_announce(chosen, total, labels, numbers), flush=True)
    results = run_study(study, runs_dir, per_device=per_device)

    from paceline.learning_curve.outcome import make_outcome, words

    outcome = make_outcome(results, chosen, chance=chance, target=target_error)
    with explained(runs_dir / study.name):
        write_json(runs_dir / study.name / FILE, {**results, "learning_curve": outcome}, indent=1)
    print(f"\n{words(outcome)}")
    print(f"Draw it: paceline report {runs_dir / study.name}")
    return 0


def _check_folder(folder: Path, task: str) -> None:
    """Refuse the folder of anything but a learning curve of this task: its files would be mixed or replaced."""
    if any((folder / name).exists() for name in ("environment.json", "metrics.jsonl", "scale.json", "toys.json")):
        raise UsageError(f"{folder} holds something other than a learning curve: choose another --name")
    with suppress(OSError, ValueError):
        study = read_json(folder / "study.json").get("study")
        other = study.get("task") if isinstance(study, dict) else None
        if other not in (None, task):
            raise UsageError(f"{folder} holds runs of task {other}: choose another --name")


def parse_sizes(text: str) -> tuple[int, ...]:
    """`500,1000,2000`: at least three different whole numbers, in order; () for "" ."""
    if not text:
        return ()
    try:
        sizes = tuple(sorted({int(each.replace("_", "")) for each in text.split(",")}))
    except ValueError:
        sizes = (0,)
    if sizes[0] < 2:
        raise UsageError(f"--sizes is {text!r}: it must be numbers of samples, such as 500,1000,2000, each at least 2")
    if len(sizes) < LEAST_SIZES:
        raise UsageError(f"--sizes is {text!r}: three parameters need at least {LEAST_SIZES} sizes; six are better")
    return sizes


def choose_sizes(total: int, given: Sequence[int] = (), smallest: int | None = None) -> tuple[int, ...]:
    """The sizes to train, in order: those given, or the data halved again and again."""
    if given:
        if given[-1] > total:
            raise UsageError(f"--sizes has {given[-1]:,}: use at most the task's {plural(total, 'training sample')}")
        return tuple(given)
    least = max(2, total >> _HALVINGS if smallest is None else smallest)
    sizes = [total >> times for times in range(64) if total >> times >= least]
    if len(sizes) < LEAST_SIZES and total >> (LEAST_SIZES - 1) < 2:
        raise UsageError(f"the task has only {plural(total, 'training sample')}: too few for a learning curve")
    if len(sizes) < LEAST_SIZES:
        raise UsageError(
            f"--smallest is {smallest:,}: halving {plural(total, 'training sample')} gives {plural(len(sizes), 'size')}, and a"
            f" curve needs at least {LEAST_SIZES}: use --smallest {total >> (LEAST_SIZES - 1)} or less"
        )
    return tuple(reversed(sizes))


def make_study(
    task: str,
    asked: Mapping[str, Any],
    config: Config,
    sizes: Sequence[int],
    total: int,
    *,
    seeds: tuple[int, ...] = (0, 1, 2),
    least_steps: int = 200,
    name: str = "",
) -> Study:
    """The study with one arm per size; the largest is the reference."""
    parts = config.virtual_workers or config.workers or 1
    batch = config.global_batch or config.reference_batch * parts
    arms = []
    for size in sizes:
        own: dict[str, Any] = {} if size == total else {"train_samples": size, "subset": "random"}
        own["global_batch"] = fit_batch(batch, parts, size)
        own["epochs"] = choose_epochs(config.epochs, total, batch, size, own["global_batch"], least_steps)
        if config.warmup_epochs:
            own["warmup_epochs"] = config.warmup_epochs * own["epochs"] / config.epochs
        if config.schedule == "step" and (ends := parse_milestones(config.step_at))[-1] >= 1:  # in epochs
            own["step_at"] = ",".join(f"{end / config.epochs:.6g}" for end in ends)
        arms.append(Arm(name=f"{size} samples", options={**asked, **own}))
    return Study(
        name=name or f"learning-curve-{name_for(task)}",
        source="learning-curve",
        task=task,
        arms=tuple(arms),
        seeds=seeds,
        reference=arms[-1].name,
        about="Error against data size.",
    )


def fit_batch(batch: int, parts: int, size: int) -> int:
    """The batch, halved while it is more than a quarter of the subset and its parts can be halved."""
    while batch > max(1, size // 4) and batch % (2 * parts) == 0:
        batch //= 2
    return batch


def choose_epochs(epochs: int, total: int, batch: int, size: int, own_batch: int, least_steps: int) -> int:
    """Epochs for a size: more by the square root of total / size, and enough for the least steps (or those of a full run)."""
    rooted = round(epochs * math.sqrt(total / size))
    least = min(least_steps, epochs * math.ceil(total / batch))
    return max(1, rooted, min(_MOST_EPOCHS, math.ceil(least / math.ceil(size / own_batch))))


def _check(options: Mapping[str, Any]) -> dict[str, Any]:
    for key in options:
        if key in SET_HERE:
            hint = {"seed": "; use --seeds", "train_samples": "; use --sizes"}.get(key, "")
            raise UsageError(f"{flag(key)} cannot be given: learning-curve sets it{hint}")
    return check_options(options)


def _check_numbers(given: Sequence[int], smallest: int | None, least_steps: int, target: float | None) -> None:
    if given and smallest is not None:
        raise UsageError("--sizes and --smallest are both given: choose one")
    for name, value in (("smallest", smallest), ("least_steps", least_steps)):
        if value is not None and value < 1:
            raise UsageError(f"{flag(name)} is {value}: it must be at least 1")
    if target is not None and not 0 < target < math.inf:
        raise UsageError(f"--target-error is {target}: it must be a positive number, such as 0.05")


def _check_config(found: tuple["Task", Config], asked: dict[str, Any]) -> Config:
    """The options of a run, with the task's own defaults. Those that cannot differ by size are turned off, or refused."""
    task, config = found
    if task.validation is None:
        raise UsageError(f"task {task.name} has no validation data, so there is no error to measure: give it validation=...")
    if config.batch_schedule:
        raise UsageError(
            f"task {task.name} has a batch schedule, but the epochs of a learning curve differ by size: leave it out"
        )
    for key in ("max_steps", "train_samples", "target_accuracy"):
        if getattr(config, key):
            asked[key] = type(getattr(Config, key))(0)
    return config


def _read_data(task: str, asked: Mapping[str, Any]) -> tuple[tuple["Task", Config], int, float | None, bool]:
    """The task and its config; the number of training samples; the error by chance, if known; whether samples have labels."""
    import numpy as np

    from paceline.core.stream import Stream
    from paceline.training import tasks
    from paceline.training.dataset import count_samples, make_training
    from paceline.training.subset import labels_of

    stages.start(is_terminal(sys.stderr))
    stages.enter("loading the task's data")
    tasks.check(task, asked)
    made, config = tasks.resolve(task, asked)
    data = make_training(made, config)
    stages.stop()
    if isinstance(data, Stream):
        raise UsageError(
            f"task {made.name} trains on a Stream, which can only be read in its order: give Arrays or a Dataset, from which"
            " random samples can be read"
        )
    labels, total = labels_of(data), count_samples(data)
    if labels is None or not total:
        return (made, config), total, None, labels is not None
    share = float(np.unique(labels, return_counts=True)[1].max()) / total
    return (made, config), total, 1 - share, True


def _announce(sizes: Sequence[int], total: int, labels: bool, seeds: Sequence[int]) -> str:
    how = "stratified by label" if labels else "not stratified: the task's data have no labels that are known in advance"
    listed = ", ".join(f"{size:,}" for size in sizes)
    one = "\none seed: no spread between seeds, so the intervals come from the fit alone" if len(seeds) == 1 else ""
    return f"{listed} of {plural(total, 'training sample')}: nested subsets, other ones for each seed, {how}{one}"
