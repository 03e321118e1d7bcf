"""Time and cost of a run with P workers, and the number beyond which more workers stop paying off.

    time(P) = steps(B) step(P),   cost(P) = price of a worker-hour x P x time(P)

With a noise scale N, steps(B) = steps(B0) (1 + N / B) / (1 + N / B0), relative to the measured run at B0 (`tradeoff.py`).
Without one, the same number of epochs, each with ceil(samples / B) steps: nothing is known about accuracy at B. Steps are
whole. No batch is larger than the training set. Validation and checkpoints are left out.

**Returns stop** at the first of the counts 1, 2, 4, ... and the largest possible one, from where no further doublings save
`WORTH` of the time per doubling. (The first doubling alone does not decide: two workers pay for communication once, and four
may pay off again.) The reason is what grew most from that count to the next: samples needed in total (noise-bound; if it is
because steps are whole, data-bound), exposed communication (bandwidth- or latency-bound, whichever is the larger share of an
all-reduce), waiting, workers of a node that slow each other down (core-bound) or, in strong scaling, what does not shrink with
a worker's samples (overhead-bound). Returns also stop if twice as many workers would need a batch larger than the training set.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.plan.cluster import Cluster
from paceline.plan.links import Array
from paceline.plan.model import Model, Step
from paceline.plan.points import Run
from paceline.plan.tradeoff import NoiseScale, examples_ratio

WORTH = 0.2
"""Doubling the workers saves at best half of the time. Saving less than this share is not worth it."""

MOST = 4096
_MOST_HERE = 64
"""The most workers considered on the machine of the record, unless --workers is given."""


@dataclass(frozen=True, kw_only=True)
class Returns:
    """Where more workers stop paying off."""

    stop_at: int | None
    """The count after which a doubling never saves a fifth of the time; None: returns do not stop."""
    saved: float | None
    """The share of the time that the next count saves; None: twice as many would need more than the training set per step."""
    bound: str
    """noise, data, bandwidth, latency, waiting, cores or overhead; empty if returns do not stop."""
    cost_doubles_at: int | None
    """The first count at which the run takes twice the worker-hours of the smallest count."""
    looked: tuple[int, ...]
    """The counts considered."""

    @property
    def most(self) -> int:
        """The largest count considered."""
        return self.looked[-1]

    @property
    def next_to(self) -> tuple[int, int]:
        """(where returns stop, the next count); the last two counts if they do not. After the last count comes twice that."""
        counts = (*self.looked, 2 * self.most)
        place = self.looked.index(self.stop_at) if self.stop_at is not None else max(0, len(self.looked) - 2)
        return counts[place], counts[place + 1]


def doublings(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def counts_up_to(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    return sorted({*doublings(most), most})


def most_workers(model: Model) -> int:
    """The largest count that makes sense, limited by the cluster, the global batch and the training set."""
    return min(place_limit(model), data_limit(model) or MOST)


def data_limit(model: Model) -> int | None:
    """The count at which the global batch is the whole training set, in weak scaling; None if that is unknown."""
    run = model.measured.run
    if run is None or run.train_samples is None or model.mode == "strong":
        return None
    return max(1, int(run.train_samples / (model.samples or model.measured.base.samples)))


def steps_needed(run: Run, global_batch: float, noise: Array | None) -> Array:
    """Whole steps to the end of the run at another global batch; without a noise scale, for the same epochs."""
    if noise is not None:
        return np.ceil(run.steps * (1 + noise / global_batch) / (1 + noise / run.global_batch) - 1e-9)
    if run.train_samples is None:
        return np.asarray([float(math.ceil(run.steps * run.global_batch / global_batch - 1e-9))])
    there, measured = (math.ceil(run.train_samples / batch - 1e-9) for batch in (global_batch, run.global_batch))
    return np.asarray([float(-(-run.steps * there // measured))])


def time_s(step: Step, run: Run, noise: Array | None) -> Array:
    """Seconds of training to the end of the run."""
    return steps_needed(run, step.global_batch, noise) * step.step_s


def price_of(cluster: Cluster, price: float | None) -> tuple[float, str] | None:
    """(price of a worker-hour, currency): as given, or as the cluster's file has it."""
    if price is not None:
        return price, cluster.price.currency if cluster.price else ""
    return (cluster.price.per_worker_hour, cluster.price.currency) if cluster.price else None


def find_returns(model: Model, run: Run | None, noise: NoiseScale | None) -> Returns:
    """Where more workers stop paying off, among 1, 2, 4, ... and the largest possible count."""
    most, places = most_workers(model), place_limit(model)
    looked = tuple(counts_up_to(most) if most == places else doublings(most))
    steps = [model.step(workers) for workers in looked]
    drawn = model.draws.noise if noise is not None else None
    times = [_time(step, run, drawn) for step in steps]
    return judge_returns(model, steps, times, most < places)


def judge_returns(model: Model, steps: Sequence[Step], times: Sequence[float], data_ends: bool = False) -> Returns:
    """Where more workers stop paying off, among counts in ascending order: their steps, and the times of the run.

    `data_ends`: more workers than the last count would need more than the training set per step.
    """
    looked = tuple(step.workers for step in steps)
    cost = [step.workers * time for step, time in zip(steps, times, strict=True)]
    dear = next((step.workers for step, each in zip(steps, cost, strict=True) if each >= 2 * cost[0]), None)
    for i, now in enumerate(looked[:-1]):
        doubled = [math.log2(later / now) for later in looked[i + 1 :]]
        if all(later > times[i] * (1 - WORTH) ** each for each, later in zip(doubled, times[i + 1 :], strict=True)):
            saved = 1 - times[i + 1] / times[i]
            bound = _blame(model, steps[i], steps[i + 1], times[i + 1] / times[i])
            return Returns(stop_at=now, saved=saved, bound=bound, cost_doubles_at=dear, looked=looked)
    if data_ends:
        return Returns(stop_at=looked[-1], saved=None, bound="data", cost_doubles_at=dear, looked=looked)
    last = 1 - times[-1] / times[-2] if len(times) > 1 else 0.0
    return Returns(stop_at=None, saved=last, bound="", cost_doubles_at=dear, looked=looked)


def place_limit(model: Model) -> int:
    """The largest count, without the limit of the training set."""
    limits = [_MOST_HERE if model.cluster.here else MOST, model.cluster.most_workers() or MOST]
    if model.mode == "strong":
        limits.append(model.measured.base.global_batch)
    return min(limits)


def _time(step: Step, run: Run | None, noise: Array | None) -> float:
    """Seconds to the end of the run; without a run, seconds per sample, which compare in the same way."""
    return float(time_s(step, run, noise)[0]) if run is not None else float(1 / step.samples_per_s[0])


def _blame(model: Model, here: Step, more: Step, ratio: float) -> str:
    """Why the next count, usually twice as many, does not save its share of the time."""
    speed, workers = float(here.samples_per_s[0] / more.samples_per_s[0]), more.workers / here.workers
    examples = ratio / speed  # how many more samples the next count needs
    if examples > workers * speed:
        noise = 0.0 if model.draws.noise is None else float(model.draws.noise[0])
        by_noise = examples_ratio(noise, more.global_batch, here.global_batch)
        return (
            "noise" if noise and by_noise - 1 > (examples - 1) / 2 else "data"
        )  # the rest comes from rounding up to whole steps
    before, after = ({name: float(s[0]) for name, s in step.components_s.items()} for step in (here, more))
    shrink = 1.0 if model.mode == "weak" else 1 / workers  # of the samples per worker
    grown = {name: after[name] - shrink * before[name] for name in after}
    worst = max(("communication", "waiting"), key=lambda name: grown[name])
    if grown[worst] < sum(grown[name] for name in ("input", "compute", "optimizer", "other")):
        if model.mode == "weak":
            return "cores"
        crowded = model.crowding(more.workers) > model.crowding(here.workers)  # else it is the fixed floor of compute
        return "cores" if crowded and grown["compute"] > grown["optimizer"] + grown["other"] else "overhead"
    if worst == "waiting":
        return "waiting"
    return "latency" if float(more.latency_s[0]) > 0.5 * float(more.reduce_s[0]) else "bandwidth"
