"""Post-local SGD (Lin et al. 2018, arXiv:1808.07217): late in a run every part trains by itself, and only every H steps weights
and optimizer state are averaged over all parts.

A part is what one GPU would have had, so it has its own weights between two averagings, its own clipping and its own optimizer
step with the mean gradient of its own samples. A worker with several parts runs them in turn and keeps a copy of weights and
state for each, which it puts into the model's own tensors: DDP and captured graphs hold those. Parts are averaged at the end of
an epoch and of the run too, so nothing but training ever sees them apart; checkpoints, checks and stops wait for an averaging.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.core.carrier import FREIGHT
from paceline.core.exact_sum import Workers
from paceline.core.parts import Pass
from paceline.data.loaders import Inputs
from paceline.errors import UsageError

if TYPE_CHECKING:
    from paceline.training.step import Step

Tensors = dict[tuple[int, str], Tensor]
"""A part's weights and optimizer state, by (parameter, name of the state or "")."""


class Local:
    """The steps of the local phase, in the place of `Step`'s own."""

    def __init__(self, step: "Step", parts: int, groups: Sequence[range]) -> None:
        schedule, self._every = step.schedule, step.config.local_steps
        if step.statistics.over_workers:
            raise UsageError("--local-steps: a norm layer takes its statistics over all workers; use norm=part or batch")
        self.first = math.ceil(step.config.local_after * schedule.total_steps)
        """The step it begins with."""
        self._step, self._parts = step, parts
        self._own = [part for group in groups for part in group]
        self._held: dict[int, Tensors] = {}
        self.apart = False
        """Whether parts have weights of their own at the moment."""
        self._since, self._said = 0, False
        self._counts: list[int] = []

    def takes(self, step: int) -> bool:
        """Whether a step is one of these."""
        return step >= self.first

    def __call__(
        self, step: int, inputs: Iterator[Inputs], passes: Sequence[Pass], step_samples: int, wishes: tuple[bool, bool]
    ) -> Tensor:
        """As `Step.__call__`; every pass is of one part. Every worker reaches this."""
        engine = self._step
        self._begin()
        engine.begin(step, wishes)
        table = torch.zeros(self._parts, FREIGHT, device=engine.world.device)
        table[self._own[0], -len(wishes) :] = engine._wish
        common = self._copy() if not self.apart and len(self._own) > 1 else {}
        for part, of_part in groupby(passes, key=lambda item: item.parts[0]):
            if len(self._own) > 1:
                self._put(self._held.get(part, common))
            self._train(list(of_part), inputs, table[part], step_samples)
            if len(self._own) > 1:
                self._held[part] = self._copy(self._held.get(part))
        engine.clock.apart()
        self.apart = True
        self._since += 1
        if self._averages_after(step):
            self._average()
        engine.enter("reduce")
        if engine.world.size > 1:
            dist.all_reduce(table)  # every row comes from one worker: adding zeros is exact
        return _add_up(list(table))

    def _begin(self) -> None:
        if self._said:
            return
        self._said = True
        after = f"after step {self.first}" if self.first else "from the first step on"
        plainly = " They are not replayed from a CUDA graph." if self._step.captured is not None else ""
        self._step.say(
            f"{after} each of the {self._parts} parts trains by itself, averaged every {self._every} step(s).{plainly}"
        )

    def _train(self, passes: list[Pass], inputs: Iterator[Inputs], row: Tensor, step_samples: int) -> None:
        """One step of one part, whose weights are in the model; its metrics go into its row."""
        engine, samples = self._step, sum(len(item.samples) for item in passes)
        for item in passes:
            engine.enter("data")
            given = next(inputs)
            engine.enter("forward")
            engine.statistics.use(item)
            values = engine.values(engine._make(given), item)
            engine.enter("backward")
            (values["loss"].mean() * (len(item.samples) / samples)).backward()  # type: ignore[no-untyped-call]
            means = torch.stack([values[name].detach().float().mean() for name in engine.metrics])
            row[: len(means)] += means * (len(item.samples) / step_samples)
        if engine.ema is not None:
            engine.ema.paused = True  # until parts are averaged
        engine.enter("update")
        engine.update()

    def _averages_after(self, step: int) -> bool:
        schedule, done = self._step.schedule, step + 1
        ends = done % schedule.steps_per_epoch == 0 or done == schedule.total_steps
        return ends or (done - self.first) % self._every == 0

    @torch.no_grad()
    def _average(self) -> None:
        """Give all parts the mean of weights and state. Every worker reaches this."""
        engine = self._step
        engine.enter("reduce")
        live = {at: tensor for at, tensor in self._tensors().items() if _is_averaged(at[1], tensor)}
        sets = list(self._held.values()) or [live]
        for dtype in sorted({tensor.dtype for tensor in live.values()}, key=str):
            places = [at for at, tensor in live.items() if tensor.dtype == dtype]
            rows = [torch.cat([_flat(one.get(at), live[at]) for at in places]) for one in sets]
            mean = (self._mean_in_order if engine.config.reduce == "exact" else self._mean)(rows)
            for at, values in zip(places, torch.split(mean, [live[at].numel() for at in places]), strict=True):
                live[at].copy_(values.view(live[at].shape))
        if engine.ema is not None:
            engine.ema.paused = False
            engine.ema.begin(engine.now, self._since)
            engine.ema.update()
        self._held, self.apart, self._since = {}, False, 0

    def _mean(self, rows: list[Tensor]) -> Tensor:
        total = _add_up(rows)
        if self._step.world.size > 1:
            dist.all_reduce(total)
        return total / self._parts

    def _mean_in_order(self, rows: list[Tensor]) -> Tensor:
        """The same bits for any number of workers: every worker adds up a share of all values, in the order of the parts.

        Not the digits of `ExactReducer`, which keep what is within 2^-37 of a tensor's largest value: Adam's second moments
        spread further, and one that became zero would make a huge step.
        """
        workers, length = Workers(), len(rows[0])
        counts = self._counts = self._counts or self._count_parts(workers)
        share = -(-length // workers.size)
        sent = rows[0].new_zeros(workers.size, max(counts), share)
        for i, row in enumerate(rows):
            padded = torch.cat([row, row.new_zeros(share * workers.size - length)])
            sent[:, i] = padded.view(workers.size, share)
        received = sent if workers.size == 1 else torch.empty_like(sent)
        workers.scatter(sent, received).wait()
        mean = _add_up([received[rank, i].double() for rank, count in enumerate(counts) for i in range(count)]) / self._parts
        part = mean.to(sent.dtype)
        means = part if workers.size == 1 else part.new_empty(share * workers.size)
        workers.gather(part, means).wait()
        return means[:length]

    def _count_parts(self, workers: Workers) -> list[int]:
        """How many each worker has; the first worker has the first ones."""
        counts = torch.zeros(workers.size, dtype=torch.int64, device=self._step.world.device)
        counts[workers.rank] = len(self._own)
        if workers.size > 1:
            dist.all_reduce(counts)
        return [int(count) for count in counts.tolist()]

    def _tensors(self) -> Tensors:
        """Weights and optimizer state as they lie in model and optimizer. (No optimizer of ours keeps numbers on the host.)"""
        found: Tensors = {}
        for number, parameter in enumerate(self._trained()):
            found[number, ""] = parameter.detach()
            for name, value in self._step.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[number, name] = value
        return found

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._step.model.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def _copy(self, into: Tensors | None = None) -> Tensors:
        """A copy of what is in model and optimizer, in memory that is there already where it can be."""
        live, into = self._tensors(), into or {}
        _copy_all([(into[at], value) for at, value in live.items() if at in into])
        return {at: into[at] if at in into else value.clone() for at, value in live.items()}

    @torch.no_grad()
    def _put(self, values: Mapping[tuple[int, str], Tensor]) -> None:
        """Into model and optimizer, in place. State that a part has not yet begins at zeros, as all our optimizers' does."""
        live = self._tensors()
        _copy_all([(tensor, values[at]) for at, tensor in live.items() if at in values])
        for at in live.keys() - values.keys():
            live[at].zero_()


def _copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """(where to, what), in as few kernels as there are."""
    if pairs:
        torch._foreach_copy_([into for into, _ in pairs], [value for _, value in pairs])


def _is_averaged(name: str, value: Tensor) -> bool:
    """Not counts of steps, which all parts have in common and some optimizers keep on the host."""
    return value.is_floating_point() and name != "step"


def _flat(held: Tensor | None, like: Tensor) -> Tensor:
    return (torch.zeros_like(like) if held is None else held).flatten()


def _add_up(rows: Sequence[Tensor]) -> Tensor:
    """Their sum, first to last: `sum(0)` takes an order of its own for some columns."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
