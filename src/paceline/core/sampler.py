"""The samples of each step, and how they are cut into parts (law 2).

The order of an epoch depends on (seed, epoch) alone. Steps cut it into global batches, and each global batch into V equal
parts. Which worker computes a part does not matter here. Every sample of the epoch is used exactly once: if the samples do not
fill the last step, the last two steps share what is left, so that no part is empty and none is smaller than half of a full one
(a tiny part would have poor batch statistics).

The global batch and V may change during a run (`phases`). A phase begins with the first step that starts at its time or later.
If less than half of its batch is left of the epoch then, it begins with the next epoch.

Two kinds of epochs differ. With `weights`, an epoch draws samples with replacement, so a sample can appear several times or not
at all. With `dealt`, samples come from a stream that cannot be indexed: part p takes every parts-th sample, starting at p, in
the order of the stream.
"""

import bisect
import functools
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.core.hashes import key, keys_numpy
from paceline.errors import UsageError
from paceline.output import plural
from paceline.phases import Phase, place_of

_DRAW = 0xD4A3  # keeps the numbers that draw weighted samples apart from those that shuffle


@dataclass(frozen=True)
class Cut:
    """An epoch, cut into steps."""

    bounds: np.ndarray
    """Where each step starts in the order, and where the last one ends."""
    phases: np.ndarray
    """Each step's phase, as a number."""
    last_full: frozenset[int]
    """The steps with a whole global batch after which comes none, or one of another phase."""

    @property
    def steps(self) -> int:
        """Steps in the epoch."""
        return len(self.phases)


@dataclass(frozen=True)
class Sampler:
    """The steps and parts of any epoch."""

    samples: int
    """Samples in an epoch; with `weights`, the number of draws."""
    global_batch: int
    """The largest one, if it changes."""
    parts: int
    """V: what a step of this many samples is cut into."""
    seed: int
    weights: Any = field(default=None, compare=False, repr=False)
    """One weight per sample of the data, as a list, array or tensor: an epoch then has `samples` draws with replacement."""
    dealt: bool = False
    """Part p takes samples p, p + parts, p + 2 parts and so on: for streams."""
    phases: tuple[Phase, ...] = ()
    """The global batch and the parts over time; by default, a single phase."""

    def __post_init__(self) -> None:
        check_divides(self.global_batch, self.parts)
        if self.weights is not None:
            object.__setattr__(self, "weights", check_weights(self.weights))
            if self.dealt:
                raise UsageError("a stream cannot be sampled by weights: it is read in its own order; leave the weights out")
        if self.phases and self.phases[0].start > 0:
            raise UsageError(f"the first phase starts at epoch {self.phases[0].start:g}: it must start at epoch 0")
        if not self.phases:
            object.__setattr__(self, "phases", (Phase(0.0, self.global_batch, self.parts),))
        if self.samples < self.parts:
            raise UsageError(
                f"{plural(self.samples, 'training sample')} cannot feed {self.parts} virtual workers: each needs at least one"
                " per step"
            )
        if self.dealt and any(phase.parts != self.parts for phase in self.phases):
            fewest = min(phase.global_batch for phase in self.phases) // self.parts
            raise UsageError(
                f"a stream is split by virtual worker, so all phases of --batch-schedule must have {self.parts} parts: use"
                f" --smallest-part {max(1, fewest)} or less, or larger batches"
            )

    # --- steps ---

    @property
    def grows(self) -> bool:
        """Whether the global batch changes, or may change later."""
        return len(self.phases) > 1 or self.phases[0].global_batch != self.global_batch

    def cut(self, epoch: int) -> Cut:
        """The steps of an epoch."""
        epoch = min(epoch, self.settled)
        if epoch not in self._cuts:
            self._cuts[epoch] = self._cut(epoch)
        return self._cuts[epoch]

    def first_step(self, epoch: int) -> int:
        """The number of steps before an epoch."""
        while len(self._firsts) <= min(epoch, self.settled):
            self._firsts.append(self._firsts[-1] + self.cut(len(self._firsts) - 1).steps)
        if epoch <= self.settled:
            return self._firsts[epoch]
        return self._firsts[self.settled] + (epoch - self.settled) * self.cut(epoch).steps

    def place(self, step: int) -> tuple[int, int]:
        """A step's epoch, and its number within it."""
        settled = self.first_step(self.settled)
        if step >= settled:
            epochs, number = divmod(step - settled, self.cut(self.settled).steps)
            return self.settled + epochs, number
        epoch = bisect.bisect_right(self._firsts, step) - 1
        return epoch, step - self._firsts[epoch]

    def phase_of(self, step: int) -> Phase:
        """The phase of a step."""
        epoch, number = self.place(step)
        return self.phases[int(self.cut(epoch).phases[number])]

    def is_last_full(self, step: int) -> bool:
        """Whether a step has a whole global batch, and the next one has not or is in another phase or epoch."""
        epoch, number = self.place(step)
        return number in self.cut(epoch).last_full

    def samples_before(self, step: int) -> int:
        """Samples that are used before a step, since the start of the run."""
        epoch, number = self.place(step)
        return epoch * self.samples + int(self.cut(epoch).bounds[number])

    def step_at(self, epochs: float) -> int:
        """The first step that starts after this many epochs or later."""
        epoch = int(epochs)
        place = place_of(epochs - epoch, self.samples)
        return self.first_step(epoch) + int(np.searchsorted(self.cut(epoch).bounds[:-1], place))

    def count_by_phase(self, total_steps: int) -> list[int]:
        """How many of the first `total_steps` steps each phase has."""
        counts = np.zeros(len(self.phases), dtype=np.int64)
        for epoch in range(self.settled):
            left = total_steps - self.first_step(epoch)
            if left <= 0:
                break
            counts += np.bincount(self.cut(epoch).phases[:left], minlength=len(counts))
        counts[-1] += max(0, total_steps - self.first_step(self.settled))
        return [int(count) for count in counts]

    @functools.cached_property
    def settled(self) -> int:
        """The epoch from which on all are cut alike."""
        return math.ceil(self.phases[-1].start)

    @functools.cached_property
    def _cuts(self) -> dict[int, Cut]:
        return {}

    @functools.cached_property
    def _firsts(self) -> list[int]:
        return [0]

    def _cut(self, epoch: int) -> Cut:
        at, bounds, numbers = 0, [np.zeros(1, dtype=np.int64)], []

        def extend(more: np.ndarray, phase: int) -> None:
            bounds.append(at + more[1:])
            numbers.append(np.full(len(more) - 1, phase))

        current = max(i for i, phase in enumerate(self.phases) if phase.start <= epoch)
        for i, phase in enumerate(self.phases):
            if not epoch < phase.start < epoch + 1:
                continue
            batch, begin = self.phases[current].global_batch, place_of(phase.start - epoch, self.samples)
            steps = max(0, -(-(begin - at) // batch))
            left = self.samples - at - steps * batch
            if 2 * left < phase.global_batch or left < phase.parts:
                continue  # too little for a step: the current phase takes it, and this one begins with the next epoch
            extend(np.arange(steps + 1) * batch, current)
            at, current = at + steps * batch, i
        extend(self._cut_rest(self.samples - at, self.phases[current]), current)
        of, ends = np.concatenate(numbers), np.concatenate(bounds)
        full = np.diff(ends) == np.asarray([phase.global_batch for phase in self.phases])[of]
        goes_on = np.append(full[1:] & (of[1:] == of[:-1]), False)
        return Cut(ends, of, frozenset(np.flatnonzero(full & ~goes_on).tolist()))

    def _cut_rest(self, samples: int, phase: Phase) -> np.ndarray:
        """Cut the last samples of an epoch into steps of one phase."""
        batch, parts = phase.global_batch, phase.parts
        full, rest = divmod(samples, batch)
        starts = np.arange(full + 1) * batch
        if rest == 0:
            return starts
        if full == 0 or (2 * rest >= batch and rest >= parts):
            return np.append(starts, samples)
        shared = batch + rest
        if shared >= 2 * parts:
            half = (shared + 1) // 2
            if self.dealt:  # all steps but the last have equal parts, so that part p gets every parts-th sample of the epoch
                half = min(-(-half // parts) * parts, (shared - parts) // parts * parts)
            return np.append(starts[:-1], [starts[-2] + half, samples])
        return np.append(starts[:-1], samples)  # parts of one sample cannot be halved: the last step takes both

    def part_bounds(self, epoch: int, number: int) -> np.ndarray:
        """Where each part of a step starts in the order, and where the last one ends. Sizes differ by one at most."""
        cut = self.cut(epoch)
        start, stop = cut.bounds[number : number + 2]
        parts = self.phases[cut.phases[number]].parts
        if self.dealt:
            each, more = divmod(int(stop - start), parts)
            return np.asarray(start + each * np.arange(parts + 1) + np.minimum(np.arange(parts + 1), more))
        return np.asarray(start + (stop - start) * np.arange(parts + 1) // parts)

    # --- order ---

    def order(self, epoch: int) -> np.ndarray:
        """The epoch's samples, shuffled: the ranks of 64-bit hashes, the same in all versions of numpy.

        No two samples have the same hash (splitmix64 is a bijection), so any sorting algorithm gives the same order.

        With weights: repetition r of sample s is the number s + r N, where N is the number of samples in the data. So every
        draw has its own number, and with it its own random numbers. `rows` gives the samples back.
        """
        if self.dealt:
            return self._deal(epoch)
        if self.weights is not None:
            return self._draw(epoch)
        return np.argsort(keys_numpy(key(self.seed, epoch), np.arange(self.samples)))

    @property
    def rows_in_data(self) -> int:
        """Samples that the data has."""
        return self.samples if self.weights is None else len(self.weights)

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """The samples that these numbers of an order stand for."""
        return numbers if self.weights is None else numbers % len(self.weights)

    def _draw(self, epoch: int) -> np.ndarray:
        """The epoch's draws, by (seed, epoch) alone."""
        keys = keys_numpy(key(self.seed, epoch, _DRAW), np.arange(self.samples))
        sums = np.cumsum(self.weights)
        places = (keys >> np.uint64(11)).astype(np.float64) * 2.0**-53 * sums[-1]
        last = int(np.flatnonzero(self.weights)[-1])  # rounding must not choose a later sample of weight 0
        rows = np.minimum(np.searchsorted(sums, places, side="right"), last)
        return np.asarray(rows + _count_earlier(rows) * len(self.weights))

    def _deal(self, epoch: int) -> np.ndarray:
        steps = [np.arange(start, stop) for start, stop in itertools.pairwise(self.cut(epoch).bounds)]
        return np.concatenate([numbers[part :: self.parts] for numbers in steps for part in range(self.parts)])


def check_divides(global_batch: int, parts: int) -> None:
    """Raise a UsageError unless a global batch can be cut into equal parts."""
    if global_batch % parts:
        below, above = global_batch // parts * parts, (global_batch // parts + 1) * parts
        hint = f"{below} or {above}" if below else f"{above}"
        raise UsageError(f"a global batch of {global_batch} does not divide into {parts} equal parts: use {hint}")


def check_weights(given: Any) -> np.ndarray:
    """Weights of samples as float64. Raises a UsageError unless they are numbers, none negative, and not all 0."""
    try:
        weights = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        raise UsageError("the weights for sampling must be numbers, one per sample") from None
    if weights.ndim != 1 or not len(weights):
        raise UsageError(f"the weights for sampling have shape {weights.shape}: give one number per sample")
    wrong = np.flatnonzero(~np.isfinite(weights) | (weights < 0))
    if len(wrong):
        raise UsageError(
            f"the weight of sample {wrong[0]} is {weights[wrong[0]]:g}: weights must be finite and not negative; 0 leaves a"
            " sample out"
        )
    if not weights.any():
        raise UsageError("all weights for sampling are 0: at least one sample needs a positive weight")
    return weights


def _count_earlier(rows: np.ndarray) -> np.ndarray:
    """For each place, how many earlier places hold the same number."""
    order = np.argsort(rows, kind="stable")
    grouped = rows[order]
    begins = np.flatnonzero(np.append(True, grouped[1:] != grouped[:-1]))
    counts = np.empty(len(rows), dtype=np.int64)
    counts[order] = np.arange(len(rows)) - np.repeat(begins, np.diff(np.append(begins, len(rows))))
    return counts
