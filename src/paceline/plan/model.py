"""How long a step takes with P workers.

    step(P) = input + compute + optimizer + other  +  exposed(P)  +  waiting(P)

- **What a worker does by itself** is as measured. On the machine that was measured (`--cluster here`) it is interpolated
  between the measured counts and constant beyond the last; elsewhere likewise, by workers a node. CPU workers that outnumber a
  node's cores (`--cores`: one machine's, whatever the nodes) share them fairly: w workers on c cores take w / c times as long,
  and so does what cores carry (gloo within a node). `speed` divides a worker's own time.
- **Weak scaling** keeps the samples a worker, **strong scaling** the global batch: the slowest worker has ceil(batch / P). With
  other samples a worker than measured, input is proportional to them, optimizer and other are fixed, compute is a line through
  the measured counts where those had different samples a worker (its height at 0 is the floor), else proportional. What sharing
  cores cost those counts is taken out of them first: the prediction puts its own back in.
- **exposed(P)**: DDP's buckets one after the other. Bucket i starts when its gradients are there (measured, as a fraction of
  the backward pass) and the one before is done, and takes an all-reduce (`links.py`); exposed is what ends after the backward
  pass (Li et al. 2020, arXiv:2006.15704, section 3.2).
- On the machine that was measured, all-reduces share cores and memory with training: a factor on them is set so that the
  exposed time of the largest count measured comes out as it was.
- **waiting(P)** is E[max of P normals] times the deviation of a worker's compute (`lag.py`).
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from paceline.plan.cluster import Cluster
from paceline.plan.draws import Draws
from paceline.plan.lag import expected_lag
from paceline.plan.links import Array, crowd, faster_s, ring_s
from paceline.plan.measured import Measured, Point

Mode = Literal["weak", "strong"]

_OWN = ("input", "compute", "optimizer", "other")
_CALIBRATED = (0.25, 20.0)
"""How much faster or slower all-reduces may be in training than by themselves."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A predicted step; one value a draw."""

    workers: int
    nodes: int
    global_batch: float
    components_s: dict[str, Array]
    reduce_s: Array
    """All buckets' all-reduces, hidden or not."""
    latency_s: Array
    """What of that is latency."""

    @property
    def step_s(self) -> Array:
        """The whole step."""
        return _total(list(self.components_s.values()))

    @property
    def samples_per_s(self) -> Array:
        """Its speed."""
        return self.global_batch / self.step_s


@dataclass(frozen=True, kw_only=True)
class Model:
    """A record on a cluster."""

    measured: Measured
    cluster: Cluster
    draws: Draws
    mode: Mode = "weak"
    speed: float = 1.0
    samples: float | None = None
    """Samples a worker and step in weak scaling; None: as measured."""
    interference: Array | None = None
    """How much longer an all-reduce takes in training than by itself, one value a draw; None: no longer."""

    def step(self, workers: int) -> Step:
        """The step of so many workers."""
        base = self.measured.base
        batch = (self.samples or base.samples) * workers if self.mode == "weak" else float(base.global_batch)
        own = self._own(workers, batch / workers if self.mode == "weak" else math.ceil(batch / workers))
        durations = [self._reduce(workers, bucket.bytes) for bucket in self.measured.buckets]
        backward = own.pop("backward")
        exposed = expose([bucket.ready for bucket in self.measured.buckets], durations, backward)
        waiting = expected_lag(workers) * self._deviation() * self.draws.lag * own["compute"]
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
        """How much slower workers are for taking turns on cores than those whose measured step is the prediction's basis."""
        there = crowd(self._sharing(workers), self._slots())
        if not self._as_measured():
            return there / self._crowded(self.measured.base)
        known = sorted(self._together(point) for point in self.measured.alike())
        nearest = min(max(self._key(workers), known[0]), known[-1])
        return there / crowd(self._sharing(nearest) if self.cluster.here else nearest, self.measured.slots)

    def interference_at_limit(self) -> bool:
        """Whether all-reduces in training were further from those by themselves than the model allows for."""
        if self.interference is None:
            return False
        low, high = _CALIBRATED
        return not 1.01 * low < float(self.interference[0]) < 0.99 * high

    def _own(self, workers: int, samples: float) -> dict[str, Array]:
        """What a worker does by itself, and its backward pass."""
        found = self._at(self._key(workers)) if self._as_measured() else self._at_samples(samples)
        factor = self.crowding(workers) / self.speed * self.draws.slowness
        return {name: seconds * factor for name, seconds in found.items()}

    def _as_measured(self) -> bool:
        """Whether workers have as many samples a step as they had when they were measured."""
        return self.mode == "weak" and self.samples in (None, self.measured.base.samples)

    def _sharing(self, workers: int) -> int:
        """How many of so many workers share cores."""
        return workers if self.cluster.one_machine else min(workers, self.cluster.workers_per_node)

    def _key(self, workers: int) -> int:
        """By what measured counts are compared: workers (here), or those that share a node's cores (elsewhere)."""
        return workers if self.cluster.here else self._sharing(workers)

    def _together(self, point: Point) -> int:
        """The same of a count that was measured."""
        return point.workers if self.cluster.here or self.cluster.one_machine else -(-point.workers // point.nodes)

    def _crowded(self, point: Point) -> float:
        """How many times as long the workers of a count took for taking turns on cores when they were measured."""
        sharing = point.workers if self.cluster.one_machine else math.ceil(point.workers / point.nodes)
        return crowd(sharing, self.measured.slots)

    def _at(self, key: int) -> dict[str, float]:
        """Between the measured counts, by workers (here) or by workers a node (elsewhere)."""
        points: dict[int, Point] = {}
        for point in self.measured.alike():
            points.setdefault(self._together(point), point)
        keys = sorted(points)
        at = {name: float(np.interp(key, keys, [points[k].components_s[name] for k in keys])) for name in _OWN}
        return {**at, "backward": float(np.interp(key, keys, [points[k].backward_s for k in keys]))}

    def _at_samples(self, samples: float) -> dict[str, float]:
        """With so many samples a worker."""
        base = self.measured.base
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
        """Workers of the cluster's nodes that run at once; None: all."""
        cores = self.cluster.cores_per_node
        return None if cores is None else max(1, cores // self.measured.threads)

    def _deviation(self) -> float:
        """The relative deviation of a worker's compute: what makes workers wait as they did, or, of one worker, as measured.

        What workers waited is the better measure: what slows all of them at once makes none of them wait.
        """
        point = self.measured.points[-1]
        if not point.components_s["compute"]:
            return 0.0
        if point.workers < 2:
            return point.compute_spread_s / point.components_s["compute"]
        return point.components_s["waiting"] / point.components_s["compute"] / expected_lag(point.workers)

    def _reduce(self, workers: int, size: float) -> tuple[Array, Array]:
        """An all-reduce of so many bytes in training, and what of it is latency."""
        factor = self.draws.reduce if self.interference is None else self.interference
        whole = all_reduce_s(self.cluster, self.draws, workers, size)
        return whole * factor, all_reduce_s(self.cluster, self.draws, workers, 0.0) * factor


def make_model(
    measured: Measured, cluster: Cluster, draws: Draws, *, mode: Mode = "weak", speed: float = 1.0, samples: float | None = None
) -> Model:
    """A model; on the machine that was measured, with its all-reduces as slow in training as they were."""
    model = Model(measured=measured, cluster=cluster, draws=draws, mode=mode, speed=speed, samples=samples)
    point = measured.points[-1]
    if not cluster.here or point.workers < 2 or not measured.buckets:
        return model
    return replace(model, interference=_interference(model, point))


def all_reduce_s(cluster: Cluster, draws: Draws, workers: int, size: float) -> Array:
    """An all-reduce by itself: over one node's link, or in the node, between nodes and in the node again."""
    nodes, on_node = cluster.nodes(workers), min(workers, cluster.workers_per_node)
    total = np.zeros_like(draws.slowness)
    if on_node > 1 and draws.intra is not None:
        total = total + ring_s(draws.intra, on_node, size) * crowd(on_node, cluster.link_cores)
    if nodes > 1 and draws.inter is not None:
        total = total + faster_s(draws.inter, nodes, size, trees=cluster.trees)
    return total


def expose(ready: list[float], durations: list[tuple[Array, Array]], backward_s: Array) -> Array:
    """How long after the backward pass the last bucket is averaged."""
    end = np.zeros_like(backward_s)
    for share, (duration, _) in zip(ready, durations, strict=True):
        end = np.maximum(end, share * backward_s) + duration
    return np.maximum(0.0, end - backward_s)


def _interference(model: Model, point: Point) -> Array | None:
    """The factor on all-reduces at which this point's exposed time comes out as it was measured, by bisection.

    Every draw of the link has a factor of its own, so that what was measured holds for all of them. None: all was hidden.
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
    """Seconds at so many samples: the line nearest to the points, neither end of it below 0; proportional for one point."""
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
