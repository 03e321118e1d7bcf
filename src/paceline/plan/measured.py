"""What a record measured of a step: where its time goes, how many bytes it averages, and what the whole run took.

A record of `paceline scale` (`scale.json`) is best: it timed one worker, two workers, and all-reduces without training. A
record of `paceline train` works, too: its last health rows have the components of a step. If its batch changed, every phase is
a point of its own (`stretches.py`): a run on one worker then measures several numbers of samples per worker. What is missing is
assumed; `assumed` lists it.
"""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config import Config
from paceline.errors import RecordError, UsageError
from paceline.output import plural
from paceline.phases import Phase
from paceline.plan.fields import BadField, load, number, own_flags, table_of, task_of, whole, words
from paceline.plan.lag import expected_lag
from paceline.plan.links import Timing
from paceline.plan.points import Bucket, Measured, Point, Run
from paceline.plan.stretches import read_phases, settle_workers, split_rows
from paceline.plan.tradeoff import read_noise_scale
from paceline.records import COMPONENTS, read_metrics, unit_of, with_new_names
from paceline.spread import deviation, mean, median
from paceline.toml import read_toml

_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20  # DDP's sizes: a small one first, so that averaging starts early
_FORWARD = 1 / 3  # of compute: a backward pass takes about as long as two forward passes
_SPREAD = 0.03  # of compute, from step to step

_NO_PHASE_TIMES = (
    "{path} does not say how long the steps of a phase take: each of its health rows has steps of several batches; train again"
    " with phases of at least one whole epoch"
)


def read_measured(path: Path) -> Measured:
    """Read the record in this folder; a one-line RecordError if it does not say enough."""
    if not path.is_dir():
        raise RecordError(f"no record at {path}: give the folder of a run, such as runs/NAME")
    if (path / "scale.json").exists():
        return _read_scale(path)
    if (path / "metrics.jsonl").exists():
        return _read_training(path)
    raise RecordError(
        f"{path} is not a record: it has neither scale.json nor metrics.jsonl; paceline scale TASK --workers 1,2 makes one"
    )


def _read_scale(path: Path) -> Measured:
    found = load(path / "scale.json")
    try:
        listed = found["counts"]
        if not isinstance(listed, list) or not listed:
            raise BadField("it measured no worker counts")
        counts = sorted(listed, key=lambda count: whole(count, "workers"))
        points = tuple(_scale_point(count) for count in counts)
        nodes = {point.workers: point.nodes for point in points}
        links = tuple(_timing(each, nodes) for each in found.get("links") or ())
        gradient_bytes = max(whole(count, "gradient_bytes", least=0) for count in counts)
        contract = table_of(counts[0], "contract")
        buckets = _scale_buckets(counts)
        cores, run = _cores(contract, table_of(found, "environment")), _planned_run(contract)
    except _BROKEN as error:
        again = f"paceline scale {task_of(found)}{own_flags(_first_contract(found))} --workers 1,2"
        raise RecordError(f"{path}/scale.json is incomplete ({words(error)}): measure again with {again}") from None
    assumed: list[str] = []
    timed = {(each.workers, each.bytes) for each in links}
    sums = [Timing(workers=p.workers, nodes=p.nodes, bytes=gradient_bytes, s=p.reduce_s) for p in points if p.workers > 1]
    sums = [each for each in sums if each.s > 0 and (each.workers, each.bytes) not in timed]
    if not buckets and gradient_bytes:
        buckets = _assumed_buckets(gradient_bytes)
        assumed.append("gradients become ready at an even rate during the backward pass, in DDP's usual buckets")
    return Measured(
        record=path.name,
        task=task_of(found),
        unit=str(found.get("unit") or unit_of(contract)),
        points=points,
        gradient_bytes=gradient_bytes,
        buckets=buckets,
        links=(*links, *sums),
        cores=cores,
        threads=_threads(contract),
        device=_device(contract),
        precision=str(contract.get("precision", "")),
        backend=str(contract.get("backend", "")),
        run=run,
        noise=None,
        assumed=tuple(assumed),
        flags=own_flags(contract),
        virtual_workers=_virtual_workers(contract),
        epochs=_epochs(contract),
    )


def _first_contract(found: Mapping[str, Any]) -> Any:
    """The first contract in a scale.json that may be broken; None if it has none."""
    counts = found.get("counts")
    listed = [each.get("contract") for each in counts if isinstance(each, Mapping)] if isinstance(counts, list) else []
    return next((each for each in listed if each), None)


_BROKEN = (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError, OverflowError)
"""Errors that reading a damaged or foreign record may raise."""


def _scale_point(count: Mapping[str, Any]) -> Point:
    """A worker count of scale.json. Its components are scaled to add up to the step time of the timed windows."""
    workers, batch, speed = whole(count, "workers"), whole(count, "global_batch"), number(count, "samples_per_s", above=True)
    components = _alone({name: number(with_new_names(count)["components_s"], name) for name in COMPONENTS}, workers)
    windows = [number({"windows": window}, "windows") for window in count.get("windows") or ()]
    scale = _scale(batch / speed, components)
    return Point(
        workers=workers,
        nodes=whole(count, "nodes") if "nodes" in count else 1,
        global_batch=batch,
        samples_per_s=speed,
        spread=deviation(windows) / mean(windows) if any(windows) else 0.0,
        components_s={name: seconds * scale for name, seconds in components.items()},
        forward_s=number(count, "forward_s") * scale,
        backward_s=number(count, "backward_s") * scale,
        compute_spread_s=number({"compute_spread_s": 0.0, **count}, "compute_spread_s") * scale,
        reduce_s=number({"reduce_s": 0.0, **count}, "reduce_s"),
        windows=tuple(windows),
        timed=1 / scale,
    )


def _scale(step_s: float, components: Mapping[str, float]) -> float:
    """The factor that makes the components add up to the step."""
    total = math.fsum(components.values())
    if total <= 0:
        raise BadField("components_s are all 0")
    return step_s / total


def _timing(found: Mapping[str, Any], nodes: Mapping[int, int]) -> Timing:
    """A timed all-reduce; it used as many nodes as training with that number of workers."""
    workers = whole(found, "workers")
    return Timing(workers=workers, nodes=nodes.get(workers, 1), bytes=whole(found, "bytes", least=0), s=number(found, "s"))


def _alone(components: Mapping[str, float], workers: int) -> dict[str, float]:
    """The components. A single worker has nobody to wait for: its communication and waiting count as overhead."""
    if workers > 1:
        return dict(components)
    idle = components["communication"] + components["waiting"]
    return {**components, "communication": 0.0, "waiting": 0.0, "other": components["other"] + idle}


def _scale_buckets(counts: Sequence[Mapping[str, Any]]) -> tuple[Bucket, ...]:
    """The buckets of the largest worker count that has any."""
    listed: Sequence[Mapping[str, Any]] = next((count["buckets"] for count in reversed(counts) if count.get("buckets")), ())
    return tuple(Bucket(bytes=number(each, "bytes"), ready=min(1.0, number(each, "ready"))) for each in listed)


def _read_training(path: Path) -> Measured:
    about = load(path / "environment.json")
    flags = own_flags(about.get("contract"))
    remedy = f"measure with paceline scale {task_of(about)}{flags} --workers 1,2"
    try:
        contract = table_of(about, "contract")
        workers, batch, nodes = (whole({"nodes": 1, **contract}, name) for name in ("workers", "global_batch", "nodes"))
        parameters = whole({"parameters": 0, **contract}, "parameters", least=0)
        planned, virtual_workers = _planned_run(contract), _virtual_workers(contract)
    except _BROKEN as error:
        raise RecordError(f"{path}/environment.json has no complete contract ({words(error)}): {remedy}") from None
    try:
        rows, contract, chosen = settle_workers(read_metrics(path), contract)
        workers, nodes, cores = whole(contract, "workers"), whole({"nodes": 1, **contract}, "nodes"), _cores(contract, about)
        health = [row for row in rows if row.get("kind") == "health" and isinstance(row.get("components_s"), Mapping)]
        phases = read_phases(rows, contract)
        run, epochs = _done_run(rows, contract, phases) or planned, _epochs_done(rows) or _epochs(contract)
    except (OSError, RecursionError, *_BROKEN) as error:
        raise RecordError(f"{path}/metrics.jsonl cannot be read ({words(error)}): {remedy}") from None
    if not health:
        raise RecordError(f"{path} does not say where a step's time goes (it has no health rows): {remedy}")
    used = health[len(health) // 3 :]  # the first rows include warm-up
    try:
        single = phases[0].global_batch if phases else batch
        grows = len(phases) > 1
        points = _phase_points(workers, nodes, rows) if grows else (_training_point(workers, nodes, single, used),)
        sizes = [whole(row, "gradient_bytes", least=0) for row in used if row.get("gradient_bytes")]
    except _BROKEN as error:
        why = f"its health rows are incomplete: {words(error)}"
        raise RecordError(f"{path} does not say where a step's time goes ({why}): {remedy}") from None
    gradient_bytes = sizes[-1] if sizes else 4 * parameters
    if not gradient_bytes:
        raise RecordError(f"{path} does not say how many bytes of gradients a step averages: {remedy}")
    if not points:
        raise RecordError(_NO_PHASE_TIMES.format(path=path))
    return Measured(
        record=path.name,
        task=task_of(about),
        unit=unit_of(contract),
        points=points,
        gradient_bytes=gradient_bytes,
        buckets=_assumed_buckets(gradient_bytes),
        links=(),
        cores=cores,
        threads=_threads(contract),
        device=_device(contract),
        precision=str(contract.get("precision", "")),
        backend=str(contract.get("backend", "")),
        run=run,
        noise=read_noise_scale(rows),
        assumed=tuple(filter(None, (chosen, *_assumptions(workers, sizes, remedy)))),
        chosen=chosen,
        flags=flags,
        phases=phases,
        virtual_workers=virtual_workers,
        smallest_part=_smallest_part(path),
        epochs=epochs,
        steps=next((row["step"] for row in reversed(rows) if row.get("kind") == "epoch" and row.get("step")), None),
    )


def _assumptions(workers: int, sizes: Sequence[int], remedy: str) -> tuple[str, ...]:
    """What a prediction from a training run assumes. `sizes`: the gradient bytes that its health rows say."""
    assumed = [
        f"the forward pass takes a third of compute, and gradients become ready at an even rate after it ({remedy} to know)"
    ]
    if not sizes:
        assumed.append("gradients have 4 bytes per parameter")
    if workers == 1:
        assumed.append(f"a worker's compute varies by {_SPREAD:.0%} from step to step")
    return tuple(assumed)


def _smallest_part(path: Path) -> int:
    """As the run was configured; the default if config.toml cannot be read."""
    with suppress(UsageError, BadField):
        return whole({"smallest_part": Config.smallest_part, **read_toml(path / "config.toml", "config.toml")}, "smallest_part")
    return Config.smallest_part


def _phase_points(workers: int, nodes: int, rows: Sequence[Mapping[str, Any]]) -> tuple[Point, ...]:
    """A point for each number of samples per worker and batch, the largest first, without the run's first rows (warm-up)."""
    found: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for i, stretch in enumerate(split_rows(rows)):
        for row in stretch.rows if i else stretch.rows[len(stretch.rows) // 3 :]:
            found.setdefault((stretch.samples(row, workers), stretch.phase.global_batch), []).append(row)
    points = []
    for (samples, batch), timed in sorted(found.items(), reverse=True):
        step = median([_mean_batch(row, batch) for row in timed])  # an epoch may end with smaller steps
        point = _training_point(workers, nodes, round(step), timed)
        points.append(replace(point, slowest_samples=samples * step / batch))
    return tuple(points)


def _mean_batch(row: Mapping[str, Any], batch: int) -> float:
    """Samples per step in a health row; at most the batch of its phase."""
    return min(float(batch), number(row, "samples_per_s", above=True) * number(row, "step_s")) if "step_s" in row else batch


def _training_point(workers: int, nodes: int, batch: int, rows: Sequence[Mapping[str, Any]]) -> Point:
    """The mean step of the health rows."""
    means = {name: mean([number(row["components_s"], name) for row in rows]) for name in COMPONENTS}
    speeds = [number(row, "samples_per_s", above=True) for row in rows]
    speed = median(speeds)
    scale = _scale(batch / speed, means)
    components = {name: seconds * scale for name, seconds in _alone(means, workers).items()}
    waits = components["waiting"] / expected_lag(workers) if workers > 1 else _SPREAD * components["compute"]
    return Point(
        workers=workers,
        nodes=nodes,
        global_batch=batch,
        samples_per_s=speed,
        spread=deviation(speeds) / mean(speeds),
        components_s=components,
        forward_s=_FORWARD * components["compute"],
        backward_s=(1 - _FORWARD) * components["compute"],
        compute_spread_s=waits,
        reduce_s=0.0,
        windows=tuple(speeds),
        steps=math.fsum(number({"steps": 1, **row}, "steps", above=True) for row in rows),
    )


def _assumed_buckets(gradient_bytes: int) -> tuple[Bucket, ...]:
    """DDP's usual buckets, each ready when its share of the backward pass is done."""
    sizes, left = [min(gradient_bytes, _FIRST_BUCKET)], gradient_bytes - min(gradient_bytes, _FIRST_BUCKET)
    while left > 0:
        sizes.append(min(left, _BUCKET))
        left -= sizes[-1]
    done, buckets = 0, []
    for size in sizes:
        done += size
        buckets.append(Bucket(bytes=size, ready=done / gradient_bytes))
    return tuple(buckets)


def _planned_run(contract: Mapping[str, Any]) -> Run | None:
    """The whole run, from its contract."""
    if any(contract.get(name) is None for name in ("epochs", "steps_per_epoch", "global_batch")):
        return None
    epochs, steps, batch = (whole(contract, name) for name in ("epochs", "steps_per_epoch", "global_batch"))
    about = f"{plural(epochs, 'epoch')} at a global batch of {batch:,} (its contract)"
    return Run(steps=epochs * steps, global_batch=batch, train_samples=_train_samples(contract, steps), about=about)


def _done_run(rows: Sequence[Mapping[str, Any]], contract: Mapping[str, Any], phases: Sequence[Phase] = ()) -> Run | None:
    """What the run did, from its last epoch. A run whose batch changed counts as one at its largest batch."""
    last = next((row for row in reversed(rows) if row.get("kind") == "epoch" and row.get("step") and row.get("epoch")), None)
    if last is None:
        return None
    batch, epochs, steps = whole(contract, "global_batch"), whole(last, "epoch"), whole(last, "step")
    reached = f" (accuracy {last['val_accuracy']:.4f})" if isinstance(last.get("val_accuracy"), float) else ""
    about = f"the {plural(epochs, 'epoch')} it trained at a global batch of {batch:,}{reached}"
    train = _train_samples(contract, math.ceil(steps / epochs))
    if len(phases) > 1:
        steps, about = epochs * math.ceil(train / batch), f"{plural(epochs, 'epoch')} at a constant global batch of {batch:,}"
    return Run(steps=steps, global_batch=batch, train_samples=train, about=about)


def _epochs_done(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The last epoch that ended."""
    return next((whole(row, "epoch") for row in reversed(rows) if row.get("kind") == "epoch" and row.get("epoch")), None)


def _epochs(contract: Mapping[str, Any]) -> int | None:
    return whole(contract, "epochs") if contract.get("epochs") else None


def _virtual_workers(contract: Mapping[str, Any]) -> int:
    return whole(contract, "virtual_workers") if contract.get("virtual_workers") else 1


def _train_samples(contract: Mapping[str, Any], steps_per_epoch: int) -> int:
    """Samples per epoch; if the contract does not say, as many as its steps use."""
    said = next((name for name in ("epoch_samples", "train_samples") if contract.get(name)), None)
    return whole(contract, said) if said else steps_per_epoch * whole(contract, "global_batch")


def _cores(contract: Mapping[str, Any], environment: Mapping[str, Any]) -> int | None:
    """The cores that CPU workers share; None for GPU workers, each with its own device."""
    devices = str(contract.get("devices", ""))
    said = re.search(r"\((\d+) cores?", devices)
    cores = int(said[1]) if said else environment.get("cores")
    return whole({"cores": cores}, "cores") if "CPU worker" in devices and cores else None


def _device(contract: Mapping[str, Any]) -> str:
    """`CPU`, or the GPU's name: devices are `2 CPU workers, ...`, `4 x NVIDIA H200` or `2 workers sharing 1 x NVIDIA H200`."""
    devices = str(contract.get("devices", ""))
    return "CPU" if "CPU worker" in devices else devices.partition(" x ")[2]


def _threads(contract: Mapping[str, Any]) -> int:
    said = re.search(r"(\d+) thread", str(contract.get("devices", "")))
    return max(1, int(said[1])) if said else 1
