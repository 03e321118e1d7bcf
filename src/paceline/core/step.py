"""One step of `Parts`: this worker's parts, in one round or in several, each with a reduction of its own.

Most steps have one round: every part adds its gradient, `reduce` combines them, the optimizer steps. A GAN's step has two: the
critic's, then the generator's. Iterate over the step again after `reduce` for the next round.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.carrier import MOST_METRICS
from paceline.core.deal import Pass
from paceline.core.engine import Work, weigh
from paceline.core.shapes import check_shapes
from paceline.errors import UsageError
from paceline.output import plural
from paceline.phases import Phase

if TYPE_CHECKING:
    from paceline.core.parts import Parts

_NOTHING = torch.empty(0)  # one for all: an epoch's steps are made at once


@dataclass
class Step:
    """One optimizer step: iterate over it for this worker's parts, then call `reduce`. Or let `backward` do both."""

    team: "Parts" = field(repr=False)
    number: int
    """Counted over the whole run, from 0."""
    phase: Phase
    """The global batch and the parts of the steps around it."""
    samples: int
    """Samples of all workers."""
    passes: list[Pass] = field(repr=False)
    batches: Iterator[Any] | None = field(default=None, repr=False)
    """What `make` turns into this worker's batches, one for each pass; None: parts have sample numbers only."""
    make: Callable[[Any], Any] = field(default=lambda given: given, repr=False)
    """Makes a part's batch, on the device, each time that a round needs it."""
    within: Callable[[], AbstractContextManager[Any]] = field(default=nullcontext, repr=False)
    """Each part's forward pass runs in this context."""
    enter: Callable[[str], None] = field(default=lambda what: None, repr=False)
    """Told what this worker does next: data, forward, backward, reduce or update."""
    round: int = -1
    """The current round, from 0; -1 before the first."""
    reduced: bool = False
    """The current round is reduced."""
    metrics: dict[str, Tensor] = field(default_factory=dict, repr=False)
    """Of the last round that was reduced: means over all samples."""
    payload: Tensor = field(default=_NOTHING, repr=False)
    """The last round's metrics and the requests to save or stop, still on the device."""
    _given: list[Any] = field(default_factory=list, repr=False)
    _names: tuple[str, ...] = ()
    _done: int = 0
    _current: "Part | None" = field(default=None, repr=False)

    def __len__(self) -> int:
        """This worker's parts."""
        return len(self.passes)

    def __iter__(self) -> Iterator["Part"]:
        """This worker's parts. Each is seeded, and the batch-norm layers use its statistics, while the loop body runs.

        Gradients from before are dropped. After `reduce`, iterate again for another round on the same samples: it has random
        numbers of its own, which follow from (seed, step, round, part).
        """
        self.team.model.zero_grad(set_to_none=True)
        self._begin_round()
        for number, part in enumerate(self.parts()):
            self._current = part
            self.enter("data")
            if self.batches is not None:
                if number == len(self._given):
                    self._given.append(next(self.batches))
                part.batch = self.make(self._given[number])
            self.team.seed(self.number, part.item, self.round)
            self.enter("forward")
            with self.within():
                yield part

    def _begin_round(self) -> None:
        if self.round >= 0 and self.team.engine.noise is not None:
            raise UsageError(f"step {self.number} is reduced more than once: measure_noise needs one reduction per step")
        self.round += 1
        self._names, self._done, self.reduced = (), 0, False

    def parts(self) -> Iterator["Part"]:
        """The same, for a caller that loads and seeds by itself."""
        self.team.switch(self.phase)
        self.team.engine.begin(self.samples)
        for number, item in enumerate(self.passes):
            self.team.statistics.use(item)
            yield Part(self, item, number == len(self.passes) - 1)

    def backward(self, function: Callable[[Any], Tensor | Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """One whole round: the gradients of all parts, combined. Returns the mean of each metric over all samples.

        `function` gets a part's batch or, without a loader, its sample numbers. It returns the loss, or a dict with the "loss",
        other metrics and perhaps a "weight": means over the part, or one value per sample. Collective: call on every rank.
        """
        for part in self:
            found = function(part.samples if self.batches is None else part.batch)
            values = dict(found) if isinstance(found, Mapping) else {"loss": found}
            if not isinstance(values.get("loss"), Tensor):
                kind = "a dict without a tensor 'loss'" if isinstance(found, Mapping) else type(found).__name__
                raise UsageError(f"the function given to step.backward returned {kind}: return the loss, or a dict with 'loss'")
            part.backward(values.pop("loss"), **values)
        return self.reduce()

    def reduce(self) -> dict[str, Tensor]:
        """Combine all parts' gradients into the parameters' `.grad`; returns the mean of each metric over all samples.

        Reading a metric waits for the device. Collective: call on every rank.
        """
        if self.reduced:
            raise UsageError(
                f"step {self.number} is reduced already: call reduce once after each `for part in step`, or step.backward alone"
            )
        if self._done != len(self.passes):
            raise UsageError(
                f"step {self.number}: backward was called for {self._done} of this worker's {plural(len(self.passes), 'part')}:"
                " call part.backward(loss) once for each"
            )
        if self.team.engine.reduces_apart:
            self.enter("reduce")
        self.payload, self.reduced = self.team.engine.reduce(), True
        if self.team.has_idle(self.phase):  # a worker without a part does not know what was reported
            self._names = tuple(self.team.world.broadcast(list(self._names)))
        names = [name for name in self._names if name != "weight"]
        self.metrics = dict(zip(names, self.payload, strict=False))
        self.enter("update")
        return self.metrics

    def count_backward(self, part: "Part") -> None:
        """Raise a UsageError unless this is the current part's first backward."""
        if self._current is not part:
            raise UsageError("call part.backward(loss) once per part, inside `for part in step`")
        self._current = None
        self._done += 1

    def forget(self) -> None:
        """Skip the rest of this step: its gradients are dropped."""
        self.team.engine.forget()

    def name_metrics(self, names: tuple[str, ...]) -> None:
        """Raise a UsageError unless all parts of the round report the same metrics."""
        if self._names and self._names != names:
            raise UsageError(f"one part reported {', '.join(names)}, another {', '.join(self._names)}: report the same metrics")
        self._names = names


@dataclass
class Part:
    """One forward and backward pass of a step: one part, or several at once, or a micro-batch of them."""

    step: Step
    item: Pass
    final: bool
    """This worker's last pass in this round."""
    batch: Any = None
    """From the loader of `Parts`, on the model's device."""

    @property
    def samples(self) -> Tensor:
        """Numbers of the samples to train on."""
        return torch.from_numpy(self.step.team.sampler.rows(self.item.samples))

    def backward(self, loss: Tensor, *, weight: Tensor | None = None, **metrics: Tensor) -> None:
        """Add the gradient of this part's mean loss.

        The loss and the metrics are means over the part, or have one value per sample. With `weight` (one number that belongs
        to the mean, such as its number of tokens, or one per sample) the step follows the mean weighted by it.
        """
        names, values = ("loss", *sorted(metrics)), {"loss": loss, **metrics}
        if len(names) > MOST_METRICS:
            raise UsageError(f"a part reported {len(names)} metrics: at most {MOST_METRICS} can be combined")
        for name, value in values.items():
            if not isinstance(value, Tensor):
                raise UsageError(f"part.backward got {name} as {type(value).__name__}: give a tensor")
        if weight is not None:
            check_shapes({**values, "weight": weight}, len(self.item.samples), "part.backward got")
        self.step.name_metrics(names if weight is None else (*names, "weight"))
        self.step.count_backward(self)

        def work(share: float) -> tuple[Tensor, Tensor]:
            return weigh(values, names, weight, share, len(self.item.samples))

        self.step.enter("backward")
        with torch.autocast(loss.device.type, enabled=False):  # backward has the types of the forward pass by itself
            self.run(work)

    def run(self, work: Work) -> None:
        """Forward and backward. `work` runs inside DDP's forward: only there does a compiled loss overlap with averaging."""
        engine = self.step.team.engine
        engine.run(self.item, engine.share(self.item, self.step.samples), self.final, work)
