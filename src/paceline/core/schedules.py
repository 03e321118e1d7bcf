"""The learning rate of every step, as a plain function of the step.

`peak_lr` comes from the rule: linear (Goyal et al. 2017, arXiv:1706.02677: lr grows with k), square root, or none, where
k = global_batch / reference_batch. AdaScale computes its gain in each step (`core/noise.py`). Nothing here has state, so
resuming needs only the step number. (torch's schedulers have: `training/rates.py`.)

To add a rule, add it to `scale_lr` and to `lr_rule` in `config.py`; to add a shape, add it to `Schedule.lr` and `schedule`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from paceline.config import Config
from paceline.values import parse_milestones


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Warm-up, then a shape, over `total_steps`."""

    peak_lr: float
    total_steps: int
    steps_per_epoch: int
    shape: str = "constant"
    by: str = "step"
    warmup_steps: int = 0
    warmup_from: float = 0.0
    peak_at: float = 0.3
    step_at: tuple[float, ...] = ()
    """Where shape "step" drops: fractions of the run, or epochs if they are 1 or more."""
    step_factor: float = 0.1
    factor: Callable[[int], float] | None = None
    """Of shape "own": a function of the step. Its value and the warm-up multiply the peak."""
    follows_length: bool = False
    """Whether shape "own" depends on the length of the run."""

    @property
    def drops_by_epoch(self) -> bool:
        """Whether `step_at` holds epochs."""
        return bool(self.step_at) and self.step_at[0] >= 1

    @property
    def _drop_unit(self) -> int:
        """What `step_at` counts in, in steps."""
        return self.steps_per_epoch if self.drops_by_epoch else self.total_steps

    @property
    def depends_on_length(self) -> bool:
        """Whether a longer run would have different learning rates in the same steps."""
        if self.shape == "own":
            return self.follows_length
        return self.shape != "constant" and not (self.shape == "step" and self.drops_by_epoch)

    def lr(self, step: int) -> float:
        """The learning rate of step `step` (from 0)."""
        step = self._counted(step)
        if self.shape == "own":
            return self.peak_lr * self.warm_up(step) * (1.0 if self.factor is None else self.factor(step))
        if step < self.warmup_steps:
            return self.peak_lr * self.warm_up(step)
        if self.shape == "constant":
            return self.peak_lr
        if self.shape == "step":
            return self.peak_lr * self.step_factor ** sum(step >= at * self._drop_unit for at in self.step_at)
        done = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        if self.shape == "linear":
            return self.peak_lr * (1 - done)
        if self.shape == "cosine":
            return self.peak_lr * (1 + math.cos(math.pi * done)) / 2
        peak = self.peak_at * self.total_steps
        if step < peak:
            return self.peak_lr * (self.warmup_from + (1 - self.warmup_from) * step / peak)
        return self.peak_lr * (self.total_steps - step) / (self.total_steps - peak) if peak < self.total_steps else self.peak_lr

    def warm_up(self, step: int) -> float:
        """What warm-up multiplies the learning rate by: 1 after its end."""
        step = self._counted(step)
        if step >= self.warmup_steps:
            return 1.0
        return self.warmup_from + (1 - self.warmup_from) * step / self.warmup_steps

    def _counted(self, step: int) -> int:
        """The step that decides the learning rate of this one."""
        step = min(step, self.total_steps)
        return step // self.steps_per_epoch * self.steps_per_epoch if self.by == "epoch" else step

    def corners(self) -> frozenset[int]:
        """The steps where the curve bends (its peak is one) and those on both sides of a drop.

        A curve of every n-th step would miss them. Empty for a schedule by epoch: all steps of an epoch have one learning rate,
        which the row of the last step shows.
        """
        if self.by == "epoch":
            return frozenset()
        bends = (self.warmup_steps, self.peak_at * self.total_steps if self.shape == "one-cycle" else 0)
        steps = {max((math.ceil(bend) - 1, math.ceil(bend)), key=self.lr) for bend in bends if bend > 0}
        if self.shape == "step":
            drops = [math.ceil(at * self._drop_unit) for at in self.step_at]
            steps |= {step for drop in drops for step in (drop - 1, drop)}
        return frozenset(step for step in steps if 0 < step < self.total_steps)


def scale_lr(base_lr: float, k: float, rule: str) -> float:
    """The peak learning rate at k times the reference batch."""
    return base_lr * {"linear": k, "sqrt": math.sqrt(k), "none": 1.0, "adascale": 1.0}[rule]


def make_schedule(config: Config, *, k: float, steps_per_epoch: int, total_steps: int) -> Schedule:
    """The schedule of a run. Warm-up starts at base_lr / peak_lr of the peak unless `warmup_from` is given."""
    peak_lr = scale_lr(config.base_lr, k, config.lr_rule)
    one_cycle_start = 0.1  # one-cycle starts low for any k: its rise is its warm-up
    start = one_cycle_start if config.schedule == "one-cycle" else min(1.0, 1 / k)
    return Schedule(
        peak_lr=peak_lr,
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        shape=config.schedule,
        by="epoch" if config.schedule_by == "epoch" else "step",
        warmup_steps=config.warmup_steps or round(config.warmup_epochs * steps_per_epoch),
        warmup_from=start if config.warmup_from is None else config.warmup_from,
        peak_at=config.peak_at,
        step_at=parse_milestones(config.step_at),
        step_factor=config.step_factor,
    )
