"""Checks made while a run trains: a task that cannot be trained as it is, and a model that silently depends on the number of
workers.

Most look at the first two passes or the first step. Each sees only what one pass shows. A problem ends the run with one line,
or prints a note.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.core.deal import Pass
from paceline.core.keys import random_state
from paceline.core.parts import Parts
from paceline.core.sync_norm import SyncNorm
from paceline.core.trees import map_tensors
from paceline.data.loaders import Batch
from paceline.dist.agree import check_agreement
from paceline.errors import UsageError
from paceline.training.forward import Forward
from paceline.training.host_state import module_state

_OWN_BUFFERS = (
    "the forward pass changes it, and each worker has seen other samples; register such a buffer with persistent=False, or"
    " train with one worker"
)
_PASSES = 2  # a value that changes in the second pass is not a cache that the first pass filled


class TaskChecks:
    """Runs the objective in the first passes of a run, and checks what it does."""

    def __init__(self, parts: Parts, forward: Forward, say: Callable[[str], None] = lambda text: None) -> None:
        self._parts, self._forward, self._say = parts, forward, say
        self.left = _PASSES
        """Passes still to check."""
        self.random = False
        """The first pass drew random numbers."""
        self._agreed = self._ended = self._told_unfrozen = False

    def idle(self) -> None:
        """This worker has no part in the step. Collective in the first step: others are in their first pass."""
        if not self._agreed:
            self._agree()

    def _agree(self) -> None:
        """Check that all workers' objectives report the same metrics. A worker without a part takes rank 0's.

        Collective: call on every rank.
        """
        parts, forward, self._agreed = self._parts, self._forward, True
        if parts.has_idle(parts.phase):
            names, weighted = parts.world.broadcast([forward.names, forward.weighted])
            if not parts.groups:
                forward.names, forward.weighted = tuple(names), weighted
        reported = (*forward.names, *(["weight"] if forward.weighted else []))
        names = {"names": torch.tensor([*"\n".join(reported).encode()], device=parts.world.device)}
        check_agreement(names, parts.world, "about the metrics", "the objective must report the same ones on every worker")

    def __call__(self, batch: Batch, item: Pass) -> dict[str, Tensor]:
        """The objective's values."""
        self.left -= 1
        state = module_state(self._forward.model)
        values = self._first(batch, item) if self.left == _PASSES - 1 else self._forward.values(batch, item)
        after = module_state(self._forward.model)
        changed = next((name for name, value in after.items() if state.get(name, value) != value), None)
        if self.left == 0 and changed is not None and self._parts.virtual_workers > 1:
            self._say(
                f"the forward pass changes {changed}, a plain attribute: each worker has its own, so the model may depend on"
                " the number of workers"
            )
        return values

    def end_step(self) -> None:
        """After the first step's gradients are reduced: report parameters without one, and compare buffers between workers.

        Collective: call on every rank.
        """
        if self._ended:
            return
        self._ended = True
        model = self._forward.model
        by_part = self._parts.statistics.names(model)
        buffers = {name: buffer for name, buffer in model.state_dict().items() if name not in by_part}
        check_agreement(buffers, self._parts.world, "after the first step", _OWN_BUFFERS)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        unused = [name for name, parameter in trained.items() if parameter.grad is None]
        if unused:
            self._say(
                f"{len(unused)} of {len(trained)} trainable parameters got no gradient in the first step (first: {unused[0]});"
                " a parameter without a gradient is left as it is, and not decayed"
            )

    def end_epoch(self) -> None:
        """Report once if parameters that were frozen when the run began require gradients now: no optimizer has them."""
        trained = {id(parameter) for parameter in self._parts.engine.carrier.trained}
        named = self._forward.model.named_parameters()
        unfrozen = [name for name, p in named if p.requires_grad and id(p) not in trained]
        if unfrozen and not self._told_unfrozen:
            self._told_unfrozen = True
            self._say(
                f"{unfrozen[0]} was frozen when the run began and is not now: it is still not trained; start a run with"
                " requires_grad=True for everything you want to train"
            )

    def _first(self, batch: Batch, item: Pass) -> dict[str, Tensor]:
        parts, forward, several = self._parts, self._forward, self._parts.virtual_workers > 1
        # In exact mode passes do not depend on the number of workers. A norm over the whole step has no parts to compare.
        # A loss that is one number for all parts cannot be compared either: `_loss_alone` then has no dimension.
        together = len(item.parts) > 1 and not parts.exact and not parts.statistics.over_workers
        alone = self._loss_alone(batch, item) if together else None
        buffers, random = self._look()
        values = forward.values(batch, item)
        if self._agreed:  # it was idle in the first step
            forward.weigh(values, 1.0, len(item.samples))
        else:
            forward.name_metrics(values, len(item.samples))
            self._agree()
        if not values["loss"].requires_grad:
            raise UsageError(
                "the objective's loss does not depend on any trainable parameter, so nothing would be learned: look for"
                " .detach(), torch.no_grad() or requires_grad=False between the parameters and the loss"
            )
        self._check_scalar(values, item)
        buffers_after, random_after = self._look()
        self.random = random != random_after
        changed = next((name for name, seen in buffers_after.items() if seen != buffers.get(name)), None)
        if changed is not None and parts.exact:
            raise UsageError(
                f"--reduce exact: the forward pass changes the buffer {changed}, which does not belong to a batch norm and"
                " would depend on the number of workers; use --reduce fast"
            )
        if changed is not None and several:
            self._say(
                f"the forward pass changes the buffer {changed}, which does not belong to a batch norm: each worker has its"
                " own, so the model may depend on the number of workers"
            )
        if alone is not None and self.random:
            self._say(
                f"the model draws random numbers while {len(item.parts)} parts run together, so which ones a part gets depends"
                " on the number of workers; --parts-at-once 1 keys them by part"
            )
        elif alone is not None and alone.dim() and not close(values["loss"].detach()[:: len(item.parts)], alone):
            raise UsageError(
                f"a part's loss changes when {len(item.parts) - 1} other parts share its pass: the model or the objective mixes"
                " the samples of a batch; use --parts-at-once 1"
            )
        return values

    def _check_scalar(self, values: dict[str, Tensor], item: Pass) -> None:
        """Check the weights, and say so if a loss that is one number per batch covers parts of several virtual workers."""
        if self._forward.weighted and not bool((values["weight"] >= 0).all()):  # later passes: see `Forward.read`
            raise UsageError(
                "the task's objective returned a 'weight' that is negative or nan: a weight must be a number of 0 or more"
            )
        if not values["loss"].dim() and len(item.parts) > 1 and not self._forward.weighted and not self._parts.exact:
            self._say(
                f"the loss is one number for a batch of {len(item.parts)} parts: unless it is a mean over samples, the model"
                " depends on the number of workers; return one value per sample, or a 'weight'"
            )

    def _look(self) -> tuple[dict[str, tuple[int, int]], bytes]:
        """What a forward pass may change that parts share: buffers, and random numbers."""
        model, by_part = self._forward.model, self._parts.statistics.names(self._forward.model)
        # A norm over the whole step has the same statistics on all workers.
        synced = {id(buffer) for module in model.modules() if isinstance(module, SyncNorm) for buffer in module.buffers()}
        named = [(name, buffer) for name, buffer in model.named_buffers() if name not in by_part and id(buffer) not in synced]
        buffers = {name: (id(buffer), buffer._version) for name, buffer in named}
        return buffers, random_state(self._parts.world.device)

    @torch.no_grad()
    def _loss_alone(self, batch: Batch, item: Pass) -> Tensor:
        """The first part's loss without the other parts. Nothing stays changed."""
        model, device, count = self._forward.model, self._parts.world.device, len(item.parts)
        kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        single = Pass(item.group, item.parts[:1], item.micro, item.last, item.samples[::count])
        self._parts.statistics.use(single)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            values = self._forward.values(every(batch, count, len(item.samples)), single)
        self._parts.statistics.use(item)
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
        self._forward.name_metrics(values, len(single.samples))
        return values["loss"]


def every(batch: Any, count: int, samples: int) -> Any:
    """Every `count`-th sample of a batch of any structure."""
    return map_tensors(lambda tensor: tensor[::count] if tensor.dim() and len(tensor) == samples else tensor, batch)


def close(one: Tensor, other: Tensor) -> bool:
    """Equal up to the rounding of different kernels for different batch sizes, bf16 included."""
    near = 0.05 * float(one.float().abs().nan_to_num().mean())  # a loss that is not finite: see `divergence.py`
    return torch.allclose(one.float(), other.float(), rtol=0.05, atol=near, equal_nan=True)
