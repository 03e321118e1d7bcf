"""One step: forward and backward over this worker's part, DDP's averaging, the optimizer. And the meter that reads it without
waiting.

Weighting: a step of R samples must move along the mean of R sample gradients, however they are spread. A worker with n of them
scales its mean loss by n * P / R; DDP then takes the mean over the P workers, and every sample weighs 1 / R.
"""

import inspect
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from paceline.config import Config
from paceline.data.keys import key, seed_all
from paceline.data.loaders import Batch
from paceline.dist.world import World
from paceline.errors import UsageError
from paceline.optim.schedules import Schedule
from paceline.training.task import Objective

MOST_METRICS = 16


class Step:
    """Everything a step needs, put together once."""

    def __init__(
        self, *, model: nn.Module, optimizer: Optimizer, schedule: Schedule, objective: Objective, world: World, config: Config
    ) -> None:
        self.model, self.world, self.schedule = model, world, schedule
        self.objective, self.config = objective, config
        self._optimizer = optimizer
        self._carrier = _Carrier(model).to(world.device)
        self._wrapped = _wrap(self._carrier, world)
        self._view = cast(nn.Module, _View(self._wrapped, model))
        self.metrics: tuple[str, ...] = ()

    def __call__(self, step: int, batches: Iterator[Batch], sizes: Sequence[int], step_samples: int) -> Tensor:
        """Train on the next `len(sizes)` micro-batches of this worker; returns the step's metrics, still on the device: means
        over the samples of all workers, the same numbers on each.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = self.schedule.lr(step)
        for micro, (size, batch) in enumerate(zip(sizes, batches, strict=False)):
            part = self.world.rank
            seed_all(key(self.config.seed, step, part, micro), self.world.device)
            last = micro == len(sizes) - 1
            with nullcontext() if last or self._wrapped is self._carrier else self._wrapped.no_sync():
                values = self._forward(batch, size)
                share = size * self.world.size / step_samples
                loss = values["loss"].mean() * share + self._carrier.load(values, self.metrics, share)
                loss.backward()  # type: ignore[no-untyped-call]
        if self.config.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return self._carrier.unload()[: len(self.metrics)]

    def _forward(self, batch: Batch, size: int) -> dict[str, Tensor]:
        with autocast(self.config, self.world):
            values = self.objective(self._view, batch)
        if not self.metrics:
            self.metrics = check_values(values, size)
        return values


class Meter:
    """The metrics of each step, read a few steps late on a GPU so that nobody waits for them.

    Every worker reads the same numbers at the same step, so decisions made from them need no further agreement.
    """

    def __init__(self, world: World) -> None:
        self._lag = 4 if world.device.type == "cuda" else 0
        self._waiting: deque[tuple[int, Tensor, Any]] = deque()

    def push(self, step: int, means: Tensor) -> Iterator[tuple[int, list[float]]]:
        """Hand in a step's metrics; yields (step, metrics) of steps whose numbers have arrived."""
        arrived = None
        if means.device.type == "cuda":
            means = means.to("cpu", non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        self._waiting.append((step, means, arrived))
        while len(self._waiting) > self._lag:
            yield self._read()

    def flush(self) -> Iterator[tuple[int, list[float]]]:
        """Read what is left."""
        while self._waiting:
            yield self._read()

    def _read(self) -> tuple[int, list[float]]:
        step, means, arrived = self._waiting.popleft()
        if arrived is not None:
            arrived.synchronize()
        return step, means.tolist()


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


class _Carrier(nn.Module):
    """The model, and one more parameter whose gradient is the step's metrics.

    DDP averages that gradient with all the others, so metrics need no collective of their own and arrive on every worker
    together with the step.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.cargo = nn.Parameter(torch.zeros(MOST_METRICS))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def load(self, values: dict[str, Tensor], metrics: Sequence[str], share: float) -> Tensor:
        """A term to add to the loss: zero, but its gradient with respect to the cargo is the metrics' means times the share."""
        means = torch.stack([values[name].detach().float().mean() for name in metrics]) * share
        return (self.cargo[: len(metrics)] * means).sum()

    def unload(self) -> Tensor:
        """What the cargo's gradient has become: the mean over workers."""
        grad, self.cargo.grad = self.cargo.grad, None
        assert grad is not None
        return grad.clone()  # DDP's bucket is written to again in the next step


def _wrap(model: nn.Module, world: World) -> Any:
    """DDP around the model where there is somebody to average with.

    Buffers are not broadcast: each worker's batch norm sees its own part, and running statistics are averaged when they are
    needed.
    """
    if world.size == 1:
        return model
    devices = [world.device.index] if world.device.type == "cuda" else None
    flags = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in flags else "broadcast_buffers"  # torch 2.13 renamed it
    keep: dict[str, Any] = {name: False}
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True, **keep)


def check_values(values: dict[str, Tensor], size: int) -> tuple[str, ...]:
    """The objective's metrics, loss first; a UsageError where it does not keep its promise."""
    if "loss" not in values:
        raise UsageError(f"the task's objective returned {sorted(values)}: it must return a dict with 'loss'")
    if len(values) > MOST_METRICS:
        raise UsageError(f"the task's objective returned {len(values)} metrics: at most {MOST_METRICS} are carried")
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.shape != (size,):
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(
                f"the task's objective returned {name!r} as {found}: it must hold one value a sample, shape ({size},)"
            )
    return ("loss", *(name for name in values if name != "loss"))
