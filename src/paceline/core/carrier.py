"""How a step's numbers travel between workers.

The carrier is the model plus one more parameter, the cargo. The gradient of the cargo is the step's metrics, the weight that
they are means by, the requests to save or stop, and one flag per parameter that says whether this worker used it. DDP averages
the cargo with all other gradients; the exact reducer sums it with them. So metrics need no collective of their own.
"""

import inspect
import warnings
from collections.abc import Callable, Sequence
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.core.exact_sum import ExactReducer, Workers

MOST_METRICS = 16
WEIGHT = MOST_METRICS  # the place of the weight, after the metrics
REQUESTS = 2  # to write a checkpoint, to stop: they travel with the metrics, so all workers see them at the same step
PAYLOAD = WEIGHT + 1 + REQUESTS
_MOST_PATTERNS = 1000


class Carrier(nn.Module):
    """The model, and the cargo: a parameter whose gradient is the step's metrics, requests and used-parameter flags.

    `forward` runs a whole pass, from the batch to the loss. DDP wraps that, so the training code may call any of the model's
    layers, in any order, any number of times.

    DDP waits until it has a gradient for every parameter. `complete` supplies the ones that the last backward pass left out. A
    parameter that no part of any worker used ends with `grad = None`, so the optimizer skips it. This is cheaper than
    `find_unused_parameters`: no graph search, no extra all-reduce, and buckets keep the order in which gradients arrive.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.cargo = nn.Parameter(torch.zeros(PAYLOAD + len(self.trained)))
        self._zeros: Tensor
        self.register_buffer("_zeros", torch.zeros(PAYLOAD), persistent=False)
        self._payload: Tensor | None = None
        self._arrived: list[Tensor] = []
        self._flags: dict[tuple[bool, ...], Tensor] = {}

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()

    def load(self, metrics: Tensor, requests: Tensor | None) -> None:
        """Add a pass's share of the metrics, and the requests (1 for each)."""
        rest = self._zeros[len(metrics) : WEIGHT + 1], self._zeros[WEIGHT + 1 :] if requests is None else requests
        payload = torch.cat((metrics, *rest))
        self._payload = payload if self._payload is None else self._payload + payload

    def unload(self) -> Tensor:
        """What was loaded since the last call; after the reduction, the mean over the step's samples."""
        payload, self._payload = self._payload, None
        assert payload is not None
        return payload

    def deliver(self, payload: Tensor) -> None:
        """Store the sum over all workers, for `unload`."""
        self._payload = payload

    def forget(self) -> None:
        """Drop an unfinished step."""
        self.zero_grad(set_to_none=True)
        self._payload = None

    def flags(self, used: tuple[bool, ...]) -> Tensor:
        """1 for each parameter that is used. Cached: a model has few such patterns, and a copy to a GPU would wait for it."""
        if used not in self._flags:
            if len(self._flags) == _MOST_PATTERNS:
                self._flags.clear()
            self._flags[used] = torch.tensor(used, dtype=self.cargo.dtype, device=self.cargo.device)
        return self._flags[used]

    def track_arrivals(self) -> None:
        """From now on, record which gradients a backward pass brings: 0.3 us per parameter."""
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
        payload, flags = torch.split(self.cargo.grad, [PAYLOAD, len(used)])
        self.deliver(payload.clone())  # DDP writes to its bucket again in the next step
        if not all(used):
            self.clear_unused((flags > 0).tolist())  # on a GPU this waits
        self.cargo.grad = None

    def clear_unused(self, used: Sequence[bool]) -> None:
        """Drop the gradients of parameters that no worker used."""
        for parameter, is_used in zip(self.trained, used, strict=True):
            if not is_used:
                parameter.grad = None


class Reducer:
    """The exact sum of all parts' gradients, metrics and flags. Each metric has digits of its own."""

    def __init__(self, carrier: Carrier, parts: int) -> None:
        self._carrier = carrier
        self._used: tuple[bool, ...] = ()
        """For each parameter, whether a part of this worker used it in this step."""
        self._one_worker = Workers().size == 1
        metrics, flags = carrier.cargo.detach()[:PAYLOAD], carrier.cargo.detach()[PAYLOAD:]
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
        """Store the sums as the parameters' gradients. Collective: call on every rank."""
        sums = self._sum.finish()
        self._carrier.deliver(torch.cat(sums[:PAYLOAD]))
        for parameter, total in zip(self._carrier.trained, sums[PAYLOAD + 1 :], strict=True):
            # In the parameter's own layout, which a fused optimizer needs.
            parameter.grad = total if parameter.is_contiguous() else torch.empty_like(parameter).copy_(total)
        if not all(self._used):  # on several GPU workers this waits
            self._carrier.clear_unused(self._used if self._one_worker else (sums[PAYLOAD] > 0).tolist())
        self._used = ()


def wrap(carrier: Carrier) -> DistributedDataParallel:
    """DDP around the carrier. Collective: call on every rank.

    Buffers are not broadcast: each part's batch norm has statistics of its own, averaged when they are needed.
    """
    flags = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in flags else "broadcast_buffers"  # torch 2.13 renamed it
    keep: dict[str, Any] = {name: False}
    # The strides of a weight with one input channel read two ways in channels-last: DDP copies its few values, and says so.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
    carrier.track_arrivals()
    return DistributedDataParallel(carrier, gradient_as_bucket_view=True, **keep)
