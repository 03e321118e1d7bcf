"""`paceline study`: train every arm with every seed, each as an ordinary run with its own record, and compare the arms.

    task = "fashion-mnist"
    seeds = 3                     # 0, 1, 2; or a list
    reference = "nesterov 128"    # the arm that the others are compared with (default: the first)
    margin = 0.005                # the difference in accuracy (or loss, if the task reports no accuracy) that counts as equal
    target_accuracy = 0.94        # for "time to target"; no run stops there
    about = "one sentence"
    [options]                     # Config's fields, for all arms
    epochs = 10
    [arms."nesterov 128"]         # options of this arm; `recipe` names a recipe to start from, `about` is a sentence
    [arms."lars 8192"]
    recipe = "batch-8192"

This file reads the definition and lists the runs; `slots.py` and `runs.py` train them, `results.py` makes the table. Nothing at
the top of it imports torch, so `--table` is fast.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.config import Config, check_options, merge_options, names_with
from paceline.dist.place import read_place
from paceline.errors import UsageError, unknown
from paceline.joins import is_auto, most_workers
from paceline.options import Role
from paceline.phases import largest_batch, parse_batch_schedule, resize_batch_schedule
from paceline.settings import parse_setting
from paceline.study.results import read_results, table
from paceline.study.runs import RunSpec
from paceline.study.slots import do_runs, work_as_slot
from paceline.toml import read_recipe, read_toml


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train."""

    name: str
    options: Mapping[str, Any]
    about: str = ""

    @property
    def slug(self) -> str:
        """The name, for use in a file name."""
        return re.sub(r"[^a-z0-9.]+", "-", self.name.lower()).strip("-.")[:80]


@dataclass(frozen=True, kw_only=True)
class Study:
    """The arms and seeds to train on one task."""

    name: str
    """The name of its folder."""
    source: str
    """Its name in error messages: the file it came from."""
    task: str
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    reference: str = ""
    margin: float = 0.005
    target_accuracy: float | None = None
    about: str = ""
    mini: bool = False
    """Made by `shrink`: its results mean nothing."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reference", self.reference or self.arms[0].name)

    def as_dict(self) -> dict[str, Any]:
        """The definition, as the results hold it."""
        arms = {arm.name: {"about": arm.about, "options": dict(arm.options)} for arm in self.arms}
        return {**asdict(self), "arms": arms, "seeds": list(self.seeds)}


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
    """What the command line calls. `slot` is for the processes that a study starts itself: the study's process id."""
    if slot:
        return work_as_slot(Path(file), slot)
    if show:
        path = Path(out or file)
        if path.suffix != ".json":
            path = Path(runs_dir) / f"study-{path.stem}{'-mini' * mini}" / "study.json"
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


def run_study(study: Study, runs_dir: Path, *, per_device: int = 1, only: Sequence[str] = (), out: str = "") -> dict[str, Any]:
    """Train the runs that are not done yet, of the arms in `only` if given. Returns the results and writes them to `out`."""
    place = read_place()
    if place.launcher != "alone":
        raise UsageError(f"a study starts its own runs: start it by itself, not with {place.launcher}")
    if per_device < 1:
        raise UsageError(f"--per-device is {per_device}: it must be at least 1")
    folder = runs_dir / study.name
    return do_runs(study.as_dict(), list_runs(study), folder, only=only, per_device=per_device, out=out)


def read_study(path: Path, *, seeds: str = "", settings: Sequence[str] = ()) -> Study:
    """Read a study from a TOML file. Raises a one-line UsageError for any mistake in it. Trains nothing, imports no torch."""
    found = read_toml(path, f"study {path}")
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
            task=_locate(path, found["task"]),
            arms=arms,
            seeds=parse_seeds(seeds) if seeds else _seeds(found.get("seeds", 3)),
            reference=found.get("reference", ""),
            margin=float(found.get("margin", 0.005)),
            target_accuracy=found.get("target_accuracy"),
            about=found.get("about", ""),
        )


def check_arms(arms: Sequence[Arm]) -> None:
    """Check that each arm's name gives it a folder of its own."""
    slugs: dict[str, str] = {}
    for arm in arms:
        if not arm.slug:
            raise UsageError(f"arm {arm.name!r}: its name needs a letter or a digit")
        if arm.slug in slugs:
            raise UsageError(f"arms {slugs[arm.slug]!r} and {arm.name!r} would share the folder name {arm.slug}: rename one")
        slugs[arm.slug] = arm.name


def parse_seeds(text: str) -> tuple[int, ...]:
    """`3` means 0, 1, 2; `0,5,7` means these seeds; `3,` means only seed 3."""
    try:
        return _seeds([int(each) for each in text.removesuffix(",").split(",")] if "," in text else int(text))
    except ValueError:
        raise UsageError(f"--seeds is {text!r}: it must be a number of seeds (3) or a list of them (0,5,7 or 3,)") from None


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Parse `--set key=value` flags into options."""
    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip().removeprefix("--").replace("-", "_")
        if not equals:
            raise UsageError(f"--set {setting}: it must be key=value, such as --set epochs=3")
        if key.startswith("set."):
            options["set"] = {**options.get("set", {}), **parse_setting(f"{key.removeprefix('set.')}={text}")}
            continue
        is_flag = isinstance(getattr(Config, key, None), bool)
        options[key] = {"true": True, "false": False}.get(text.lower(), text) if is_flag else text
    with _naming("--set"):
        return _own(options)


def read_base(recipe: str) -> dict[str, Any]:
    """A recipe's options, without those that an arm may not set (a record's config.toml holds all options)."""
    return {name: value for name, value in read_recipe(recipe).items() if name not in names_with(Role.STUDY)}


def is_built_in(task: str) -> bool:
    """Whether this is the name of a built-in task, not a user's file or module."""
    return ".py" not in task and ":" not in task


_NOT_IN_MINI = ("workers", "workers_schedule", "data_dir", "max_steps")


def shrink(study: Study) -> Study:
    """A tiny version of a study that checks in a minute on a CPU that every arm's options work. Its results mean nothing.

    One seed, one epoch of 3 steps of the mini data (limited to its 6,000 images), a small conv net. All batches are divided by
    32, so k stays the same; a part has at least 4 samples, so V stays the same too. A batch schedule keeps its phases, in
    more steps. A user's own task keeps its data and model and makes 3 steps.
    """
    own = not is_built_in(study.task)
    arms = []
    for arm in study.arms:
        options = {name: value for name, value in arm.options.items() if name not in _NOT_IN_MINI}
        with _naming(f"{study.source}, arm {arm.name!r}"):
            batches = _small_batches(all_options(study.task, arm.options) if own else arm.options)
        options |= {**batches, "epochs": 1, "checkpoint_every": "0", "precision": "auto", "fast": "auto"}
        samples = min(6000, 3 * batches["global_batch"])
        options |= {"max_steps": 3} if own else {"model": "cnn:width=4", "train_samples": samples}
        if options.get("warmup_steps"):
            options["warmup_steps"] = 1
        if options.get("warmup_epochs"):
            options["warmup_epochs"] = min(0.3, float(options["warmup_epochs"]))
        if options.get("norm_part"):
            options["norm_part"] = min(int(options["norm_part"]), 4)
        arms.append(replace(arm, options=options))
    task = study.task if own else "fashion-mnist-mini"
    return replace(study, name=f"{study.name}-mini", task=task, seeds=study.seeds[:1], arms=tuple(arms), mini=True)


def all_options(task: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of a run of this task, with the task's own defaults filled in."""
    from paceline.training import tasks

    return {name: value for name, value in vars(tasks.resolve(task, options)[1]).items() if value is not None}


def list_runs(study: Study) -> list[RunSpec]:
    """All runs, seed by seed, so that a study that is cut short has all arms. Checks each arm's options first."""
    from paceline.training import tasks
    from paceline.training.terms import settle_batch

    resolved: dict[str, dict[str, Any]] = {}
    given: dict[str, dict[str, Any]] = {}
    for arm in study.arms:
        with _naming(f"{study.source}, arm {arm.name!r}"):
            tasks.check(study.task, arm.options)
            task, config = tasks.resolve(study.task, arm.options)
            if task.validation is None:
                raise UsageError(f"task {task.name} has no validation data, so nothing can be compared: give it validation=...")
            joining = config.workers_schedule
            if is_auto(joining) and not (config.virtual_workers or most_workers(joining)):
                raise UsageError(
                    "--workers auto: this machine's devices would decide how many virtual workers there are, and so the"
                    " model: give --virtual-workers"
                )
            settle_batch(config, config.workers or 1)
            resolved[arm.name], given[arm.name] = vars(config), _with_settings(arm.options, config)
    return [
        RunSpec(arm.name, seed, f"{arm.slug}-seed{seed}", study.task, given[arm.name], {**resolved[arm.name], "seed": seed})
        for seed in study.seeds
        for arm in study.arms
    ]


def _with_settings(options: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """An arm's options, with its settings as the task converted them: JSON would keep values from the command line as text."""
    return {**options, **({"set": config.set} if config.set else {})}


def _small_batches(options: Mapping[str, Any]) -> dict[str, Any]:
    config = check_options({"reference_batch": Config.reference_batch, **options})
    schedule = str(config.get("batch_schedule") or "")
    pairs = parse_batch_schedule(schedule)
    most = most_workers(config.get("workers_schedule", ""))
    parts = int(config.get("virtual_workers") or config.get("workers") or most or 1)
    reference = int(config["reference_batch"])
    large = int(config.get("global_batch") or largest_batch(pairs, reference * parts))
    accumulate = int(config.get("accumulate", 1))
    small = parts * max(4, accumulate, large // 32 // parts)
    found = {"virtual_workers": parts, "global_batch": small, "reference_batch": max(1, round(reference * small / large))}
    if not schedule:
        return found
    smallest = max(4, accumulate, int(config.get("smallest_part", Config.smallest_part)) * small // large)
    epochs = max(float(config.get("epochs", Config.epochs)), 1.0 + max((start for start, _ in pairs), default=0.0))
    resized = resize_batch_schedule(schedule, small, parts, smallest, stretch=1 / epochs)
    return {**found, "batch_schedule": resized, "smallest_part": smallest}


_KEYS: dict[str, tuple[Any, str]] = {
    "task": (str, "a name, a file or module:function"),
    "seeds": ((int, list), "a number of seeds, or a list of them"),
    "reference": (str, "the name of an arm"),
    "about": (str, "text"),
    "options": (dict, "a table of options"),
    "arms": (dict, "a table of arms"),
    "margin": ((int, float), "a positive number, such as 0.005"),
    "target_accuracy": ((int, float), "a number between 0 and 1"),
}
"""The keys of a study file: the type of each, and a description for error messages."""


def _check_keys(found: Mapping[str, Any]) -> None:
    for key, value in found.items():
        if key not in _KEYS:
            raise unknown("key", key, _KEYS)
        kind, meant = _KEYS[key]
        most = {"margin": math.inf, "target_accuracy": 1.000001}.get(key)
        if not isinstance(value, kind) or isinstance(value, bool) or (most and not 0 < value < most):
            raise UsageError(f"{key} is {value!r}: it must be {meant}")
    if "task" not in found:
        raise UsageError('it names no task: add task = "fashion-mnist"')
    if not found.get("arms"):
        raise UsageError('it has no arms: add [arms."a name"] with its options')


def _read_arm(path: Path, name: str, common: Mapping[str, Any], arm: Any, given: Mapping[str, Any]) -> Arm:
    with _naming("[options]"):
        _own(common)
    with _naming(f"arm {name!r}"):
        if not isinstance(arm, dict):
            raise UsageError(f"it is {arm!r}: it must be a table of options")
        if not name.isprintable():
            raise UsageError("an arm's name must be plain text in one line")
        own = dict(arm)
        recipe, about = own.pop("recipe", ""), own.pop("about", "")
        if not isinstance(recipe, str) or not isinstance(about, str):
            raise UsageError("recipe and about must be text")
        base = read_base(_locate(path, recipe)) if recipe else {}
        return Arm(name=name, options=merge_options(common, base, _own(own), given), about=about)


def _own(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check options that an arm sets: both names and values."""
    for key in options:
        if key in names_with(Role.STUDY):
            raise UsageError(f"{key} cannot be set here: the study sets it" + ("; use seeds" if key == "seed" else ""))
    return check_options(options)


_MOST_SEEDS = 1000


def _seeds(given: Any) -> tuple[int, ...]:
    many = isinstance(given, int) and given > _MOST_SEEDS
    seeds = list(range(given)) if isinstance(given, int) and not many else given
    if many or not seeds or any(not isinstance(seed, int) or isinstance(seed, bool) or seed < 0 for seed in seeds):
        raise UsageError(f"seeds is {given!r}: it must be a number of seeds, 1 to {_MOST_SEEDS}, or a list of whole numbers")
    return tuple(dict.fromkeys(seeds))


def _locate(path: Path, name: str) -> str:
    """Find a file that a study names: in the working folder, or next to the study file."""
    near = path.parent / name
    return str(near) if not Path(name).exists() and near.is_file() else name


@contextmanager
def _naming(where: str) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{where}{', ' if str(error).startswith(('arm ', '[opt')) else ': '}{error}") from None
