"""From the name on the command line to a Task and its Config: built-in names, files and modules."""

import functools
import importlib
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch

from paceline import models
from paceline.config import Config, check_options, flag, make_config, names_with
from paceline.data import fashion_mnist
from paceline.data.augment import Images
from paceline.data.conversion import name_type
from paceline.data.loaders import Arrays
from paceline.data.verb import DownloadProgress
from paceline.errors import PacelineError, UsageError, unknown
from paceline.explanation import headline
from paceline.optim import check_optimizer
from paceline.options import Role
from paceline.settings import Settings, fit_settings
from paceline.training.task import Task, classify, no_objective

_MEAN, _DEVIATION = 0.2860, 0.3530  # of Fashion-MNIST's 60,000 training images scaled to [0, 1]
_SIDE = 28  # pixels


def check(name: str, options: Mapping[str, Any]) -> None:
    """Raise a UsageError for what is wrong before any worker starts, without loading data or running the user's file."""
    converted = check_options(options)
    if not isinstance(name, str):
        _check_task(name, "paceline.train got", "give")
    if name not in _BUILT_IN:
        _locate(name)
        return  # the file may register its own models and optimizers
    _refuse_settings(name, converted)
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
        _refuse_settings(task, vars(config))
        made = _images(task, config)
        _check_own(made, config)
        return made, config
    if not isinstance(task, str):
        made = _check_task(task, "paceline.train got", "give")
        _refuse_settings(made, options)
        return made, configure(made, options)
    made, settings = _call(task, check_options({"set": options.get("set")})["set"])
    return made, configure(made, {**options, "set": settings} if settings else options)


def configure(task: Task, options: Mapping[str, Any]) -> Config:
    """The configuration of a user's own task."""
    config = make_config(own_defaults(task), cast(Mapping[str, Any], task.defaults), options)
    _check_own(task, config)
    for key in options:  # a record's config.toml has all options, most of them with their defaults
        if key in names_with(Role.IMAGES) and getattr(config, key) != getattr(Config, key):
            raise UsageError(f"{flag(key)} is for built-in image tasks; {task.name} prepares its own data and loss")
    if task.model is not None and config.model:
        raise UsageError(f"--model {config.model}: task {task.name} has its own model")
    if task.model is None and task.classes < 1:
        raise UsageError(
            f"task {task.name} has neither a model nor classes: give model=lambda: Net(...), or classes=N for"
            " --model to build one"
        )
    if task.validation is None and config.target_accuracy:
        raise UsageError(
            f"--target-accuracy {config.target_accuracy:g}: task {task.name} has no validation data, so no accuracy is"
            " measured; give it validation=..., or leave --target-accuracy out"
        )
    if task.validation is None:
        for key in ("monitor", "save_best", "stop_after"):
            if getattr(config, key):
                raise UsageError(
                    f"{flag(key)}: task {task.name} has no validation data, so no epoch is better than another; give it"
                    f" validation=..., or leave {flag(key)} out"
                )
    return config


def own_defaults(task: Task) -> dict[str, Any]:
    """The defaults of a task with its own optimizer or schedule."""
    chosen = {"optimizer": "own", "schedule": "constant"} if task.optimizer is not None else {}
    return {**chosen, "schedule": "own"} if task.schedule is not None else chosen


def _check_own(task: Task, config: Config) -> None:
    """Raise a UsageError if an option needs an optimizer, schedule or objective that the task does not have."""
    if task.objective is no_objective and config.ema:
        raise UsageError(
            f"--ema: task {task.name} has no objective, which batch-norm statistics of averaged weights need: give one"
        )
    for name in ("optimizer", "schedule"):
        if getattr(config, name) == "own" and getattr(task, name) is None:
            raise UsageError(
                f"{flag(name)} own: task {task.name} has no {name} of its own; give it {name}=..., or choose another"
            )


def _refuse_settings(task: str | Task, options: Mapping[str, Any]) -> None:
    for key in options.get("set") or ():
        what = f"the Task {task.name} is already made" if isinstance(task, Task) else f"task {task} is built in"
        raise UsageError(f"--set {key}: {what}; --set is for the parameters of task() in a file my_task.py or module:function")


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


def _call(name: str, given: Settings) -> tuple[Task, Settings]:
    """Run the user's file or import the module, and call the function that makes the task: the task, and what it was given."""
    source, function = _locate(name)
    try:
        make = getattr(_import(source), function, None)
        if make is None:
            raise UsageError(f"{source} has no function {function}(): a task file defines task() -> paceline.Task")
        if isinstance(make, Task):
            _refuse_settings(make, {"set": given})
            return make, given
        settings = fit_settings(make, f"{function}() in {source}", given)
        task = make(**settings)
    except PacelineError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"task {name} raised {headline(error)}") from error  # explain() finds the user's line in the cause
    return _check_task(task, f"{function}() in {source} returned", "it must return"), settings


def find_function(name: str, what: str) -> Any:
    """The function that `file.py:function` or `module:function` names; `what` is the flag that gave it."""
    source, _, function = name.partition(":")
    if source.endswith(".py") and not Path(source).is_file():
        raise UsageError(f"{what} {name}: {source} does not exist (looked in {Path.cwd()})")
    try:
        found = getattr(_import(source), function, None)
    except PacelineError:
        raise
    except (Exception, SystemExit) as error:
        raise UsageError(f"{what} {name} raised {headline(error)}") from error
    if not callable(found):
        raise UsageError(f"{what} {name}: {source} has no function {function}()")
    return found


def _check_task(task: Any, found: str, rule: str) -> Task:
    if isinstance(task, Task):
        return task
    hint = "; is a `return` missing?" if task is None else ""
    raise UsageError(f"{found} {name_type(task)}: {rule} a paceline.Task{hint}")


def make_importable(folder: str) -> None:
    """Put a folder on the path: after the standard library, which a queue.py in it must not replace, and before packages."""
    if folder not in sys.path:
        library = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
        library += [os.path.join(path, "lib-dynload") for path in library]
        sys.path.insert(max((i + 1 for i, path in enumerate(sys.path) if path in library), default=0), folder)


def _import(source: str) -> ModuleType:
    if not source.endswith(".py"):
        make_importable(os.getcwd())
        return importlib.import_module(source)
    path = Path(source).resolve()
    make_importable(str(path.parent))  # a task file may import files next to it
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
