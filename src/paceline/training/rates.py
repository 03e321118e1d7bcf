"""The learning rate of every parameter group at every step: from a `Schedule`, or from one of torch's schedulers.

The rate of a group is the one at `reference_batch`. The lr rule scales it with k, the schedule and the warm-up multiply it. A
scheduler of torch reads and writes `group["lr"]`: it only ever sees the rates at `reference_batch`, and the rates that the
optimizer reads are computed from them. So a scheduler does what it does in a plain loop, whatever k and the warm-up are.
"""

import inspect
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.core.sampler import Sampler
from paceline.core.schedules import Schedule
from paceline.errors import UsageError, first_line
from paceline.training.monitor import Monitor
from paceline.training.plain_state import find_changes, merge, snapshot

_NOT_SETTINGS = ("params", "lr", "initial_lr")


class Rates:
    """The learning rates of a run."""

    schedule: Schedule
    """The schedule of the first group. With a torch scheduler, only its length and warm-up are used."""
    words: str
    """The schedule as the contract shows it."""
    keys: Sequence[Hashable]
    """For each group: groups with the same key have the same rate in every step."""
    changes_settings = False
    """Whether a scheduler changes something else in the groups, such as momentum; known at the latest when it does."""
    fixed_length = ""
    """Why a run with these rates cannot become longer; "" if it can."""

    def at(self, step: int) -> list[float]:
        """The rate of each group in this step."""
        raise NotImplementedError

    def reached(self, step: int) -> float:
        """The rate of the first group in the last step before a resume, or in the first step of a new run."""
        return self.at(step)[0]

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Take in a validation's metrics, after an epoch that is not the last. Call on every rank."""

    def follow(self, sampler: Sampler, total_steps: int) -> None:
        """Continue with these steps: `--batch-schedule auto` has changed the global batch."""
        self.schedule = replace(self.schedule, sampler=sampler, total_steps=total_steps)

    def facts(self) -> dict[str, Any]:
        """The state, in plain values for a checkpoint; empty without state."""
        return {}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's state."""


class PlannedRates(Rates):
    """Rates that follow from the step alone."""

    def __init__(self, words: str, schedules: Sequence[Schedule], scales: Sequence[float]) -> None:
        """One schedule per group, and a factor on top (`lr_scale` in the group)."""
        self.schedule, self.words = schedules[0], words
        self.keys = self._peaks = [(each.peak_lr, scale) for each, scale in zip(schedules, scales, strict=True)]
        self._by_peak = {each.peak_lr: each for each in schedules}

    def follow(self, sampler: Sampler, total_steps: int) -> None:
        """Continue with these steps: `--batch-schedule auto` has changed the global batch."""
        super().follow(sampler, total_steps)
        schedules = self._by_peak.items()
        self._by_peak = {peak: replace(each, sampler=sampler, total_steps=total_steps) for peak, each in schedules}

    def at(self, step: int) -> list[float]:
        """The rate of each group in this step."""
        found = {peak_lr: schedule.lr(step) for peak_lr, schedule in self._by_peak.items()}
        return [found[peak_lr] * scale for peak_lr, scale in self._peaks]


def plan_rates(optimizer: Optimizer, schedule: Schedule, words: str, peaks: Sequence[float] | None = None) -> PlannedRates:
    """The rates of a schedule, with these peaks of the groups if they have their own."""
    scales = [float(group.get("lr_scale", 1.0)) for group in optimizer.param_groups]
    schedules = [schedule if peaks is None else replace(schedule, peak_lr=peak) for peak in peaks or scales]
    return PlannedRates(words, schedules, scales)


class SchedulerRates(Rates):
    """Rates from one of torch's schedulers, which is stepped when a step or an epoch begins, or after a validation."""

    def __init__(self, scheduler: LRScheduler, schedule: Schedule, *, growth: float, by: str, monitor: Monitor | None) -> None:
        """`growth` is what the lr rule multiplies with. `monitor`: the metric that the scheduler's `step` is given, if any."""
        self.scheduler, self.schedule, self._growth, self._by, self._monitor = scheduler, schedule, growth, by, monitor
        self._optimizer = scheduler.optimizer
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch warns after a resume and in captured runs
        self._rates, self._count = self._read(), 0
        self._fresh = snapshot(scheduler.state_dict())
        self.keys = range(len(self._rates))
        self.changes_settings = bool(getattr(scheduler, "cycle_momentum", False))
        name = type(scheduler).__name__
        self._what = f"the task's schedule, {name},"
        when = f"after each validation by its {monitor.metric}" if monitor else f"once per {by}"
        self.words = f"{name} (the task's own) {when}"
        self.fixed_length = f"{self._what} was made for the old length" if schedule.follows_length else ""
        self.facts()  # a state that no checkpoint can hold is refused now

    def at(self, step: int) -> list[float]:
        """The rate of each group in this step. Steps must not go backward."""
        step = min(step, self.schedule.total_steps)
        wanted = 0 if self._monitor else step if self._by == "step" else self.schedule.epoch_of(step)
        while self._count < wanted:
            self._advance()
        factor = self._growth * self.schedule.warm_up(step) * self.schedule.batch_scale(step)
        return [rate * factor for rate in self._rates]

    def reached(self, step: int) -> float:
        """The rate of the first group in the last step before a resume, or in the first step of a new run."""
        return self._rates[0] * self._growth * self.schedule.warm_up(step) * self.schedule.batch_scale(step)

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Step a scheduler that looks at a metric."""
        if self._monitor is not None:
            self._advance(self._monitor.read(metrics))

    def facts(self) -> dict[str, Any]:
        """What has changed since the scheduler was made."""
        state = find_changes(self._fresh, self.scheduler.state_dict(), self._what)
        monitored = {"monitor": self._monitor.metric} if self._monitor else {}
        return {"count": self._count, "rates": self._rates, "by": self._by, "state": state, **monitored}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's state."""
        now = self._monitor.metric if self._monitor else None
        if facts.get("monitor") != now:
            raise UsageError(
                f"cannot resume: --monitor was {facts.get('monitor')}, is {now}, and the learning rate follows it:"
                " give the old one, or start a new run"
            )
        state = snapshot(self.scheduler.state_dict())
        merge(state, facts["state"])
        self.scheduler.load_state_dict(state)
        self._count, self._rates = facts["count"], list(facts["rates"])

    def _advance(self, *metric: float) -> None:
        groups = self._optimizer.param_groups
        for group, rate in zip(groups, self._rates, strict=True):
            group["lr"] = rate
        before = [_settings(group) for group in groups]
        try:
            self.scheduler.step(*metric)  # type: ignore[arg-type]
        except ValueError as error:  # OneCycleLR after its last step
            raise UsageError(f"{self._what} failed in its step {self._count + 1}: {first_line(error)}") from error
        self._rates, self._count = self._read(), self._count + 1
        self.changes_settings |= before != [_settings(group) for group in groups]

    def _read(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]


def takes_metrics(scheduler: LRScheduler) -> bool:
    """Whether its `step` must be given something, as that of ReduceLROnPlateau."""
    parameters = inspect.signature(scheduler.step).parameters.values()
    needed = [each for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]
    return any(each.kind is not each.VAR_POSITIONAL for each in needed)


def check_mode(scheduler: LRScheduler, monitor: Monitor) -> None:
    """Raise a UsageError if the scheduler waits for a metric to move in the direction that is worse."""
    mode = getattr(scheduler, "mode", monitor.mode)
    if isinstance(scheduler, ReduceLROnPlateau) and mode != monitor.mode:
        better = "smaller" if monitor.mode == "min" else "larger"
        raise UsageError(
            f"the task's schedule, ReduceLROnPlateau, has mode={mode!r}, but a {better} {monitor.metric} is better: use"
            f" mode={monitor.mode!r}, or choose the metric with --monitor and --mode"
        )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What else a scheduler may change in a group."""
    plain = (int, float, str, tuple, list)
    return {name: value for name, value in group.items() if name not in _NOT_SETTINGS and isinstance(value, plain)}
