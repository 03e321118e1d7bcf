"""The forward pass: from a pass's inputs to its loss and metrics."""

from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.carrier import MOST_METRICS
from paceline.core.deal import Pass
from paceline.data.loaders import Batch, Inputs, Loader
from paceline.errors import UsageError
from paceline.records import ROW_FIELDS
from paceline.training.task import Objective


class Forward:
    """Calls the task's objective on a batch, under autocast where bf16 is on."""

    def __init__(self, model: nn.Module, objective: Objective, loader: Loader, precision: str) -> None:
        self.model, self.objective, self._make = model, objective, loader.make
        self._device, self._bf16 = next(model.parameters()).device, precision == "bf16"
        self.names: tuple[str, ...] = ()
        """The objective's metrics in training, loss first: known after the first pass."""

    def autocast(self) -> torch.autocast:
        """bf16 where it is on; weights, gradients and optimizer state stay fp32."""
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16)

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
        self.names = check_values(values, size)


def check_values(values: dict[str, Any], size: int) -> tuple[str, ...]:
    """The objective's metrics, loss first; a UsageError if they are not as a task promises."""
    if "loss" not in values:
        raise UsageError(f"the task's objective returned {sorted(values)}: it must return a dict with 'loss'")
    if len(values) > MOST_METRICS:
        raise UsageError(f"the task's objective returned {len(values)} metrics: it may return at most {MOST_METRICS}")
    for name, value in values.items():
        if not isinstance(name, str) or not name.isprintable() or name in ROW_FIELDS:
            taken = ", ".join(sorted(ROW_FIELDS))
            raise UsageError(f"the task's objective returned a metric named {name!r}: use plain text other than {taken}")
        if not isinstance(value, Tensor) or value.shape != (size,):
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise UsageError(
                f"the task's objective returned {name!r} as {found}: it must hold one value per sample, shape ({size},)"
            )
    return ("loss", *sorted(name for name in values if name != "loss"))  # sorted: a set's order differs between processes
