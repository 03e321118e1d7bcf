"""A task: the model, the data and the objective. Everything else about a run is configuration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.data.loaders import Arrays, Batch, Prepare
from paceline.values import check_name

Objective = Callable[[nn.Module, Batch], dict[str, Tensor]]
"""(model, batch) -> {"loss": one value per sample, any other metric: one value per sample}."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A user's model and data. `my_task.py` holds a function `task() -> Task`; `paceline train my_task.py` trains it."""

    name: str
    """Used in the names of its records."""
    train: Callable[[], Arrays | Dataset[Any]]
    """Makes the training data. Called once in every worker; the first worker of each node calls it before the others."""
    validation: Callable[[], Arrays | Dataset[Any]]
    """Makes the validation data."""
    objective: Objective
    """Calls the model on a batch and returns a dict of tensors with one value per sample. The mean of "loss" over the step is
    minimized; everything else is averaged and reported. One value per sample is what makes the last step of an epoch and
    validation exact. `model` is the one that the task made: call it, or any of its layers. Training and validation may report
    different metrics. On a GPU a step is recorded once and replayed (`--fast`): Python code in here then does not run again."""
    model: Callable[[], nn.Module] | None = None
    """Makes the model, randomly initialized. None: `--model` builds it (images of shape C x H x W in, `classes` logits out)."""
    classes: int = 0
    """Number of classes, if `--model` builds the model."""
    prepare: Prepare | None = None
    """Turns a batch, on the device, into what the objective gets: scaling, augmentation. It runs for every batch; a
    `KeyedPrepare` such as `Images` becomes part of the recorded step instead."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Options (fields of Config) that suit this task; recipes and flags override them."""
    unit: str = "images"
    """What to call samples, as in images/s."""

    def __post_init__(self) -> None:
        check_name("a task's name, which is used in the names of its records,", self.name)


def classify(label_smoothing: float = 0.0) -> Objective:
    """Cross-entropy and accuracy. Labels are smoothed in training only: validation losses stay comparable between runs."""

    def objective(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        inputs, labels = batch
        logits = model(inputs).float()
        smoothing = label_smoothing if model.training else 0.0
        loss = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        return {"loss": loss, "accuracy": (logits.argmax(1) == labels).float()}

    return objective
