"""What carries a step's numbers between workers: the model with one more parameter, whose gradient is the step's metrics; DDP
or the exact sum around it; and the meter that reads the metrics without waiting.
"""

import inspect
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.dist.reduce import ExactReducer
from paceline.dist.world import World

MOST_METRICS = 16
WISHES = 2  # to write a checkpoint, to stop: they ride with the metrics, so that all workers learn of them at the same step


class Carrier(nn.Module):
    """The model, and one more parameter whose gradient is the step's metrics.

    DDP averages that gradient with all the others, so metrics need no collective of their own and arrive on every worker
    together with the step.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.cargo = nn.Parameter(torch.zeros(MOST_METRICS + WISHES))
        self._nothing: Tensor
        self.register_buffer("_nothing", torch.zeros(MOST_METRICS + WISHES), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def load(self, values: dict[str, Tensor], metrics: Sequence[str], share: float, wish: Tensor | None) -> Tensor:
        """A term to add to the loss: zero, but its gradient with respect to the cargo is the metrics' means times the share,
        and the wishes (1 for each).
        """
        means = torch.stack([values[name].detach().float().mean() for name in metrics]) * share
        freight = [means, self._nothing[len(metrics) : MOST_METRICS], self._nothing[MOST_METRICS:] if wish is None else wish]
        return (self.cargo * torch.cat(freight)).sum()

    def unload(self) -> Tensor:
        """What the cargo's gradient has become: the mean over the step's samples."""
        grad, self.cargo.grad = self.cargo.grad, None
        assert grad is not None
        return grad.clone()  # DDP's bucket is written to again in the next step


class Reducer:
    """The exact sum of the gradients of model and cargo; each of the cargo's numbers has digits of its own."""

    def __init__(self, carrier: Carrier, parts: int) -> None:
        self._cargo = carrier.cargo
        self._parameters = [parameter for parameter in carrier.model.parameters() if parameter.requires_grad]
        self._sum = ExactReducer([*torch.split(self._cargo.detach(), 1), *self._parameters], parts)

    def add(self) -> None:
        """Take the gradients of a part, and clear them for the next."""
        assert self._cargo.grad is not None
        self._sum.add([*torch.split(self._cargo.grad, 1), *(parameter.grad for parameter in self._parameters)])
        for parameter in (self._cargo, *self._parameters):
            parameter.grad = None

    def forget(self) -> None:
        """Begin anew."""
        self._sum.forget()

    def finish(self) -> None:
        """Put the sums where the optimizer looks for gradients. Every worker reaches this."""
        sums = self._sum.finish()
        count = self._cargo.numel()
        self._cargo.grad = torch.cat(sums[:count])
        for parameter, total in zip(self._parameters, sums[count:], strict=True):
            # In the parameter's own layout, which a fused optimizer needs.
            parameter.grad = total if parameter.is_contiguous() else torch.empty_like(parameter).copy_(total)


def wrap(model: nn.Module, world: World) -> Any:
    """DDP around the model where there is somebody to average with.

    Buffers are not broadcast: each part's batch norm has statistics of its own, averaged when they are needed.
    """
    if world.size == 1:
        return model
    devices = [world.device.index] if world.device.type == "cuda" else None
    flags = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in flags else "broadcast_buffers"  # torch 2.13 renamed it
    keep: dict[str, Any] = {name: False}
    # The strides of a weight with one input channel read two ways in channels-last: DDP copies its few values, and says so.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True, **keep)


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
