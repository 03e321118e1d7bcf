"""Multi-tensor updates for optimizers that need one number per tensor: a norm, a ratio, a step count.

`torch._foreach_mul_` by a different value for each tensor launches one kernel per tensor, so fifty tensors need hundreds per
step. Instead, one flat buffer per name holds the state of all parameters of a group, and the state of each parameter is a view
of it. A step copies the gradients into such a buffer, computes one value per tensor in small vectors, expands these to the
elements with an index, and adds the views of the buffer to the weights. That takes about twenty kernels for any number of
tensors, never waits for the device, and uses fixed addresses, so a CUDA graph can replay it. Parameters of 16 bits have float32
state and a float32 copy of themselves ("master") that the step updates. Buffers keep each parameter's memory order,
channels-last or not.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer


class Pack:
    """Parameters of one group, device and type, with their buffers and one view per parameter."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        buffers: Mapping[str, Tensor],
        values: Mapping[str, Tensor],
        index: Tensor | None,
    ) -> None:
        """`buffers` have one value per element and include "scratch"; `values` have one per parameter. `index` has the number
        of each element's parameter, or is None on a CPU, where one large kernel gains nothing.
        """
        self.parameters, self.buffers, self.values = list(parameters), dict(buffers), dict(values)
        self.flat = self.buffers["scratch"]
        """The gradients at the start of an update; the change to the weights at its end."""
        sizes = [parameter.numel() for parameter in self.parameters]
        self._ends = list(accumulate(sizes))
        self.index = index
        self._views = {name: self._split(buffer) for name, buffer in self.buffers.items()}
        self.tensors = self._views["scratch"]
        """`flat` as one view per parameter."""
        self.weights = self._views.get("master", self.parameters)
        self._sections: dict[tuple[int, int], Pack] = {}

    @cached_property
    def batches(self) -> list[Tensor]:
        """`flat` as (matrices, rows, columns), one batch per shape. Columns are in memory order, which may be permuted."""
        batches, begin = [], 0
        for shape, same in groupby(self.parameters, lambda parameter: parameter.shape):
            count, size = len(list(same)), shape.numel()
            if size:
                batches.append(self.flat[begin : begin + count * size].view(count, shape[0], -1))
            begin += count * size
        return batches

    def states(self) -> Iterable[tuple[Tensor, dict[str, Tensor]]]:
        """Each parameter with its state, as views of the buffers."""
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
        """Add its value to each tensor in `flat`."""
        if self.index is None:
            torch._foreach_add_(self.tensors, list(values.unbind()))
        else:
            self.flat.add_(values.index_select(0, self.index))

    def load(self, gradients: list[Tensor]) -> None:
        """Start an update: copy the gradients to `flat`."""
        torch._foreach_copy_(self.tensors, gradients)

    def add_weights(self, factor: float) -> None:
        """Add `factor` times the weights to `flat`."""
        if factor:
            torch._foreach_add_(self.tensors, self.weights, alpha=factor)

    def move(self) -> None:
        """End an update: add `flat` to the weights."""
        torch._foreach_add_(self.weights, self.tensors)
        self._round()

    def put(self) -> None:
        """End an update: copy `flat` to the weights."""
        torch._foreach_copy_(self.weights, self.tensors)
        self._round()

    def renew(self, parameter: Tensor) -> None:
        """Reset the state of one parameter to its initial values."""
        for other, state in self.states():
            if other is parameter:
                for name, value in state.items():
                    value.copy_(parameter) if name == "master" else value.zero_()

    def section(self, begin: int, end: int) -> "Pack":
        """The parameters from `begin` to `end` as a separate pack that shares these buffers."""
        if (begin, end) not in self._sections:
            elements = slice(self._ends[begin - 1] if begin else 0, self._ends[end - 1])
            buffers = {name: buffer[elements] for name, buffer in self.buffers.items()}
            values = {name: value[begin:end] for name, value in self.values.items()}
            index = None if self.index is None else self.index[elements] - begin  # on the device: no copy to wait for
            self._sections[begin, end] = Pack(self.parameters[begin:end], buffers, values, index)
        return self._sections[begin, end]

    def _round(self) -> None:
        if self.weights is not self.parameters:
            torch._foreach_copy_(self.parameters, self.weights)

    def _split(self, buffer: Tensor) -> list[Tensor]:
        pairs = zip(self.parameters, [0, *self._ends], strict=False)
        return [buffer[begin : begin + p.numel()].as_strided(p.shape, _strides(p)) for p, begin in pairs]


def index_of(parameters: Sequence[Tensor]) -> Tensor:
    """The number of the parameter that each element belongs to."""
    sizes = torch.tensor([parameter.numel() for parameter in parameters])
    return torch.arange(len(parameters), dtype=torch.int32).repeat_interleave(sizes)


class _Capture:
    """A step captured as a CUDA graph, and the settings it was captured with."""

    def __init__(self) -> None:
        self.graph: torch.cuda.CUDAGraph | None = None
        self.lrs: list[Tensor] = []
        self._seen: Any = None
        self._calls = 0

    def is_ready(self, settings: Any) -> bool:
        """Whether the last two calls had the same settings: options and addresses of the weights."""
        if settings != self._seen:
            self._seen, self._calls, self.graph = settings, 0, None
        self._calls += 1
        return self._calls > 2


class Flat(Optimizer):
    """Base class of optimizers that update all tensors of a pack at once: a subclass writes `update`."""

    elements: ClassVar[tuple[str, ...]] = ()
    """Names of state with one value per element."""
    values: ClassVar[tuple[str, ...]] = ()
    """Names of state with one value per parameter."""
    uses_graph: bool = True
    """On a GPU, replay the step as one CUDA graph from the third call on. Set it to False if whole training steps are captured,
    as in Paceline's own loop."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        """`capturable` in the groups means that the learning rate may be a tensor on the device."""
        for name, value in defaults.items():
            if isinstance(value, float) and value < 0:
                raise ValueError(f"{type(self).__name__}: {name} is {value}: it must be at least 0")
        for beta in defaults.get("betas", ()):
            if not 0 <= beta < 1:
                raise ValueError(f"{type(self).__name__}: a beta is {beta}: it must be at least 0 and below 1")
        self._packs: list[list[Pack]] = []
        self._capture = _Capture()
        super().__init__(params, {**defaults, "capturable": True})

    def update(self, pack: Pack, group: Mapping[str, Any]) -> None:
        """Turn the gradients in `pack.flat` into the change, and apply it to the weights."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step for all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.uses_graph and self._replay():
            return loss
        for group, packs in zip(self.param_groups, self._packs, strict=True):
            for pack in packs:
                gradients = [parameter.grad for parameter in pack.parameters]
                for section, present in _sections(pack, gradients):
                    section.load(present)
                    self.update(section, group)
        return loss

    def _replay(self) -> bool:
        """Run the step as a graph. False, with nothing done, if it cannot, or if settings changed in the last three calls."""
        capture, packs = self._capture, [pack for packs in self._packs for pack in packs]
        parameters = [parameter for pack in packs for parameter in pack.parameters]
        if not _on_one_gpu(parameters) or torch.cuda.is_current_stream_capturing():
            return False
        if any(p.grad is None or p.grad.layout is not torch.strided for p in parameters):
            return False
        options = [{name: group[name] for name in group if name not in ("params", "lr")} for group in self.param_groups]
        if not capture.is_ready((options, [parameter.data_ptr() for parameter in parameters])):
            return False
        if capture.graph is None:
            lrs, graph = [torch.zeros((), device=parameters[0].device) for _ in self.param_groups], torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may use the GPU
                    for group, of_group, lr in zip(self.param_groups, self._packs, lrs, strict=True):
                        for pack in of_group:
                            self.update(pack, {**group, "lr": lr})
            except RuntimeError:  # something cannot be captured: use the plain step
                self.uses_graph = False
                return False
            capture.graph, capture.lrs = graph, lrs
        for pack in packs:
            pack.load([parameter.grad for parameter in pack.parameters if parameter.grad is not None])
        for group, lr in zip(self.param_groups, capture.lrs, strict=True):
            given = group["lr"]
            lr.copy_(given) if isinstance(given, Tensor) and given.device == lr.device else lr.fill_(float(given))
        capture.graph.replay()
        return True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Also creates the group's state."""
        super().add_param_group(param_group)
        self._packs.append(self._pack(self.param_groups[-1]["params"]))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's, but into the existing buffers, and without rounding to the type of the parameters."""
        super().load_state_dict(state_dict)  # rounds
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        given = state_dict["state"]
        self._adopt({parameter: given.get(number, {}) for number, parameter in zip(numbers, parameters, strict=True)})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by unpickling and copying, which do not include buffers, and by `load_state_dict`."""
        super().__setstate__(state)
        given = dict(self.state)
        self._capture = _Capture()
        if "_packs" not in self.__dict__:
            self._packs = [self._pack(group["params"]) for group in self.param_groups]
        self._adopt(given)

    @torch.no_grad()
    def _adopt(self, given: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Copy state into the buffers; reset what is not given."""
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
        """Buffers of zeros for the parameters of a group; parameters of equal shape are adjacent."""

        def kind(parameter: Tensor) -> tuple[str, str, bool]:
            return str(parameter.device), str(parameter.dtype), _strides(parameter) == parameter.stride()

        packs = []
        ordered = sorted(parameters, key=lambda parameter: (kind(parameter), tuple(parameter.shape)))
        for members in (cut for _, same in groupby(ordered, kind) for cut in _cuts(list(same))):
            first, size = members[0], sum(member.numel() for member in members)
            if not first.is_floating_point():
                raise TypeError(f"{type(self).__name__} cannot train parameters of type {first.dtype}")
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
    """On a CPU, sections whose buffers fit its caches (a fifth less time); elsewhere one section, for the fewest kernels."""
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


def _sections(pack: Pack, gradients: list[Tensor | None]) -> list[tuple[Pack, list[Tensor]]]:
    """The whole pack, or the sections of it that have gradients."""
    if any(gradient is not None and gradient.layout is not torch.strided for gradient in gradients):
        raise RuntimeError("this optimizer needs every tensor's norm and does not support sparse gradients: use dense ones")
    present = [gradient for gradient in gradients if gradient is not None]
    if len(present) == len(gradients):
        return [(pack, present)]
    sections, begin = [], 0
    for has, run in groupby(gradients, lambda gradient: gradient is not None):
        found = list(run)
        if has:
            sections.append((pack.section(begin, begin + len(found)), [gradient for gradient in found if gradient is not None]))
        begin += len(found)
    return sections


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's own strides if it fills its memory row by row (channels-last does); otherwise those of a plain tensor.

    Row by row, so that adjacent parameters of equal shape in a buffer are a batch of matrices (`muon.py`).
    """
    rows = parameter.ndim == 0 or parameter.size(0) <= 1 or parameter.stride(0) * parameter.size(0) == parameter.numel()
    dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()  # keeps strides without gaps and overlaps
    return parameter.stride() if rows and dense else torch.empty(parameter.shape, device="meta").stride()
