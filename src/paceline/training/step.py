"""One step: forward and backward over this worker's parts, the reduction, the optimizer.

Weighting: a step of R samples must move along the mean of R sample gradients, however they are spread. A pass over n of them
scales its mean loss by n / R, and the exact reducer adds all passes up; DDP takes the mean over P workers instead, so there
the factor is n * P / R.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.config import Config
from paceline.data.loaders import Batch, Inputs, Loader, map_tensors
from paceline.dist.watch import PHASES as WATCHED
from paceline.dist.world import World
from paceline.errors import UsageError
from paceline.optim.schedules import Schedule
from paceline.records import ROW_FIELDS
from paceline.training.carrier import MOST_METRICS, WISHES, Carrier, Reducer, wrap
from paceline.training.ema import Ema
from paceline.training.gradients import Jitter, Sam
from paceline.training.local import Local
from paceline.training.noise import Noise, adascale_gain, noise_scale
from paceline.training.parts import Pass, Statistics
from paceline.training.task import Objective
from paceline.training.timing import Clock

Loss = Callable[[Inputs, float, Tensor | None], Tensor]
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
        self._full, self._measuring = full, False
        self._unit = 0, 0.0
        """The first part of those that the pass under way adds to, and what their loss counts for so far."""
        self._carrier = Carrier(model).to(world.device)
        exact = config.reduce == "exact"
        self._wrapped: Any = self._carrier if exact else wrap(self._carrier, world)
        self._reducer = Reducer(self._carrier, parts) if exact else None
        self._scale = 1 if exact else world.size
        self._view = cast(nn.Module, _View(self._wrapped, model))
        self.metrics: tuple[str, ...] = ()
        """What the objective reports, loss first: known from the first pass, or from a checkpoint."""
        self._looked = False
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
        averaged = self._reducer is None and world.size > 1
        self.clock = Clock(world, self._carrier.parameters() if averaged else (), config.profile)
        if averaged and (noise is not None or config.profile):
            cast(DistributedDataParallel, self._wrapped).register_comm_hook(dist.group.WORLD, self._look_and_average)
        self._wish = torch.zeros(WISHES, device=world.device)
        self._wished = (False,) * WISHES
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
                if loss is not None:
                    total = loss(given, share, wish)
                else:
                    total = self._weigh(self._forward(self._make(given), item), share, wish)
                self.enter("backward")
                total.backward()  # type: ignore[no-untyped-call]
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
            with self._apart():
                loss(given, *self._terms(item, step_samples, item is passes[-1])).backward()  # type: ignore[no-untyped-call]
        self.forget()

    def forget(self) -> None:
        """Leave a step that was not finished."""
        self._carrier.zero_grad(set_to_none=True)
        if self._reducer is not None:
            self._reducer.forget()

    def loss(self, given: Inputs, share: float, wish: Tensor | None) -> Tensor:
        """From inputs to what is differentiated, with nothing in it that only the first pass needs."""
        with autocast(self.config, self.world):
            values = self.objective(self._view, self._make(given))
        return self._weigh(values, share, wish)

    def _apart(self) -> Any:
        """Gradients stay on this worker."""
        return nullcontext() if self._wrapped is self._carrier else self._wrapped.no_sync()

    def _terms(self, item: Pass, step_samples: int, final: bool) -> tuple[float, Tensor | None]:
        """What a pass's mean loss counts for, and the wishes, which travel with the step's last."""
        return len(item.samples) * self._scale / step_samples, self._wish if final else None

    def _weigh(self, values: dict[str, Tensor], share: float, wish: Tensor | None) -> Tensor:
        return values["loss"].mean() * share + self._carrier.load(values, self.metrics, share, wish)

    def read(self, values: Sequence[float]) -> tuple[dict[str, float], tuple[bool, bool]]:
        """A step's metrics by name, and the wishes: to write a checkpoint, to stop."""
        save, stop = values[MOST_METRICS : MOST_METRICS + WISHES]
        noise = dict(zip(_NOISE, values[MOST_METRICS + WISHES :], strict=False))
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

    def _forward(self, batch: Batch, item: Pass) -> dict[str, Tensor]:
        if not self._looked:
            return self._forward_first(batch, item)
        return self._objective(self._view, batch, item)

    def _objective(self, model: nn.Module, batch: Batch, item: Pass) -> dict[str, Tensor]:
        with autocast(self.config, self.world):
            try:
                return self.objective(model, batch)
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):
                    raise
                raise UsageError(
                    f"a pass over {len(item.samples)} sample(s) of {len(item.parts)} part(s): batch norm needs two a part;"
                    " use a larger --global-batch, fewer virtual workers, or a smaller --accumulate"
                ) from error

    def _forward_first(self, batch: Batch, item: Pass) -> dict[str, Tensor]:
        """A pass that also looks for what would make the model depend on the number of workers, as far as one pass shows it."""
        self._looked = True
        # In exact mode passes do not depend on it, and a norm over the whole step has no parts to compare.
        together = len(item.parts) > 1 and self.config.reduce == "fast" and not self.statistics.over_workers
        alone = self._loss_alone(batch, item) if together else None
        buffers, random = self._look()
        values = self._objective(self._view, batch, item)
        self.metrics = check_values(values, len(item.samples))
        buffers_after, random_after = self._look()
        self.random = random != random_after
        changed = next((name for name, seen in buffers_after.items() if seen != buffers.get(name)), None)
        if changed is not None and self.config.reduce == "exact":
            raise UsageError(
                f"--reduce exact: the forward pass changes the buffer {changed}, which is no batch norm's and would depend on"
                " the number of workers; use --reduce fast"
            )
        if alone is not None and self.random:
            self.say(
                f"the model draws random numbers while {len(item.parts)} parts run together: every part has its own, but which"
                " ones depends on the number of workers; --parts-at-once 1 keys them by part"
            )
        elif alone is not None and not _close(values["loss"].detach()[:: len(item.parts)], alone):
            raise UsageError(
                f"a part's loss beside {len(item.parts) - 1} other part(s) is not what it is alone: the model or the objective"
                " looks across the samples of a batch; use --parts-at-once 1"
            )
        return values

    def _look(self) -> tuple[dict[str, tuple[int, int]], bytes]:
        """What a forward pass may change that parts share: buffers, and random numbers."""
        parted = self.statistics.names(self.model)
        buffers = {name: (id(b), b._version) for name, b in self.model.named_buffers() if name not in parted}
        cuda = self.world.device.type == "cuda"
        random = torch.cuda.get_rng_state(self.world.device) if cuda else torch.get_rng_state()
        return buffers, random.numpy().tobytes()

    @torch.no_grad()
    def _loss_alone(self, batch: Batch, item: Pass) -> Tensor:
        """The first part's loss without the others; nothing is left changed."""
        count, part = len(item.parts), range(item.parts[0], item.parts[0] + 1)
        kept = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        single = Pass(item.group, part, item.micro, item.last, item.samples[::count])
        self.statistics.use(single)
        with torch.random.fork_rng([self.world.device] if self.world.device.type == "cuda" else []):
            values = self._objective(self.model, _every(batch, count, len(item.samples)), single)
        self.statistics.use(item)
        for name, buffer in self.model.named_buffers():
            buffer.copy_(kept[name])
        return values["loss"]


def autocast(config: Config, world: World) -> torch.autocast:
    """bf16 where asked for; weights, gradients and optimizer state stay fp32."""
    return torch.autocast(world.device.type, torch.bfloat16, enabled=config.precision == "bf16")


class _View:
    """What the objective gets in training: called, it is the wrapped model; in all else, the model itself."""

    def __init__(self, wrapped: nn.Module, model: nn.Module) -> None:
        self._wrapped, self._model = wrapped, model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _close(one: Tensor, other: Tensor) -> bool:
    """Equal up to the rounding of other kernels for other batches, bf16 included."""
    near = 0.05 * float(one.float().abs().mean())
    return torch.allclose(one.float(), other.float(), rtol=0.05, atol=near, equal_nan=True)


def _every(batch: Any, step: int, samples: int) -> Any:
    """Every so many samples of a batch, whatever it is made of."""
    return map_tensors(lambda tensor: tensor[::step] if tensor.dim() and len(tensor) == samples else tensor, batch)


def check_values(values: dict[str, Tensor], size: int) -> tuple[str, ...]:
    """The objective's metrics, loss first; a UsageError where it does not keep its promise."""
    if "loss" not in values:
        raise UsageError(f"the task's objective returned {sorted(values)}: it must return a dict with 'loss'")
    if len(values) > MOST_METRICS:
        raise UsageError(f"the task's objective returned {len(values)} metrics: at most {MOST_METRICS} are carried")
    for name, value in values.items():
        if not isinstance(name, str) or not name.isprintable() or name in ROW_FIELDS:
            taken = ", ".join(sorted(ROW_FIELDS))
            raise UsageError(f"the task's objective returned a metric named {name!r}: use plain text other than {taken}")
        if not isinstance(value, Tensor) or value.shape != (size,):
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(
                f"the task's objective returned {name!r} as {found}: it must hold one value a sample, shape ({size},)"
            )
    return ("loss", *(name for name in values if name != "loss"))
