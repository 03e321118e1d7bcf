"""Evaluates a model at many points of a line or a plane in weight space, on fixed samples, in place.

On a GPU one CUDA graph moves the weights and runs all batches, so a point costs the host three launches. Its results stay on
the device until a block of points is done.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.landscape.directions import Direction
from paceline.training.capture.graph import Graph, find_obstacle
from paceline.training.fixed import Fixed

METRICS = "loss", "accuracy"


class Points:
    """Metrics at coordinates along one or two directions from the model. Use it in `torch.no_grad`."""

    def __init__(self, fixed: Fixed, directions: Sequence[Direction]) -> None:
        self._fixed = fixed
        device = fixed.run.world.device
        moved = {name for direction in directions for name in direction}
        live = {**dict(fixed.model.named_parameters()), **dict(fixed.model.named_buffers())}
        self._live = {name: live[name].detach() for name in live if name in moved}
        self._start = {name: tensor.clone() for name, tensor in self._live.items()}
        self._directions = [
            {name: _laid_out(tensor.to(device, self._live[name].dtype), self._live[name]) for name, tensor in each.items()}
            for each in directions
        ]
        self._width = max(1, len(directions))
        self._buffers = {name for name, _ in fixed.model.named_buffers()}
        self._graph: Graph | None = None
        self._capture()

    def evaluate(self, places: Sequence[Sequence[float]]) -> Tensor:
        """The metrics at some places: a table of (places, sets, 2) on the CPU, in float64; nan where a metric is missing."""
        device = self._fixed.run.world.device
        rows = torch.tensor(places, dtype=torch.float32).view(-1, self._width).to(device)
        found = torch.stack([self._at(row) for row in rows]).cpu()
        self.restore()
        return found

    def evaluate_weights(self, weights: Mapping[str, Tensor]) -> Tensor:
        """The metrics of other weights, with the model's own buffers: a table of (sets, 2)."""
        own = dict(self._fixed.model.named_parameters())
        kept = {name: own[name].detach().clone() for name in weights if name in own}
        for name in kept:
            own[name].detach().copy_(weights[name])
        self._fixed.seed()
        found = self._means().cpu()
        for name, value in kept.items():
            own[name].detach().copy_(value)
        return found

    def restore(self) -> None:
        """Put the model's own weights back, bit for bit."""
        for name, tensor in self._live.items():
            tensor.copy_(self._start[name])

    def _at(self, place: Tensor) -> Tensor:
        if self._graph is not None:
            return self._graph([(place,)]).clone()
        self._fixed.seed()
        return self._move_and_run([(place,)])

    def _move_and_run(self, given: list[tuple[Tensor, ...]]) -> Tensor:
        ((place,),) = given
        torch._foreach_copy_(list(self._live.values()), list(self._start.values()))
        for number, direction in enumerate(self._directions):
            self._add({name: each for name, each in direction.items() if name not in self._buffers}, place[number])
            # Beyond two models a variance could become negative: there the nearer model's statistics stay.
            inside = place[number].clamp(0, 1)
            self._add({name: each for name, each in direction.items() if name in self._buffers}, inside)
        return self._means()

    def _add(self, direction: Direction, length: Tensor) -> None:
        if direction:
            torch._foreach_add_([self._live[name] for name in direction], torch._foreach_mul(list(direction.values()), length))

    def _means(self) -> Tensor:
        rows = []
        for name in self._fixed.sets:
            means = self._fixed.means(name)
            known = dict(zip(self._fixed.names[name], means, strict=True))
            rows.append(
                torch.stack([known[each] if each in known else torch.full_like(means[0], torch.nan) for each in METRICS])
            )
        return torch.stack(rows)

    def _capture(self) -> None:
        """Record a point as a CUDA graph, if the model allows it."""
        device = self._fixed.run.world.device
        if device.type != "cuda":
            return
        given: list[tuple[Tensor, ...]] = [(torch.zeros(self._width, device=device),)]
        _, why = find_obstacle(self._move_and_run, given, self._fixed.model, self._fixed.objective)
        if not why:
            try:
                self._graph = Graph(self._move_and_run, given)
            except Exception:  # any failure of the recording: the plain form works
                torch.cuda.synchronize()
        self.restore()


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """A copy with the strides of another tensor, as the multi-tensor kernels need: channels-last convolutions."""
    return torch.empty_like(like).copy_(tensor)
