"""What happens with a trained model on any number of workers: `paceline evaluate` and `paceline predict`.

Both build the run of a record again: its task, its options and its weights, with the data to look at in place of the task's
own. One CPU thread per worker and deterministic kernels give the same numbers on any number of workers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from paceline.config import Config, make_config
from paceline.core.determinism import deterministic
from paceline.core.keys import key, seed_sample
from paceline.data.conversion import name_type
from paceline.data.loaders import Arrays
from paceline.dist.launch import WorkerFailed, launch
from paceline.dist.place import check_workers, read_place
from paceline.dist.world import World, world
from paceline.errors import Stopped, UsageError, unknown
from paceline.loading import load_rest
from paceline.output import plural, stages
from paceline.training import tasks
from paceline.training.build import Run, build
from paceline.training.dataset import _DATA, count_samples
from paceline.training.plain import make_clock, make_step
from paceline.training.subset import take_samples
from paceline.training.task import Task, no_objective
from paceline.training.task_fields import Source, check_data, is_factory
from paceline.training.trained import WEIGHTS, Trained, put_in, read_trained
from paceline.training.validation import Validation
from paceline.training.weight_files import find_weights, read_on_main, read_weights

TRAIN = "train"
_TRAINING_ONLY: dict[str, Any] = {"optimizer": None, "schedule": None, "sampling": None, "hooks": (), "step": None}
_VALIDATION_ONLY: dict[str, Any] = {"metrics": {}, "validation_objective": None}
"""Fields of a Task that only training or validation needs, and their values if they are not needed."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Which model to look at, and with which data."""

    record: str
    weights: str = "last"
    """A key of `WEIGHTS`."""
    data: str = ""
    """`train`, a named validation set, or `file.py:function` or `module:function`; "": the validation data."""
    sets: tuple[str, ...] = ()
    """Look at these instead of `data`: "train", "validation" (the main set), or both. A task without validation data has only
    the first."""
    precision: str = ""
    """Replaces the precision that the run had."""
    task: str = ""
    """Replaces the task that the record names."""
    workers: int | None = None
    backend: str = "auto"
    runs_dir: str = Config.runs_dir


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A record's model with its weights, and the data to look at."""

    trained: Trained
    task: Task
    run: Run
    weights: str
    """The file of the weights."""
    data: str
    """Which data it is."""


def in_world(request: Request, command: Sequence[str], work: Callable[[World], dict[str, Any]]) -> dict[str, Any] | None:
    """Call `work` in this process or in workers that run this command again; None if they did."""
    place = read_place()
    launched = make_config({"backend": request.backend, **({"workers": request.workers} if request.workers else {})})
    check_workers(place, launched.workers)
    trained = read_trained(request.record, request.runs_dir)  # report a mistake before any worker starts
    find_weights(trained.record, request.runs_dir, WEIGHTS[request.weights])
    if place.launcher == "alone" and (launched.workers or 1) > 1:
        stages.enter(f"starting {plural(launched.workers or 1, 'worker')}")
        stages.hand_over()
        outcome = launch(command, launched)
        if outcome.failure is not None:
            raise WorkerFailed(outcome.failure.explain(), outcome.exit_code)
        if outcome.exit_code:
            raise Stopped(f"stopped by {outcome.why}", outcome.why)
        return None
    load_rest()
    stages.enter("meeting the other workers" if place.size > 1 else "loading the task")
    with world(request.backend) as here, deterministic():
        return work(here)


@contextmanager
def opened(request: Request, here: World, *, validates: bool) -> Iterator[Opened]:
    """Build the run of a record for these workers, with its weights. Collective: call on every rank.

    The data to look at takes the place of the training data and of the validation data. `validates`: the metrics are needed.
    """
    found = vars(read_trained(request.record, request.runs_dir)) if here.is_main else None
    trained = Trained(**here.broadcast(found))
    stages.enter("loading the task")
    task, config = trained.resolve(request.task or None)
    if request.sets:
        sources, about = _choose_sets(request.sets, task, config), " and ".join(request.sets)
    else:
        sources, about = _choose_data(request.data, task, config, predicts=not validates)
    first = next(iter(sources.values())) if isinstance(sources, Mapping) else sources
    # A stream is read whole only as validation data: as training data it would be split by the number of workers.
    looked_at: dict[str, Any] = {"train": first, "validation": sources}
    unneeded = _TRAINING_ONLY if validates else {**_TRAINING_ONLY, **_VALIDATION_ONLY}
    if task.objective is no_objective and not validates:  # without its step function, a task must have an objective
        looked_at["objective"] = lambda model, batch: no_objective(model, batch)
    seen = count_samples(cast(Any, first)())
    if not seen:
        raise UsageError(f"{about} has no samples: check for a wrong folder, or a filter that removes everything")
    if seen < here.size:
        raise UsageError(f"{plural(seen, 'sample')} for {here.size} workers: use --workers {seen} or fewer")
    plain = _plain(config, here, trained, request.precision or config.precision)
    run = build(replace(task, **looked_at, **unneeded), plain, here)
    with run:
        name = WEIGHTS[request.weights]
        weights, path = read_on_main(lambda: _read(trained.record, request.runs_dir, name), here)
        put_in(run.model, weights, Path(path))
        run.model.eval()
        yield Opened(trained=trained, task=task, run=run, weights=path, data=about)


def evaluate(request: Request, here: World) -> dict[str, Any]:
    """The metrics of a record's model: the same numbers on any number of workers. Collective: call on every rank."""
    with opened(request, here, validates=True) as model:
        run = model.run
        step = make_step(run, make_clock(run))
        validation = Validation(run, step, step)

        def tell(done: int, total: int) -> None:
            stages.enter(f"evaluating: chunk {done:,} of {total:,}")

        metrics = validation(max(0, model.trained.epochs - 1), tell)  # random numbers as in the run's last validation
        stages.stop()
        own = dict(model.trained.metrics) if not request.data and request.weights == "last" else {}
        return {
            "record": model.trained.record,
            "task": model.task.name,
            "weights": model.weights,
            "data": model.data,
            "samples": run.contract.validation_samples,
            "metrics": metrics,
            "in_the_record": own,
        }


def _read(record: str, runs_dir: str, name: str) -> tuple[dict[str, Tensor], str]:
    path = find_weights(record, runs_dir, name)
    return read_weights(path), str(path)


def _plain(config: Config, here: World, trained: Trained, precision: str) -> Config:
    """The options that matter for a forward pass; one part per worker, so that the model is the same on any number of them.

    Convolutions are laid out as in the run: where it ran several parts in one pass, they are not channels-last.
    """
    part = max(1, (config.global_batch or config.reference_batch) // (config.virtual_workers or 1))
    together = trained.parts.startswith("together") or trained.parts.endswith("at once")
    return make_config(
        {
            "model": config.model,
            "data_dir": config.data_dir,
            "pixels": config.pixels,
            "norm_part": config.norm_part,
            "accumulate": config.accumulate,
            "loader": config.loader,
            "loader_workers": config.loader_workers,
            "precision": precision,
            "seed": config.seed,
            "eval_batch": config.eval_batch,
            "set": config.set,
            "fast": "off" if together else config.fast,
            "virtual_workers": here.size,
            "global_batch": part * here.size,
        }
    )


Chosen = Source | Mapping[str, Source]


def _choose_data(given: str, task: Task, config: Config, *, predicts: bool) -> tuple[Chosen, str]:
    """The data that `--data` means, as functions that make it once, and its name."""
    sets: Any = task.validation
    named = dict(sets) if isinstance(sets, Mapping) else {} if sets is None else {"validation": sets}
    if given in ("", "validation") and not named:
        raise UsageError(
            f"task {task.name} has no validation data: use --data train, or --data FILE.py:FUNCTION for data of your own"
        )
    if given == TRAIN and TRAIN not in named:
        return _once(_taken(task, config), config, 0, task.name), "the training data"
    if given in named or not given:
        chosen = {name: _once(each, config, 1 + i, task.name) for i, (name, each) in enumerate(named.items())}
        if given:
            return chosen[given], "the validation data" if given == "validation" else f"validation set {given}"
        if len(chosen) > 1 and not predicts:
            return chosen, f"validation sets {', '.join(chosen)}"
        name = next(iter(chosen))
        return chosen[name], "the validation data" if name == "validation" else f"validation set {name}"
    if ":" not in given:
        error = unknown("value for --data", given, [*named, TRAIN])
        raise UsageError(f"{error} (or FILE.py:FUNCTION or MODULE:FUNCTION, a function that returns data)")
    return _once(tasks.find_function(given, "--data"), config, 1, task.name, given), given


def _choose_sets(names: Sequence[str], task: Task, config: Config) -> Chosen:
    """The training data, the main validation set, or both."""
    if task.validation is None and TRAIN not in names:
        raise UsageError(f"task {task.name} has no validation data: use --sets train")
    chosen: dict[str, Source] = {}
    for name in names:
        if name == TRAIN or task.validation is not None:
            source, _ = _choose_data(TRAIN if name == TRAIN else "", task, config, predicts=True)
            chosen[name] = next(iter(source.values())) if isinstance(source, Mapping) else source
    return chosen


def _once(source: Any, config: Config, number: int, task: str, given: str = "") -> Callable[[], Any]:
    """A function that makes data when it is first called, with the random numbers that a run's own data gets."""

    @cache
    def make() -> Any:
        seed_sample(key(config.seed, _DATA, number))
        made = source() if is_factory(source) else source
        if isinstance(made, Tensor | np.ndarray):
            made = Arrays((torch.as_tensor(made),))  # inputs without labels
        if given and isinstance(made, Task):
            raise UsageError(f"--data {given} returned a Task: give a function that returns data (--task chooses another task)")
        if given and made is None:
            raise UsageError(f"--data {given} returned {name_type(made)}: it must return data (is a `return` missing?)")
        return check_data(task, f"--data {given}" if given else "data", made)

    return make


def _taken(task: Task, config: Config) -> Callable[[], Any]:
    """A function that makes the training data of a run, also of one with `--train-samples`."""

    def make() -> Any:
        made = cast(Callable[[], Any], task.train)() if is_factory(task.train) else task.train
        return take_samples(check_data(task.name, TRAIN, made), config, task.name)

    return make


def refuse_problem(problem: str, here: World) -> None:
    """Raise rank 0's problem on every worker, if it has one. Collective: call on every rank."""
    problem = here.broadcast(problem)
    if problem:
        raise UsageError(problem)
