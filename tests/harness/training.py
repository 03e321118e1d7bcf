"""Train in a test's own processes, and tasks small enough to reason about."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline.config import make_config
from paceline.data.loaders import Arrays
from paceline.dist.world import World
from paceline.training.build import build
from paceline.training.checkpoint.keeper import Keeper
from paceline.training.loop import fit
from paceline.training.observers import Result
from paceline.training.task import Task, classify
from paceline.training.tasks import own_defaults

ALONE = World(
    rank=0,
    local_rank=0,
    node=0,
    size=1,
    local_size=1,
    nodes=1,
    device=torch.device("cpu"),
    backend="gloo",
    launcher="test",
)
"""A world of one CPU worker, outside of any process group."""


@dataclass
class Watcher:
    """An observer that remembers."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    healths: list[dict[str, Any]] = field(default_factory=list)
    timelines: list[dict[str, Any]] = field(default_factory=list)
    layers_rows: list[dict[str, Any]] = field(default_factory=list)
    phases: list[dict[str, Any]] = field(default_factory=list)

    def start(self, contract: Any) -> None: ...

    def say(self, text: str) -> None:
        self.notes.append(text)

    def step(self, row: Any) -> None:
        self.steps.append(dict(row))

    def layers(self, row: Any) -> None:
        self.layers_rows.append(dict(row))

    def validating(self, epoch: int, done: int, total: int) -> None: ...

    def phase(self, row: Any) -> None:
        self.phases.append(dict(row))

    def join(self, row: Any) -> None: ...

    def epoch(self, row: Any) -> None:
        self.epochs.append(dict(row))

    def health(self, row: Any) -> None:
        self.healths.append(dict(row))

    def timeline(self, timeline: Any) -> None:
        self.timelines.append(dict(timeline))

    def end(self, result: Result, model: nn.Module | None) -> None:
        self.results.append(result)


@dataclass
class Trained:
    """What a worker ended with; plain enough to cross a pipe."""

    weights: dict[str, Any]
    optimizer: dict[str, Any]
    watcher: Watcher
    result: Result


def train_in(world: World, task: Task, options: dict[str, Any], folder: Path | None = None, resumes: bool = False) -> Trained:
    """Train a task as this worker of this world. Every worker watches: numbers must be the same everywhere.

    With a folder, rank 0 writes its checkpoints there; `resumes` goes on from the last one.
    """
    config = make_config(own_defaults(task), cast(Mapping[str, Any], task.defaults), {"log_every": 1, **options})
    watcher = Watcher()
    with build(task, config, world) as run:
        result = fit(run, [watcher], Keeper(run, folder if world.is_main else None, watcher.say, resumes))
    weights = {name: tensor.cpu().numpy().copy() for name, tensor in run.model.state_dict().items()}
    state = {
        f"{number}.{name}": torch.as_tensor(value).cpu().numpy().copy()
        for number, one in run.update.optimizer.state_dict()["state"].items()
        for name, value in one.items()
    }
    return Trained(weights, state, watcher, result)


def blobs(
    samples: int = 103, validation: int = 41, objective: Any = None, dropout: float = 0.0, norm: bool = False, **fields: Any
) -> Task:
    """Three classes of points in five dimensions. Each sample carries its number, so that objectives can say whom they saw."""

    def points(count: int, seed: int) -> Arrays:
        random = torch.Generator().manual_seed(seed)
        labels = torch.arange(count) % 3
        centres = torch.randn(3, 5, generator=torch.Generator().manual_seed(7))
        return Arrays((centres[labels] + torch.randn(count, 5, generator=random), labels, torch.arange(count)))

    def model() -> nn.Module:
        layers: list[nn.Module] = [nn.Linear(5, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3)]
        return nn.Sequential(*layers[:1], *([nn.BatchNorm1d(8)] if norm else []), *layers[1:])

    defaults = {"global_batch": 12, "base_lr": 0.05, "reference_batch": 12, "epochs": 2, "eval_batch": 10, "weight_decay": 1e-3}
    return Task(
        name="blobs",
        model=model,
        train=lambda: points(samples, 0),
        validation=lambda: points(validation, 1),
        objective=objective or first_two(classify()),
        defaults=defaults,
        **fields,
    )


def first_two(objective: Any) -> Any:
    """An objective over (inputs, labels), for batches that carry the sample's number too."""

    def wrapped(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        values: dict[str, Tensor] = objective(model, batch[:2])
        return values

    return wrapped
