"""The time of a run whose batch changes (`--batch-schedule`) with P workers.

    time(P) = sum over phases and sizes of steps:  steps x step(P, the samples of the slowest worker)

The phases, their parts and their steps are those of a real run (`phases.py`, `core/sampler.py`): they depend on the schedule, V
and `--smallest-part`, never on P. So more workers take the same steps, only with fewer samples each. In a phase with fewer
parts than workers, the others idle. An epoch may end with smaller steps; they count with their own size. Validation and
checkpoints are left out. Everything is computed for each draw (`draws.py`), so sums and ratios have error bars, too.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.core.sampler import Sampler
from paceline.errors import UsageError
from paceline.phases import Phase, check_starts, is_auto, largest_batch, make_phases, parse_batch_schedule, write_batch_schedule
from paceline.plan.draws import bars
from paceline.plan.links import Array
from paceline.plan.model import Model, Step, slowest_samples
from paceline.plan.points import Measured
from paceline.plan.target import Returns, judge_returns


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A run whose batch may change: its phases and their steps."""

    phases: tuple[Phase, ...]
    sizes: tuple[tuple[tuple[int, int], ...], ...]
    """For each phase: (samples in a step, number of such steps)."""
    parts: int
    """V, the largest possible number of workers."""
    epochs: int
    train_samples: int
    own: bool
    """Whether it is the record's own schedule."""

    @property
    def text(self) -> str:
        """As `--batch-schedule` takes it."""
        return write_batch_schedule([(phase.start, phase.global_batch) for phase in self.phases])

    def steps(self, phase: int) -> int:
        """The steps of a phase."""
        return sum(count for _, count in self.sizes[phase])


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A run with one number of workers; arrays have one value per draw."""

    workers: int
    nodes: int
    phases: tuple[Step, ...]
    """For each phase with steps, the sums over its steps."""
    numbers: tuple[int, ...]
    """Which phases these are."""

    @property
    def time_s(self) -> Array:
        """The training time of the run."""
        return np.asarray(np.sum([step.step_s for step in self.phases], axis=0))

    def whole(self) -> Step:
        """The run as if it were one long step."""
        return _sum(self.phases)


def find_schedule(
    measured: Measured,
    text: str = "",
    *,
    virtual_workers: int | None = None,
    smallest_part: int | None = None,
    epochs: int | None = None,
    train_samples: int | None = None,
    most: int = 64,
) -> Schedule:
    """The schedule that is asked about: `text`, or the record's own. A one-line UsageError if it cannot be one.

    V is as given, as in the record or, if that had a single part, `most`: the largest number of workers asked about.
    """
    samples = train_samples or (measured.run.train_samples if measured.run else None)
    epochs = epochs or measured.epochs
    if samples is None or epochs is None:
        missing = "--train-samples" if samples is None else "--epochs"
        raise UsageError(f"{measured.record} does not say how long its run is: give {missing}")
    own = not text and virtual_workers is None and smallest_part is None
    if own:
        done = None if train_samples or epochs != measured.epochs else measured.steps
        return _cut(measured.phases, measured.virtual_workers, (epochs, done), samples, own=True)
    if text and is_auto(text):
        raise UsageError(
            f"--batch-schedule is {text}, but its phases are known only after training: give them as epoch:batch pairs (a run"
            " with auto prints them), or give a record of such a run"
        )
    pairs = parse_batch_schedule(text) or [(phase.start, phase.global_batch) for phase in measured.phases]
    check_starts(pairs, epochs)
    parts = virtual_workers or (measured.virtual_workers if measured.virtual_workers > 1 else most)
    largest = largest_batch(pairs)
    if largest % parts:
        raise UsageError(
            f"the largest batch of --batch-schedule, {largest:,}, does not divide into {parts:,} equal parts: use"
            f" {largest // parts * parts or parts} or {(largest // parts + 1) * parts}, or another --virtual-workers"
        )
    phases = make_phases(pairs, parts, smallest_part or measured.smallest_part)
    return _cut(phases, parts, (epochs, None), samples, own=False)


def _cut(phases: tuple[Phase, ...], parts: int, length: tuple[int, int | None], samples: int, *, own: bool) -> Schedule:
    """Cut all epochs into steps. `length`: epochs, and the steps after which the run ends, if it ended within an epoch."""
    epochs, end = length
    most = max(phases, key=lambda phase: phase.global_batch)  # of auto it may have fewer parts than V
    sampler = Sampler(samples, most.global_batch, most.parts, 0, phases=phases)
    end = min(end or sampler.first_step(epochs), sampler.first_step(epochs))
    counts: Counter[tuple[int, int]] = Counter()
    last = sampler.place(end - 1)[0]
    for epoch in range(min(last, sampler.settled) + 1):
        cut = sampler.cut(epoch)
        steps = list(zip(cut.phases.tolist(), np.diff(cut.bounds).tolist(), strict=True))
        if epoch == sampler.settled:  # all further epochs are like this one
            counts.update({each: count * (last - epoch) for each, count in Counter(steps).items()})
        counts.update(steps[: end - sampler.first_step(last)] if epoch in (last, sampler.settled) else steps)
    sizes = tuple(
        tuple(sorted(((size, count) for (of, size), count in counts.items() if of == number), reverse=True))
        for number in range(len(phases))
    )
    return Schedule(phases=phases, sizes=sizes, parts=parts, epochs=epochs, train_samples=samples, own=own)


def predict(model: Model, schedule: Schedule, workers: int) -> Prediction:
    """The run with this number of workers."""
    phases, numbers = [], []
    for number, (phase, sizes) in enumerate(zip(schedule.phases, schedule.sizes, strict=True)):
        if sizes:
            phases.append(_sum([_times(model.step_of(workers, phase, size), count) for size, count in sizes]))
            numbers.append(number)
    return Prediction(workers=workers, nodes=model.cluster.nodes(workers), phases=tuple(phases), numbers=tuple(numbers))


def find_phased_returns(model: Model, predictions: Sequence[Prediction]) -> Returns:
    """Where more workers stop paying off, among the predicted counts."""
    steps = [each.whole() for each in predictions]
    return judge_returns(model, steps, [float(each.time_s[0]) for each in predictions])


def phase_rows(schedule: Schedule, prediction: Prediction) -> list[dict[str, Any]]:
    """Each phase with this number of workers. Times of a step are means over the steps of the phase."""
    total, rows = float(prediction.time_s[0]), []
    for number, summed in zip(prediction.numbers, prediction.phases, strict=True):
        phase, steps = schedule.phases[number], schedule.steps(number)
        time, low, high = bars(summed.step_s)
        rows.append(
            {
                "start": phase.start,
                "global_batch": phase.global_batch,
                "parts": phase.parts,
                "steps": steps,
                "samples_per_worker": slowest_samples(phase, phase.global_batch, prediction.workers),
                "idle_workers": max(0, prediction.workers - phase.parts),
                "step_s": time / steps,
                "components_s": {name: float(seconds[0]) / steps for name, seconds in summed.components_s.items()},
                "time_s": time,
                "time_low_s": low,
                "time_high_s": high,
                "share": time / total,
            }
        )
    return rows


def _times(step: Step, count: int) -> Step:
    return Step(
        workers=step.workers,
        nodes=step.nodes,
        global_batch=step.global_batch * count,
        components_s={name: seconds * count for name, seconds in step.components_s.items()},
        reduce_s=step.reduce_s * count,
        latency_s=step.latency_s * count,
    )


def _sum(steps: Sequence[Step]) -> Step:
    """Steps one after the other, as one."""
    names = steps[0].components_s
    return Step(
        workers=steps[0].workers,
        nodes=steps[0].nodes,
        global_batch=sum(step.global_batch for step in steps),
        components_s={name: np.asarray(np.sum([step.components_s[name] for step in steps], axis=0)) for name in names},
        reduce_s=np.asarray(np.sum([step.reduce_s for step in steps], axis=0)),
        latency_s=np.asarray(np.sum([step.latency_s for step in steps], axis=0)),
    )
