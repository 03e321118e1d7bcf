"""`paceline plan RECORD --cluster NAME`: speed, time and cost with 1 to 4096 workers, predicted from a record.

    measured.py -> cluster.py -> draws.py -> model.py (a step of P workers) -> target.py (time, cost, returns) -> words.py

`make_plan` does this and `plan_verb` prints it. Nothing here imports torch.
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.files import write_file
from paceline.output import make_table, plural
from paceline.plan.cluster import ENDLESS, HERE, Cluster, find_cluster, list_presets
from paceline.plan.draws import bars, draw
from paceline.plan.fields import short
from paceline.plan.here import make_here
from paceline.plan.measured import Measured, Run, read_measured
from paceline.plan.model import Mode, Model, make_model
from paceline.plan.target import Returns, counts_up_to, data_limit, find_returns, place_limit, price_of, steps_needed, time_s
from paceline.plan.tradeoff import MOST_NOISE, NoiseScale, given_noise_scale, read_noise_scale
from paceline.plan.trust import find_doubt, find_warnings
from paceline.plan.words import (
    BARS,
    count_words,
    list_words,
    money_words,
    number_words,
    range_words,
    returns_words,
    time_words,
)
from paceline.records import find_record, read_metrics

MOST_ASKED = 1_000_000
"""The largest --workers."""

_BOUNDS = {"speed": (1e-6, 1e6), "price": (0.0, 1e9), "target-steps": (0, 10**12), "samples": (0, 10**9)}
"""The range of number flags: above the first (or from it, if it is not 0), up to the second."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asks for; the fields are flags."""

    record: str = ""
    """A record's folder, or its name in runs_dir."""
    cluster: str
    """A preset's name, a TOML file, `here` or `list`."""
    mode: Mode = "weak"
    workers: str = ""
    """Counts such as 1,2,8; empty: 1, 2, 4, ... up to 4096, or to what the cluster has room for (`here`: 64)."""
    target_steps: int | None = None
    """Steps to the target at the record's global batch, instead of the steps of its run."""
    noise: str = ""
    """A noise scale in samples, or a record that measured it."""
    price: float | None = None
    samples: int | None = None
    """Samples per worker and step in weak scaling; None: as measured."""
    speed: float = 1.0
    """How many times as fast a worker is there as the measured one."""
    cores: str = ""
    """Cores that all CPU workers share, on any number of nodes; `none`: each has its own device; empty: as measured."""
    json: str = ""
    runs_dir: str = "runs"

    def __post_init__(self) -> None:
        if self.mode not in ("weak", "strong"):
            raise UsageError(
                f"--mode is {self.mode!r}: it must be weak (fixed samples per worker) or strong (fixed global batch)"
            )
        check_number("speed", self.speed)
        for name, value in {"price": self.price, "target-steps": self.target_steps, "samples": self.samples}.items():
            check_number(name, value)
        if self.samples is not None and self.mode == "strong":
            raise UsageError(
                f"--samples is {self.samples:,}, but --mode strong divides the record's global batch: leave --samples out,"
                " or use --mode weak"
            )
        if self.cores not in ("", "none") and not (
            self.cores.isascii() and self.cores.isdigit() and 0 < int(self.cores[:9]) < 10**6
        ):
            raise UsageError(f"--cores is {self.cores!r}: it must be a number of cores above 0, or none")


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
    plan = make_plan(request)
    print("\n".join([*introduce(plan), "", table(plan), "", *conclude(plan)]))
    if request.json:
        write_json(plan, Path(request.json))
    return 0


def check_number(name: str, value: float | None) -> None:
    """A UsageError for a flag's number that makes no sense."""
    low, high = _BOUNDS[name]
    if value is None or (value > 0 and low <= value <= high):
        return
    said = short(value) if isinstance(value, int) and abs(value) > 10**15 else f"{value:g}"
    if not 0 < value < math.inf:
        raise UsageError(f"--{name} is {said}: it must be a number above 0")
    raise UsageError(f"--{name} is {said}: it must be {f'{low:g} to' if low else 'at most'} {high:g}")


def make_plan(request: Request) -> Plan:
    """Predict."""
    measured = read_measured(find_record(request.record, request.runs_dir))
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


def make_cluster(name: str, measured: Measured, cores: str = "") -> tuple[Measured, Cluster]:
    """The record and the cluster of this name, with `cores` applied; `here` is made from the record's own all-reduces.

    Also with `none`, the machine's cores carry the link within a node.
    """
    if cores not in ("", "none"):
        if measured.cores is None:
            raise UsageError(
                f"--cores is {cores}, but the workers of {measured.record} have GPUs and share no cores: leave it out"
            )
        if name == HERE:
            measured = replace(measured, cores=int(cores))
    cluster = make_here(measured) if name == HERE else find_cluster(name)
    if cores == "none":
        return replace(measured, cores=None), replace(cluster, cores_per_node=None)
    return measured, replace(cluster, cores_per_node=int(cores), one_machine=True) if cores else cluster


def parse_counts(text: str, model: Model) -> list[int]:
    """`--workers 1,2,8` as numbers; if it is empty, all doublings and the most the cluster has room for."""
    if not text:
        return counts_up_to(place_limit(model))
    try:
        counts = sorted({int(each) for each in text.split(",")})
    except ValueError:
        counts = [0]
    if counts[0] < 1:
        raise UsageError(f"--workers is {short(text)}: it must be counts above 0, such as 1,2,8")
    if counts[-1] > MOST_ASKED:
        raise UsageError(f"--workers asks for more than {MOST_ASKED:,}, the largest count that can be predicted: ask for fewer")
    limit = model.cluster.most_workers()
    if limit and counts[-1] > limit:
        raise UsageError(
            f"--workers asks for {counts[-1]}: {model.cluster.name} is a single node of {limit}; choose a cluster with a"
            " network (--cluster list), or give it an inter link"
        )
    batch = model.measured.base.global_batch
    if model.mode == "strong" and counts[-1] > batch:
        raise UsageError(f"--workers asks for {counts[-1]}: a fixed global batch of {batch} allows at most {batch}")
    return counts


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
    measured, cluster = plan.model.measured, plan.model.cluster
    counts = list_words([f"{point.workers:,}" for point in measured.points])
    counts += " worker" if counts == "1" else " workers"
    buckets = plural(len(measured.buckets), "bucket")
    about = f"{cluster.name}, {cluster.about}" if cluster.about else cluster.name
    lines = [
        f"measured: {measured.task} with {counts}, {number_words(measured.base.samples)} {measured.unit} per worker and"
        f" step, {measured.gradient_bytes:,} bytes of gradients in {buckets} ({measured.record})",
        f"cluster: {about}{'; ' + cluster.source if cluster.here else ''}",
    ]
    lines += [f"warning: {each}" for each in plan.warnings]
    if cluster.unverified or not (cluster.source or cluster.here):
        lines.append(f"unverified: {cluster.unverified or 'all numbers: the file names no source'}")
    fixed = "fixed samples per worker" if plan.model.mode == "weak" else "fixed global batch"
    speed = "as fast as" if plan.request.speed == 1 else f"{plan.request.speed:g} times as fast as"
    lines.append(f"assumed: {plan.model.mode} scaling ({fixed}); a worker there is {speed} the measured one (--speed)")
    fewer = plan.model.mode == "strong" or (plan.request.samples or measured.base.samples) != measured.base.samples
    shared = fewer and len({round(point.samples) for point in measured.points}) == 1
    more = ["compute is proportional to the samples per worker; optimizer and other are fixed"] if shared else []
    if plan.request.samples and plan.model.mode == "weak":
        more.append(f"{plan.request.samples:,} {measured.unit} per worker and step")
    if plan.request.cores == "none":
        more.append("each worker has its own device and shares no cores (--cores)")
    elif plan.request.cores:
        more.append(f"all workers share {plural(int(plan.request.cores), 'core')}, on any number of nodes (--cores)")
    return [*lines, *(f"assumed: {each}" for each in (*measured.assumed, *more))]


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


def write_json(plan: Plan, path: Path) -> None:
    """Write the prediction as JSON."""
    try:
        write_file(path, json.dumps(as_json(plan), indent=2, allow_nan=False) + "\n")
    except ValueError:
        raise UsageError(f"cannot write --json {path}: a predicted number is not finite; the table shows which") from None
    except OSError as error:
        raise UsageError(f"cannot write --json {path}: {error.strerror}") from None


def as_json(plan: Plan) -> dict[str, Any]:
    """The prediction and what it is based on, as a JSON-able dict."""
    measured, model = plan.model.measured, plan.model
    return {
        "kind": "plan",
        "request": asdict(plan.request),
        "task": measured.task,
        "unit": measured.unit,
        "measured": {**asdict(measured), "noise": asdict(plan.noise) if plan.noise else None},
        "cluster": _cluster_json(model.cluster),
        "interference": None if model.interference is None else float(model.interference[0]),
        "rows": list(plan.rows),
        "returns": {**asdict(plan.returns), "most": plan.returns.most},
        "warnings": list(plan.warnings),
        "sentences": conclude(plan),
    }


def _cluster_json(cluster: Cluster) -> dict[str, Any]:
    """The cluster; `workers_per_node` is null if a node has room for any number."""
    places = None if cluster.workers_per_node >= ENDLESS else cluster.workers_per_node
    return {**asdict(cluster), "workers_per_node": places}


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
