"""A trained model from its record: `paceline.load`, and what `evaluate` and `predict` need to know about a record.

Nothing in a record runs code. Its config.toml and environment.json name the task, which is loaded as `--resume` does; its
weights are a .safetensors file.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from paceline.config import Config, names_with
from paceline.errors import RecordError, UsageError
from paceline.files import read_json
from paceline.options import Role
from paceline.records import find_record, read_result
from paceline.toml import read_recipe
from paceline.training import tasks
from paceline.training.model import make_bare_model, own_buffers
from paceline.training.task import Task
from paceline.training.task_fields import check_data, is_factory
from paceline.training.weight_files import MODEL, find_weights, fit_weights, read_weights

WEIGHTS = {"last": MODEL, "best": "best.safetensors"}
"""The files of a record that `--weights` names."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a record says about its run: enough to make the model again."""

    record: str
    task: str
    """The name of its task: built-in, a file or module:function; for a Task made in Python, that Task's own name."""
    options: dict[str, Any]
    """The run's options, without those that belong to one start of it."""
    epochs: int = 0
    """How many epochs it trained."""
    parts: str = ""
    """How a worker ran its parts, as its contract says."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Of its last validation."""

    def resolve(self, task: str | Task | None = None) -> tuple[Task, Config]:
        """The task and its configuration. `task` replaces the one that the record names."""
        given = task or self.task
        if isinstance(given, str):
            self._check_named(given, given is not self.task)
            return tasks.resolve(given, self.options)
        return tasks.resolve(given, {name: value for name, value in self.options.items() if name != "set"})

    def _check_named(self, name: str, given: bool) -> None:
        built_in = name in tasks.built_in()
        if not given and not built_in and ".py" not in name and ":" not in name:
            raise UsageError(
                f"{self.record} was trained from a Task made in Python, {name!r}: give that Task (paceline.load(record,"
                " task=...)), or a file that makes it (--task FILE)"
            )
        source = name.partition(":")[0]
        if not given and source.endswith(".py") and not Path(source).is_file():
            raise UsageError(
                f"{self.record} was trained from {source}, which does not exist here (looked in {Path.cwd()}): run this where"
                " the file is, or give it with --task FILE"
            )


def load(record: str | Path, task: str | Task | None = None) -> nn.Module:
    """The trained model of a record, on the CPU and in evaluation mode.

    `record` is its folder, its name in the folder runs, or a file of weights in it (`best.safetensors`). `task` is needed if
    the record was made from a Task object, and if the task's file has moved. The only code that runs is the task's own, which
    makes the model: the record holds none.
    """
    file = Path(record) if str(record).endswith(".safetensors") and Path(record).is_file() else None
    trained = read_trained(str(record if file is None else file.parent))
    path = file or find_weights(trained.record, "", MODEL)
    made, config = trained.resolve(task)
    with _random_state_kept():
        model, _ = make_bare_model(made, config, lambda: _first_data(made))
    own_buffers(model)
    put_in(model, read_weights(path), path)
    return model.eval()


def read_trained(record: str, runs_dir: str = Config.runs_dir) -> Trained:
    """What a record says about its run. Raises a UsageError of one line if it is not the record of a training run."""
    path = find_record(record, runs_dir)
    if path.is_file():
        raise UsageError(f"{record} is a file: give the folder of a record")
    try:
        about = read_json(path / "environment.json")
        contract = about.get("contract") if isinstance(about.get("contract"), dict) else {}
        task = str(about["task"])
    except (OSError, ValueError, KeyError):
        raise UsageError(f"{path} is not a record of paceline train: it has no readable environment.json") from None
    left_out = names_with(Role.START) | {"workers", "init_from", "branch_from"}
    options = {name: value for name, value in read_recipe(str(path / "config.toml")).items() if name not in left_out}
    try:
        result = read_result(path)
    except RecordError:
        result = {}
    metrics = result.get("metrics")
    return Trained(
        record=str(path),
        task=task,
        options=options,
        epochs=_whole(result.get("epochs"), 0),
        parts=str(cast(dict[str, Any], contract).get("parts") or ""),
        metrics=metrics if isinstance(metrics, dict) else {},
    )


def put_in(model: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Copy all weights of a record into its model. Raises a UsageError unless every tensor fits."""
    match = fit_weights(model, weights)
    if not match.complete:
        raise UsageError(
            f"the task's model does not fit {path}: {match.describe()}; the task has changed since the run, or is another one"
        )


def _first_data(task: Task) -> Any:
    """The training data: a model that `--model` names is made for the shape of its images."""
    made = cast(Callable[[], Any], task.train)() if is_factory(task.train) else task.train
    return check_data(task.name, "train", made)


def _whole(value: Any, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else otherwise


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Making a model seeds torch, numpy and random: the caller's program gets its own state back."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
