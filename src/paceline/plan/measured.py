"""What a record says about a step: where its time goes, how many bytes it averages, and what the whole run took.

Best is a record of `paceline scale` (`scale.json`), which timed one worker and two, and all-reduces by themselves. A record of
`paceline train` will do: its last health rows hold the parts of a step. What it lacks is assumed, and `assumed` says so.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import RecordError
from paceline.measure.spread import deviation, mean, median
from paceline.plan.lag import expected_lag
from paceline.plan.links import Timing
from paceline.plan.noise import Noise, read_noise
from paceline.records import read_metrics, unit_of

PARTS = ("input", "compute", "communication", "waiting", "optimizer", "other")

_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20  # DDP's own sizes: a small one first, so that averaging starts early
_FORWARD = 1 / 3  # of compute: a backward pass takes about two forward passes' time
_SPREAD = 0.03  # of compute, from step to step


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Gradients that DDP averages in one go."""

    bytes: float
    ready: float
    """When they are there, as a fraction of the backward pass."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """A step as it was measured with so many workers."""

    workers: int
    nodes: int
    global_batch: int
    samples_per_s: float
    spread: float
    """Relative deviation of the speed from window to window."""
    parts_s: Mapping[str, float]
    """Where a step's time goes; they add up to global_batch / samples_per_s."""
    forward_s: float
    backward_s: float
    compute_spread_s: float
    """Deviation of one worker's compute from step to step."""
    reduce_s: float

    @property
    def samples(self) -> float:
        """Samples a worker and step."""
        return self.global_batch / self.workers

    @property
    def step_s(self) -> float:
        """Seconds a step."""
        return self.global_batch / self.samples_per_s


@dataclass(frozen=True, kw_only=True)
class Run:
    """The training that is to be done: so many steps at a global batch."""

    steps: int
    global_batch: int
    epochs: float
    about: str


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Everything a prediction starts from."""

    record: str
    task: str
    unit: str
    points: tuple[Point, ...]
    """By number of workers."""
    gradient_bytes: int
    buckets: tuple[Bucket, ...]
    links: tuple[Timing, ...]
    cores: int | None
    """Cores of the machine where workers are CPU workers; None where they have GPUs."""
    threads: int
    """Threads of a CPU worker."""
    backend: str
    run: Run | None
    noise: Noise | None
    assumed: tuple[str, ...]

    @property
    def base(self) -> Point:
        """The smallest count measured."""
        return self.points[0]

    @property
    def slots(self) -> int | None:
        """Workers of the machine that run at once; None: all."""
        return None if self.cores is None else max(1, self.cores // self.threads)

    def alike(self) -> tuple[Point, ...]:
        """The points with as many samples a worker and step as the base: weak scaling."""
        return tuple(point for point in self.points if math.isclose(point.samples, self.base.samples, rel_tol=0.02))


def read_measured(path: Path) -> Measured:
    """What the record in this folder says; a RecordError of one line where that is not enough."""
    if not path.is_dir():
        raise RecordError(f"no record at {path}: give the folder of a run, such as runs/NAME")
    if (path / "scale.json").exists():
        return _read_scale(path)
    if (path / "metrics.jsonl").exists():
        return _read_training(path)
    raise RecordError(
        f"{path} is no record: it holds neither scale.json nor metrics.jsonl; paceline scale TASK --workers 1,2 makes one"
    )


def _read_scale(path: Path) -> Measured:
    found = _load(path / "scale.json")
    try:
        counts = sorted(found["counts"], key=lambda count: int(count["workers"]))
        points = tuple(_scale_point(count) for count in counts)
        links = tuple(_timing(each) for each in found.get("links", ()))
        gradient_bytes = max(int(count["gradient_bytes"]) for count in counts)
        contract = counts[0].get("contract") or {}
        buckets = _scale_buckets(counts)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError) as error:
        raise RecordError(f"{path}/scale.json is incomplete ({_words(error)}): measure again with {_remedy(found)}") from None
    assumed: list[str] = []
    timed = {(each.workers, each.bytes) for each in links}
    whole = [Timing(workers=p.workers, bytes=gradient_bytes, s=p.reduce_s) for p in points if p.workers > 1]
    whole = [each for each in whole if each.s > 0 and (each.workers, each.bytes) not in timed]
    if not buckets and gradient_bytes:
        buckets = _assumed_buckets(gradient_bytes)
        assumed.append("gradients become ready evenly through the backward pass, in DDP's usual buckets")
    return Measured(
        record=path.name,
        task=str(found.get("task", "TASK")),
        unit=str(found.get("unit") or unit_of(contract)),
        points=points,
        gradient_bytes=gradient_bytes,
        buckets=buckets,
        links=(*links, *whole),
        cores=_cores(contract, found.get("environment") or {}),
        threads=_threads(contract),
        backend=str(contract.get("backend", "")),
        run=_planned_run(contract),
        noise=None,
        assumed=tuple(assumed),
    )


def _scale_point(count: Mapping[str, Any]) -> Point:
    """A count of scale.json. Its parts are scaled to add up to the time a step took in the timed windows."""
    speed, batch = _finite(count["samples_per_s"]), int(count["global_batch"])
    parts = _alone({name: _finite(count["parts_s"][name]) for name in PARTS}, int(count["workers"]))
    windows = [_finite(window) for window in count.get("windows") or ()]
    scale = batch / speed / math.fsum(parts.values())
    forward, backward = _finite(count["forward_s"]), _finite(count["backward_s"])
    return Point(
        workers=int(count["workers"]),
        nodes=int(count.get("nodes", 1)),
        global_batch=batch,
        samples_per_s=speed,
        spread=deviation(windows) / mean(windows) if windows else 0.0,
        parts_s={name: seconds * scale for name, seconds in parts.items()},
        forward_s=forward * scale,
        backward_s=backward * scale,
        compute_spread_s=_finite(count.get("compute_spread_s", 0.0)) * scale,
        reduce_s=_finite(count.get("reduce_s", 0.0)),
    )


def _timing(found: Mapping[str, Any]) -> Timing:
    return Timing(workers=int(found["workers"]), bytes=int(found["bytes"]), s=_finite(found["s"]))


def _alone(parts: Mapping[str, float], workers: int) -> dict[str, float]:
    """The parts; of one worker, which waits for nobody, what passed as such is overhead."""
    if workers > 1:
        return dict(parts)
    idle = parts["communication"] + parts["waiting"]
    return {**parts, "communication": 0.0, "waiting": 0.0, "other": parts["other"] + idle}


def _scale_buckets(counts: Sequence[Mapping[str, Any]]) -> tuple[Bucket, ...]:
    """The buckets of the largest count that has any."""
    listed: Sequence[Mapping[str, Any]] = next((count["buckets"] for count in reversed(counts) if count.get("buckets")), ())
    return tuple(Bucket(bytes=_finite(each["bytes"]), ready=min(1.0, max(0.0, _finite(each["ready"])))) for each in listed)


def _read_training(path: Path) -> Measured:
    about = _load(path / "environment.json")
    contract = about.get("contract") or {}
    try:
        rows = read_metrics(path)
        health = [row for row in rows if row.get("kind") == "health" and isinstance(row.get("parts_s"), Mapping)]
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise RecordError(f"{path}/metrics.jsonl cannot be read ({_words(error)})") from None
    used = health[len(health) // 3 :]  # the first rows hold warm-up
    remedy = f"measure with {_remedy(about)}"
    try:
        workers, batch = int(contract["workers"]), int(contract["global_batch"])
        parts = {name: mean([_finite(row["parts_s"][name]) for row in used]) for name in PARTS}
        speed = median([_finite(row["samples_per_s"]) for row in used])
        sizes = [int(row["gradient_bytes"]) for row in used if row.get("gradient_bytes")]
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError):
        raise RecordError(f"{path} does not say where a step's time goes (it has no complete health rows): {remedy}") from None
    if not used or speed <= 0:
        raise RecordError(f"{path} does not say where a step's time goes (it has no health rows): {remedy}")
    assumed = [f"the forward pass is a third of compute and gradients become ready evenly after it ({remedy} to know)"]
    if not sizes:
        assumed.append("gradients are 4 bytes a parameter")
    gradient_bytes = sizes[-1] if sizes else 4 * int(contract.get("parameters", 0))
    if not gradient_bytes:
        raise RecordError(f"{path} does not say how many bytes of gradients a step averages: {remedy}")
    point = _training_point(workers, batch, speed, parts, used)
    nodes = int(contract.get("nodes", 1))
    if workers == 1:
        assumed.append(f"a worker's compute varies by {_SPREAD:.0%} from step to step")
    return Measured(
        record=path.name,
        task=str(contract.get("task", "TASK")),
        unit=unit_of(contract),
        points=(Point(**{**vars(point), "nodes": nodes}),),
        gradient_bytes=gradient_bytes,
        buckets=_assumed_buckets(gradient_bytes),
        links=(),
        cores=_cores(contract, about),
        threads=_threads(contract),
        backend=str(contract.get("backend", "")),
        run=_done_run(rows, contract) or _planned_run(contract),
        noise=read_noise(rows),
        assumed=tuple(assumed),
    )


def _training_point(
    workers: int, batch: int, speed: float, parts: Mapping[str, float], rows: Sequence[Mapping[str, Any]]
) -> Point:
    scale = batch / speed / math.fsum(parts.values())
    parts = {name: seconds * scale for name, seconds in _alone(parts, workers).items()}
    speeds = [float(row["samples_per_s"]) for row in rows]
    waits = parts["waiting"] / expected_lag(workers) if workers > 1 else _SPREAD * parts["compute"]
    return Point(
        workers=workers,
        nodes=1,
        global_batch=batch,
        samples_per_s=speed,
        spread=deviation(speeds) / mean(speeds),
        parts_s=parts,
        forward_s=_FORWARD * parts["compute"],
        backward_s=(1 - _FORWARD) * parts["compute"],
        compute_spread_s=waits,
        reduce_s=0.0,
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
    """What the contract says a whole run would be."""
    try:
        epochs, steps = int(contract["epochs"]), int(contract["steps_per_epoch"])
        batch = int(contract["global_batch"])
    except (KeyError, TypeError, ValueError):
        return None
    about = f"{epochs} epochs at a global batch of {batch:,} (its contract)"
    return Run(steps=epochs * steps, global_batch=batch, epochs=epochs, about=about)


def _done_run(rows: Sequence[Mapping[str, Any]], contract: Mapping[str, Any]) -> Run | None:
    """What the run did, by its last epoch."""
    last = next((row for row in reversed(rows) if row.get("kind") == "epoch" and row.get("step") and row.get("epoch")), None)
    if last is None:
        return None
    batch, epochs = int(contract["global_batch"]), int(last["epoch"])
    reached = f" (accuracy {last['val_accuracy']:.4f})" if isinstance(last.get("val_accuracy"), float) else ""
    about = f"the {epochs} epochs it trained at a global batch of {batch:,}{reached}"
    return Run(steps=int(last["step"]), global_batch=batch, epochs=epochs, about=about)


def _cores(contract: Mapping[str, Any], environment: Mapping[str, Any]) -> int | None:
    """Cores that the workers may use, where they share them; a GPU worker has a device of its own."""
    devices = str(contract.get("devices", ""))
    said = re.search(r"\((\d+) cores", devices)
    cores = said[1] if said else environment.get("cores")
    return int(cores) if "CPU worker" in devices and cores else None


def _threads(contract: Mapping[str, Any]) -> int:
    said = re.search(r"(\d+) thread", str(contract.get("devices", "")))
    return max(1, int(said[1])) if said else 1


def _finite(value: Any) -> float:
    """The number; a ValueError where it is none, since records write those as text."""
    number = float(value)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{number} where a number is needed")
    return number


def _load(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from None
    except ValueError:
        raise RecordError(f"{path} is not valid JSON: it was cut short, or is not a record's") from None
    if not isinstance(found, dict):
        raise RecordError(f"{path} holds no table: it is not a record's")
    return found


def _remedy(about: Mapping[str, Any]) -> str:
    return f"paceline scale {about.get('task', 'TASK')} --workers 1,2"


def _words(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)
