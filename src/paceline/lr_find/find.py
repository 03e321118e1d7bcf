"""`paceline lr-find TASK`: train for some steps while the learning rate grows, and recommend one from the losses.

The test trains the task's own model with its own batch, optimizer and precision, on any number of workers. Learning rates grow
exponentially from `--from` to `--to`; the test stops when the loss explodes. The curve and the recommendation are written to
lr-find.json and lr-find.svg in a folder of the runs folder. Weights are not kept. Nothing at the top of this file imports
torch.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from paceline.config import Config, check_options, flag, make_config, merge_options, names_with
from paceline.core.schedules import scale_lr
from paceline.dist.launch import WorkerFailed, launch
from paceline.dist.place import check_workers, read_place
from paceline.errors import PacelineError, RecordError, UsageError, reason
from paceline.files import write_file, write_json
from paceline.flags import to_flags
from paceline.lr_find.picture import draw
from paceline.lr_find.rule import RULE, Advice, Point, recommend
from paceline.options import Role, option_of
from paceline.output import make_table, plural
from paceline.records import environment, name_for
from paceline.toml import read_recipe

FIRST, LAST, STEPS = 1e-5, 10.0, 100
_SCHEDULE = next(field for field in fields(Config) if field.name == "schedule")
REFUSED = names_with(Role.WHOLE_RUN, Role.LENGTH).union(
    (field.name for field in fields(Config) if option_of(field).section == option_of(_SCHEDULE).section),
    ("base_lr", "local_steps", "local_after", "ema"),
    ("checkpoint_every", "keep", "log_every"),
)
"""Options of a whole run, and of the learning rate that the test sets itself."""
FILE, PICTURE = "lr-find.json", "lr-find.svg"
_ROWS = 12
_LEAST_STEPS = 20


def find_verb(given: Mapping[str, Any]) -> int:
    """What the command line calls, with its flags."""
    options = merge_options(given)
    task, recipe = options.pop("task"), options.pop("recipe", None)
    sweep = {name: options.pop(name) for name in ("first", "last", "steps")}
    _check(options, **sweep)
    if recipe:  # a recipe's learning rate still says how the rates of parameter groups compare
        kept = {name: value for name, value in read_recipe(recipe).items() if name == "base_lr" or name not in REFUSED}
        options = merge_options(kept, options)
    check_options(options)
    place = read_place()
    options.setdefault("name", f"lr-find-{name_for(task)}-{time.strftime('%Y%m%d-%H%M%S')}")
    folder = Path(options.get("runs_dir", Config.runs_dir)) / options["name"]
    launched = make_config({name: value for name, value in options.items() if name in names_with(Role.LAUNCH)})
    check_workers(place, launched.workers)
    if place.launcher != "paceline" and folder.exists():
        raise UsageError(f"{folder} exists: choose another --name")
    if place.launcher == "alone" and (launched.workers or 1) * launched.nodes > 1:
        return _launch(task, options, sweep, launched)
    from paceline.lr_find.sweep import sweep_here

    found = sweep_here(task, options, sweep["first"], sweep["last"], sweep["steps"])
    if found is not None:  # on rank 0
        _report(task, folder, found, sweep)
    return 0


def _check(options: Mapping[str, Any], first: float, last: float, steps: int) -> None:
    """Refuse ranges and options that make no sense."""
    for name in options:
        if name in REFUSED:
            why = "finds the learning rate" if name == "base_lr" else "sets the learning rate of each step, for --steps steps"
            raise UsageError(f"{flag(name)} does not apply to lr-find, which {why}: remove it")
    for what, value in (("--from", first), ("--to", last)):
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"{what} is {value:g}: a learning rate must be a positive number")
    if last < 10 * first:
        raise UsageError(f"--to is {last:g}: it must be at least 10 times --from ({first:g})")
    if not _LEAST_STEPS <= steps <= 100_000:
        raise UsageError(f"--steps is {steps}: it must be between {_LEAST_STEPS} and 100,000")


def _launch(task: str, options: Mapping[str, Any], sweep: Mapping[str, Any], launched: Config) -> int:
    """Start N workers, each running this command again."""
    from paceline.training import tasks

    tasks.check(task, options)
    own = [f"--from={sweep['first']}", f"--to={sweep['last']}", f"--steps={sweep['steps']}"]
    outcome = launch(["lr-find", task, *to_flags(options), *own], launched)
    if outcome.exit_code == 0:
        return 0
    if outcome.failure is None:
        raise KeyboardInterrupt
    raise WorkerFailed(outcome.failure.explain(), outcome.exit_code)


def _report(task: str, folder: Path, found: Mapping[str, Any], sweep: Mapping[str, Any]) -> None:
    """Write the result and the picture, print the curve and the recommendation. Raises an error without a recommendation."""
    points, contract = found["points"], found["contract"]
    advice = recommend(points, found["exploded"])
    base_lr = None if advice is None else _round(advice.lr / scale_lr(1.0, contract["k"], contract["lr_rule"]))
    facts = {
        "kind": "lr-find",
        "task": task,
        **{"from": sweep["first"], "to": sweep["last"], "steps": sweep["steps"]},
        "exploded": found["exploded"],
        "rule": RULE,
        "advice": None if advice is None else {**asdict(advice), "base_lr": base_lr},
        "points": [asdict(point) for point in points],
        "contract": contract,
        **found["grows"],
        "environment": environment(),
    }
    try:
        folder.mkdir(parents=True)
        write_json(folder / FILE, facts)
        about = f"{task}: {contract['optimizer']}, global batch {contract['global_batch']}"
        write_file(folder / PICTURE, draw(points, advice, about))
    except OSError as error:
        raise RecordError(f"cannot write {folder}: {reason(error)}; choose another --runs-dir") from error
    print(_table(points))
    ended = f"the loss exploded at {points[-1].lr:.3g}" if found["exploded"] else f"all {plural(len(points), 'step')} done"
    print(f"{ended}; curve in {folder / PICTURE}, numbers in {folder / FILE}")
    if found["grows"]:
        print(_say_swept(contract["global_batch"], **found["grows"]))
    if advice is None:
        raise PacelineError(
            f"no recommendation: the smoothed loss did not fall by 10% between {points[0].lr:.3g} and {points[-1].lr:.3g};"
            " try more --steps or another range, and check that the task learns at all"
        )
    print(_say(advice, base_lr, contract, found["own"]))
    if advice.warning:
        print(f"note: {advice.warning}")


def _say_swept(global_batch: int, batch_schedule: str, batch_lr_power: float) -> str:
    return (
        f"all steps had a global batch of {global_batch}, the largest of --batch-schedule {batch_schedule}; for smaller"
        f" batches a run scales the learning rate (--batch-lr-power {batch_lr_power:g})"
    )


def _say(advice: Advice, base_lr: float | None, contract: Mapping[str, Any], own: bool) -> str:
    low = f"lowest smoothed loss at {advice.minimum_lr:.3g}, steepest fall at {advice.steepest_lr:.3g}"
    scaled = ""
    if contract["k"] != 1:
        scaled = f" (a peak of {advice.lr:.2g} at global batch {contract['global_batch']}, by rule {contract['lr_rule']})"
    what = f"--base-lr {base_lr:g}"
    if own:
        what = f"lr {base_lr:g} for the first parameter group of the task's own optimizer, and the others in proportion"
    return f"{low}\nrecommended: {what}{scaled}\nthe rule: {RULE}"


def _table(points: Sequence[Point]) -> str:
    """About a dozen rows of the curve, evenly spaced, the last one included."""
    every = max(1, -(-len(points) // _ROWS))
    shown = [point for point in points if (len(points) - point.step) % every == 0]
    rows = [(f"{p.step}", f"{p.lr:.3g}", f"{p.loss:.4f}", f"{p.smoothed:.4f}") for p in shown]
    return make_table(("step", "learning rate", "loss", "smoothed"), rows)


def _round(value: float) -> float:
    """Two significant digits: the test is not more precise."""
    return float(f"{value:.2g}")
