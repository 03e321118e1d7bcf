"""The results of a study: its runs as JSON, each arm compared with the reference, and the table. Nothing here imports torch."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.errors import RecordError, UsageError, reason
from paceline.files import read_json
from paceline.output import make_table
from paceline.phases import batch_words, parse_batch_schedule
from paceline.records import read_metrics, read_result
from paceline.spread import LEGEND, LOSS_LEGEND, Comparison, compare, deviation, mean, median
from paceline.status import Status

_FACTS = (
    *("virtual_workers", "global_batch", "reference_batch", "base_lr", "k", "lr_rule", "peak_lr", "optimizer", "schedule"),
    *("warmup", "steps_per_epoch", "precision", "model", "parameters", "devices", "data"),
)
"""The fields of a run's contract that are copied into the results."""


def read_run(record: Path, state: Mapping[str, Any], target: float | None) -> dict[str, Any]:
    """A run's entry in the results, from its state and its record."""
    result, rows, about = {}, [], {}
    if state["status"] != Status.FAILED or (record / "result.json").exists():
        with suppress(RecordError, OSError, ValueError):
            result, rows = read_result(record), read_metrics(record)
            about = read_json(record / "environment.json")
    epochs = [row for row in rows if row["kind"] == "epoch"]
    reached = [row["time_s"] for row in epochs if target and row.get("val_accuracy", 0) >= target]
    noise = [row["noise_scale"] for row in rows if isinstance(row.get("noise_scale"), int | float)]
    contract = about.get("contract", {})
    batches = [row["global_batch"] for row in rows if row["kind"] == "phase" and isinstance(row.get("global_batch"), int)]
    series = {name: [row.get(name) for row in epochs] for name in ("time_s", "val_accuracy", "val_loss")}
    return {
        "arm": state["arm"],
        "seed": state["seed"],
        "status": state["status"],
        "why": state.get("why", ""),
        "where": state.get("where", ""),
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
        **({"batches": batches} if batches else {}),
        "contract": {name: contract[name] for name in _FACTS if name in contract},
        "when": about.get("when"),
        "git": about.get("git"),
        "torch": about.get("versions", {}).get("torch"),
        "record": str(record),
        "per_device": state.get("per_device", 1),
    }


def make_results(study: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> dict[str, Any]:
    """The results of a study: its definition, its runs from `read_run`, and facts `about` the machine."""
    accuracy = not any(run["metrics"] for run in runs) or any("accuracy" in run["metrics"] for run in runs)
    return {
        "study": study,
        "mini": bool(study.get("mini")),
        "metric": "accuracy" if accuracy else "loss",
        "per_device": max((run["per_device"] for run in runs), default=1),
        "environment": {
            **about,
            "devices": sorted({run["contract"]["devices"] for run in runs if "devices" in run["contract"]}),
        },
        "runs": runs,
    }


def read_results(path: Path) -> dict[str, Any]:
    """Read the results of a study from its JSON file."""
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        hint = "; has the study been run?" if isinstance(error, OSError) else ""
        raise UsageError(f"cannot read results {path}: {reason(error)}{hint}") from None
    return check_results(found, str(path))


def check_results(found: Any, path: str) -> dict[str, Any]:
    """What was read from `path`, if it holds the results of a study."""
    try:
        known = {"arms", "reference", "margin", "target_accuracy"} <= found["study"].keys() and found["metric"] in (
            "accuracy",
            "loss",
        )
        known = known and all(
            {"arm", "status", "metrics", "contract", "time_to_target_s"} <= run.keys() for run in found["runs"]
        )
    except (TypeError, KeyError, AttributeError):
        known = False
    if not known:
        raise UsageError(f"{path} does not hold the results of a study: give the study.json or --out file that a study wrote")
    return dict(found)


def compare_arm(results: Mapping[str, Any], arm: str) -> Comparison:
    """Compare an arm's final values with the reference's (see `spread.compare`), taking failed runs into account:

    an arm with a diverged run is worse; there is no verdict if one of its runs failed otherwise, or one of the reference's did.
    """
    study, metric = results["study"], results["metric"]
    reference = study["reference"]
    found = compare(
        final_values(results, arm), final_values(results, reference), study["margin"], lower_is_better=metric == "loss"
    )
    lost, lost_there = (_lost(results, name) for name in (arm, reference))
    if lost_there:
        return replace(found, verdict="no verdict", why=f"{len(lost_there)} of the reference's runs failed")
    diverged = lost.count(Status.DIVERGED)
    if diverged:
        return replace(found, verdict="worse", why=f"{diverged} of {_count(results, arm)} diverged")
    if lost:
        return replace(found, verdict="no verdict", why=f"{len(lost)} of {_count(results, arm)} failed")
    return found


def final_values(results: Mapping[str, Any], arm: str) -> list[float]:
    """The metric of the last validation of each of the arm's finished runs."""
    metric = results["metric"]
    good = [run for run in results["runs"] if run["arm"] == arm and Status(run["status"]).good]
    return [run["metrics"][metric] for run in good if metric in run["metrics"]]


def batches_of(results: Mapping[str, Any], arm: str) -> list[int]:
    """The batches of an arm's phases: of its first run that finished, else of its schedule, else of a run that failed."""
    runs = [run for run in results["runs"] if run["arm"] == arm and isinstance(run.get("batches"), list)]
    seen = [[batch for batch in run["batches"] if isinstance(batch, int)] for run in runs]
    finished = [batches for run, batches in zip(runs, seen, strict=True) if Status(run["status"]).good]
    given: list[int] = []
    with suppress(UsageError, TypeError, KeyError, AttributeError):  # results from elsewhere may hold anything
        given = [batch for _, batch in parse_batch_schedule(results["study"]["arms"][arm]["options"]["batch_schedule"])]
    return next((batches for batches in (*finished, given, *seen) if batches), [])


def step_words(results: Mapping[str, Any], arm: str) -> str:
    """The steps of an arm's finished runs: `189`; with an automatic schedule, seeds may differ: `180 to 195`."""
    good = [run for run in results["runs"] if run["arm"] == arm and Status(run["status"]).good]
    steps = [run["steps"] for run in good if isinstance(run.get("steps"), int)]
    return " to ".join(f"{count:,}" for count in sorted({min(steps), max(steps)})) if steps else "-"


MINI = "These numbers mean nothing: --mini trains a few steps of a small net, only to check that every arm's options work."
"""Shown with the results of a mini study."""


def table(results: Mapping[str, Any]) -> str:
    """The results as an aligned table for a terminal, with a legend."""
    heads, rows = _cells(results)
    mini = f"{MINI}\n\n" if results.get("mini") else ""
    return f"{mini}{make_table(heads, rows, left=2)}\n\n{_legend_of(results)}\n"


def markdown(results: Mapping[str, Any]) -> str:
    """The results as a Markdown table, with a legend."""
    heads, rows = _cells(results)
    lines = [f"| {' | '.join(cell.replace('|', _BAR) for cell in row)} |" for row in (heads, *rows)]
    lines.insert(1, "|---" * len(heads) + "|")
    mini = [f"**{MINI}**", ""] if results.get("mini") else []
    return "\n".join([*mini, *lines, "", _legend_of(results)]) + "\n"


_BAR = "\\|"  # in a Markdown cell


def _cells(results: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table's heads and rows. The verdict comes right after the arm's name."""
    study, metric = results["study"], results["metric"]
    reference, target = study["reference"], study["target_accuracy"]
    heads = ["arm", f"difference from {_plain(reference)}", f"{metric}, mean ± sd (n)", "failed"]
    heads += [f"median time to {target:g}"] if target else []
    grows = any(len(batches_of(results, arm)) > 1 for arm in study["arms"])  # else the steps follow from the batch
    heads += ["global batch", *(["steps"] if grows else []), "V", "peak lr"]
    rows = []
    for arm in study["arms"]:
        runs = [run for run in results["runs"] if run["arm"] == arm]
        facts: Mapping[str, Any] = next((run["contract"] for run in runs if run["contract"]), {})
        verdict = "-" if arm == reference else difference_words(compare_arm(results, arm), metric)
        cells = [_plain(arm), verdict, spread_words(final_values(results, arm)), str(len(_lost(results, arm)))]
        if target:
            times = [run["time_to_target_s"] for run in runs if Status(run["status"]).good]
            times = [time for time in times if time is not None]
            cells.append(f"{f'{median(times):.3g} s' if times else '-'} ({len(times)} of {len(runs)})")
        batches = batches_of(results, arm)
        cells.append(batch_words(batches) if len(batches) > 1 else _number(facts.get("global_batch"), ","))
        cells += [step_words(results, arm)] if grows else []
        rows.append([*cells, _number(facts.get("virtual_workers"), ""), _number(facts.get("peak_lr"), ".4g")])
    return heads, rows


def _legend_of(results: Mapping[str, Any]) -> str:
    return legend(results["metric"], results["study"]["margin"], results.get("per_device", 1))  # older results do not have it


def legend(metric: str, margin: float, shared: int) -> str:
    """What the table's columns and verdicts mean; `shared` runs trained on a device at the same time."""
    words = points(margin) if metric == "accuracy" else f"{margin:g}"
    about = f"{metric.capitalize()} of the last validation, without failed runs. Difference [90% interval], margin {words}."
    longer = f" {shared} runs shared each device, so their times are longer than those of a single run." if shared > 1 else ""
    verdicts = LOSS_LEGEND if metric == "loss" else LEGEND
    return f"{about} {verdicts[0].upper()}{verdicts[1:]}.{longer}"


def points(share: float) -> str:
    """A difference in accuracy: `1 point`, `0.5 points`."""
    return f"{100 * share:g} point{'s' * (100 * share != 1)}"


def spread_words(values: Sequence[float], n: str = "") -> str:
    """`0.9412 ± 0.0011 (3)`; `n` is text to put before the count."""
    if not values:
        return f"- ({n}0)"
    spread = f" ± {deviation(values):.4f}" if len(values) > 1 else ""
    return f"{mean(values):.4f}{spread} ({n}{len(values)})"


def difference_words(found: Comparison, metric: str, joint: str = ": ") -> str:
    """`-0.12 points [-0.31, +0.07]: equal`; a loss has no unit."""
    if found.difference is None:
        return found.words()
    scale, unit, digits = (100, " points", 2) if metric == "accuracy" else (1, "", 4)
    interval = ""
    if found.low is not None and found.high is not None:
        interval = f" [{scale * found.low:+.{digits}f}, {scale * found.high:+.{digits}f}]"
    return f"{scale * found.difference:+.{digits}f}{unit}{interval}{joint}{found.words()}"


def _lost(results: Mapping[str, Any], arm: str) -> list[str]:
    """The statuses of the arm's runs that did not finish."""
    return [run["status"] for run in results["runs"] if run["arm"] == arm and not Status(run["status"]).good]


def _count(results: Mapping[str, Any], arm: str) -> int:
    return sum(run["arm"] == arm for run in results["runs"])


def _plain(name: str) -> str:
    """A name from a file, as text for a cell."""
    return "".join(c if c.isprintable() else "?" for c in name)


def _number(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)
