"""A task: the model, the data and the objective. Everything else about a run is configuration."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.config import Config
from paceline.core.step import Step
from paceline.data.batching import Collate
from paceline.data.conversion import name_type
from paceline.data.loaders import Batch, Prepare
from paceline.errors import SampleError, UsageError
from paceline.training import task_fields
from paceline.training.hooks import Hooks, check_hooks
from paceline.training.sampling import Sampling, check_sampling
from paceline.training.task_fields import Source

Objective = Callable[[nn.Module, Batch], dict[str, Tensor]]
"""(model, batch) -> {"loss": ..., any other metric: ..., "weight": optional, "outputs": optional}: see `Task.objective`."""

StepFunction = Callable[[Step, nn.Module, Mapping[str, Optimizer]], Mapping[str, Tensor] | None]
"""(step, model, optimizers by name) -> metrics of the step, "loss" among them; None: those of the last reduction."""


def no_objective(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Stands for the objective of a task that has a step function and no validation."""
    raise UsageError("the task has no objective, which validates: give Task(objective=...), a function of (model, batch)")


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
    validation: Source | Mapping[str, Source] | None = None
    """The validation data, or a function that makes it. A dict of several by name: the first is the main one, and metrics of
    the others are called "NAME/loss". None: the run has no validation, and its result no metrics."""
    objective: Objective = no_objective
    """Calls the model on a batch and returns a dict of tensors. The mean of "loss" over the step is minimized; everything else
    is averaged and reported. A value has one number per sample, or is one number for the batch, which counts for each of its
    samples. With "weight" (one number per sample, or one that belongs to means over the batch, such as their number of tokens)
    all means are weighted by it, over the whole step and over the whole validation set. "outputs" is for `metrics`.

    `model` is the one that the task made: call it, or any of its layers. Training and validation may report different metrics.
    On a GPU a step is recorded once and replayed (`--fast`): Python code in here then does not run again. Only a task
    with `step` and without validation can leave it out."""
    validation_objective: Objective | None = None
    """Another objective for validation. None: the same one."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Metrics of the whole validation set, by name. A function gets the objective's "outputs" of all samples (a tuple as
    positional arguments, a dict as keyword arguments) and returns a number. An object with update, compute and reset, such as
    those of torchmetrics, is fed in sample order. Both run on rank 0's CPU."""
    model: Callable[[], nn.Module] | None = None
    """Makes the model, randomly initialized: a function or a class. A model that exists already is refused: its weights were
    drawn before `--seed` was set, and a second run would start from trained weights. None: `--model` builds it (images of
    shape C x H x W in, `classes` logits out)."""
    classes: int = 0
    """Number of classes, if `--model` builds the model."""
    prepare: Prepare | None = None
    """Turns a batch, on the device, into what the objective gets: scaling, augmentation. It runs for every batch; a
    `KeyedPrepare` such as `Images` becomes part of the recorded step instead."""
    predict: Callable[[nn.Module, Batch], Any] | None = None
    """What `paceline predict` writes for a batch: a tensor, or a tuple or dict of tensors, one row per sample. It also gets
    data without labels. None: the "outputs" that the objective reports, or else `model(batch[0])`."""
    collate: Collate | None = None
    """Makes a batch from a list of samples, for samples that cannot be stacked, such as texts of different lengths. It runs in
    the loader processes, in training and in validation. With it, parts run in turn, because what it does to a sample may depend
    on the other samples in the list. None: samples are stacked."""
    sampling: Sampling | None = None
    """Draw the samples of an epoch with replacement: one weight per training sample, `balanced(labels)`, `Weighted(weights,
    draws)`, or a function of the training data that returns one of these. The draws follow from (seed, epoch). None: an epoch
    uses each sample once."""
    defaults: Mapping[str, Any] | Config = field(default_factory=dict)
    """Options (fields of Config) that suit this task; recipes and flags override them. Of a Config, the options that were
    passed to it count."""
    unit: str = "images"
    """What to call samples, as in images/s."""
    optimizer: Callable[[nn.Module, Config], Optimizer | Mapping[str, Optimizer]] | None = None
    """Makes the optimizer: any torch.optim.Optimizer. The learning rate of each parameter group is the one at
    `reference_batch`: `--lr-rule` scales it, the schedule multiplies it. A dict of optimizers needs the task's own `step`.
    None: `--optimizer` makes it."""
    schedule: Callable[..., Any] | None = None
    """The learning-rate schedule: a function `step -> factor`, or a function `optimizer -> scheduler` that makes a scheduler of
    torch. Further parameters named `steps`, `epochs` or `steps_per_epoch` get the length of the run. None: `--schedule`."""

    step: StepFunction | None = None
    """The task's own training step, for several optimizers or reductions: a function of (step, model, optimizers). It
    calls `step.backward(function)` or iterates over the step once per reduction, steps the optimizers and returns the metrics.
    The objective is then used only for validation. None: one reduction of the objective's loss, one optimizer step."""
    hooks: Hooks | Sequence[Hooks] = ()
    """Functions that the run calls while it trains: after steps, validations, epochs and checkpoints, and at its end."""

    def __new__(cls, **given: Any) -> Self:
        """Raise a UsageError for a field that does not exist, with the nearest one."""
        task_fields.check_known(given, (each.name for each in fields(cls)))
        return super().__new__(cls)

    def __post_init__(self) -> None:
        task_fields.check_texts(self.name, self.unit, self.classes)
        task_fields.check_source(self.name, "train", self.train)
        validates = bool(task_fields.check_validation(self.name, self.validation))
        if self.objective is no_objective:
            task_fields.check_no_objective(self.name, self.step, validates and self.validation_objective is None)
        task_fields.check_objective(self.name, self.objective, classify)
        if self.validation_objective is not None:
            if not validates:
                raise UsageError(f"task {self.name}: validation_objective needs validation data: give validation=...")
            task_fields.check_objective(self.name, self.validation_objective, classify, "validation_objective")
        object.__setattr__(self, "metrics", task_fields.check_metrics(self.name, self.metrics, validates))
        task_fields.check_model(self.name, self.model)
        task_fields.check_prepare(self.name, self.prepare)
        task_fields.check_optimizer(self.name, self.optimizer)
        task_fields.check_schedule(self.name, self.schedule)
        task_fields.check_step(self.name, self.step)
        task_fields.check_predict(self.name, self.predict)
        object.__setattr__(self, "hooks", check_hooks(self.name, self.hooks))
        task_fields.check_collate(self.name, self.collate)
        check_sampling(self.name, self.sampling)
        object.__setattr__(self, "defaults", task_fields.check_defaults(self.name, self.defaults))
        for own in ("optimizer", "schedule"):
            task_fields.check_one_of(self.name, own, getattr(self, own), self.defaults)


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


def validation_sources(task: Task) -> dict[str, Source]:
    """The validation data of a task by name, the main one first; empty without validation."""
    return task_fields.check_validation(task.name, task.validation)


def is_classify(objective: Objective) -> bool:
    """Whether `classify` made this objective."""
    made = getattr(objective, "__module__", ""), getattr(objective, "__qualname__", "")
    return made == (__name__, "classify.<locals>.objective")


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
