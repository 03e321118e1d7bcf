"""Predictions of a record's model, in sample order and with the same bytes on any number of workers: `paceline predict`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.exact_mean import Chunks
from paceline.core.in_order import gather_in_order
from paceline.core.keys import key, seed_all
from paceline.data.conversion import name_type
from paceline.data.loaders import Batch
from paceline.dist.world import World
from paceline.errors import PacelineError, UsageError, first_line
from paceline.output import stages
from paceline.training.after import Opened, Request, opened, refuse_problem
from paceline.training.build import ValidationSet
from paceline.training.outputs import check_target, name_rows, writing

_PREDICT = 0x93ED  # keeps the random numbers of predictions apart from those of training

Predict = Callable[[Batch], Any]


@torch.no_grad()
def predict(request: Request, to: Path, force: bool, here: World) -> dict[str, Any]:
    """Write the predictions to a file on rank 0; says what was written. Collective: call on every rank."""
    with opened(request, here, validates=False) as model:
        run, samples = model.run, _data(model).samples
        size = run.config.eval_batch or (1000 if here.device.type == "cuda" else 250)
        chunks, (how, function) = Chunks(samples, size, here), _choose(model, min(size, samples))
        with ExitStack() as stack:
            writer, problem = None, ""
            if here.is_main:
                try:
                    check_target(to, force)
                    writer = stack.enter_context(writing(to, samples))
                except PacelineError as error:
                    problem = str(error)
            refuse_problem(problem, here)
            names: list[str] = []
            for number, rows in enumerate(gather_in_order(chunks, _predictions(model, chunks, function))):
                assert writer is not None
                names = list(rows)
                writer.add(number * size, rows)
                done = min(samples, (number + 1) * size)
                stages.enter(f"predicting: {done:,} of {samples:,} samples")
        return {"file": str(to), "samples": samples, "names": names, "data": model.data, "weights": model.weights, "how": how}


def _predictions(model: Opened, chunks: Chunks, function: Predict) -> Iterator[dict[str, Tensor]]:
    """The named rows of each of this worker's chunks."""
    run, loader = model.run, _data(model).loader

    def seed(i: int) -> None:
        seed_all(key(run.config.seed, _PREDICT, chunks.numbers[i]), run.world.device)

    for mine, inputs in zip(chunks.mine, loader.inputs(chunks.mine, None, seed), strict=True):
        with torch.no_grad(), run.forward.autocast():
            tree = function(loader.make(inputs))
        yield name_rows(tree, len(mine))


def _data(model: Opened) -> ValidationSet:
    """The data to predict."""
    return next(iter(model.run.validation_sets.values()))


def _choose(model: Opened, count: int) -> tuple[str, Predict]:
    """How to predict: the task's `predict`, else the objective's outputs, else the model on the first tensor of the batch.

    Every worker tries the objective on the first chunk, so that all choose alike.
    """
    run, task = model.run, model.task
    objective, own = getattr(task, "validation_objective", None) or task.objective, task.predict
    if own is not None:
        return "the task's predict", lambda batch: own(run.model, batch)
    (batch,) = _data(model).loader.batches([np.arange(count)], None)
    why = "the objective reports no 'outputs'"
    try:
        with run.forward.autocast():
            if "outputs" in objective(run.model, batch):
                return "the objective's outputs", lambda batch: objective(run.model, batch)["outputs"]
    except Exception as error:  # most likely because the data has no labels
        why = f"the objective cannot be called on this data ({type(error).__name__}: {first_line(error)})"
    first = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not isinstance(first, Tensor):
        raise UsageError(
            f"{why}, and batches begin with {name_type(first)}: give the task predict=..., which gets (model, batch)"
        )

    def call(batch: Any) -> Any:
        return run.model(batch[0] if isinstance(batch, tuple | list) else batch)

    return f"model(batch[0]), because {why}", call
