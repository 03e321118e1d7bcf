"""The loss scale of `--precision fp16`.

Small gradients are zero in float16. So the loss is multiplied by a scale before the backward pass, and the gradients are
divided by it after the reduction. If a gradient overflows, the step is skipped and the scale is halved; after 2,000 steps
without an overflow it is doubled (Micikevicius et al. 2018, arXiv:1710.03740; the numbers are those of torch's GradScaler).

Whether to skip is decided from the reduced gradients, which are equal on all workers. The scale is a power of two, so it rounds
nothing. All of it stays in tensors on the device: a step does not wait for it, and a CUDA graph can contain it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.errors import Diverged
from paceline.output import plural

FIRST_SCALE = 2.0**16
GROWTH_STEPS = 2000
MOST_IN_A_ROW = 24
"""More skipped steps in a row mean that the run has diverged: by then the scale fell from 2^16 to 2^-8."""
REPORTED = 3
"""Numbers that `Scaler.report` adds to a step's metrics."""


class Scaler:
    """Scales the loss, divides the gradients, and skips steps whose gradients are not finite."""

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), FIRST_SCALE, device=device)
        self._good = torch.zeros((), dtype=torch.int32, device=device)
        """Steps since the scale last changed."""
        self._skipped = torch.zeros(2, device=device)
        """Skipped steps: of the whole run, and in a row."""
        self._overflow = torch.zeros((), device=device)
        """1 if this step's gradients are not finite."""
        self._stepped = False

    def tensors(self) -> dict[str, Tensor]:
        """What a step changes, by name in a checkpoint."""
        return {"scaler.scale": self.scale, "scaler.good": self._good, "scaler.skipped": self._skipped}

    def report(self) -> Tensor:
        """The scale, and the skipped steps of the run and in a row, after this step."""
        return torch.cat((self.scale.view(1), self._skipped))

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss to differentiate: float32, because 2^16 is infinite in float16."""
        return loss.float() * self.scale if loss.dtype != torch.float64 else loss * self.scale

    @torch.no_grad()
    def unscale(self, parameters: Iterable[Tensor]) -> None:
        """Divide the reduced gradients by the scale, and look for overflows."""
        self._overflow.zero_()
        inverse = self.scale.reciprocal()
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        values = [grad._values() if grad.is_sparse else grad for grad in grads]
        for dtype in sorted({value.dtype for value in values}, key=str):
            same = [value for value in values if value.dtype == dtype]
            torch._amp_foreach_non_finite_check_and_unscale_(same, self._overflow, inverse)

    @torch.no_grad()
    def step(self, optimizer: Optimizer) -> None:
        """The optimizer's step, unless a gradient overflowed; then the scale of the next step."""
        if self._overflow.device.type == "cpu":
            if not self._overflow:
                optimizer.step()
        elif getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf = self._overflow  # type: ignore[attr-defined]  # fused kernels do nothing if it is 1
            optimizer.step()
        elif not _is_complete(optimizer) and (optimizer.state or not self._stepped):
            if not self._overflow:  # waits, but only until the optimizer has made its state
                optimizer.step()
                self._stepped = True
        else:
            self._step_or_restore(optimizer)
        self._skipped.copy_(torch.stack((self._skipped[0], self._skipped[1] * self._overflow)) + self._overflow)
        torch._amp_update_scale_(self.scale, self._good, self._overflow, 2.0, 0.5, GROWTH_STEPS)

    @torch.no_grad()
    def _step_or_restore(self, optimizer: Optimizer) -> None:
        """A step that is undone if a gradient overflowed: for optimizers that do not look. Needs a copy of all they change."""
        changed = _state(optimizer)
        before = [tensor.clone() for tensor in changed]
        optimizer.step()
        skipped = self._overflow > 0
        for tensor, old in zip(changed, before, strict=True):
            tensor.copy_(torch.where(skipped, old, tensor))


def _is_complete(optimizer: Optimizer) -> bool:
    """Whether all parameters with a gradient have state."""
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return bool(optimizer.state) and all(p in optimizer.state for p in trained)


def _state(optimizer: Optimizer) -> list[Tensor]:
    """The tensors that a step changes: weights, and state, of which views (optim/flat.py) count as the buffer they share.

    Without state on the host, such as the step count of a plain Adam, which counts skipped steps too.
    """
    weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    found = weights + [value if value._base is None else value._base for value in states]
    return list({id(tensor): tensor for tensor in found if tensor.device == weights[0].device}.values())


class Skips:
    """Reads, on the host, what steps report about the scale: counts skipped steps, and ends a run that only skips."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told: float | None = None
        """Skipped steps when the user was last told; None: before the first step that this process read."""

    def read(self, values: Sequence[float], metrics: Mapping[str, float], step: int, last: bool) -> bool:
        """Take in a step's report, at the end of its values. Whether its metrics are left out: it was skipped, and they are not
        finite. `last`: tell the user what was skipped, after an epoch's last step.
        """
        scale, total, in_a_row = values[-REPORTED:]
        if self._told is None:
            self._told = total - min(in_a_row, 1)
        if in_a_row > MOST_IN_A_ROW:
            loss = metrics["loss"]
            raise Diverged(
                f"diverged: {in_a_row:.0f} steps in a row were skipped up to step {step + 1}, because gradients were not finite"
                f" in fp16 even at a loss scale of {scale:g} (loss {loss:.4g}); look for nan or inf in the data, or try a lower"
                " --base-lr, --precision bf16 or fp32"
            )
        if last and total > self._told:
            count = plural(int(total - self._told), "step")
            self._say(
                f"fp16: {count} skipped in this epoch, {total:.0f} in the run, because gradients overflowed;"
                f" loss scale {scale:g}"
            )
            self._told = total
        return in_a_row > 0 and not all(map(math.isfinite, metrics.values()))


def read_report(values: Sequence[float]) -> dict[str, float]:
    """The report as fields of a row."""
    scale, total, _ = values[-REPORTED:]
    return {"loss_scale": scale, "skipped_steps": total}
