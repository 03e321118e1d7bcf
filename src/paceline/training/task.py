"""A task: what is trained, on which data, against which objective. Everything else about a run is configuration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline.data.loaders import Arrays, Batch, Prepare
from paceline.values import check_name

Objective = Callable[[nn.Module, Batch], dict[str, Tensor]]
"""(model, batch) -> {"loss": one value a sample, any other metric: one value a sample}."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A user's model and data. `my_task.py` holds a function `task() -> Task`; `paceline train my_task.py` trains it."""

    name: str
    """Names the record."""
    train: Callable[[], Arrays | Dataset[Any]]
    """Makes the training data; called once in every worker, on a node's first worker before the others."""
    validation: Callable[[], Arrays | Dataset[Any]]
    """Makes the validation data."""
    objective: Objective
    """Calls the model on a batch and returns a dict of tensors with one value a sample: "loss" is what is minimised (its mean
    over the step), everything else is averaged and reported. One value a sample is what makes the tail of an epoch and
    validation exact. `model` is the one that the task made: call it, or any of its layers. Training and validation may report
    different metrics. On a GPU a step is recorded once and replayed (`--fast`): what Python itself does here is then not done
    again."""
    model: Callable[[], nn.Module] | None = None
    """Makes the model, randomly initialised; None takes `--model` (images of shape C x H x W in, `classes` logits out)."""
    classes: int = 0
    """Classes, where `--model` builds the model."""
    prepare: Prepare | None = None
    """Turns a batch, on the device, into what the objective gets: scaling, augmentation. It runs for every batch, unless it is
    a `KeyedPrepare` such as `Images`: that is part of the recorded step."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Options (Config's fields) this task likes; recipes and flags override them."""
    unit: str = "images"
    """What a sample is called in images/s."""

    def __post_init__(self) -> None:
        check_name("a task's name, which becomes that of its records,", self.name)


def classify(label_smoothing: float = 0.0) -> Objective:
    """Cross-entropy and accuracy. Labels are smoothed in training alone: a validation loss is comparable between runs."""

    def objective(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        inputs, labels = batch
        logits = model(inputs).float()
        smoothing = label_smoothing if model.training else 0.0
        loss = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        return {"loss": loss, "accuracy": (logits.argmax(1) == labels).float()}

    return objective
