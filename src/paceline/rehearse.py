"""`paceline rehearse TASK --workers 64`: measure the accuracy of 64 workers on a single one.

A run depends on its virtual workers V, not on the workers that compute it, so V = 64 on one worker gives the accuracy of 64. Up
to four arms are trained with several seeds and compared (as a study, see `study/`): the reference (one worker at the reference
batch); N workers as asked; N workers with a batch that grows to the same size (with a constant batch, if the one asked for
grows); and, for a built-in task, N workers with the packaged recipe nearest to the global batch. The best arm that is not
worse than the reference is saved as a recipe. Nothing at the top of this file imports torch.
"""

import argparse
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config import Config, check_options, flag, make_config, merge_options, names_with
from paceline.dist.place import read_place
from paceline.errors import UsageError
from paceline.files import write_file
from paceline.flags import add_flags, add_task
from paceline.options import Role
from paceline.phases import batch_words, grow_batch, largest_batch, parse_batch_schedule, resize_batch_schedule
from paceline.records import name_for
from paceline.spread import Comparison, mean
from paceline.study.results import (
    batches_of,
    compare_arm,
    difference_words,
    final_values,
    points,
    spread_words,
    step_words,
    table,
)
from paceline.study.study import Arm, Study, all_options, is_built_in, parse_seeds, read_base, run_study
from paceline.toml import packaged_recipes, read_recipe, to_toml

REFERENCE = "reference"

_NEAR = math.log(2) + 1e-9
"""A recipe for a batch more than twice or less than half as large is not used."""

_ORDER = ("better", "equal", "no worse", "undecided", "no verdict", "worse")
_GOOD = ("better", "equal", "no worse")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the task, how often to train it, and one flag per option."""
    add_task(parser)
    parser.add_argument("--seeds", default="3", metavar="N", help="N seeds (3) or these (0,5,7) [3]")
    parser.add_argument(
        "--margin", default=0.005, type=float, metavar="X", help="accuracies (or losses) this close count as equal [0.005]"
    )
    parser.add_argument("--per-device", default=1, type=int, metavar="N", help="runs at once on each GPU, or on the CPU [1]")
    hidden = dict.fromkeys(names_with(Role.STUDY) - {"runs_dir"} | {"workers_schedule"}, argparse.SUPPRESS)
    add_flags(parser, {**hidden, "workers": "The number of workers to rehearse."})


def run(options: dict[str, Any]) -> int:
    """Train the arms, print the table and the verdict, write the recipe."""
    task, recipe = options.pop("task"), options.pop("recipe", None)
    seeds, margin, per_device = options.pop("seeds", "3"), options.pop("margin", 0.005), options.pop("per_device", 1)
    options = merge_options(read_base(recipe), options) if recipe else options
    runs_dir = str(options.pop("runs_dir", Config.runs_dir))
    study, workers = make_rehearsal(task, options, seeds=parse_seeds(str(seeds)), margin=margin)
    place = read_place()
    if place.launcher != "alone":
        raise UsageError(f"rehearse trains all parts on one worker: start it by itself, not with {place.launcher}")
    print(f"{workers} virtual workers on one worker: the same model, only slower", flush=True)
    folder = Path(runs_dir) / study.name
    results = run_study(study, Path(runs_dir), per_device=per_device)
    print(f"\n{table(results)}")
    best, lines = verdict(results, workers)
    written = folder / "recipe.toml"
    if best:
        _write_recipe(written, study, best, workers)
        lines.append(f"Use: paceline train {task} --workers {workers} --recipe {written}")
    elif written.exists():
        written.replace(written.with_suffix(".toml.old"))  # from an earlier rehearsal with other options
    print("\n".join(lines))
    return 0


def make_rehearsal(
    task: str, options: Mapping[str, Any], *, seeds: tuple[int, ...] = (0, 1, 2), margin: float = 0.005
) -> tuple[Study, int]:
    """The study to run, and N. Raises a UsageError for options that cannot be rehearsed."""
    if not margin > 0 or not math.isfinite(margin):
        raise UsageError(f"--margin is {margin}: it must be a positive number, such as 0.005")
    asked, workers, parts = _check(options)
    reference_batch = asked.get("reference_batch") or _task_default(task, asked, "reference_batch")
    if given := asked.get("batch_schedule", _task_default(task, asked, "batch_schedule")):
        asked["batch_schedule"] = given
    batch = asked.get("global_batch") or _largest(asked) or reference_batch * parts
    plain = {name: value for name, value in asked.items() if name not in names_with(Role.SEVERAL_PARTS)}
    if plain.get("lr_rule") == "adascale":
        plain["lr_rule"] = "none"  # at k = 1 its gain is 1
    large = {"virtual_workers": parts, "global_batch": batch}
    constant = {"batch_schedule": ""} if "batch_schedule" in asked else {}  # the task's defaults may have one
    one = {"virtual_workers": 1, "global_batch": reference_batch}
    arms = [
        Arm(name=REFERENCE, options={**plain, **one, **constant}, about="one worker"),
        Arm(name=f"{workers} workers as asked", options={**asked, **large}),
    ]
    epochs = asked.get("epochs") or _task_default(task, asked, "epochs")
    if given:
        arms.append(Arm(name=f"{workers} workers, constant batch", options={**asked, **large, **constant}))
    elif schedule := _growth(asked, large, epochs, reference_batch):
        arms.append(Arm(name=f"{workers} workers, growing to {batch}", options={**asked, **large, "batch_schedule": schedule}))
    nearest = nearest_recipe(batch) if is_built_in(task) else None
    found = check_options(read_recipe(nearest)) if nearest else {}
    hidden = str(asked.get("model", "")).partition(":")[0] != "linear"
    if nearest and (hidden or found.get("optimizer") != "muon"):  # muon needs hidden layers
        # The user's model, data and number of epochs stay, so that arms can be compared.
        kept = {name: value for name, value in plain.items() if name not in names_with(Role.METHOD)}
        taken = {name: value for name, value in found.items() if name in names_with(Role.METHOD, Role.AUGMENT)}
        if taken.get("batch_schedule"):
            stretch = epochs / found.get("epochs", Config.epochs)
            # With a recipe's large --smallest-part, some of these workers would have no part in early phases.
            smallest = min(taken.get("smallest_part", Config.smallest_part), Config.smallest_part)
            schedule = resize_batch_schedule(taken["batch_schedule"], batch, parts, smallest, stretch=stretch)
            taken |= {"batch_schedule": schedule, "smallest_part": smallest}
        arms.append(
            Arm(name=f"{workers} workers with {nearest}", options={**merge_options(kept, taken), **large}, about=nearest)
        )
    name = f"rehearse-{name_for(task)}-{workers}"
    return Study(
        name=name, source="rehearse", task=task, arms=tuple(arms), seeds=seeds, reference=REFERENCE, margin=margin
    ), workers


def _check(options: Mapping[str, Any]) -> tuple[dict[str, Any], int, int]:
    """The options as asked, without the workers; N; and V."""
    for key in options:
        if key in names_with(Role.STUDY):
            raise UsageError(f"{flag(key)} cannot be given: rehearse sets it" + ("; use --seeds" if key == "seed" else ""))
    asked = check_options(options)
    if asked.pop("workers_schedule", ""):
        raise UsageError(
            "rehearse trains all parts on one worker, so none can join: give --workers a number, and leave out"
            " --workers-schedule"
        )
    workers = asked.pop("workers", None)
    if workers is None:
        raise UsageError("rehearse needs --workers: the number of workers to rehearse")
    parts = asked.get("virtual_workers") or workers
    if parts == 1:
        raise UsageError("--workers is 1: there is nothing to rehearse; give two or more")
    if parts < workers:
        raise UsageError(f"--virtual-workers {parts} is less than --workers {workers}: each worker needs at least one part")
    return asked, workers, parts


def nearest_recipe(batch: int) -> str | None:
    """The packaged recipe with the nearest global batch, by ratio; None if the nearest is not within a factor of 2.

    Of two for the same batch, it is the one whose batch grows.
    """
    distances: list[tuple[float, bool, str]] = []
    for name in packaged_recipes():
        recipe = check_options(read_recipe(name)) if name.startswith("batch-") else {}
        made_for = recipe.get("global_batch") or _largest(recipe)
        if made_for:
            distances.append((abs(math.log(made_for / batch)), not recipe.get("batch_schedule"), name))
    best = min(distances, default=(math.inf, False, ""))
    return best[2] if best[0] <= _NEAR else None


def _largest(options: Mapping[str, Any]) -> int:
    """The largest batch of a schedule with given batches; 0 without one."""
    return largest_batch(parse_batch_schedule(options.get("batch_schedule", "")))


def _growth(asked: Mapping[str, Any], large: Mapping[str, int], epochs: float, least: int) -> str:
    """A schedule that ends at the batch asked for; "" if the batch cannot grow, or if the given options need a constant one."""
    smallest = asked.get("smallest_part", Config.smallest_part)
    if asked.get("lr_rule") == "adascale" or asked.get("local_steps") or asked.get("accumulate", 1) > smallest:
        return ""
    if asked.get("max_steps"):  # the shares of the epochs would not be those of the run
        return ""
    return grow_batch(large["global_batch"], epochs, large["virtual_workers"], smallest, least)


def verdict(results: Mapping[str, Any], workers: int) -> tuple[str | None, list[str]]:
    """The arm to use, if any, and the results in words, one line per arm."""
    metric, margin = results["metric"], results["study"]["margin"]
    arms = [arm for arm in results["study"]["arms"] if arm != REFERENCE]
    found = {arm: compare_arm(results, arm) for arm in arms}
    lines = []
    for arm in arms:
        values = final_values(results, arm)
        ends = f"would reach {metric} {_reached(results, arm)}" if values else "would not finish"
        against = f" against {_reached(results, REFERENCE)} for one worker" if values and arm == arms[0] else ""
        who = f"{workers} workers ({_batches(results, arm)})" if arm == arms[0] else f"{_how(results, arm)} they"
        lines.append(f"{who} {ends}{against}: {_plain_verdict(found[arm], metric, margin)}.")
    ranked = sorted(arms, key=lambda arm: (_ORDER.index(found[arm].verdict), _badness(results, arm)))
    best = ranked[0]
    if found[best].verdict in _GOOD:
        return best, lines
    if found[best].verdict == "worse":
        lines.append(
            f"Every arm with {workers} workers loses accuracy; '{best}' loses least. Try fewer workers"
            f" (--workers {max(2, workers // 2)}), more --epochs, or a longer warm-up (--schedule cosine --warmup-epochs 2)."
        )
        return None, lines
    lines.append("No verdict yet: use more --seeds to get one. The best so far:")
    return (best if final_values(results, best) else None), lines


def _how(results: Mapping[str, Any], arm: str) -> str:
    """What an arm does otherwise than the one that was asked for."""
    about, batches = results["study"]["arms"][arm], batches_of(results, arm)
    growing = f"growing from {batches[0]:,} to {batches[-1]:,}" if len(batches) > 1 else ""
    if about["about"]:
        return f"With recipe {about['about']}" + (f", {growing}," if growing else "")
    if about["options"].get("batch_schedule"):
        return growing.capitalize() or f"With --batch-schedule and a {_batches(results, arm)}"
    return f"With a constant {_batches(results, arm)}"


def _batches(results: Mapping[str, Any], arm: str) -> str:
    batches = batches_of(results, arm) or [results["study"]["arms"][arm]["options"]["global_batch"]]
    return f"global batch of {batch_words(batches)}" if len(batches) > 1 else f"global batch {batches[0]:,}"


def _reached(results: Mapping[str, Any], arm: str) -> str:
    """`0.9412 ± 0.0011 (n 3) in 189 steps`."""
    steps = step_words(results, arm)
    return spread_words(final_values(results, arm), "n ") + ("" if steps == "-" else f" in {steps} step{'s' * (steps != '1')}")


def _plain_verdict(found: Comparison, metric: str, margin: float) -> str:
    within = f" within {points(margin)}" if metric == "accuracy" else f" within {margin:g}"
    return difference_words(found, metric, ", ") + (within if found.verdict == "equal" else "")


def _badness(results: Mapping[str, Any], arm: str) -> float:
    values = final_values(results, arm)
    average = mean(values) if values else math.inf
    return average if results["metric"] == "loss" or not values else -average


def _write_recipe(path: Path, study: Study, best: str, workers: int) -> None:
    """Write all options of the arm except `workers`, which depends on where the recipe is used."""
    options = next(arm.options for arm in study.arms if arm.name == best)
    config = replace(make_config(all_options(study.task, options)), workers=None)
    about = f"# {best}, rehearsed\n#     paceline train {study.task} --workers {workers} --recipe THIS_FILE\n"
    write_file(path, about + to_toml(config, without=names_with(Role.STUDY)))


def _task_default(task: str, options: Mapping[str, Any], name: str) -> Any:
    """The task's default for an option. For a built-in task this is Config's, so the task need not be loaded."""
    return getattr(Config, name) if is_built_in(task) else all_options(task, options)[name]
