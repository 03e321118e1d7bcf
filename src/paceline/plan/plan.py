"""`paceline plan RECORD --cluster NAME`: speed, time and cost with 1 to 4096 workers, predicted from a record.

    request.py (flags) -> measured.py -> cluster.py -> draws.py -> model.py (a step of P workers)
    -> target.py (time, cost, returns) -> words.py; for a batch schedule: -> phased.py -> phased_plan.py

`make_plan` does this and `plan_verb` prints it. Nothing here imports torch.
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.files import write_file
from paceline.output import make_table
from paceline.plan.cluster import list_presets
from paceline.plan.draws import bars, draw
from paceline.plan.model import Model, make_model
from paceline.plan.phased_plan import (
    PhasedPlan,
    conclude_schedule,
    introduce_schedule,
    make_scheduled_plan,
    phased_json,
    phased_tables,
)
from paceline.plan.points import Measured, Run
from paceline.plan.request import (
    Request,
    as_json_base,
    asks_schedule,
    introduce_record,
    make_cluster,
    parse_counts,
    read_request,
)
from paceline.plan.target import Returns, data_limit, find_returns, price_of, steps_needed, time_s
from paceline.plan.tradeoff import MOST_NOISE, NoiseScale, given_noise_scale, read_noise_scale
from paceline.plan.trust import find_doubt, find_warnings
from paceline.plan.words import (
    BARS,
    count_words,
    money_words,
    number_words,
    range_words,
    returns_words,
    time_words,
)
from paceline.records import find_record, read_metrics


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A prediction, ready to be shown."""

    request: Request
    model: Model
    noise: NoiseScale | None
    rows: tuple[dict[str, Any], ...]
    returns: Returns
    warnings: tuple[str, ...] = ()
    """What makes the prediction untrustworthy, with what to do (`trust.py`)."""


def plan_verb(**flags: Any) -> int:
    """Predict; print the table and what it means. Called with the command line's flags."""
    request = Request(**flags)
    if request.cluster == "list":
        print(list_presets())
        return 0
    if not request.record:
        raise UsageError("plan needs a RECORD: the folder of a run, such as runs/NAME (--cluster list does not)")
    measured = read_request(request)
    if asks_schedule(request, measured):
        phased = make_scheduled_plan(request, measured)
        print("\n".join([*introduce_schedule(phased), "", phased_tables(phased), "", *conclude_schedule(phased)]))
        if request.json:
            write_json(phased, Path(request.json))
        return 0
    plan = make_plan(request, measured)
    print("\n".join([*introduce(plan), "", table(plan), "", *conclude(plan)]))
    if request.json:
        write_json(plan, Path(request.json))
    return 0


def make_plan(request: Request, measured: Measured | None = None) -> Plan:
    """Predict a run with a constant batch."""
    measured = measured or read_request(request)
    if request.target_steps:
        measured = replace(measured, run=_to_target(measured, request.target_steps))
    _check_samples(request.samples, measured)
    noise = find_noise_scale(request.noise, request.runs_dir) if request.noise else measured.noise
    measured, cluster = make_cluster(request.cluster, measured, request.cores)
    draws = draw(measured, cluster, noise)
    model = make_model(measured, cluster, draws, mode=request.mode, speed=request.speed, samples=request.samples)
    counts = parse_counts(request.workers, model)
    doubt, warnings = find_doubt(model, counts), find_warnings(model, counts)
    if doubt:
        draws = draw(measured, cluster, noise, doubt)
        model = make_model(measured, cluster, draws, mode=request.mode, speed=request.speed, samples=request.samples)
    price = price_of(cluster, request.price)
    rows = tuple(make_row(model, workers, price) for workers in counts)
    returns = find_returns(model, measured.run, noise)
    return Plan(request=request, model=model, noise=noise, rows=rows, returns=returns, warnings=warnings)


def find_noise_scale(text: str, runs_dir: str) -> NoiseScale:
    """The noise scale given by `--noise`: a number of samples, or a record."""
    try:
        scale = float(text.replace(",", ""))
    except ValueError:
        try:
            return _noise_scale_of(find_record(text, runs_dir))
        except UsageError as error:
            raise UsageError(
                f"--noise is neither a number of samples nor a record that measured the noise scale: {error}"
            ) from None
    if not 0 < scale < math.inf:
        raise UsageError(f"--noise is {scale:g}: it must be a number of samples above 0, or a record")
    if scale > MOST_NOISE:
        raise UsageError(f"--noise is {scale:g}: it must be at most {MOST_NOISE:g} samples")
    return given_noise_scale(scale)


def make_row(model: Model, workers: int, price: tuple[float, str] | None) -> dict[str, Any]:
    """The prediction for this number of workers."""
    step, one, run = model.step(workers), model.step(1), model.measured.run
    speed = bars(step.samples_per_s)
    efficiency = bars(step.samples_per_s / (workers * one.samples_per_s))
    row: dict[str, Any] = {
        "workers": workers,
        "nodes": step.nodes,
        "global_batch": round(step.global_batch),
        **dict(zip(("samples_per_s", "low", "high"), speed, strict=True)),
        **dict(zip(("efficiency", "efficiency_low", "efficiency_high"), efficiency, strict=True)),
        "step_s": float(step.step_s[0]),
        "components_s": {name: float(seconds[0]) for name, seconds in step.components_s.items()},
        "reduce_s": float(step.reduce_s[0]),
    }
    if run is None or workers > (data_limit(model) or workers):
        return row
    times = time_s(step, run, model.draws.noise)
    row["steps"] = int(steps_needed(run, step.global_batch, model.draws.noise)[0])
    row |= dict(zip(("time_s", "time_low_s", "time_high_s"), bars(times), strict=True))
    if price:
        each = price[0] * workers / 3600
        row |= dict(zip(("cost", "cost_low", "cost_high"), bars(times * each), strict=True)) | {"currency": price[1]}
    return row


def introduce(plan: Plan) -> list[str]:
    """What the prediction is based on, and what it assumes."""
    measured, fixed = plan.model.measured, "fixed samples per worker" if plan.model.mode == "weak" else "fixed global batch"
    scaling = f"{plan.model.mode} scaling ({fixed}); "
    fewer = plan.model.mode == "strong" or (plan.request.samples or measured.base.samples) != measured.base.samples
    shared = fewer and len({round(point.samples) for point in measured.points}) == 1
    more = ["compute is proportional to the samples per worker; optimizer and other are fixed"] if shared else []
    if plan.request.samples and plan.model.mode == "weak":
        more.append(f"{plan.request.samples:,} {measured.unit} per worker and step")
    return introduce_record(plan.model, plan.warnings, plan.request, scaling, more)


def table(plan: Plan) -> str:
    """The prediction as a plain-text table."""
    unit = plan.model.measured.unit
    timed, priced = (any(name in row for row in plan.rows) for name in ("time_s", "cost"))
    heads = ["workers", "nodes", "batch", f"{unit}/s", "low to high", "efficiency", "step ms", "exposed", "waiting"]
    heads += (["steps", "time", "low to high"] if timed else []) + (["cost"] if priced else [])
    return make_table(heads, [_cells(row, timed, priced) for row in plan.rows], left=0)


def conclude(plan: Plan) -> list[str]:
    """What the table means: where returns stop and why, what the time is for, what the ranges are."""
    run, noise, returns = plan.model.measured.run, plan.noise, plan.returns
    lines = [returns_words(returns, plan.model.cluster, "time"), *_say_data(plan)]
    if run is None:
        lines.append("The record does not say how long a run is, so the time to a target is unknown: give --target-steps.")
    elif plan.model.mode == "strong":
        lines.append(f"Time is for {run.about}: a fixed global batch needs the same steps with any number of workers.")
    elif noise is None:
        lines.append(
            f"Time is for the same number of epochs as {run.about}. The accuracy at these batches is unknown: paceline rehearse"
            f" measures it, and paceline advise measures the noise scale (--noise)."
        )
    else:
        width = f" ({range_words(noise.low, noise.high)})" if noise.rows else ""
        lines.append(
            f"Time is for the same progress as {run.about}. The steps follow from the noise scale of"
            f" {number_words(noise.scale)} samples{width}, assuming a well-tuned learning rate at each batch"
            " (paceline rehearse checks it)."
        )
    if plan.model.interference is not None:
        factor = float(plan.model.interference[0])
        said = f"In training, all-reduces take {factor:.2f} times as long here as without training"
        if plan.model.interference_at_limit():
            said += ", the limit of the model. The measurement is beyond it, so do not trust this prediction"
        lines.append(f"{said}.")
    return [*lines, f"({BARS})"]


def write_json(plan: Plan | PhasedPlan, path: Path) -> None:
    """Write a prediction as JSON."""
    found = phased_json(plan) if isinstance(plan, PhasedPlan) else as_json(plan)
    try:
        write_file(path, json.dumps(found, indent=2, allow_nan=False) + "\n")
    except ValueError:
        raise UsageError(f"cannot write --json {path}: a predicted number is not finite; the table shows which") from None
    except OSError as error:
        raise UsageError(f"cannot write --json {path}: {error.strerror}") from None


def as_json(plan: Plan) -> dict[str, Any]:
    """The prediction and what it is based on, as a JSON-able dict."""
    base = as_json_base(plan.request, plan.model)
    return {
        **base,
        "measured": {**base["measured"], "noise": asdict(plan.noise) if plan.noise else None},
        "rows": list(plan.rows),
        "returns": {**asdict(plan.returns), "most": plan.returns.most},
        "warnings": list(plan.warnings),
        "sentences": conclude(plan),
    }


def _check_samples(samples: int | None, measured: Measured) -> None:
    """A UsageError if a worker has more samples per step than the training set."""
    most = measured.run.train_samples if measured.run else None
    if samples is not None and most is not None and samples > most:
        raise UsageError(f"--samples is {samples:,}: the training set has {most:,} {measured.unit}; give at most {most:,}")


def _to_target(measured: Measured, steps: int) -> Run:
    """This number of steps, at the record's global batch."""
    batch = measured.run.global_batch if measured.run else measured.base.global_batch
    train = measured.run.train_samples if measured.run else None
    return Run(steps=steps, global_batch=batch, train_samples=train, about=f"{steps:,} steps at a global batch of {batch:,}")


def _say_data(plan: Plan) -> list[str]:
    """From which count on no time is predicted."""
    run, limit, unit = plan.model.measured.run, data_limit(plan.model), plan.model.measured.unit
    if run is None or limit is None:
        return []
    why = f"a step would need more than the {run.train_samples:,} training {unit}"
    beyond = [row["workers"] for row in plan.rows if row["workers"] > limit]
    more = " and more" if len(beyond) > 1 else ""
    return [f"No time is predicted for {count_words(beyond[0])}{more}: {why}."] if beyond else []


def _noise_scale_of(path: Path) -> NoiseScale:
    """The noise scale a record measured."""
    try:
        found = read_noise_scale(read_metrics(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{path} is not a record of paceline train") from None
    if found is None:
        raise UsageError(f"{path} did not measure the noise scale: train with --measure-noise, or use paceline advise")
    return found


def _cells(row: dict[str, Any], timed: bool, priced: bool) -> list[str]:
    components = row["components_s"]
    cells = [f"{row['workers']:,}", f"{row['nodes']:,}", f"{row['global_batch']:,}", number_words(row["samples_per_s"])]
    cells += [range_words(row["low"], row["high"]), f"{row['efficiency']:.1%}"]
    cells += [number_words(1e3 * each) for each in (row["step_s"], components["communication"], components["waiting"])]
    if timed and "time_s" in row:
        cells += [f"{row['steps']:,}", time_words(row["time_s"])]
        cells.append(f"{time_words(row['time_low_s'])} to {time_words(row['time_high_s'])}")
    elif timed:
        cells += ["-", "-", "-"]
    cost = money_words(row["cost"], row["currency"]) if "cost" in row else "-"
    return cells + ([cost] if priced else [])
