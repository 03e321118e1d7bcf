"""What carries a step's numbers between workers: the model with one more parameter, whose gradient is the step's metrics and
which parameters it used; DDP or the exact sum around it; and the meter that reads the metrics without waiting.
"""

import inspect
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.config import Config
from paceline.core.exact_sum import ExactReducer, Workers
from paceline.dist.world import World

MOST_METRICS = 16
WISHES = 2  # to write a checkpoint, to stop: they ride with the metrics, so that all workers learn of them at the same step
FREIGHT = MOST_METRICS + WISHES
_MOST_PATTERNS = 1000


class Carrier(nn.Module):
    """The model, and one more parameter, the cargo: its gradient is the step's metrics, and a flag for each parameter it used.

    DDP averages that gradient with all the others, so metrics need no collective of their own and arrive on every worker
    together with the step. `forward` runs a whole pass, from the batch to the loss: DDP wraps that, so it does not matter which
    of the model's layers the objective calls, or how often.

    DDP waits until it has a gradient for every parameter. `complete` hands in what the last backward pass left out. A parameter
    that no part of any worker used ends with `grad = None`, so that the optimizer leaves it alone. That is cheaper than
    `find_unused_parameters`: no search of the graph, no all-reduce, and buckets keep the order in which gradients come.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.cargo = nn.Parameter(torch.zeros(FREIGHT + len(self.trained)))
        self._nothing: Tensor
        self.register_buffer("_nothing", torch.zeros(FREIGHT), persistent=False)
        self._freight: Tensor | None = None
        self._arrived: list[Tensor] = []
        self._flags: dict[tuple[bool, ...], Tensor] = {}

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()

    def load(self, means: Tensor, wish: Tensor | None) -> None:
        """Add a pass's share of the metrics, and the wishes (1 for each)."""
        rest = self._nothing[len(means) : MOST_METRICS], self._nothing[MOST_METRICS:] if wish is None else wish
        freight = torch.cat((means, *rest))
        self._freight = freight if self._freight is None else self._freight + freight

    def unload(self) -> Tensor:
        """What was loaded since this was last asked; after `complete`, the mean over the step's samples."""
        freight, self._freight = self._freight, None
        assert freight is not None
        return freight

    def deliver(self, freight: Tensor) -> None:
        """Put what all workers loaded where `unload` finds it."""
        self._freight = freight

    def forget(self) -> None:
        """Leave a step that was not finished."""
        self.zero_grad(set_to_none=True)
        self._freight = None

    def flags(self, used: tuple[bool, ...]) -> Tensor:
        """1 for each parameter that is used. Kept: a model has few such patterns, and a copy to a GPU would wait for it."""
        if used not in self._flags:
            if len(self._flags) == _MOST_PATTERNS:
                self._flags.clear()
            self._flags[used] = torch.tensor(used, dtype=self.cargo.dtype, device=self.cargo.device)
        return self._flags[used]

    def watch_arrivals(self) -> None:
        """Note from now on which gradients a backward pass brings: 0.3 us per parameter."""
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self._arrived.append)  # type: ignore[no-untyped-call]

    def begin_backward(self) -> None:
        """Forget the gradients that an earlier pass brought."""
        self._arrived.clear()

    def complete(self) -> None:
        """Give DDP what it still waits for after the last backward pass. Collective: call on every rank."""
        missing: list[nn.Parameter] = []
        used = (True,) * len(self.trained)
        if len(self._arrived) < len(self.trained):
            arrived = set(map(id, self._arrived))
            missing = [parameter for parameter in self.trained if id(parameter) not in arrived]
            used = tuple(parameter.grad is not None for parameter in self.trained)
        frozen = [parameter for parameter in missing if not parameter.requires_grad]  # since the run began
        for parameter in frozen:
            parameter.requires_grad_(True)  # or it could not be handed to DDP
        zeros = [torch.zeros_like(parameter) for parameter in missing]
        torch.autograd.backward([self.cargo, *missing], [torch.cat((self.unload(), self.flags(used))), *zeros])
        for parameter in frozen:
            parameter.requires_grad_(False)
        assert self.cargo.grad is not None
        freight, flags = torch.split(self.cargo.grad, [FREIGHT, len(used)])
        self.deliver(freight.clone())  # DDP writes to its bucket again in the next step
        if not all(used):
            self.clear_unused((flags > 0).tolist())  # on a GPU this waits
        self.cargo.grad = None

    def clear_unused(self, used: Sequence[bool]) -> None:
        """Drop the gradients of parameters that no worker used."""
        for parameter, is_used in zip(self.trained, used, strict=True):
            if not is_used:
                parameter.grad = None


class Reducer:
    """The exact sum of all parts' gradients, metrics and flags; each metric has digits of its own."""

    def __init__(self, carrier: Carrier, parts: int) -> None:
        self._carrier = carrier
        self._used: tuple[bool, ...] = ()
        """Of each parameter, whether a part of this worker's used it in this step."""
        self._one_worker = Workers().size == 1
        metrics, flags = carrier.cargo.detach()[:FREIGHT], carrier.cargo.detach()[FREIGHT:]
        self._sum = ExactReducer([*torch.split(metrics, 1), flags, *carrier.trained], parts)

    def add(self) -> None:
        """Take the gradients of a part, and clear them for the next."""
        carrier = self._carrier
        grads = [parameter.grad for parameter in carrier.trained]
        used = tuple(grad is not None for grad in grads)
        self._used = tuple(map(or_, self._used, used)) if self._used else used
        self._sum.add([*torch.split(carrier.unload(), 1), carrier.flags(used), *grads])
        for parameter in carrier.trained:
            parameter.grad = None

    def forget(self) -> None:
        """Drop what was added."""
        self._used = ()
        self._sum.forget()

    def finish(self) -> None:
        """Put the sums where the optimizer looks for gradients. Collective: call on every rank."""
        sums = self._sum.finish()
        self._carrier.deliver(torch.cat(sums[:FREIGHT]))
        for parameter, total in zip(self._carrier.trained, sums[FREIGHT + 1 :], strict=True):
            # In the parameter's own layout, which a fused optimizer needs.
            parameter.grad = total if parameter.is_contiguous() else torch.empty_like(parameter).copy_(total)
        if not all(self._used):  # on several GPU workers this waits
            self._carrier.clear_unused(self._used if self._one_worker else (sums[FREIGHT] > 0).tolist())
        self._used = ()


def averages(world: World, config: Config) -> bool:
    """Whether DDP averages the workers' gradients."""
    return world.size > 1 and config.reduce == "fast"


def wrap(carrier: Carrier) -> DistributedDataParallel:
    """DDP around the carrier. Collective: call on every rank.

    Buffers are not broadcast: each part's batch norm has statistics of its own, averaged when they are needed.
    """
    flags = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in flags else "broadcast_buffers"  # torch 2.13 renamed it
    keep: dict[str, Any] = {name: False}
    # The strides of a weight with one input channel read two ways in channels-last: DDP copies its few values, and says so.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    carrier.watch_arrivals()
    return DistributedDataParallel(carrier, gradient_as_bucket_view=True, **keep)


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
