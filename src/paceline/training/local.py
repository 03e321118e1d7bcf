"""Post-local SGD (Lin et al. 2018, arXiv:1808.07217): late in a run every part trains by itself, and only every H steps
weights and optimizer state are averaged over all parts.

A part is what one GPU would have had. Between two averagings it has its own weights, its own gradient clipping and its own
optimizer step with the mean gradient of its own samples. A worker with several parts runs them in turn. It keeps a copy of
weights and state for each and swaps it into the model's own tensors, which DDP and captured graphs refer to. Parts are also
averaged at the end of each epoch and of the run, so only training ever sees them apart; checkpoints, checks and stops wait for
an averaging.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.core.carrier import PAYLOAD
from paceline.core.deal import Pass
from paceline.core.engine import divide_by_weight
from paceline.core.exact_sum import Workers
from paceline.core.parts import Step
from paceline.core.schedules import Schedule
from paceline.data.loaders import Inputs
from paceline.output import plural
from paceline.training.step import Executor, Requests, TrainStep

Tensors = dict[tuple[int, str], Tensor]
"""A part's weights and optimizer state, by (parameter, name of the state or "")."""


def first_local_step(local_steps: int, local_after: float, schedule: Schedule) -> int | None:
    """The step at which parts begin to train by themselves; None without `--local-steps`."""
    return math.ceil(local_after * schedule.total_steps) if local_steps else None


def with_local_steps(
    step: TrainStep, executor: Executor, first: int | None, every: int, say: Callable[[str], None]
) -> Executor:
    """The executor, with local steps from step `first` on; the executor itself if that is None."""
    return executor if first is None else LocalSteps(step, executor, first, every, say)


class LocalSteps:
    """Trains the local steps; hands all earlier ones to another executor."""

    def __init__(self, step: TrainStep, before: Executor, first: int, every: int, say: Callable[[str], None]) -> None:
        """`before` trains the steps up to `first`; then parts are averaged after each `every` steps."""
        self._step, self._before, self._first, self._every, self._say = step, before, first, every, say
        self._parts, self._world = step.parts.virtual_workers, step.parts.world
        self._own = [part for group in step.parts.groups for part in group]
        self._held: dict[int, Tensors] = {}
        self.apart = False
        """Parts have weights of their own at the moment."""
        self._since, self._said = 0, False
        self._counts: list[int] = []

    def __call__(self, step: Step, inputs: Iterator[Inputs], requests: Requests = (False, False)) -> Tensor:
        """Train a step. Every pass of a local step holds one part. Collective: call on every rank."""
        if step.number < self._first:
            return self._before(step, inputs, requests)
        self._announce()
        plain = self._step
        plain.begin(step.number, requests)
        table = torch.zeros(self._parts, PAYLOAD, device=self._world.device)
        table[self._own[0], -len(requests) :] = plain.parts.engine.requests
        common = self._copy() if not self.apart and len(self._own) > 1 else {}
        for part, of_part in groupby(step.passes, key=lambda item: item.parts[0]):
            if len(self._own) > 1:
                self._put(self._held.get(part, common))
            self._train(list(of_part), inputs, table[part], step.samples)
            if len(self._own) > 1:
                self._held[part] = self._copy(self._held.get(part))
        plain.clock.apart()
        self.apart = True
        self._since += 1
        if self._averages_after(step.number):
            self._average()
        plain.enter("reduce")
        if self._world.size > 1:
            dist.all_reduce(table)  # every row comes from one worker: adding zeros is exact
        out = _add_up(list(table))
        return divide_by_weight(out, ()) if plain.forward.weighted else out

    def _announce(self) -> None:
        if self._said:
            return
        self._said = True
        after = f"after step {self._first}" if self._first else "from the first step on"
        plainly = "" if self._before is self._step else " These steps are not replayed from a CUDA graph."
        every = "step" if self._every == 1 else plural(self._every, "step")
        self._say(f"{after} each of the {self._parts} parts trains by itself, averaged every {every}.{plainly}")

    def _train(self, passes: list[Pass], inputs: Iterator[Inputs], row: Tensor, step_samples: int) -> None:
        """One step of one part, whose weights are in the model. Its metrics go into its row."""
        plain, samples = self._step, sum(len(item.samples) for item in passes)
        own = torch.zeros_like(row)
        for item in passes:
            plain.enter("data")
            given = next(inputs)
            plain.enter("forward")
            plain.parts.statistics.use(item)
            values = plain.values(given, item)
            plain.enter("backward")
            loss, means = plain.forward.weigh(values, 1.0, len(item.samples))
            with plain.parts.statistics.recomputing():
                (loss * (len(item.samples) / samples)).backward()  # type: ignore[no-untyped-call]
            row[: len(means)] += means * (len(item.samples) / step_samples)
            own[: len(means)] += means * (len(item.samples) / samples)
        if plain.forward.weighted:
            divide_by_weight(own, [parameter.grad for parameter in self._trained()])
        plain.enter("update")
        plain.update(averages=False)  # the averaged weights take in the mean over all parts, not one part's weights

    def _averages_after(self, step: int) -> bool:
        schedule, done = self._step.update.schedule, step + 1
        ends = done % schedule.steps_per_epoch == 0 or done == schedule.total_steps
        return ends or (done - self._first) % self._every == 0

    @torch.no_grad()
    def _average(self) -> None:
        """Give all parts the mean of weights and state. Collective: call on every rank."""
        plain, ema = self._step, self._step.update.ema
        plain.enter("reduce")
        live = {at: tensor for at, tensor in self._tensors().items() if _is_averaged(at[1], tensor)}
        sets = list(self._held.values()) or [live]
        for dtype in sorted({tensor.dtype for tensor in live.values()}, key=str):
            places = [at for at, tensor in live.items() if tensor.dtype == dtype]
            rows = [torch.cat([_flat(one.get(at), live[at]) for at in places]) for one in sets]
            mean = (self._mean_in_order if plain.parts.exact else self._mean)(rows)
            for at, values in zip(places, torch.split(mean, [live[at].numel() for at in places]), strict=True):
                live[at].copy_(values.view(live[at].shape))
        if ema is not None:
            ema.begin(plain.number, self._since)
            ema.update()
        self._held, self.apart, self._since = {}, False, 0

    def _mean(self, rows: list[Tensor]) -> Tensor:
        total = _add_up(rows)
        if self._world.size > 1:
            dist.all_reduce(total)
        return total / self._parts

    def _mean_in_order(self, rows: list[Tensor]) -> Tensor:
        """The same bits for any number of workers: every worker adds up a share of all values, in the order of the parts.

        `ExactReducer` will not do: it keeps what is within 2^-37 of a tensor's largest value. Adam's second moments spread
        further, and one that became zero would make a huge step.
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
        """How many parts each worker has; the first worker has the first ones."""
        counts = torch.zeros(workers.size, dtype=torch.int64, device=self._world.device)
        counts[workers.rank] = len(self._own)
        if workers.size > 1:
            dist.all_reduce(counts)
        return [int(count) for count in counts.tolist()]

    def _tensors(self) -> Tensors:
        """The live weights and optimizer state. (None of our optimizers keeps numbers on the host.)"""
        found: Tensors = {}
        for number, parameter in enumerate(self._trained()):
            found[number, ""] = parameter.detach()
            for name, value in self._step.update.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[number, name] = value
        return found

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._step.parts.model.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def _copy(self, into: Tensors | None = None) -> Tensors:
        """A copy of what is in model and optimizer, reusing the memory of `into` where possible."""
        live, into = self._tensors(), into or {}
        _copy_all([(into[at], value) for at, value in live.items() if at in into])
        return {at: into[at] if at in into else value.clone() for at, value in live.items()}

    @torch.no_grad()
    def _put(self, values: Mapping[tuple[int, str], Tensor]) -> None:
        """Copy into model and optimizer, in place. Missing state starts at zero, as it does in all our optimizers."""
        live = self._tensors()
        _copy_all([(tensor, values[at]) for at, tensor in live.items() if at in values])
        for at in live.keys() - values.keys():
            live[at].zero_()


def _copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy (target, source) pairs in as few kernels as possible."""
    if pairs:
        torch._foreach_copy_([into for into, _ in pairs], [value for _, value in pairs])


def _is_averaged(name: str, value: Tensor) -> bool:
    """All floats except step counts, which all parts share and some optimizers keep on the host."""
    return value.is_floating_point() and name != "step"


def _flat(held: Tensor | None, like: Tensor) -> Tensor:
    return (torch.zeros_like(like) if held is None else held).flatten()


def _add_up(rows: Sequence[Tensor]) -> Tensor:
    """Their sum, first to last: `sum(0)` may use another order for some columns."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
