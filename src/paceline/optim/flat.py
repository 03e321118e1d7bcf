"""Multi-tensor updates for optimizers that need a number per tensor: a norm, a ratio, a count of steps.

`torch._foreach_mul_` by a value for each tensor is a kernel a tensor; fifty tensors make a step of hundreds. So the state of
all parameters of a group lies in one flat buffer a name, and the parameters' own state is views of it. A step copies the
gradients into a buffer of the same form, works on one value a tensor in small vectors, spreads those over the elements by an
index, and adds the buffer's views to the weights: some twenty kernels whatever the number of tensors, no wait for the device,
and fixed addresses, so that a CUDA graph can repeat it. Parameters of 16 bits have float32 state and a float32 copy of
themselves ("master") that the step works on. Buffers are in each parameter's own memory order, channels-last or not.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer


class Pack:
    """Parameters of one group, device and type: their buffers, and views of them by parameter."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        buffers: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        index: Tensor | None,
    ) -> None:
        """`buffers` have a value for each element, "scratch" among them; `values` one for each parameter; `index` says which
        parameter an element belongs to. A CPU, which gains nothing from one large kernel, does without.
        """
        self.parameters, self.buffers, self.values = list(parameters), dict(buffers), dict(values)
        self.flat = self.buffers["scratch"]
        """The gradients when an update begins; what is added to the weights when it ends."""
        sizes = [parameter.numel() for parameter in self.parameters]
        self._ends = list(accumulate(sizes))
        self.index = index
        self._views = {name: self._split(buffer) for name, buffer in self.buffers.items()}
        self.tensors = self._views["scratch"]
        """`flat` by parameter."""
        self.weights = self._views.get("master", self.parameters)
        self._parts: dict[tuple[int, int], Pack] = {}

    @cached_property
    def batches(self) -> list[Tensor]:
        """`flat` as (matrices, rows, columns), a batch for each shape. In memory order: columns may have changed places."""
        batches, begin = [], 0
        for shape, same in groupby(self.parameters, lambda parameter: parameter.shape):
            count, size = len(list(same)), shape.numel()
            if size:
                batches.append(self.flat[begin : begin + count * size].view(count, shape[0], -1))
            begin += count * size
        return batches

    def states(self) -> Iterable[tuple[Tensor, dict[str, Tensor]]]:
        """Each parameter with its state: views of the buffers."""
        for number, parameter in enumerate(self.parameters):
            state = {name: views[number] for name, views in self._views.items() if name != "scratch"}
            yield parameter, state | {name: values[number] for name, values in self.values.items()}

    def norms(self, tensors: list[Tensor]) -> Tensor:
        """The 2-norm of each tensor."""
        return torch.stack(torch._foreach_norm(tensors))

    def scale(self, values: Tensor) -> None:
        """Multiply each tensor in `flat` by its value."""
        if self.index is None:
            torch._foreach_mul_(self.tensors, list(values.unbind()))
        else:
            self.flat.mul_(values.index_select(0, self.index))

    def shift(self, values: Tensor) -> None:
        """Add to each tensor in `flat` its value."""
        if self.index is None:
            torch._foreach_add_(self.tensors, list(values.unbind()))
        else:
            self.flat.add_(values.index_select(0, self.index))

    def load(self, gradients: list[Tensor]) -> None:
        """Begin an update: `flat` holds the gradients."""
        torch._foreach_copy_(self.tensors, gradients)

    def add_weights(self, factor: float) -> None:
        """Add so much of the weights to `flat`."""
        if factor:
            torch._foreach_add_(self.tensors, self.weights, alpha=factor)

    def move(self) -> None:
        """End an update: add `flat` to the weights."""
        torch._foreach_add_(self.weights, self.tensors)
        self._round()

    def put(self) -> None:
        """End an update: the weights are `flat`."""
        torch._foreach_copy_(self.weights, self.tensors)
        self._round()

    def renew(self, parameter: Tensor) -> None:
        """State as at the beginning for one parameter."""
        for other, state in self.states():
            if other is parameter:
                for name, value in state.items():
                    value.copy_(parameter) if name == "master" else value.zero_()

    def part(self, begin: int, end: int) -> "Pack":
        """The parameters from `begin` to `end` as a pack of their own, in the same buffers."""
        if (begin, end) not in self._parts:
            elements = slice(self._ends[begin - 1] if begin else 0, self._ends[end - 1])
            buffers = {name: buffer[elements] for name, buffer in self.buffers.items()}
            values = {name: value[begin:end] for name, value in self.values.items()}
            index = None if self.index is None else self.index[elements] - begin  # on the device: no copy to wait for
            self._parts[begin, end] = Pack(self.parameters[begin:end], buffers, values, index)
        return self._parts[begin, end]

    def _round(self) -> None:
        if self.weights is not self.parameters:
            torch._foreach_copy_(self.parameters, self.weights)

    def _split(self, buffer: Tensor) -> list[Tensor]:
        pairs = zip(self.parameters, [0, *self._ends], strict=False)
        return [buffer[begin : begin + p.numel()].as_strided(p.shape, _strides(p)) for p, begin in pairs]


def index_of(parameters: Sequence[Tensor]) -> Tensor:
    """Of each element, which parameter it belongs to."""
    sizes = torch.tensor([parameter.numel() for parameter in parameters])
    return torch.arange(len(parameters), dtype=torch.int32).repeat_interleave(sizes)


class _Record:
    """A step as a CUDA graph, and what it was recorded for."""

    def __init__(self) -> None:
        self.graph: torch.cuda.CUDAGraph | None = None
        self.lrs: list[Tensor] = []
        self._told: Any = None
        self._calls = 0

    def is_ready(self, told: Any) -> bool:
        """Whether this is what the last two calls were told, too: options, and where the weights lie."""
        if told != self._told:
            self._told, self._calls, self.graph = told, 0, None
        self._calls += 1
        return self._calls > 2


class Flat(Optimizer):
    """An optimizer whose `update` is written once, for all tensors of a pack."""

    elements: ClassVar[tuple[str, ...]] = ()
    """State with a value for each element."""
    values: ClassVar[tuple[str, ...]] = ()
    """State with one value a parameter."""
    uses_graph: bool = True
    """On a GPU, replay the step as a CUDA graph from its third call on: one launch. Set it to False where somebody else records
    whole training steps, as Paceline's own loop does."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        """`capturable` tells who sets the learning rate that it may be a tensor on the device."""
        for name, value in defaults.items():
            if isinstance(value, float) and value < 0:
                raise ValueError(f"{type(self).__name__}: {name} is {value}: it must be at least 0")
        for beta in defaults.get("betas", ()):
            if not 0 <= beta < 1:
                raise ValueError(f"{type(self).__name__}: a beta is {beta}: it must be at least 0 and less than 1")
        self._packs: list[list[Pack]] = []
        self._record = _Record()
        super().__init__(params, {**defaults, "capturable": True})

    def update(self, pack: Pack, group: Mapping[str, Any]) -> None:
        """From gradients in `pack.flat` to the weights."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.uses_graph and self._replay():
            return loss
        for group, packs in zip(self.param_groups, self._packs, strict=True):
            for pack in packs:
                gradients = [parameter.grad for parameter in pack.parameters]
                for part, present in _parts(pack, gradients):
                    part.load(present)
                    self.update(part, group)
        return loss

    def _replay(self) -> bool:
        """The step as a graph. False, with nothing done, where it cannot be, or has not been the same for three calls."""
        record, packs = self._record, [pack for packs in self._packs for pack in packs]
        parameters = [parameter for pack in packs for parameter in pack.parameters]
        if not _on_one_gpu(parameters) or torch.cuda.is_current_stream_capturing():
            return False
        if any(p.grad is None or p.grad.layout is not torch.strided for p in parameters):
            return False
        told = [{name: group[name] for name in group if name not in ("params", "lr")} for group in self.param_groups]
        if not record.is_ready((told, [parameter.data_ptr() for parameter in parameters])):
            return False
        if record.graph is None:
            lrs, graph = [torch.zeros((), device=parameters[0].device) for _ in self.param_groups], torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may use the GPU
                    for group, of_group, lr in zip(self.param_groups, self._packs, lrs, strict=True):
                        for pack in of_group:
                            self.update(pack, {**group, "lr": lr})
            except RuntimeError:  # whatever does not let itself be recorded: the plain step is there
                self.uses_graph = False
                return False
            record.graph, record.lrs = graph, lrs
        for pack in packs:
            pack.load([parameter.grad for parameter in pack.parameters if parameter.grad is not None])
        for group, lr in zip(self.param_groups, record.lrs, strict=True):
            given = group["lr"]
            lr.copy_(given) if isinstance(given, Tensor) and given.device == lr.device else lr.fill_(float(given))
        record.graph.replay()
        return True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Also makes the group's state."""
        super().add_param_group(param_group)
        self._packs.append(self._pack(self.param_groups[-1]["params"]))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch does, but into the buffers that are there, and without rounding to the parameters' type on the way."""
        super().load_state_dict(state_dict)  # rounds
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        given = state_dict["state"]
        self._adopt({parameter: given.get(number, {}) for number, parameter in zip(numbers, parameters, strict=True)})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Reached by unpickling and copying, which bring no buffers, and by `load_state_dict`."""
        super().__setstate__(state)
        given = dict(self.state)
        self._record = _Record()
        if "_packs" not in self.__dict__:
            self._packs = [self._pack(group["params"]) for group in self.param_groups]
        self._adopt(given)

    @torch.no_grad()
    def _adopt(self, given: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Copy state into the buffers; what is not given is as at the beginning."""
        for packs in self._packs:
            for pack in packs:
                for parameter, state in pack.states():
                    found = given.get(parameter, {})
                    self.state[parameter] = state
                    if any(name not in found for name in state):
                        pack.renew(parameter)
                    for name in state:
                        if name in found and found[name] is not state[name]:
                            state[name].copy_(found[name])

    @torch.no_grad()
    def _pack(self, parameters: Sequence[Tensor]) -> list[Pack]:
        """Buffers of zeros for the parameters of a group, those of equal shape side by side."""

        def kind(parameter: Tensor) -> tuple[str, str, bool]:
            return str(parameter.device), str(parameter.dtype), _strides(parameter) == parameter.stride()

        packs = []
        ordered = sorted(parameters, key=lambda parameter: (kind(parameter), tuple(parameter.shape)))
        for members in (cut for _, same in groupby(ordered, kind) for cut in _cuts(list(same))):
            first, size = members[0], sum(member.numel() for member in members)
            if not first.is_floating_point():
                raise TypeError(f"{type(self).__name__} does not train parameters of type {first.dtype}")
            small = first.dtype in (torch.bfloat16, torch.float16)
            dtype = torch.float32 if small else first.dtype
            names = ["scratch", *self.elements, *(["master"] if small else [])]
            buffers = {name: torch.zeros(size, dtype=dtype, device=first.device) for name in names}
            values = {name: torch.zeros(len(members), dtype=dtype, device=first.device) for name in self.values}
            pack = Pack(members, buffers, values, None if first.device.type == "cpu" else index_of(members).to(first.device))
            if small:
                torch._foreach_copy_(pack.weights, members)
            for parameter, state in pack.states():
                self.state[parameter] = state
            packs.append(pack)
        return packs


def _cuts(parameters: list[Tensor]) -> list[list[Tensor]]:
    """On a CPU stretches whose buffers stay in its caches (a fifth less time); elsewhere all, for the fewest kernels."""
    if parameters[0].device.type != "cpu":
        return [parameters]
    cuts: list[list[Tensor]] = []
    room = 0
    for parameter in parameters:
        if not cuts or parameter.numel() > room:
            cuts.append([])
            room = _CACHED
        cuts[-1].append(parameter)
        room -= parameter.numel()
    return cuts


_CACHED = 2**16


def _on_one_gpu(parameters: Sequence[Tensor]) -> bool:
    return parameters[0].is_cuda and len({parameter.device for parameter in parameters}) == 1


def _parts(pack: Pack, gradients: list[Tensor | None]) -> list[tuple[Pack, list[Tensor]]]:
    """The pack whole, or its stretches of parameters that have a gradient."""
    if any(gradient is not None and gradient.layout is not torch.strided for gradient in gradients):
        raise RuntimeError("this optimizer needs a norm of every tensor and does not take sparse gradients: use dense ones")
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) == len(gradients):
        return [(pack, present)]
    parts, begin = [], 0
    for has, stretch in groupby(gradients, lambda gradient: gradient is not None):
        found = list(stretch)
        if has:
            parts.append((pack.part(begin, begin + len(found)), [gradient for gradient in found if gradient is not None]))
        begin += len(found)
    return parts


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's own, where it fills its memory row after row (channels-last does); otherwise those of a plain tensor.

    Row after row, so that any stretch of equal shapes in a buffer is a batch of matrices (`muon.py`).
    """
    rows = parameter.ndim == 0 or parameter.size(0) <= 1 or parameter.stride(0) * parameter.size(0) == parameter.numel()
    dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()  # kept if without gap or overlap
    return parameter.stride() if rows and dense else torch.empty(parameter.shape, device="meta").stride()
