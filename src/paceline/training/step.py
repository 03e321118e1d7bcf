"""One step: forward and backward over this worker's parts, the reduction, the optimizer.

Weighting: a step of R samples must move along the mean of R sample gradients, however they are spread. A pass over n of them
scales its mean loss by n / R, and the exact reducer adds all passes up; DDP takes the mean over P workers instead, so there
the factor is n * P / R.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.optim import Optimizer

from paceline.config import Config
from paceline.core.carrier import FREIGHT, MOST_METRICS, WISHES, Carrier, Reducer, averages, wrap
from paceline.core.noise import Noise, adascale_gain, noise_scale
from paceline.core.parts import Pass, Statistics
from paceline.core.schedules import Schedule
from paceline.data.loaders import Batch, Inputs, Loader
from paceline.dist.watch import PHASES as WATCHED
from paceline.dist.world import World
from paceline.errors import UsageError
from paceline.training.ema import Ema
from paceline.training.first import FirstPasses
from paceline.training.gradients import Jitter, Sam
from paceline.training.local import Local
from paceline.training.task import Objective
from paceline.training.timing.clock import Clock

Loss = Callable[[Inputs, float], tuple[Tensor, Tensor]]
"""A pass's inputs and share of the step -> what is differentiated, and the metrics' means, both times the share."""
Captured = Callable[[int, Iterator[Inputs]], Tensor | None]
"""A step's number and inputs -> its metrics; None, with no input taken, where there is no graph of it."""

_NOISE = ("gradient_variance", "gradient_square")


class Step:
    """Everything a step needs, put together once."""

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        schedule: Schedule,
        objective: Objective,
        world: World,
        config: Config,
        loader: Loader,
        parts: int,
        groups: Sequence[range],
        full: int,
        noise: Noise | None = None,
    ) -> None:
        self.model, self.world, self.schedule, self._make = model, world, schedule, loader.make
        self.objective, self.config, self.optimizer = objective, config, optimizer
        self.groups, self.statistics = groups, Statistics(model, groups, parts)
        self._full, self._measuring, self.parts = full, False, parts
        self._unit = 0, 0.0
        """The first part of those that the pass under way adds to, and what their loss counts for so far."""
        self._carrier = Carrier(model).to(world.device)
        exact = config.reduce == "exact"
        self._reducer = Reducer(self._carrier, parts) if exact else None
        self._scale = 1 if exact else world.size
        self.metrics: tuple[str, ...] = ()
        """What the objective reports, loss first: known from the first pass, or from a checkpoint."""
        self._first = FirstPasses(self)
        self.random = False
        """Whether a pass draws random numbers, as far as the first one shows."""
        read_lr = all(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
        scales = {group.setdefault("lr_scale", 1.0) for group in optimizer.param_groups}
        self.lrs: dict[float, Tensor] = {}
        """The learning rate as a tensor, times what some groups have it multiplied by: so a captured step can be told another.
        Empty where the optimizer would read it from the host."""
        if world.device.type == "cuda" and read_lr:
            self.lrs = {scale: torch.zeros((), device=world.device) for scale in scales}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.noise = noise
        self._sam = Sam(trained, config.sam_rho) if config.sam_rho else None
        self._jitter = Jitter(trained, config.gradient_noise, config.seed) if config.gradient_noise else None
        self.ema = Ema(model, config.ema) if config.ema else None
        self.local = Local(self, parts, groups) if config.local_steps else None
        self._averages = averages(world, config)
        self.clock = Clock(world, self._carrier.cargo if self._averages else None, config.profile)
        self._wrapped = cast(Any, wrap(self._carrier) if self._averages else self._carrier)
        if self._averages and (noise is not None or config.profile):
            self._wrapped.register_comm_hook(dist.group.WORLD, self._look_and_average)
        self._wish = torch.zeros(WISHES, device=world.device)
        self._wished = (False,) * WISHES
        self._unfrozen_told = False
        self.captured: Captured | None = None
        """Does a step by replaying a graph (`fast.py`)."""
        self.compiled = False
        self.now = 0
        """The step under way, or the last one."""
        self.mark: Callable[[int, str], None] = lambda step, phase: None
        """Told where in the step this worker is."""
        self.say: Callable[[str], None] = lambda text: None
        """Told what the user should know."""

    def __call__(
        self,
        step: int,
        inputs: Iterator[Inputs],
        passes: Sequence[Pass],
        step_samples: int,
        wishes: tuple[bool, bool] = (False, False),
    ) -> Tensor:
        """Train on the next `len(passes)` of this worker's inputs; returns the step's metrics and wishes, still on the device:
        means over the samples of all workers, the same numbers on each. On a GPU they are good until the next step.
        """
        self.clock.begin(step)
        if self.local is not None and self.local.takes(step):
            return self.local(step, inputs, passes, step_samples, wishes)
        self.begin(step, wishes)
        replays = self.captured is not None and not self.clock.follows_buckets  # of which a graph has none
        done = self.captured(step, inputs) if self.captured is not None and replays else None
        return self.run(inputs, passes, step_samples) if done is None else done

    def enter(self, phase: str) -> None:
        """Say where in the step this worker is: to whoever watches over it, and to the clock."""
        if phase in WATCHED:
            self.mark(self.now, phase)
        self.clock.enter(phase)

    def begin(self, step: int, wishes: tuple[bool, bool] = (False, False)) -> None:
        """Set what differs from step to step beside the inputs."""
        self.now = step
        lr = self.schedule.lr(step)
        for scale, tensor in self.lrs.items():
            tensor.fill_(lr * scale)  # the number travels with the kernel's launch: no copy to wait for
        for group in self.optimizer.param_groups:
            scale = group["lr_scale"]
            group["lr"] = self.lrs[scale] if self.lrs else lr * scale
        if self._jitter is not None:
            self._jitter.begin(step)
        if self.ema is not None:
            self.ema.begin(step)
        if wishes != self._wished:
            self._wished = wishes
            for wish, wished in zip(self._wish, wishes, strict=True):
                wish.fill_(float(wished))

    def run(
        self,
        inputs: Iterator[Inputs],
        passes: Sequence[Pass],
        step_samples: int,
        loss: Loss | None = None,
    ) -> Tensor:
        """All passes, the reduction and the optimizer; `loss` may be a compiled `self.loss`."""
        noise = self.noise if step_samples == self._full else None  # a smaller step has parts of other sizes
        self._measuring = noise is not None
        if noise is not None:
            noise.start()
        for number, item in enumerate(passes):
            final = number == len(passes) - 1
            self.enter("data")
            given = next(inputs)
            self.enter("forward")
            self.statistics.use(item)
            share, wish = self._terms(item, step_samples, final)
            self._unit = item.parts[0], share + (self._unit[1] if item.micro else 0.0)
            aside = self._climb(given, item) if self._sam is not None else nullcontext()
            with nullcontext() if final else self._apart(), aside:
                total, means = self._wrapped(partial(loss or partial(self._pass_loss, item), given, share))
                self.enter("backward")
                self._carrier.begin_backward()
                total.backward()
                self._carrier.load(means, wish)
                if final and self._averages:
                    self._carrier.complete()
            if self._sam is not None:
                self.enter("update")
                self._sam.descend()
            if noise is not None and item.last and (self._reducer is not None or not final or self.world.size == 1):
                noise.take(*self._unit, sums=self._reducer is None)
            if self._reducer is not None and item.last:
                self._reducer.add()
        if self.world.size > 1 and (self._reducer is not None or noise is not None):
            self.enter("reduce")
        if self._reducer is not None:
            self._reducer.finish()
        if noise is not None:
            noise.finish(self.world)
        self._first.end_step()
        self.enter("update")
        self.update()
        self.enter("other")
        out = self._carrier.unload()
        return out if self.noise is None else torch.cat((out, self.noise.state.float()))

    def update(self) -> None:
        """The optimizer's step, with the gradients that are there."""
        if self.config.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        if self._jitter is not None:
            self._jitter.add()
        if self.noise is not None and self.config.lr_rule == "adascale":
            gain = self.noise.gain(self.config.reference_batch)
            for tensor in self.lrs.values():
                tensor.mul_(gain)
            for group in () if self.lrs else self.optimizer.param_groups:
                group["lr"] *= float(gain)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update()

    def tell_unfrozen(self) -> None:
        """Say once if parameters that were frozen when the run began require gradients now: no optimizer has them."""
        trained = {id(parameter) for parameter in self._carrier.trained}
        unfrozen = [name for name, p in self.model.named_parameters() if p.requires_grad and id(p) not in trained]
        if unfrozen and not self._unfrozen_told:
            self._unfrozen_told = True
            self.say(
                f"{unfrozen[0]} was frozen when the run began and is not now: it is still not trained; start a run with"
                " requires_grad=True for all that you want to train"
            )

    def kept(self) -> dict[str, Tensor]:
        """What a step changes beside the model, its statistics and the optimizer's state."""
        kept = {} if self.noise is None else {"noise": self.noise.state}
        return kept if self.ema is None else {**kept, **{f"ema.{i}": tensor for i, tensor in enumerate(self.ema.tensors())}}

    def _climb(self, given: Inputs, item: Pass) -> Any:
        """Take the weights uphill; returns a context in which batch norm leaves the running statistics alone."""
        assert self._sam is not None
        with autocast(self.config, self.world):
            values = self.objective(self.model, self._make(given))
        self._sam.climb(values["loss"].mean())
        return self.statistics.aside()

    def _look_and_average(
        self,
        group: dist.ProcessGroup,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        """DDP's own averaging, with a look at this worker's gradients before it, and at the clock."""
        if self._measuring and self.noise is not None:
            pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
            self.noise.add(*self._unit, {p: grad for p, grad in pairs if p is not self._carrier.cargo})
            self.clock.looked()
        return self.clock.average(bucket, lambda: allreduce_hook(group, bucket))

    def dry_run(self, inputs: Sequence[Inputs], passes: Sequence[Pass], step_samples: int, loss: Loss) -> None:
        """All forward and backward passes, by this worker alone: one that fails leaves nobody in a collective. Nothing but
        running statistics changes.
        """
        for given, item in zip(inputs, passes, strict=True):
            self.statistics.use(item)
            share, _ = self._terms(item, step_samples, item is passes[-1])
            with self._apart():
                total, _ = self._wrapped(partial(loss, given, share))
                total.backward()
        self.forget()

    def forget(self) -> None:
        """Leave a step that was not finished."""
        self._carrier.forget()
        if self._reducer is not None:
            self._reducer.forget()

    def loss(self, given: Inputs, share: float) -> tuple[Tensor, Tensor]:
        """From inputs to what is differentiated, and the metrics' means; nothing in it that only the first pass needs."""
        with autocast(self.config, self.world):
            values = self.objective(self.model, self._make(given))
        return self._weigh(values, share)

    def _pass_loss(self, item: Pass, given: Inputs, share: float) -> tuple[Tensor, Tensor]:
        return self._weigh(self.values(self._make(given), item), share)

    def _apart(self) -> Any:
        """Gradients stay on this worker."""
        return nullcontext() if self._wrapped is self._carrier else self._wrapped.no_sync()

    def _terms(self, item: Pass, step_samples: int, final: bool) -> tuple[float, Tensor | None]:
        """What a pass's mean loss counts for, and the wishes, which travel with the step's last."""
        return len(item.samples) * self._scale / step_samples, self._wish if final else None

    def _weigh(self, values: dict[str, Tensor], share: float) -> tuple[Tensor, Tensor]:
        means = torch.stack([values[name].detach().float().mean() for name in self.metrics])
        return values["loss"].mean() * share, means * share

    def read(self, values: Sequence[float]) -> tuple[dict[str, float], tuple[bool, bool]]:
        """A step's metrics by name, and the wishes: to write a checkpoint, to stop."""
        save, stop = values[MOST_METRICS:FREIGHT]
        noise = dict(zip(_NOISE, values[FREIGHT:], strict=False))
        return dict(zip(self.metrics, values, strict=False)) | noise, (save > 0, stop > 0)

    def explain(self, row: Mapping[str, float], lr: float) -> tuple[dict[str, float], float]:
        """A row of means for people, with the noise scale where it is measured, and the learning rate with AdaScale's gain."""
        found = {name: value for name, value in row.items() if name not in _NOISE}
        if self.noise is None:
            return found, lr
        variance, square = (row[name] for name in _NOISE)
        found["noise_scale"] = noise_scale(variance, square)
        if self.config.lr_rule == "adascale":
            state = torch.tensor((variance, square), dtype=torch.float64)
            found["gain"] = float(adascale_gain(state, self._full, self.config.reference_batch))
        return found, lr * found.get("gain", 1.0)

    def values(self, batch: Batch, item: Pass) -> dict[str, Tensor]:
        """The objective's values for a pass."""
        return self._first(batch, item) if self._first.left else self.call_objective(batch, item)

    def call_objective(self, batch: Batch, item: Pass) -> dict[str, Tensor]:
        """The objective's values, with nothing looked for."""
        with autocast(self.config, self.world):
            try:
                return self.objective(self.model, batch)
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):
                    raise
                raise UsageError(
                    f"a pass over {len(item.samples)} sample(s) of {len(item.parts)} part(s): batch norm needs two a part;"
                    " use a larger --global-batch, fewer virtual workers, or a smaller --accumulate"
                ) from error


def autocast(config: Config, world: World) -> torch.autocast:
    """bf16 where asked for; weights, gradients and optimizer state stay fp32."""
    return torch.autocast(world.device.type, torch.bfloat16, enabled=config.precision == "bf16")
