"""The learning rate of every step, as a plain function of the step.

`peak_lr` comes from the rule: linear (Goyal et al. 2017, arXiv:1706.02677: lr grows with k), square root, or none, where
k = global_batch / reference_batch. AdaScale computes its gain in each step (`core/noise.py`). Nothing here has state, so
resuming needs only the step number. (torch's schedulers have: `training/rates.py`.)

If the global batch changes during the run (`--batch-schedule`), steps differ in length. Then the shape follows the samples that
are used, and so does a warm-up in epochs; a warm-up in steps counts steps. Each phase multiplies the learning rate by (its
batch / the largest batch)^power.

To add a rule, add it to `scale_lr` and to `lr_rule` in `config.py`; to add a shape, add it to `Schedule.lr` and `schedule`.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.config import Config
from paceline.phases import is_auto
from paceline.values import parse_milestones

if TYPE_CHECKING:  # it imports numpy and torch, which `paceline lr-find --help` does without
    from paceline.core.sampler import Sampler


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Warm-up, then a shape, over `total_steps`."""

    peak_lr: float
    total_steps: int
    steps_per_epoch: int
    shape: str = "constant"
    by: str = "step"
    warmup_steps: int = 0
    warmup_samples: float = 0.0
    """A warm-up in epochs, if the global batch changes."""
    warmup_from: float = 0.0
    peak_at: float = 0.3
    step_at: tuple[float, ...] = ()
    """Where shape "step" drops: fractions of the run, or epochs if they are 1 or more."""
    step_factor: float = 0.1
    factor: Callable[[int], float] | None = None
    """Of shape "own": a function of the step. Its value and the warm-up multiply the peak."""
    follows_length: bool = False
    """Whether shape "own" depends on the length of the run."""
    sampler: "Sampler | None" = None
    """The steps of a run whose global batch changes."""
    samples: int = 0
    """Samples until the end of the shape, if that is not the end of `total_steps`: the batches of those may still grow."""
    batch_power: float = 0.0

    @property
    def drops_by_epoch(self) -> bool:
        """Whether `step_at` holds epochs."""
        return bool(self.step_at) and self.step_at[0] >= 1

    @property
    def _drop_unit(self) -> int:
        """What `step_at` counts in, in the unit of `_time`."""
        if self.sampler is not None and self.drops_by_epoch:
            return self.sampler.samples
        return self.steps_per_epoch if self.drops_by_epoch else self._end

    @functools.cached_property
    def _end(self) -> int:
        """When the shape ends, in the unit of `_time`."""
        return self.samples or self._time(self.total_steps)

    @functools.cached_property
    def _warm(self) -> float:
        """When the warm-up ends, in the unit of `_time`."""
        return self.warmup_samples or self._time(self.warmup_steps)

    def count_rising(self) -> int:
        """The steps until the learning rate is at its peak."""
        if self.shape == "one-cycle":
            return round(self.peak_at * self._end) if self.sampler is None else self._step_after(self.peak_at * self._end)
        return self._step_after(self._warm)

    def _time(self, step: int) -> int:
        """When a step starts: in steps or, if their batches differ, in samples."""
        return step if self.sampler is None else self.sampler.samples_before(step)

    def _step_after(self, time: float) -> int:
        """The first step that starts at this time or later."""
        return math.ceil(time) if self.sampler is None else self.sampler.step_at(time / self.sampler.samples)

    def epoch_of(self, step: int) -> int:
        """The epoch that a step belongs to, from 0."""
        return step // self.steps_per_epoch if self.sampler is None else self.sampler.place(step)[0]

    def batch_share(self, step: int) -> float:
        """The global batch of a step's phase, as a fraction of the largest."""
        return 1.0 if self.sampler is None else self.sampler.phase_of(step).global_batch / self.sampler.global_batch

    def batch_scale(self, step: int) -> float:
        """What the phase of a step multiplies the learning rate by."""
        return float(self.batch_share(step) ** self.batch_power)

    @property
    def depends_on_length(self) -> bool:
        """Whether a longer run would have different learning rates in the same steps."""
        if self.shape == "own":
            return self.follows_length
        return self.shape != "constant" and not (self.shape == "step" and self.drops_by_epoch)

    def lr(self, step: int) -> float:
        """The learning rate of step `step` (from 0)."""
        return self.batch_scale(step) * self._shaped(step)

    def _shaped(self, step: int) -> float:
        """Without the phase's factor."""
        step = self._counted(step)
        if self.shape == "own":
            return self.peak_lr * self.warm_up(step) * (1.0 if self.factor is None else self.factor(step))
        now, end, warm = self._time(step), self._end, self._warm
        if now < warm:
            return self.peak_lr * self.warm_up(step)
        if self.shape == "constant":
            return self.peak_lr
        if self.shape == "step":
            return self.peak_lr * self.step_factor ** sum(now >= at * self._drop_unit for at in self.step_at)
        done = (now - warm) / max(1, end - warm)
        if self.shape == "linear":
            return self.peak_lr * (1 - done)
        if self.shape == "cosine":
            return self.peak_lr * (1 + math.cos(math.pi * done)) / 2
        peak = self.peak_at * end
        if now < peak:
            return self.peak_lr * (self.warmup_from + (1 - self.warmup_from) * now / peak)
        return self.peak_lr * (end - now) / (end - peak) if peak < end else self.peak_lr

    def warm_up(self, step: int) -> float:
        """What warm-up multiplies the learning rate by: 1 after its end."""
        step = self._counted(step)
        if self._time(step) >= self._warm:
            return 1.0
        done = self._time(step) / self.warmup_samples if self.warmup_samples else step / self.warmup_steps
        return self.warmup_from + (1 - self.warmup_from) * done

    def _counted(self, step: int) -> int:
        """The step that decides the learning rate of this one."""
        step = min(step, self.total_steps)
        if self.by != "epoch":
            return step
        epoch = self.epoch_of(step)
        return epoch * self.steps_per_epoch if self.sampler is None else self.sampler.first_step(epoch)

    def corners(self) -> frozenset[int]:
        """The steps where the curve bends (its peak is one) and those on both sides of a drop.

        A curve of every n-th step would miss them. For a schedule by epoch only those where a phase begins: otherwise all steps
        of an epoch have one learning rate, which the row of the last step shows.
        """
        jumps = [] if self.sampler is None else list(itertools.accumulate(self.sampler.count_by_phase(self.total_steps)))
        if self.by == "epoch":
            return self._inside(jumps)
        bends = [self._step_after(self._warm)]
        if self.shape == "one-cycle":
            bends.append(self._step_after(self.peak_at * self._end))
        steps = {max((bend - 1, bend), key=self.lr) for bend in bends if bend > 0}
        jumps += [self._step_after(at * self._drop_unit) for at in self.step_at] if self.shape == "step" else []
        return self._inside(jumps, steps)

    def _inside(self, jumps: Iterable[int], bends: Iterable[int] = ()) -> frozenset[int]:
        """Bends, and the steps on both sides of jumps, as far as the run has them."""
        found = {*bends, *(step for jump in jumps for step in (jump - 1, jump))}
        return frozenset(step for step in found if 0 < step < self.total_steps)


def scale_lr(base_lr: float, k: float, rule: str) -> float:
    """The peak learning rate at k times the reference batch."""
    return base_lr * {"linear": k, "sqrt": math.sqrt(k), "none": 1.0, "adascale": 1.0}[rule]


def make_schedule(config: Config, sampler: "Sampler") -> Schedule:
    """The schedule of a run. Warm-up starts at base_lr / peak_lr of the peak unless `warmup_from` is given."""
    k, steps_per_epoch = sampler.global_batch / config.reference_batch, sampler.cut(sampler.settled).steps
    peak_lr = scale_lr(config.base_lr, k, config.lr_rule)
    one_cycle_start = 0.1  # one-cycle starts low for any k: its rise is its warm-up
    start = one_cycle_start if config.schedule == "one-cycle" else min(1.0, 1 / k)
    return Schedule(
        peak_lr=peak_lr,
        total_steps=count_steps(sampler, config.epochs, config.max_steps),
        steps_per_epoch=steps_per_epoch,
        shape=config.schedule,
        by="epoch" if config.schedule_by == "epoch" else "step",
        warmup_steps=config.warmup_steps or (0 if sampler.grows else round(config.warmup_epochs * steps_per_epoch)),
        warmup_samples=config.warmup_epochs * sampler.samples if sampler.grows else 0.0,
        warmup_from=start if config.warmup_from is None else config.warmup_from,
        peak_at=config.peak_at,
        step_at=parse_milestones(config.step_at),
        step_factor=config.step_factor,
        sampler=sampler if sampler.grows else None,
        samples=config.epochs * sampler.samples if sampler.grows and is_auto(config.batch_schedule) else 0,
        batch_power=config.batch_lr_power,
    )


def count_steps(sampler: "Sampler", epochs: int, max_steps: int) -> int:
    """The steps of a whole run."""
    total = sampler.first_step(epochs)
    return min(total, max_steps or total)
