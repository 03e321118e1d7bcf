"""How long a step takes with P workers.

    step(P) = input + compute + optimizer + other  +  exposed(P)  +  waiting(P)

- **What a worker does by itself** is as measured. On the machine of the record (`--cluster here`) it is interpolated between
  the measured counts and constant beyond the last; on other clusters in the same way, by workers per node. If there are more
  CPU workers than a node has cores (with `--cores`: than the whole machine has), they share them fairly: w workers on c cores
  take w / c times as long, and so do links carried by cores (gloo within a node). `speed` divides a worker's own time.
- **Weak scaling** keeps the samples per worker, **strong scaling** the global batch: the slowest worker has ceil(batch / P). If
  the samples per worker differ from those measured, input is proportional to them, optimizer and other are fixed, and compute
  follows a line through the measured counts if those had different samples per worker (its height at 0 is the floor), else it
  is proportional. The cost of sharing cores is taken out of the measured counts first; the prediction adds its own.
- **Batch schedules** (`step_of`): in a phase of W parts, the slowest worker has ceil(W / P) of them. If the record measured
  several numbers of samples per worker with one count (a run whose batch changed), all times are interpolated between these
  points. Beyond them, input and compute follow the line through the nearest two, between the bounds `constant` and
  `proportional to the samples`, from which error bars are drawn; optimizer and other stay as at the nearest point.
- **exposed(P)**: DDP's buckets, one after the other. Bucket i starts when its gradients are ready (measured, as a fraction of
  the backward pass) and the previous bucket is done, and takes one all-reduce (`links.py`). Exposed is what ends after the
  backward pass (Li et al. 2020, arXiv:2006.15704, section 3.2).
- On the machine of the record, all-reduces share cores and memory with training. A factor on them is set so that the exposed
  time of the largest measured count is reproduced.
- **waiting(P)** is E[max of P normals] times the deviation of a worker's compute (`lag.py`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from paceline.phases import Phase
from paceline.plan.cluster import Cluster
from paceline.plan.draws import Draws
from paceline.plan.lag import expected_lag
from paceline.plan.links import Array, crowd, faster_s, ring_s
from paceline.plan.points import Measured, Point

Mode = Literal["weak", "strong"]

_OWN = ("input", "compute", "optimizer", "other")
_FIXED = frozenset({"optimizer", "other"})  # they do not depend on the number of samples
_CALIBRATED = (0.25, 20.0)
"""The range of the factor between an all-reduce in training and one without training."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A predicted step; one value per draw."""

    workers: int
    nodes: int
    global_batch: float
    components_s: dict[str, Array]
    reduce_s: Array
    """The all-reduces of all buckets, hidden or not."""
    latency_s: Array
    """The latency included in `reduce_s`."""

    @property
    def step_s(self) -> Array:
        """The time of the whole step."""
        return _total(list(self.components_s.values()))

    @property
    def samples_per_s(self) -> Array:
        """The speed."""
        return self.global_batch / self.step_s


@dataclass(frozen=True, kw_only=True)
class Model:
    """Predicts the steps of a record's run on a cluster."""

    measured: Measured
    cluster: Cluster
    draws: Draws
    mode: Mode = "weak"
    speed: float = 1.0
    samples: float | None = None
    """Samples per worker and step in weak scaling; None: as measured."""
    interference: Array | None = None
    """The factor by which an all-reduce takes longer in training, one value per draw; None: 1."""

    def step(self, workers: int) -> Step:
        """The step with this number of workers."""
        base = self.measured.base
        batch = (self.samples or base.samples) * workers if self.mode == "weak" else float(base.global_batch)
        own = self._own(workers, batch / workers if self.mode == "weak" else math.ceil(batch / workers))
        return self._assemble(workers, workers, batch, own)

    def step_of(self, workers: int, phase: Phase, batch: int) -> Step:
        """A step of a batch schedule: in this phase, and with this batch, which is smaller at the end of an epoch."""
        active = min(workers, phase.parts)
        own = by_samples(self.measured, slowest_samples(phase, batch, workers), self.draws.beyond, self._crowded)
        factor = crowd(self._sharing(active), self._slots()) / self.speed * self.draws.slowness
        return self._assemble(workers, active, batch, {name: seconds * factor for name, seconds in own.items()})

    def _assemble(self, workers: int, active: int, batch: float, own: dict[str, Array]) -> Step:
        """The step of `workers`, of which `active` compute, from what one of these does by itself."""
        durations = [self._reduce(workers, bucket.bytes) for bucket in self.measured.buckets]
        backward = own.pop("backward")
        exposed = expose([bucket.ready for bucket in self.measured.buckets], durations, backward)
        waiting = expected_lag(active) * self._deviation() * self.draws.lag * own["compute"]
        nothing = np.zeros_like(backward)
        return Step(
            workers=workers,
            nodes=self.cluster.nodes(workers),
            global_batch=batch,
            components_s={**own, "communication": exposed, "waiting": waiting},
            reduce_s=_total([nothing, *(whole for whole, _ in durations)]),
            latency_s=_total([nothing, *(latency for _, latency in durations)]),
        )

    def crowding(self, workers: int) -> float:
        """How much slower sharing cores makes the workers, relative to the measured step that the prediction is based on."""
        there = crowd(self._sharing(workers), self._slots())
        if not self.as_measured():
            return there / self._crowded(self.measured.base)
        known = sorted(self._together(point) for point in self.measured.alike())
        nearest = min(max(self._key(workers), known[0]), known[-1])
        return there / crowd(self._sharing(nearest) if self.cluster.here else nearest, self.measured.slots)

    def interference_at_limit(self) -> bool:
        """Whether the measured factor between all-reduces in training and without is outside the model's range."""
        if self.interference is None:
            return False
        low, high = _CALIBRATED
        return not 1.01 * low < float(self.interference[0]) < 0.99 * high

    def as_measured(self) -> bool:
        """Whether workers have as many samples per step as in the measurement."""
        return self.mode == "weak" and self.samples in (None, self.measured.base.samples)

    def _own(self, workers: int, samples: float) -> dict[str, Array]:
        """The components that a worker does by itself, and its backward pass."""
        found = self._at(self._key(workers)) if self.as_measured() else self._at_samples(samples)
        factor = self.crowding(workers) / self.speed * self.draws.slowness
        return {name: seconds * factor for name, seconds in found.items()}

    def _sharing(self, workers: int) -> int:
        """How many of these workers share cores."""
        return workers if self.cluster.one_machine else min(workers, self.cluster.workers_per_node)

    def _key(self, workers: int) -> int:
        """The key for interpolation: the workers (here), or the workers that share a node's cores (other clusters)."""
        return workers if self.cluster.here else self._sharing(workers)

    def _together(self, point: Point) -> int:
        """The same key for a measured count."""
        return point.workers if self.cluster.here or self.cluster.one_machine else -(-point.workers // point.nodes)

    def _crowded(self, point: Point) -> float:
        """How many times longer sharing cores made the workers of a measured count take."""
        sharing = point.workers if self.cluster.one_machine else math.ceil(point.workers / point.nodes)
        return crowd(sharing, self.measured.slots)

    def _at(self, key: int) -> dict[str, float]:
        """Interpolate between measured counts, by workers (here) or by workers per node (other clusters)."""
        points: dict[int, Point] = {}
        for point in self.measured.alike():
            points.setdefault(self._together(point), point)
        keys = sorted(points)
        at = {name: float(np.interp(key, keys, [points[k].components_s[name] for k in keys])) for name in _OWN}
        return {**at, "backward": float(np.interp(key, keys, [points[k].backward_s for k in keys]))}

    def _at_samples(self, samples: float) -> dict[str, float]:
        """With this number of samples per worker."""
        base = self.measured.base
        if len(self.measured.fewest()) > 1:  # a run whose batch changed
            found = by_samples(self.measured, samples, np.zeros(1), self._crowded)
            return {name: float(seconds[0]) * self._crowded(base) for name, seconds in found.items()}
        most = math.ceil(base.samples)
        alone = [point.components_s["compute"] / self._crowded(point) for point in self.measured.points]
        points = [(float(math.ceil(point.samples)), s) for point, s in zip(self.measured.points, alone, strict=True)]
        compute = base.components_s["compute"] * _line(points, samples) / _line(points, most)
        share = samples / most
        return {
            "input": base.components_s["input"] * share,
            "compute": compute,
            "optimizer": base.components_s["optimizer"],
            "other": base.components_s["other"],
            "backward": base.backward_s * compute / base.components_s["compute"] if base.components_s["compute"] else 0.0,
        }

    def _slots(self) -> int | None:
        """How many workers of a node can run at the same time; None: all."""
        cores = self.cluster.cores_per_node
        return None if cores is None else max(1, cores // self.measured.threads)

    def _deviation(self) -> float:
        """The relative deviation of a worker's compute: derived from the measured waiting; for one worker, as measured.

        Waiting is the better measure: what slows all workers at once makes none of them wait.
        """
        point = self.measured.widest
        if not point.components_s["compute"]:
            return 0.0
        if point.workers < 2:
            return point.compute_spread_s / point.components_s["compute"]
        return point.components_s["waiting"] / point.components_s["compute"] / expected_lag(point.workers)

    def _reduce(self, workers: int, size: float) -> tuple[Array, Array]:
        """An all-reduce of this many bytes in training, and its latency."""
        factor = self.draws.reduce if self.interference is None else self.interference
        whole = all_reduce_s(self.cluster, self.draws, workers, size)
        return whole * factor, all_reduce_s(self.cluster, self.draws, workers, 0.0) * factor


def make_model(
    measured: Measured, cluster: Cluster, draws: Draws, *, mode: Mode = "weak", speed: float = 1.0, samples: float | None = None
) -> Model:
    """A model; on the machine of the record, its all-reduces are as slow in training as they were measured."""
    model = Model(measured=measured, cluster=cluster, draws=draws, mode=mode, speed=speed, samples=samples)
    point = measured.widest
    if not cluster.here or point.workers < 2 or not measured.buckets:
        return model
    return replace(model, interference=_interference(model, point))


def all_reduce_s(cluster: Cluster, draws: Draws, workers: int, size: float) -> Array:
    """An all-reduce without training: over one node's link, or within nodes, between nodes and within nodes again."""
    nodes, on_node = cluster.nodes(workers), min(workers, cluster.workers_per_node)
    total = np.zeros_like(draws.slowness)
    if on_node > 1 and draws.intra is not None:
        total = total + ring_s(draws.intra, on_node, size) * crowd(on_node, cluster.link_cores)
    if nodes > 1 and draws.inter is not None:
        total = total + faster_s(draws.inter, nodes, size, trees=cluster.trees)
    return total


def expose(ready: list[float], durations: list[tuple[Array, Array]], backward_s: Array) -> Array:
    """How long after the end of the backward pass the last bucket is averaged."""
    end = np.zeros_like(backward_s)
    for share, (duration, _) in zip(ready, durations, strict=True):
        end = np.maximum(end, share * backward_s) + duration
    return np.maximum(0.0, end - backward_s)


def slowest_samples(phase: Phase, batch: int, workers: int) -> int:
    """The samples of the worker with the most parts, in a step of this batch. The sizes of parts differ by one at most."""
    return min(batch, -(-phase.parts // workers) * -(-batch // phase.parts))


def by_samples(
    measured: Measured, samples: float, beyond: Array, crowded: Callable[[Point], float] = lambda point: 1.0
) -> dict[str, Array]:
    """The components that a worker does by itself with this number of samples, and its backward pass; one value per draw.

    `crowded`: how many times longer sharing cores made the workers of a measured count take.
    """
    points: dict[float, dict[str, float]] = {}
    weights: dict[float, float] = {}
    for point in measured.fewest():
        found = {**{name: point.components_s[name] for name in _OWN}, "backward": point.backward_s}
        points.setdefault(point.samples, {name: seconds / crowded(point) for name, seconds in found.items()})
        weights.setdefault(point.samples, point.steps)
    seconds = {name: [each[name] for each in points.values()] for name in (*_OWN, "backward")}
    for name in seconds.keys() - _FIXED:
        seconds[name] = rising(seconds[name], list(weights.values()))
    return {name: _at_draws(list(points), each, name, samples, beyond) for name, each in seconds.items()}


def _at_draws(known: list[float], seconds: list[float], name: str, samples: float, beyond: Array) -> Array:
    """Seconds at this many samples: interpolated within the known points, drawn between bounds beyond them."""
    at = float(np.interp(samples, known, seconds))
    end = 0 if samples < known[0] else -1
    if known[0] <= samples <= known[-1] or name in _FIXED:
        return np.full_like(beyond, at)
    proportional = at * samples / known[end]
    nominal = proportional
    if len(known) > 1:
        one, two = (0, 1) if end == 0 else (-2, -1)
        nominal = at + (seconds[two] - seconds[one]) / (known[two] - known[one]) * (samples - known[end])
    low, high = min(at, proportional), max(at, proportional)
    nominal = min(max(nominal, low), high)
    if end:  # more samples than measured cannot take less time than the line says
        low = nominal
    return nominal + np.where(beyond < 0, beyond * (nominal - low), beyond * (high - nominal))


def rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest values that never fall (pool adjacent violators): more samples do not take less time, except by noise."""
    pools: list[list[tuple[float, float]]] = []
    for pair in zip(values, weights, strict=True):
        pools.append([pair])
        while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    return [_mean(pool) for pool in pools for _ in pool]


def _mean(pool: Sequence[tuple[float, float]]) -> float:
    """The mean of (value, weight) pairs."""
    return math.fsum(value * weight for value, weight in pool) / math.fsum(weight for _, weight in pool)


def _interference(model: Model, point: Point) -> Array | None:
    """The factor on all-reduces that reproduces this point's measured exposed time, found by bisection.

    Every draw of the link gets its own factor, so that all draws agree with the measurement. None: nothing was exposed.
    """
    alone = replace(model, interference=np.ones_like(model.draws.slowness))
    by_itself = [alone._reduce(point.workers, bucket.bytes)[0] for bucket in model.measured.buckets]
    ready = [bucket.ready for bucket in model.measured.buckets]
    backward = point.backward_s * model.draws.slowness
    target = point.components_s["communication"] * model.draws.reduce
    if target[0] <= 0:
        return None
    low, high = (np.full_like(backward, each) for each in _CALIBRATED)
    for _ in range(60):
        middle = (low + high) / 2
        short = expose(ready, [(s * middle, s) for s in by_itself], backward) < target
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    return (low + high) / 2


def _total(values: list[Array]) -> Array:
    return np.asarray(np.sum(values, axis=0), dtype=np.float64)


def _line(points: list[tuple[float, float]], samples: float) -> float:
    """Seconds at this many samples: the least-squares line, without negative slope or floor; proportional for one point."""
    counts = np.array([count for count, _ in points])
    seconds = np.array([second for _, second in points])
    if np.ptp(counts) < 1e-9:
        return float(seconds[0] * samples / counts[0])
    slope, floor = (float(each) for each in np.polyfit(counts, seconds, 1))
    if floor < 0:
        slope, floor = float(counts @ seconds / (counts @ counts)), 0.0
    elif slope < 0:
        slope, floor = 0.0, float(seconds.mean())
    return floor + slope * samples
