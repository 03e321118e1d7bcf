"""From the name on the command line to a Task and its Config: built-in names, files and modules."""

import functools
import importlib
import importlib.util
import os
import sys
import sysconfig
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from paceline import models
from paceline.config import Config, check_options, flag, make_config, names_with
from paceline.data import fashion_mnist
from paceline.data.augment import Images
from paceline.data.loaders import Arrays
from paceline.data.verb import DownloadProgress
from paceline.errors import PacelineError, UsageError, unknown
from paceline.optim import check_optimizer
from paceline.options import Role
from paceline.training.task import Task, classify

_MEAN, _DEVIATION = 0.2860, 0.3530  # of Fashion-MNIST's 60,000 training images scaled to [0, 1]
_SIDE = 28  # pixels


def check(name: str, options: Mapping[str, Any]) -> None:
    """Raise a UsageError for what is wrong before any worker starts, without loading data or running the user's file."""
    converted = check_options(options)
    if name not in _BUILT_IN:
        _locate(name)
        return  # the file may register its own models and optimizers
    check_optimizer(converted.get("optimizer", Config.optimizer))
    if converted.get("model"):
        models.check(converted["model"])


def built_in() -> Collection[str]:
    """The names of the built-in tasks."""
    return _BUILT_IN.keys()


def resolve(task: str | Task, options: Mapping[str, Any]) -> tuple[Task, Config]:
    """The task, given itself or by name, and its configuration: the task's defaults, overridden by the options."""
    if isinstance(task, str) and task in _BUILT_IN:
        config = make_config(_BUILT_IN[task], options)
        return _images(task, config), config
    made = _call(task) if isinstance(task, str) else task
    return made, configure(made, options)


def configure(task: Task, options: Mapping[str, Any]) -> Config:
    """The configuration of a user's own task."""
    for key in task.defaults:
        if key in names_with(Role.PLACE):
            raise UsageError(f"task {task.name}: {key!r} says where a run happens: it cannot be one of the task's defaults")
    config = make_config(task.defaults, options)
    for key in options:  # a record's config.toml has all options, most of them with their defaults
        if key in names_with(Role.IMAGES) and getattr(config, key) != getattr(Config, key):
            raise UsageError(f"{flag(key)} is for built-in image tasks; {task.name} prepares its own data and loss")
    if task.model is not None and config.model:
        raise UsageError(f"--model {config.model}: task {task.name} has its own model")
    if task.model is None and task.classes < 1:
        raise UsageError(f"task {task.name} has neither a model nor classes: --model needs the number of classes")
    return config


def _images(name: str, config: Config) -> Task:
    """A built-in task. The files are read once for both splits."""
    if config.crop > _SIDE:
        raise UsageError(f"--crop is {config.crop}: images of {name} are {_SIDE} x {_SIDE} pixels, so use at most {_SIDE}")

    @functools.cache
    def data() -> fashion_mnist.ImageData:
        with DownloadProgress() as progress:
            return fashion_mnist.load(name, Path(config.data_dir) if config.data_dir else None, progress)

    def arrays(images: np.ndarray, labels: np.ndarray) -> Arrays:
        return Arrays((torch.from_numpy(images), torch.from_numpy(labels)), about=data().where)

    standard = config.pixels == "standard"
    return Task(
        name=name,
        train=lambda: arrays(data().train_images, data().train_labels),
        validation=lambda: arrays(data().validation_images, data().validation_labels),
        objective=classify(config.label_smoothing),
        classes=10,
        prepare=Images(
            mean=_MEAN if standard else 0.0,
            deviation=_DEVIATION if standard else 1.0,
            crop=config.crop,
            flip=config.flip,
            erase=config.erase,
            seed=config.seed,
        ),
    )


_BUILT_IN: dict[str, dict[str, Any]] = {
    "fashion-mnist": {"model": "cnn", "flip": True},
    "fashion-mnist-mini": {"model": "cnn", "flip": True},
}


def _locate(name: str) -> tuple[str, str]:
    """`my_task.py`, `my_task.py:function` or `module:function` as (file or module, function)."""
    source, _, function = name.partition(":")
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise UsageError(f"task file {source} does not exist (looked in {Path.cwd()})")
        return source, function or "task"
    if function:
        return source, function
    error = unknown("task", name, _BUILT_IN)
    raise UsageError(f"{error} (or a file my_task.py with a function task(), or module:function)")


def _call(name: str) -> Task:
    """Run the user's file or import the module, and call the function that makes the task."""
    source, function = _locate(name)
    try:
        make = getattr(_import(source), function, None)
        if make is None:
            raise UsageError(f"{source} has no function {function}(): a task file defines task() -> paceline.Task")
        task = make()
    except PacelineError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = [frame for frame in frames if frame.filename != __file__ and "importlib" not in frame.filename]
        at = f" (line {place[-1].lineno} of {Path(place[-1].filename).name})" if place else ""
        raise UsageError(f"task {name} raised {type(error).__name__}: {' '.join(str(error).split())}{at}") from error
    if not isinstance(task, Task):
        raise UsageError(f"{function}() in {source} returned {type(task).__name__}: it must return a paceline.Task")
    return task


def _make_importable(folder: str) -> None:
    """Put a folder on the path: after the standard library, which a queue.py in it must not replace, and before packages."""
    if folder not in sys.path:
        library = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
        library += [os.path.join(path, "lib-dynload") for path in library]
        sys.path.insert(max((i + 1 for i, path in enumerate(sys.path) if path in library), default=0), folder)


def _import(source: str) -> ModuleType:
    if not source.endswith(".py"):
        _make_importable(os.getcwd())
        return importlib.import_module(source)
    path = Path(source).resolve()
    _make_importable(str(path.parent))  # a task file may import files next to it
    name = path.stem
    while name in sys.stdlib_module_names or (name in sys.modules and not _is_from(path, sys.modules[name])):
        name = f"paceline_task_{name}"  # a file called queue.py must not replace the standard library's queue
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # DataLoader processes, which are forks, need it to find the user's classes
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if sys.modules.get(name) is module:
            del sys.modules[name]  # the next try must not get a half-initialized module
        raise
    return module


def _is_from(path: Path, module: ModuleType) -> bool:
    return getattr(module, "__file__", None) == str(path)
