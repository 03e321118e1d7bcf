"""One step: forward and backward over this worker's part, DDP's averaging, the optimizer. And the meter that reads it without
waiting.

Weighting: a step of R samples must move along the mean of R sample gradients, however they are spread. A worker with n of them
scales its mean loss by n * P / R; DDP then takes the mean over the P workers, and every sample weighs 1 / R.
"""

import inspect
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
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


class Step:
    """Everything a step needs, put together once."""

    def __init__(
        self, *, model: nn.Module, optimizer: Optimizer, schedule: Schedule, objective: Objective, world: World, config: Config
    ) -> None:
        self.model, self.world, self.schedule = model, world, schedule
        self._wrapped = _wrap(model, world)
        self._optimizer, self.objective, self.config = optimizer, objective, config
        self.metrics: tuple[str, ...] = ()

    def __call__(self, step: int, batches: Iterator[Batch], sizes: Sequence[int], step_samples: int) -> Tensor:
        """Train on the next `len(sizes)` micro-batches of this worker; returns the sums of its samples' metrics, still on the
        device.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = self.schedule.lr(step)
        sums: Tensor | None = None
        for micro, (size, batch) in enumerate(zip(sizes, batches, strict=False)):
            part = self.world.rank
            seed_all(key(self.config.seed, step, part, micro), self.world.device)
            last = micro == len(sizes) - 1
            with nullcontext() if last or self._wrapped is self.model else self._wrapped.no_sync():
                values = self._forward(batch, size)
                (values["loss"].mean() * (size * self.world.size / step_samples)).backward()  # type: ignore[no-untyped-call]
            micro_sums = torch.stack([values[name].detach().float().sum() for name in self.metrics])
            sums = micro_sums if sums is None else sums + micro_sums
        if self.config.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        assert sums is not None
        return sums

    def _forward(self, batch: Batch, size: int) -> dict[str, Tensor]:
        with autocast(self.config, self.world):
            values = self.objective(self._wrapped, batch)
        if not self.metrics:
            self.metrics = _metric_names(values, size)
        return values


class Meter:
    """The metrics of each step, summed over all workers, read a few steps late so that nobody waits for them.

    Every worker pushes every step and reads the same numbers at the same step, so decisions made from them need no further
    agreement.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._lag = 4 if world.device.type == "cuda" else 1
        self._waiting: deque[tuple[int, int, Tensor, Any]] = deque()

    def push(self, step: int, sums: Tensor, samples: int) -> Iterator[tuple[int, list[float]]]:
        """Hand in a step's sums; yields (step, means) of steps whose numbers have arrived."""
        ready = dist.all_reduce(sums, async_op=True) if self._world.size > 1 else None
        if self._world.device.type == "cuda" and (ready is None or self._world.backend == "nccl"):
            if ready is not None:
                ready.wait()  # orders the streams; the host goes on (gloo's wait would stop it)
            sums = sums.to("cpu", non_blocking=True)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        self._waiting.append((step, samples, sums, ready))
        while len(self._waiting) > self._lag:
            yield self._read()

    def flush(self) -> Iterator[tuple[int, list[float]]]:
        """Read what is left."""
        while self._waiting:
            yield self._read()

    def _read(self) -> tuple[int, list[float]]:
        step, samples, sums, ready = self._waiting.popleft()
        if isinstance(ready, torch.cuda.Event):
            ready.synchronize()
        elif ready is not None:
            ready.wait()
        return step, [value / samples for value in sums.tolist()]


def autocast(config: Config, world: World) -> torch.autocast:
    """bf16 where asked for; weights, gradients and optimizer state stay fp32."""
    return torch.autocast(world.device.type, torch.bfloat16, enabled=config.precision == "bf16")


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


def _metric_names(values: dict[str, Tensor], size: int) -> tuple[str, ...]:
    """The objective's metrics, loss first; a UsageError where it does not keep its promise."""
    if "loss" not in values:
        raise UsageError(f"the task's objective returned {sorted(values)}: it must return a dict with 'loss'")
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.shape != (size,):
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(
                f"the task's objective returned {name!r} as {found}: it must hold one value a sample, shape ({size},)"
            )
    return ("loss", *(name for name in values if name != "loss"))
