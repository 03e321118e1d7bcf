"""One training step: forward and backward over this worker's parts, the reduction, the update.

`TrainStep` is the plain form. `capture.CapturedStep` replays it as a CUDA graph; `local.LocalSteps` lets parts train by
themselves for some steps. All three are called the same way.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.core.deal import Pass
from paceline.core.parts import Part, Parts, Step
from paceline.data.loaders import Inputs
from paceline.dist.watch import WATCHED
from paceline.training.forward import Forward
from paceline.training.gradients import Sam
from paceline.training.task_checks import TaskChecks
from paceline.training.timing.clock import Clock
from paceline.training.update import Update

Weighted = Callable[[Inputs, float, int], tuple[Tensor, Tensor]]
"""`Forward.run_pass`, or its compiled form."""
Mark = Callable[[int, str], None]
"""Called with the step and the stage that this worker enters."""
Requests = tuple[bool, bool]
"""To write a checkpoint; to stop."""


class Executor(Protocol):
    """What trains a step. Returns its metrics, requests and noise state, still on the device: means over all workers' samples.
    On a GPU they are valid until the next step.
    """

    def __call__(self, step: Step, inputs: Iterator[Inputs], requests: Requests = ...) -> Tensor: ...


class TrainStep:
    """The plain step. It takes one input per pass."""

    def __init__(
        self,
        parts: Parts,
        forward: Forward,
        update: Update,
        *,
        clock: Clock,
        checks: TaskChecks,
        mark: Mark,
        sam: Sam | None = None,
        number: int = 0,
    ) -> None:
        self.parts, self.forward, self.update, self.clock = parts, forward, update, clock
        self.checks, self._mark, self._sam = checks, mark, sam
        self.number = number
        """The current step, or the last one."""

    def __call__(self, step: Step, inputs: Iterator[Inputs], requests: Requests = (False, False)) -> Tensor:
        self.begin(step.number, requests)
        return self.run(step, inputs)

    def unwatched(self) -> "TrainStep":
        """The same step, but the watch for hung workers does not see it: for trials before the first step."""
        return TrainStep(
            self.parts,
            self.forward,
            self.update,
            clock=self.clock,
            checks=self.checks,
            mark=lambda number, stage: None,
            sam=self._sam,
        )

    def begin(self, number: int, requests: Requests = (False, False)) -> None:
        """Set what differs from step to step besides the inputs."""
        self.number = number
        self.clock.begin(number)
        self.update.begin(number)
        self.parts.engine.request(requests)

    def run(self, step: Step, inputs: Iterator[Inputs], weighted: Weighted | None = None) -> Tensor:
        """All passes, the reduction and the update. `weighted` may be a compiled `Forward.run_pass`."""
        if not step.passes:
            self.checks.idle()
        for part in step.parts():
            self.enter("data")
            given = next(inputs)
            self.enter("forward")
            with self._climbed(given, part.item):
                part.run(partial(self._work, part, given, weighted))
            if self._sam is not None:
                self.enter("update")
                self._sam.descend()
        if self.parts.engine.reduces_apart:
            self.enter("reduce")
        out = self.parts.engine.reduce()
        self.checks.end_step()
        self.enter("update")
        self.update()
        self.enter("other")
        return out if self.update.scaler is None else torch.cat((out, self.update.scaler.report()))

    def enter(self, stage: str) -> None:
        """Tell the clock, and the watch for hung workers, what this worker does next."""
        if stage in WATCHED:
            self._mark(self.number, stage)
        self.clock.enter(stage)

    def mark(self, stage: str) -> None:
        """Tell the watch alone: this is outside of any timed step."""
        self._mark(self.number, stage)

    def values(self, given: Inputs, item: Pass) -> dict[str, Tensor]:
        """The objective's values for a pass, checked in the first passes of the run."""
        batch = self.forward.make(given)
        return self.checks(batch, item) if self.checks.left else self.forward.values(batch, item)

    def _work(self, part: Part, given: Inputs, weighted: Weighted | None, share: float) -> tuple[Tensor, Tensor]:
        samples = len(part.item.samples)
        loss, metrics = (
            weighted(given, share, samples) if weighted else self.forward.weigh(self.values(given, part.item), share, samples)
        )
        self.enter("backward")
        return self._scaled(loss), metrics

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.update.scaler is None else self.update.scaler.scaled(loss)

    def _climbed(self, given: Inputs, item: Pass) -> AbstractContextManager[Any]:
        """With SAM, move the weights uphill; batch norm leaves its running statistics alone in the returned context."""
        if self._sam is None:
            return nullcontext()
        values = self.forward.values(self.forward.make(given), item)
        if self.checks.left:
            self.forward.name_metrics(values, len(item.samples))
        loss, _ = self.forward.weigh(values, 1.0, len(item.samples))
        with self.parts.statistics.recomputing():
            self._sam.climb(self._scaled(loss))  # its length does not matter, so a weighted sum is as good as a mean
        return self.parts.statistics.aside()
