"""The mechanics of a step: passes in, one gradient out. `Parts` is the way to use it.

Weighting: a step of R samples must follow the mean of R sample gradients, however the samples are spread. A pass over n of them
scales its mean loss by n / R, and the exact reducer adds all passes up. DDP takes the mean over P workers instead, so there the
factor is n * P / R.

If the samples have weights (tokens, valid pixels), the step must follow their weighted mean. No pass knows the weight of the
whole step, so each one computes its weighted sum, scaled by 1 / R (or P / R). The weight travels with the metrics in the same
scale. After the reduction, gradients and metrics are divided by it, on the device. See `weigh`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from paceline.core.carrier import MOST_METRICS, REQUESTS, WEIGHT, Carrier, Reducer, wrap
from paceline.core.deal import Pass
from paceline.core.noise import Noise
from paceline.dist.world import World
from paceline.errors import UsageError
from paceline.phases import Phase

Work = Callable[[float], tuple[Tensor, Tensor]]
"""A pass's share of the step -> its loss and the vector of its metrics, both times the share: what `weigh` returns."""
BucketHook = Callable[[Any, Callable[[], "torch.futures.Future[Tensor]"]], "torch.futures.Future[Tensor]"]
"""Called with a DDP bucket and the function that starts averaging it; returns what that function returned."""


def weigh(
    values: Mapping[str, Tensor], names: Sequence[str], weight: Tensor | None, share: float, samples: int
) -> tuple[Tensor, Tensor]:
    """A pass's loss and the vector of its metrics, both times its share of the step. `samples`: of the pass.

    Every value is one number, the mean over the pass, or has one number per sample. With a weight (one number, or one per
    sample) the results are weighted sums, and the vector ends with the weight. A value of weight 0 does not count, even if it
    is nan. A negative weight makes all results nan.
    """
    if weight is None:
        means = torch.stack([values[name].detach().float().mean() for name in names])
        return values["loss"].mean() * share, means * share
    weight = weight.detach().float()
    weight = torch.where(weight >= 0, weight, torch.nan)
    sums = [_weighted_sum(values[name].detach(), weight) for name in names]
    rest = weight.new_zeros(MOST_METRICS - len(names))
    vector = torch.cat((torch.stack(sums).float(), rest, weight.sum().view(1)))
    return _weighted_sum(values["loss"], weight) * (share / samples), vector * (share / samples)


def _weighted_sum(value: Tensor, weight: Tensor) -> Tensor:
    value, weight = value if value.dtype == torch.float64 else value.float(), weight if value.dim() else weight.sum()
    return (torch.where(weight == 0, 0.0, value) * weight).sum()


@torch.no_grad()
def divide_by_weight(payload: Tensor, grads: Iterable[Tensor | None]) -> Tensor:
    """Divide gradients, in place, and metrics by the step's weight: weighted means, or 0 if the weight is 0. No host sync."""
    weight = payload[WEIGHT]
    inverse = torch.where(weight == 0, 1.0, 1 / weight)  # if all weights are 0, so are the sums
    found = [grad for grad in grads if grad is not None]
    for dtype in {grad.dtype for grad in found}:
        torch._foreach_mul_([grad for grad in found if grad.dtype == dtype], inverse.to(dtype))
    return torch.cat((payload[:WEIGHT] * inverse, payload[WEIGHT:]))


def averages(world: World, exact: bool) -> bool:
    """Whether DDP averages the workers' gradients."""
    return world.size > 1 and not exact


@torch.no_grad()
def _copy_from_rank_0(tensors: Iterable[Tensor]) -> None:
    """Give every worker rank 0's values, as bytes: gloo has no int16 or float8. Collective: call on every rank."""
    for tensor in tensors:
        if tensor.numel():
            data = tensor.detach().flatten().clone().view(torch.uint8)
            dist.broadcast(data, 0)
            tensor.detach().copy_(data.view(tensor.dtype).view(tensor.shape))


class Engine:
    """Runs the passes of a step and reduces their gradients over parts and workers."""

    def __init__(self, model: nn.Module, parts: int, world: World, *, exact: bool, measures_noise: bool = False) -> None:
        """`parts`: the most that a step has. Call `enter` before the first step. Collective: call on every rank."""
        self._world = world
        self.carrier = Carrier(model).to(world.device)
        self.averages = averages(world, exact)
        """DDP averages the workers' gradients."""
        if world.size > 1:
            _copy_from_rank_0([*(model.parameters() if exact else ()), *model.buffers()])  # DDP may leave out buffers
        self.noise = Noise(self.carrier.trained, parts, world.device) if measures_noise else None
        self._reducer = Reducer(self.carrier, parts) if exact else None
        self._wrapped = cast(Any, wrap(self.carrier) if self.averages else self.carrier)
        self._bucket_hook: BucketHook | None = None
        self._hooked = False
        if self.noise is not None:
            self._register_hook()
        self.requests = torch.zeros(REQUESTS, device=world.device)
        """This worker's requests (to save, to stop): 1 for each."""
        self._requested = (False,) * REQUESTS
        self.around_backward: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Makes the context of every backward pass."""
        self._global_batch = 0
        self._unfinished = False
        """A step has begun and is not reduced."""
        self._measured: Noise | None = None
        """The noise scale, if this step's gradients are compared."""
        self._weighted: bool | None = None
        """This step's metrics came with a weight; None before its first pass."""
        self._idle = False
        self._unit = 0, 0.0
        """First of the parts that the current pass adds to, and what their loss counts for so far."""

    def hook_buckets(self, hook: BucketHook) -> None:
        """Call `hook` for every DDP bucket that becomes ready. Once, before the first step."""
        self._bucket_hook = hook
        self._register_hook()

    def enter(self, phase: Phase, units: Sequence[int]) -> None:
        """The next steps belong to this phase. `units`: parts in each pass of all workers."""
        self._global_batch = phase.global_batch
        if self.noise is not None:
            self.noise.enter(units, phase.part_batch, phase.global_batch)

    def request(self, requests: tuple[bool, bool]) -> None:
        """Set this worker's requests. All workers see them in the next reduced step."""
        if requests != self._requested:
            self._requested = requests
            for place, wanted in zip(self.requests, requests, strict=True):
                place.fill_(float(wanted))

    def begin(self, step_samples: int) -> None:
        """A step of this many samples, of all workers, begins."""
        if self._unfinished:
            self.forget()
            raise UsageError("the last step was not reduced: call step.reduce() once, after all its parts")
        full = step_samples == self._global_batch  # a smaller step has parts of other sizes
        self._measured = self.noise if full and self.noise is not None and self.noise.can_compare else None
        if self._measured is not None:
            self._measured.start()

    def share(self, item: Pass, step_samples: int) -> float:
        """What a pass's mean loss counts for in the step."""
        return len(item.samples) * (self._world.size if self.averages else 1) / step_samples

    def run(self, item: Pass, share: float, final: bool, work: Work) -> None:
        """Forward and backward of one pass. The final one also starts what other workers wait for."""
        carrier, self._unfinished = self.carrier, True
        self._unit = item.parts[0], share + (self._unit[1] if item.micro else 0.0)
        with nullcontext() if final else self._apart():
            total, metrics = self._wrapped(partial(work, share))
            self._check_weighted(metrics.numel() > WEIGHT)
            carrier.begin_backward()
            with self.around_backward():
                total.backward()
            carrier.load(metrics, self.requests if final else None)
            if final and self.averages:
                carrier.complete()
        if self._measured is not None and item.last and not (final and self.averages):
            self._measured.take(*self._unit, sums=self._reducer is None)
        if self._reducer is not None and item.last:
            self._reducer.add()

    def reduce(self) -> Tensor:
        """Finish the step's gradients. Returns metrics, requests and noise state, still on the device.

        Metrics are means over the samples of all workers. A worker without a part in this step takes part with zeros.
        Collective: call on every rank.
        """
        idle = not self._unfinished
        if idle:
            self._join_idle()
        if self._reducer is not None:
            self._reducer.finish()
        if self._measured is not None:
            self._measured.finish(self._world)
        out, self._unfinished = self.carrier.unload(), False
        if self._weighted or idle:
            out = divide_by_weight(out, [parameter.grad for parameter in self.carrier.trained])
        self._weighted = None
        return out if self.noise is None else torch.cat((out, self.noise.state.float()))

    def _join_idle(self) -> None:
        """Take part in a step in which this worker has no part."""
        none = torch.zeros(0, device=self.requests.device)
        self._idle = True
        if self.averages:
            self._wrapped(lambda: none)
            self.carrier.begin_backward()
        self.carrier.load(none, self.requests)
        if self.averages:
            self.carrier.complete()
        if self._reducer is not None:
            self._reducer.add()
        self._idle = False

    def dry_run(self, passes: Sequence[Pass], step_samples: int, work: Callable[[int, float], tuple[Tensor, Tensor]]) -> None:
        """All forward and backward passes of a step, without other workers: a failure leaves none of them in a collective.

        `work` gets a pass's index and share. Gradients are dropped.
        """
        for number, item in enumerate(passes):
            with self._apart():
                total, _ = self._wrapped(partial(work, number, self.share(item, step_samples)))
                with self.around_backward():
                    total.backward()
        self.forget()

    def forget(self) -> None:
        """Drop an unfinished step."""
        self._unfinished, self._weighted = False, None
        self.carrier.forget()
        if self._reducer is not None:
            self._reducer.forget()

    @property
    def compares(self) -> bool:
        """This step's gradients are compared for the noise scale."""
        return self._measured is not None

    @property
    def reduces_apart(self) -> bool:
        """`reduce` talks to other workers, beyond what DDP did within the backward pass; without a part there was none."""
        return self._world.size > 1 and (not self._unfinished or self._reducer is not None or self._measured is not None)

    def _check_weighted(self, weighted: bool) -> None:
        """Raise a UsageError if only some passes of a step have a weight, or if a weight has no meaning here."""
        if self._weighted is not None and self._weighted != weighted:
            raise UsageError("one pass of a step had a 'weight' and another had none: give it every time, or never")
        if weighted and self.noise is not None:
            raise UsageError(
                "the noise scale and AdaScale compare the gradients of parts with equal weights: leave out 'weight', or"
                " --measure-noise and --lr-rule adascale"
            )
        self._weighted = weighted

    def _apart(self) -> AbstractContextManager[Any]:
        """Gradients stay on this worker."""
        return cast(AbstractContextManager[Any], self._wrapped.no_sync()) if self.averages else nullcontext()

    def _register_hook(self) -> None:
        if self.averages and not self._hooked:
            self._hooked = True
            self._wrapped.register_comm_hook(dist.group.WORLD, self._average_bucket)

    def _average_bucket(
        self,
        group: dist.ProcessGroup,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        """DDP's own averaging, after the noise scale has seen this worker's gradients."""
        if self._measured is not None and not self._idle:
            pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
            self._measured.add(*self._unit, {p: grad for p, grad in pairs if p is not self.carrier.cargo})
        average = partial(allreduce_hook, group, bucket)
        return average() if self._bucket_hook is None else self._bucket_hook(bucket, average)
