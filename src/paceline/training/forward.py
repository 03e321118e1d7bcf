"""The forward pass: from a pass's inputs to its loss and metrics."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.carrier import MOST_METRICS, WEIGHT
from paceline.core.deal import Pass
from paceline.core.engine import weigh
from paceline.core.shapes import check_shapes
from paceline.core.trees import tensors_in
from paceline.data.conversion import name_type
from paceline.data.loaders import Batch, Inputs, Loader
from paceline.errors import UsageError, first_line
from paceline.records import ROW_FIELDS
from paceline.training.task import Objective

SPECIAL = "weight", "outputs"
"""Keys of the objective's dict that are not metrics."""
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Forward:
    """Calls the task's objective on a batch, under autocast in bf16 and fp16."""

    def __init__(self, model: nn.Module, objective: Objective, loader: Loader, precision: str) -> None:
        self.model, self.objective, self._make = model, objective, loader.make
        self._device, self._kind = next(model.parameters()).device, _AUTOCAST.get(precision)
        self.names: tuple[str, ...] = ()
        """The objective's metrics in training, loss first: known after the first pass."""
        self.weighted = False
        """Whether the objective returns a weight, by which these means are weighted."""

    def autocast(self) -> torch.autocast:
        """bf16 or fp16 where it is on; weights, gradients and optimizer state stay fp32."""
        return torch.autocast(self._device.type, self._kind or torch.bfloat16, enabled=self._kind is not None)

    def make(self, given: Inputs) -> Batch:
        """The batch of these inputs."""
        return self._make(given)

    def values(self, batch: Batch, item: Pass) -> dict[str, Tensor]:
        """The objective's values."""
        with self.autocast():
            try:
                return self.objective(self.model, batch)
            except ValueError as error:
                if "more than 1 value per channel" not in str(error):
                    raise
                raise UsageError(
                    f"batch norm needs at least two samples per part; this pass has {len(item.samples)} for"
                    f" {len(item.parts)} of them: use a larger --global-batch, fewer virtual workers, or a smaller --accumulate"
                ) from error
            except RuntimeError as error:
                clash = self._find_type_clash(batch) if "type" in str(error) else ""
                if not clash:
                    raise
                raise UsageError(f"{first_line(error)}: {clash}") from error

    def _find_type_clash(self, batch: Batch) -> str:
        """In words: the batch's first tensor is not of the type of the weights. "" if it is."""
        kind = next(self.model.parameters()).dtype
        found = next(tensors_in(batch), None)
        if found is None or found.dtype == kind:
            return ""
        kinds = [str(each).removeprefix("torch.") for each in (found.dtype, kind)]
        return (
            f"the first tensor of the batch is {kinds[0]}, and the model's weights are {kinds[1]}; convert the data to"
            f" {kinds[1]}, or the model to {kinds[0]}"
        )

    def run_pass(self, given: Inputs, share: float, samples: int) -> tuple[Tensor, Tensor]:
        """From inputs to loss and metrics, times the share; with nothing that only the first pass needs: it can be compiled."""
        with self.autocast():
            values = self.objective(self.model, self._make(given))
        return weigh(values, self.names, values.get("weight"), share, samples)

    def weigh(self, values: dict[str, Tensor], share: float, samples: int) -> tuple[Tensor, Tensor]:
        """The loss of a pass, and the vector of its metrics, both times its share of the step. `samples`: of the pass."""
        if self.weighted != ("weight" in values) or not values.keys() >= set(self.names):
            raise _different(_reported(values), (*self.names, *(["weight"] if self.weighted else [])))
        return weigh(values, self.names, values.get("weight"), share, samples)

    def read(self, step: int, numbers: Sequence[float]) -> tuple[dict[str, float], float]:
        """A step's metrics, and the mean weight of its samples (1 without weights), from what the step returned.

        Raises a UsageError for a weight that cannot be: the same one on every worker, because all have the same numbers.
        """
        metrics = dict(zip(self.names, numbers, strict=False))
        if not self.weighted:
            return metrics, 1
        weight = numbers[WEIGHT]
        if not math.isfinite(weight) or weight < 0:
            raise UsageError(
                f"the task's objective returned a 'weight' in step {step + 1} that is negative or not finite: a weight must be"
                " a number of 0 or more"
            )
        return metrics, weight

    def name_metrics(self, values: dict[str, Tensor], size: int) -> None:
        """Check the first pass's values, and take their names."""
        self.names, self.weighted = check_values(values, size, self._device), "weight" in values


def check_values(values: Any, size: int, device: torch.device) -> tuple[str, ...]:
    """The objective's metrics, loss first, without "weight" and "outputs"; a UsageError if one is not as a task promises."""
    if not isinstance(values, dict):
        hint = "; is a `return` missing?" if values is None else ""
        raise UsageError(
            f"the task's objective returned {name_type(values)}: it must return a dict of tensors, such as"
            f" {{'loss': F.cross_entropy(logits, labels, reduction='none')}}{hint}"
        )
    if "loss" not in values:
        found = ", ".join(repr(name) for name in values) or "nothing"
        raise UsageError(f"the task's objective returned a dict with {found}: it must have 'loss', the value to minimize")
    metrics = {name: value for name, value in values.items() if name not in SPECIAL}
    if len(metrics) > MOST_METRICS:
        raise UsageError(f"the task's objective returned {len(metrics)} metrics: it may return at most {MOST_METRICS}")
    check_shapes({name: value for name, value in values.items() if name != "outputs"}, size, "the task's objective returned")
    for name, value in values.items():
        if name == "outputs":
            _check_outputs(value, size)
            continue
        if not isinstance(name, str) or not name.isprintable() or name in ROW_FIELDS:
            taken = ", ".join(sorted(ROW_FIELDS))
            raise UsageError(f"the task's objective returned a metric named {name!r}: use plain text other than {taken}")
        if value.is_complex() or (name == "loss" and not value.is_floating_point()):
            kind = str(value.dtype).removeprefix("torch.")
            raise UsageError(
                f"the task's objective returned {name!r} as {kind}: use a real floating-point type, such as float32"
            )
        if value.device.type != device.type:
            raise UsageError(
                f"the task's objective returned {name!r} on {value.device}: it must stay on the model's device, {device}"
            )
    return ("loss", *sorted(name for name in metrics if name != "loss"))  # sorted: a set's order differs between processes


def _check_outputs(outputs: Any, size: int) -> None:
    """Raise a UsageError unless this is a tensor, or a tuple or dict of tensors, with one row per sample."""
    found = list(outputs.values() if isinstance(outputs, dict) else outputs if isinstance(outputs, tuple | list) else [outputs])
    for value in found:
        if not isinstance(value, Tensor):
            raise UsageError(
                f"the task's objective returned 'outputs' with {name_type(value)} in it: it must be a tensor, or a tuple or"
                " dict of tensors"
            )
        if not value.dim() or len(value) != size:
            raise UsageError(
                f"the task's objective returned 'outputs' with a tensor of shape {tuple(value.shape)}: it must have one row per"
                f" sample, and this batch has {size}"
            )
    if not found or (isinstance(outputs, dict) and not all(isinstance(name, str) for name in outputs)):
        raise UsageError("the task's objective returned 'outputs' that is empty, or a dict whose keys are not text")


def _reported(values: dict[str, Tensor]) -> tuple[str, ...]:
    return tuple(name for name in values if name != "outputs")


def _different(found: Sequence[str], expected: Sequence[str]) -> UsageError:
    return UsageError(
        f"the task's objective returned {', '.join(found)} for one batch, and {', '.join(expected)} for another: return the"
        " same metrics each time"
    )
