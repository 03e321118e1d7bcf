"""What the first passes of a run look for: a task that cannot be trained as it is, and a model that would depend on the number
of workers without saying so.

Each check sees only what one pass shows. A problem ends the run with one line, or prints a note.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.carrier import MOST_METRICS
from paceline.core.keys import random_state
from paceline.core.parts import Pass
from paceline.data.loaders import Batch, map_tensors
from paceline.dist.agree import check_agreement
from paceline.errors import UsageError
from paceline.records import ROW_FIELDS
from paceline.training.capture.graph import module_state

if TYPE_CHECKING:
    from paceline.training.step import Step

_OWN_BUFFERS = (
    "the forward pass changes it, and each worker has seen other samples; register such a buffer with persistent=False, or"
    " train with one worker"
)
_PASSES = 2  # a value that changes in the second pass is not a cache that the first one filled


class FirstPasses:
    """Runs the objective in the first passes, and checks what it does."""

    def __init__(self, step: "Step") -> None:
        self._step = step
        self.left = _PASSES
        self._ended = False

    def __call__(self, batch: Batch, item: Pass) -> dict[str, Tensor]:
        """The objective's values."""
        self.left -= 1
        state = module_state(self._step.model)
        values = self._first(batch, item) if self.left == _PASSES - 1 else self._step.call_objective(batch, item)
        after = module_state(self._step.model)
        changed = next((name for name, value in after.items() if state.get(name, value) != value), None)
        if self.left == 0 and changed is not None and self._step.parts > 1:
            self._step.say(
                f"the forward pass changes {changed}, a plain attribute: each worker has its own, so the model may depend on"
                " the number of workers"
            )
        return values

    def end_step(self) -> None:
        """After the first step's gradients are averaged: say which parameters have none, and compare buffers between workers.
        Collective: call on every rank.
        """
        if self._ended:
            return
        self._ended = True
        parted = self._step.statistics.names(self._step.model)
        buffers = {name: b for name, b in self._step.model.state_dict().items() if name not in parted}
        check_agreement(buffers, self._step.world, "after the first step", _OWN_BUFFERS)
        trained = {name: p for name, p in self._step.model.named_parameters() if p.requires_grad}
        unused = [name for name, parameter in trained.items() if parameter.grad is None]
        if unused:
            self._step.say(
                f"{len(unused)} of {len(trained)} trainable parameters got no gradient in the first step (first: {unused[0]});"
                " a parameter without a gradient is left as it is, and not decayed"
            )

    def _first(self, batch: Batch, item: Pass) -> dict[str, Tensor]:
        step = self._step
        # In exact mode passes do not depend on the number of workers. A norm over the whole step has no parts to compare.
        together = len(item.parts) > 1 and step.config.reduce == "fast" and not step.statistics.over_workers
        alone = self._loss_alone(batch, item) if together else None
        buffers, random = self._look()
        values = step.call_objective(batch, item)
        step.metrics = check_values(values, len(item.samples))
        names = {"names": torch.tensor([*"\n".join(step.metrics).encode()], device=step.world.device)}
        check_agreement(names, step.world, "about the metrics", "the objective must report the same ones on every worker")
        if not values["loss"].requires_grad:
            raise UsageError(
                "the objective's loss does not depend on any trainable parameter, so nothing would be learned: look for"
                " .detach(), torch.no_grad() or requires_grad=False between the parameters and the loss"
            )
        buffers_after, random_after = self._look()
        step.random = random != random_after
        changed = next((name for name, seen in buffers_after.items() if seen != buffers.get(name)), None)
        if changed is not None and step.config.reduce == "exact":
            raise UsageError(
                f"--reduce exact: the forward pass changes the buffer {changed}, which does not belong to a batch norm and"
                " would depend on the number of workers; use --reduce fast"
            )
        if changed is not None and step.parts > 1:
            step.say(
                f"the forward pass changes the buffer {changed}, which does not belong to a batch norm: each worker has its"
                " own, so the model may depend on the number of workers"
            )
        if alone is not None and step.random:
            step.say(
                f"the model draws random numbers while {len(item.parts)} parts run together, so which ones a part gets depends"
                " on the number of workers; --parts-at-once 1 keys them by part"
            )
        elif alone is not None and not close(values["loss"].detach()[:: len(item.parts)], alone):
            raise UsageError(
                f"a part's loss beside {len(item.parts) - 1} other part(s) is not what it is alone: the model or the objective"
                " looks across the samples of a batch; use --parts-at-once 1"
            )
        return values

    def _look(self) -> tuple[dict[str, tuple[int, int]], bytes]:
        """What a forward pass may change that parts share: buffers, and random numbers."""
        model, device = self._step.model, self._step.world.device
        parted = self._step.statistics.names(model)
        buffers = {name: (id(b), b._version) for name, b in model.named_buffers() if name not in parted}
        return buffers, random_state(device)

    @torch.no_grad()
    def _loss_alone(self, batch: Batch, item: Pass) -> Tensor:
        """The first part's loss without the others; nothing is left changed."""
        step, count = self._step, len(item.parts)
        kept = {name: buffer.clone() for name, buffer in step.model.named_buffers()}
        single = Pass(item.group, item.parts[:1], item.micro, item.last, item.samples[::count])
        step.statistics.use(single)
        with torch.random.fork_rng([step.world.device] if step.world.device.type == "cuda" else []):
            values = step.call_objective(every(batch, count, len(item.samples)), single)
        step.statistics.use(item)
        for name, buffer in step.model.named_buffers():
            buffer.copy_(kept[name])
        return values["loss"]


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
                f"the task's objective returned {name!r} as {found}: it must hold one value per sample, shape ({size},)"
            )
    return ("loss", *sorted(name for name in values if name != "loss"))  # in one order: a set's differs between processes


def every(batch: Any, count: int, samples: int) -> Any:
    """Every n-th sample of a batch, whatever the batch is made of."""
    return map_tensors(lambda tensor: tensor[::count] if tensor.dim() and len(tensor) == samples else tensor, batch)


def close(one: Tensor, other: Tensor) -> bool:
    """Equal up to the rounding of other kernels for other batches, bf16 included."""
    near = 0.05 * float(one.float().abs().mean())
    return torch.allclose(one.float(), other.float(), rtol=0.05, atol=near, equal_nan=True)
