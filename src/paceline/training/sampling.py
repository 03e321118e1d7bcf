"""Which samples an epoch uses, other than each once: draws by weight. And what a run says about its data.

Weighted draws give up law 2: in an epoch, a sample can come several times or not at all. All other laws hold, because the draws
follow from (seed, epoch) alone (`Sampler`).
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.sampler import check_weights
from paceline.core.stream import Stream
from paceline.data.conversion import name_type
from paceline.data.loaders import Arrays
from paceline.dist.agree import check_agreement
from paceline.dist.world import World
from paceline.errors import UsageError
from paceline.output import plural

if TYPE_CHECKING:
    from paceline.training.task import Task


@dataclass(frozen=True)
class Weighted:
    """Draw an epoch's samples with replacement, each with a chance in proportion to its weight."""

    weights: Any
    """One number per training sample, as a list, array or tensor. 0 leaves a sample out."""
    draws: int | None = None
    """Draws in an epoch (default: as many as there are samples)."""

    def __post_init__(self) -> None:
        weights = self.weights.detach().cpu() if isinstance(self.weights, Tensor) else self.weights
        object.__setattr__(self, "weights", check_weights(weights))
        if self.draws is not None and (isinstance(self.draws, bool) or not isinstance(self.draws, int) or self.draws < 1):
            raise UsageError(f"Weighted(draws={self.draws!r}): give the number of draws in an epoch, a whole number")


Sampling = Sequence[float] | Tensor | np.ndarray | Weighted | Callable[[Any], Any]


def balanced(labels: Any, draws: int | None = None) -> Weighted:
    """Weights with which each class is drawn equally often. `labels` has one label per training sample: numbers or texts."""
    found = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
    if found.ndim != 1 or not len(found):
        raise UsageError(f"balanced() got labels of shape {found.shape}: give one label per training sample")
    _, classes, counts = np.unique(found, return_inverse=True, return_counts=True)
    return Weighted(1.0 / counts[classes], draws)


def check_sampling(name: str, sampling: Any) -> None:
    """Raise a UsageError unless this can give weights, as far as can be told without the data."""
    if sampling is None or isinstance(sampling, Weighted) or callable(sampling):
        if sampling is balanced:
            raise UsageError(f"task {name}: sampling=balanced is not called: write sampling=balanced(labels)")
        return
    if isinstance(sampling, str) or not isinstance(sampling, Sequence | np.ndarray | Tensor):
        raise UsageError(
            f"task {name}: sampling is {name_type(sampling)}: give one weight per training sample, balanced(labels), or a"
            " function of the training data that returns one of these"
        )
    _as_weighted(name, sampling)


@dataclass(frozen=True)
class Draws:
    """How an epoch's samples are drawn; without weights, each is used once."""

    weights: np.ndarray | None = None
    draws: int = 0

    def describe(self) -> str:
        """For the contract; "" if each sample is used once."""
        if self.weights is None:
            return ""
        return f"{plural(self.draws, 'draw')} per epoch by weight, with replacement: a sample can repeat or be left out"

    def add_to(self, data_sha256: str) -> str:
        """The hash of data and weights: a resumed run must find the same."""
        if self.weights is None:
            return data_sha256
        return hashlib.sha256(f"{data_sha256} {self.draws} ".encode() + self.weights.tobytes()).hexdigest()


def make_weights(task: "Task", data: Any, world: World) -> Draws:
    """The weights of a task's training samples. Collective: call on every rank."""
    if task.sampling is None:
        return Draws()
    if isinstance(data, Stream):
        raise UsageError(
            f"task {task.name}: sampling needs data that can be indexed, Arrays or a map-style Dataset: a Stream is read in its"
            " own order"
        )
    given = task.sampling(data) if callable(task.sampling) else task.sampling
    weighted = _as_weighted(task.name, given)
    if len(weighted.weights) != len(data):
        raise UsageError(
            f"task {task.name}: sampling has {plural(len(weighted.weights), 'weight')}, but there are"
            f" {plural(len(data), 'training sample')}: give one weight per sample"
        )
    facts = {"weights": torch.from_numpy(weighted.weights)}
    check_agreement(facts, world, "about the sampling", "the task must give the same weights in every worker")
    return Draws(weighted.weights, weighted.draws or len(data))


def check_collated(task: "Task", train: Any, validation: Mapping[str, Any]) -> None:
    """Raise a UsageError if a task's collate would never be called."""
    for field, data in (("train", train), *(("validation", each) for each in validation.values())):
        if task.collate is not None and isinstance(data, Arrays):
            raise UsageError(
                f"task {task.name}: {field} is Arrays, whose batches are cut out of the arrays, so collate has no samples to"
                " join: use a Dataset, or use prepare instead of collate"
            )


def describe_data(data: Any, parts: int) -> str:
    """The data, for the contract."""
    if isinstance(data, Stream):
        return data.describe(parts)
    return getattr(data, "about", "") or f"{type(data).__name__} of {plural(len(data), 'sample')}"


def _as_weighted(name: str, given: Any) -> Weighted:
    if isinstance(given, Weighted):
        return given
    if given is None:
        raise UsageError(
            f"task {name}: the function for sampling returned None: it must return weights; is a `return` missing?"
        )
    try:
        return Weighted(given)
    except UsageError as error:
        raise UsageError(f"task {name}: {error}") from None
