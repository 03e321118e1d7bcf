"""A task: the model, the data and the objective. Everything else about a run is configuration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config import Config
from paceline.data.batching import Collate
from paceline.data.conversion import name_type
from paceline.data.loaders import Batch, Prepare
from paceline.errors import SampleError, UsageError
from paceline.training import task_fields
from paceline.training.sampling import Sampling, check_sampling
from paceline.training.task_fields import Source

Objective = Callable[[nn.Module, Batch], dict[str, Tensor]]
"""(model, batch) -> {"loss": one value per sample, any other metric: one value per sample}."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A user's model and data. `my_task.py` holds a function `task() -> Task`; `paceline train my_task.py` trains it.

    A mistake that can be detected here raises a UsageError here, so that its traceback ends at the user's own line.
    """

    name: str
    """Used in the names of its records."""
    train: Source
    """The training data: `Arrays`, a map-style Dataset or a `Stream`, or a function that makes it. The function is called once
    in every worker; the first worker of each node calls it before the others."""
    validation: Source | None = None
    """The validation data, or a function that makes it. None: the run has no validation, and its result no metrics."""
    objective: Objective
    """Calls the model on a batch and returns a dict of tensors with one value per sample. The mean of "loss" over the step is
    minimized; everything else is averaged and reported. One value per sample is what makes the last step of an epoch and
    validation exact. `model` is the one that the task made: call it, or any of its layers. Training and validation may report
    different metrics. On a GPU a step is recorded once and replayed (`--fast`): Python code in here then does not run again."""
    model: Callable[[], nn.Module] | None = None
    """Makes the model, randomly initialized: a function or a class. A model that exists already is refused: its weights were
    drawn before `--seed` was set, and a second run would start from trained weights. None: `--model` builds it (images of
    shape C x H x W in, `classes` logits out)."""
    classes: int = 0
    """Number of classes, if `--model` builds the model."""
    prepare: Prepare | None = None
    """Turns a batch, on the device, into what the objective gets: scaling, augmentation. It runs for every batch; a
    `KeyedPrepare` such as `Images` becomes part of the recorded step instead."""
    collate: Collate | None = None
    """Makes a batch of a list of samples, for samples that cannot be stacked: texts of different lengths. It runs in the loader
    processes, in training and in validation. None: samples are stacked. Parts then run in turn, because what it does to a part
    may depend on the other samples of the list."""
    sampling: Sampling | None = None
    """Draw the samples of an epoch with replacement: one weight per training sample, `balanced(labels)`, `Weighted(weights,
    draws)`, or a function of the training data that returns one of these. The draws follow from (seed, epoch). None: an epoch
    uses each sample once."""
    defaults: Mapping[str, Any] | Config = field(default_factory=dict)
    """Options (fields of Config) that suit this task; recipes and flags override them. Of a Config, the options that were
    passed to it count."""
    unit: str = "images"
    """What to call samples, as in images/s."""

    def __new__(cls, **given: Any) -> Self:
        """Raise a UsageError for a field that does not exist, with the nearest one."""
        task_fields.check_known(given, (each.name for each in fields(cls)))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        task_fields.check_texts(self.name, self.unit, self.classes)
        task_fields.check_source(self.name, "train", self.train)
        if self.validation is not None:
            task_fields.check_source(self.name, "validation", self.validation)
        task_fields.check_objective(self.name, self.objective, classify)
        task_fields.check_model(self.name, self.model)
        task_fields.check_prepare(self.name, self.prepare)
        task_fields.check_collate(self.name, self.collate)
        check_sampling(self.name, self.sampling)
        object.__setattr__(self, "defaults", task_fields.check_defaults(self.name, self.defaults))


def classify(label_smoothing: float = 0.0) -> Objective:
    """Cross-entropy and accuracy. Labels are smoothed in training only: validation losses stay comparable between runs."""

    def objective(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        if not (
            isinstance(batch, tuple | list)
            and len(batch) == 2
            and isinstance(batch[0], Tensor)
            and isinstance(batch[1], Tensor)
        ):
            raise UsageError(f"classify() needs batches of two tensors, (inputs, labels): this batch is {_describe(batch)}")
        inputs, labels = batch
        outputs = model(inputs)
        if not isinstance(outputs, Tensor):
            raise UsageError(
                f"classify() needs a model that returns logits, one row per sample: it returned {_describe(outputs)}"
            )
        logits = outputs.float()
        if labels.dtype in (torch.int32, torch.int16, torch.int8, torch.bool):  # common in numpy
            labels = labels.long()
        smoothing = label_smoothing if model.training else 0.0
        try:
            loss = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
            return {"loss": loss, "accuracy": (logits.argmax(1) == labels).float()}
        except (IndexError, RuntimeError, ValueError) as error:
            why = _find_wrong_labels(logits, labels)
            raise (SampleError(f"classify() {why}") if why else error) from None

    return objective


def _describe(value: Any) -> str:
    """What a batch or a model's output is, in words."""
    if not isinstance(value, tuple | list):
        return name_type(value)
    return f"{name_type(value)} of {', '.join(map(name_type, value)) or 'nothing'}"


def _find_wrong_labels(logits: Tensor, labels: Tensor) -> str:
    """Why cross-entropy failed, as far as shapes and labels tell; "" if they do not."""
    shape = tuple(logits.shape)
    if logits.dim() < 2:
        return f"needs one row of logits per sample, shape (samples, classes): the model returned shape {shape}"
    if labels.is_floating_point() or labels.dim() != logits.dim() - 1:
        kind = f"{str(labels.dtype).removeprefix('torch.')} of shape {tuple(labels.shape)}"
        fix = "use labels.long(), labels.squeeze(1) or, if they are one-hot, labels.argmax(1)"
        return f"needs one label per sample, a whole number (int64): labels are {kind}; {fix}"
    if labels.device.type != "cpu":  # after a failed assertion on a GPU nothing can be read from it
        return ""
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= shape[1]:
        return (
            f"found labels from {low} to {high}, but the model has {shape[1]} outputs: labels must be from 0 to {shape[1] - 1}"
        )
    return ""
