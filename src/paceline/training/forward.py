"""The forward pass: from a pass's inputs to its loss and metrics."""

from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.carrier import MOST_METRICS
from paceline.core.deal import Pass
from paceline.data.conversion import name_type
from paceline.data.loaders import Batch, Inputs, Loader, tensors_in
from paceline.errors import UsageError, first_line
from paceline.records import ROW_FIELDS
from paceline.training.task import Objective

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Forward:
    """Calls the task's objective on a batch, under autocast in bf16 and fp16."""

    def __init__(self, model: nn.Module, objective: Objective, loader: Loader, precision: str) -> None:
        self.model, self.objective, self._make = model, objective, loader.make
        self._device, self._kind = next(model.parameters()).device, _AUTOCAST.get(precision)
        self.names: tuple[str, ...] = ()
        """The objective's metrics in training, loss first: known after the first pass."""

    def autocast(self) -> torch.autocast:
        """bf16 or fp16 where it is on; weights, gradients and optimizer state stay fp32."""
        return torch.autocast(self._device.type, self._kind or torch.bfloat16, enabled=self._kind is not None)

    def make(self, given: Inputs) -> Batch:
        """The batch of these inputs."""
        return self._make(given)

    def values(self, batch: Batch, item: Pass) -> dict[str, Tensor]:
        """The objective's values, one per sample."""
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

    def weighted(self, given: Inputs, share: float) -> tuple[Tensor, Tensor]:
        """From inputs to loss and metrics, times the share; with nothing that only the first pass needs: it can be compiled."""
        with self.autocast():
            values = self.objective(self.model, self._make(given))
        return self.weigh(values, share)

    def weigh(self, values: dict[str, Tensor], share: float) -> tuple[Tensor, Tensor]:
        """The mean loss, and the vector of the metrics' means, both times the share."""
        means = torch.stack([values[name].detach().float().mean() for name in self.names])
        return values["loss"].mean() * share, means * share

    def name_metrics(self, values: dict[str, Tensor], size: int) -> None:
        """Check the first pass's values, and take their names."""
        self.names = check_values(values, size, self._device)


def check_values(values: Any, size: int, device: torch.device) -> tuple[str, ...]:
    """The objective's metrics, loss first; a UsageError if they are not as a task promises."""
    if not isinstance(values, dict):
        hint = "; is a `return` missing?" if values is None else ""
        raise UsageError(
            f"the task's objective returned {name_type(values)}: it must return a dict with one value per sample, such as"
            f" {{'loss': F.cross_entropy(logits, labels, reduction='none')}}{hint}"
        )
    if "loss" not in values:
        found = ", ".join(repr(name) for name in values) or "nothing"
        raise UsageError(f"the task's objective returned a dict with {found}: it must have 'loss', the value to minimize")
    if len(values) > MOST_METRICS:
        raise UsageError(f"the task's objective returned {len(values)} metrics: it may return at most {MOST_METRICS}")
    for name, value in values.items():
        if not isinstance(name, str) or not name.isprintable() or name in ROW_FIELDS:
            taken = ", ".join(sorted(ROW_FIELDS))
            raise UsageError(f"the task's objective returned a metric named {name!r}: use plain text other than {taken}")
        if not isinstance(value, Tensor) or value.shape != (size,):
            raise UsageError(
                f"the task's objective returned {name!r} as {_describe(value)}: it must hold one value per sample, a tensor of"
                f" shape ({size},)" + _hint(value)
            )
        if value.is_complex() or (name == "loss" and not value.is_floating_point()):
            kind = str(value.dtype).removeprefix("torch.")
            raise UsageError(
                f"the task's objective returned {name!r} as {kind}: use a real floating-point type, such as float32"
            )
        if value.device.type != device.type:
            raise UsageError(
                f"the task's objective returned {name!r} on {value.device}: it must stay on the model's device, {device}"
            )
    return ("loss", *sorted(name for name in values if name != "loss"))  # sorted: a set's order differs between processes


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else name_type(value)


def _hint(value: Any) -> str:
    """How to get one value per sample from a mean, or from several values per sample."""
    if not isinstance(value, Tensor):
        return ""
    return (
        "; use reduction='none', or leave out .mean()"
        if not value.dim()
        else "; use .flatten(1).mean(1)"
        if value.dim() > 1
        else ""
    )
