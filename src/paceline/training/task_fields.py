"""What the fields of a Task may hold, and what its factories may return. A mistake is a UsageError of one line."""

import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset

from paceline.config import Config, check_options, names_with
from paceline.core.stream import Stream
from paceline.data.conversion import name_type
from paceline.data.loaders import Arrays, KeyedPrepare
from paceline.errors import UsageError, unknown
from paceline.hints import find_hint
from paceline.options import Role
from paceline.values import check_name, flag, short

Data = Arrays | Stream | Dataset[Any]
Source = Callable[[], Data] | Data
"""Data, or a function that makes it."""

_MEANT = {
    **dict.fromkeys(("data", "dataset", "train_set", "training_data"), "train"),
    **dict.fromkeys(("val", "valid", "dev", "test", "eval", "val_data", "test_data"), "validation"),
    **dict.fromkeys(("loss", "loss_fn", "criterion"), "objective"),
    **dict.fromkeys(("net", "network", "module"), "model"),
    **dict.fromkeys(("training_step", "train_step", "step_fn"), "step"),
    **dict.fromkeys(("transform", "transforms", "augment", "preprocess"), "prepare"),
    **dict.fromkeys(("collate_fn", "collator", "data_collator"), "collate"),
    **dict.fromkeys(("sampler", "weights", "sample_weights", "train_sampler"), "sampling"),
    **dict.fromkeys(("config", "options", "hparams"), "defaults"),
    **dict.fromkeys(("optim", "optimizers", "opt", "configure_optimizers"), "optimizer"),
    **dict.fromkeys(("scheduler", "lr_scheduler", "schedulers", "lr_schedule"), "schedule"),
    **dict.fromkeys(("infer", "inference", "predict_step", "forward"), "predict"),
    **dict.fromkeys(("callbacks", "callback", "hook", "listeners"), "hooks"),
}
"""Names that other tools use, and the field that they mean here."""
LENGTHS = ("steps", "epochs", "steps_per_epoch")
"""Parameters that a schedule function may have besides its first: the run's length."""
_DATA_RULE = "give Arrays((inputs, targets)), a map-style Dataset or a Stream"


def check_known(given: Iterable[str], known: Iterable[str]) -> None:
    """Raise a UsageError for a field that Task does not have."""
    names = set(known)
    for name in given:
        if name in names:
            continue
        if name in _MEANT:
            raise UsageError(f"Task has no field {name!r}: did you mean {_MEANT[name]!r}?")
        if name in names_with(Role.PLACE):
            raise UsageError(f"Task has no field {name!r}: it says where a run happens; use {flag(name)}")
        if name in Config.__dataclass_fields__:
            raise UsageError(f"Task has no field {name!r}: it is an option; give it as defaults={{{name!r}: ...}}")
        hint = find_hint(name, Config.__dataclass_fields__)
        if hint.startswith(("use ", "not ")):
            raise UsageError(f"Task has no field {name!r}: {hint}; options go into defaults={{...}}")
        raise unknown("field of Task", name, names)


def check_texts(name: Any, unit: Any, classes: Any) -> None:
    """The fields that are text or a number."""
    if not isinstance(name, str):
        raise UsageError(f"a task's name is {name_type(name)}: it must be text, as in name='my-task'")
    check_name("a task's name, which is used in the names of its records,", name)
    if not isinstance(unit, str):
        raise UsageError(f"task {name}: unit is {name_type(unit)}: it must be text, what a sample is called, as in 'images'")
    if isinstance(classes, bool) or not isinstance(classes, int | np.integer) or classes < 0:
        shown = name_type(classes) if not isinstance(classes, int | float) else classes
        raise UsageError(f"task {name}: classes is {shown}: it must be the number of classes, a whole number such as 10")


def check_model(name: str, model: Any) -> None:
    """A function that makes the model, or None."""
    if isinstance(model, nn.Module):
        raise UsageError(
            f"task {name}: model is {name_type(model)} that is already made, so --seed could not decide its first weights: give"
            f" a function that makes it, as in model=lambda: {type(model).__name__}(...)"
        )
    if isinstance(model, str):
        raise UsageError(
            f"task {name}: model is text, {short(repr(model))}: give a function that makes it, as in model=lambda: Net(...);"
            " for a built-in net leave it out, and give classes=N and defaults={'model': NAME}"
        )
    if model is not None:
        _check_call(name, "model", model, (), "model=lambda: Net(...)")


def check_source(name: str, field: str, given: Any) -> None:
    """Data, or a function that makes it."""
    if given is None:
        raise UsageError(f"task {name}: {field} is None: {_DATA_RULE}, or a function that makes one")
    if is_factory(given):
        _check_call(name, field, given, (), f"{field}=lambda: MyDataset(...)")
    else:
        check_data(name, field, given)


def check_objective(name: str, objective: Any, classify: Any, field: str = "objective") -> None:
    """A function of (model, batch)."""
    fix = f"def {field}(model, batch): return {{'loss': one value per sample}}"
    if objective is classify:
        raise UsageError(f"task {name}: {field}=classify is not called: write {field}=classify()")
    module = getattr(objective, "__module__", "") or ""
    if module.startswith("torch."):  # a loss function, its class, or a module of it: all are called with (outputs, targets)
        shown = getattr(objective, "__name__", type(objective).__name__)
        raise UsageError(
            f"task {name}: {field} is torch's {shown}: an objective gets (model, batch) and returns a dict; use classify()"
            f" for cross-entropy, or write {fix}"
        )
    _check_call(name, field, objective, ("model", "batch"), fix)


def check_no_objective(name: str, step: Any, validates: bool) -> None:
    """Raise a UsageError unless the task can do without an objective: a step function trains, and nothing validates."""
    if step is None or validates:
        what = "its validation data needs one" if step is not None else "it says what to minimize"
        fix = "objective=classify(), or a function of (model, batch) that returns {'loss': ...}"
        raise UsageError(f"task {name} has no objective, and {what}: give {fix}")


def check_validation(name: str, given: Any) -> dict[str, Source]:
    """Validation data, or a dict of several by name: by name, the main one first. The name of a single one is "validation"."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        check_source(name, "validation", given)
        return {"validation": given}
    if not given:
        raise UsageError(f"task {name}: validation is an empty dict: give {{'test': data}}, or None for no validation")
    for key, source in given.items():
        if not isinstance(key, str):
            raise UsageError(
                f"task {name}: validation has the key {short(repr(key))}: keys name the sets, as in {{'test': data}}"
            )
        check_name(f"task {name}: the name of a validation set", key)
        check_source(name, f"validation set {key!r}", source)
    return dict(given)


def check_metrics(name: str, metrics: Any, validates: bool) -> dict[str, Any]:
    """Metrics of the whole validation set, by name: functions, or objects with update, compute and reset."""
    if not isinstance(metrics, Mapping):
        raise UsageError(f"task {name}: metrics is {name_type(metrics)}: it must be a dict, as in {{'f1': F1Score(...)}}")
    for key, metric in metrics.items():
        what = f"task {name}: metrics[{short(repr(key))}]"
        if not isinstance(key, str) or not key or not key.isprintable() or "/" in key:
            raise UsageError(f"{what}: the name of a metric must be plain text without a slash")
        if isinstance(metric, type):
            raise UsageError(f"{what} is {name_type(metric)}: give an object, as in {metric.__name__}(...)")
        methods = [each for each in ("update", "compute", "reset") if callable(getattr(metric, each, None))]
        if not callable(metric) and len(methods) < 3:
            raise UsageError(
                f"{what} is {name_type(metric)}: it must be a function of the outputs, or an object with update, compute and"
                " reset"
            )
    if metrics and not validates:
        raise UsageError(f"task {name}: metrics are computed from validation data, and the task has none: give validation=...")
    return dict(metrics)


def check_prepare(name: str, prepare: Any) -> None:
    """A function of (batch, samples, epoch), or None."""
    if prepare is not None and not (isinstance(prepare, KeyedPrepare) and not isinstance(prepare, type)):
        fix = "def prepare(batch, samples, epoch): return batch"
        _check_call(name, "prepare", prepare, ("batch", "samples", "epoch"), fix)


def check_optimizer(name: str, optimizer: Any) -> None:
    """A function of (model, config) that makes an optimizer, or None."""
    fix = "optimizer=lambda model, config: RMSprop(model.parameters(), lr=0.01)"
    if isinstance(optimizer, str):
        raise UsageError(
            f"task {name}: optimizer is text, {short(repr(optimizer))}: a built-in one is an option, as in"
            f" defaults={{'optimizer': 'adamw'}}; for any other write {fix}"
        )
    if isinstance(optimizer, Optimizer):
        raise UsageError(
            f"task {name}: optimizer is already made ({type(optimizer).__name__}), but the model is not: give a function"
            f" that makes it, as in {fix.replace('RMSprop', type(optimizer).__name__)}"
        )
    if isinstance(optimizer, type) and issubclass(optimizer, Optimizer):
        shown = optimizer.__name__
        raise UsageError(f"task {name}: optimizer is the class {shown}: write {fix.replace('RMSprop', shown)}")
    if optimizer is not None:
        _check_call(name, "optimizer", optimizer, ("model", "config"), fix)


def check_step(name: str, step: Any) -> None:
    """A function of (step, model, optimizers), or None."""
    if step is not None:
        fix = "def step(step, model, optimizers): return step.backward(...)"
        _check_call(name, "step", step, ("step", "model", "optimizers"), fix)


def check_schedule(name: str, schedule: Any) -> None:
    """A function of the step, or of the optimizer, or None."""
    fix = "schedule=lambda step: 0.99**step or schedule=lambda optimizer: StepLR(optimizer, step_size=1)"
    if isinstance(schedule, str):
        raise UsageError(
            f"task {name}: schedule is text, {short(repr(schedule))}: a built-in one is an option, as in"
            f" defaults={{'schedule': 'cosine'}}; for any other write {fix}"
        )
    if isinstance(schedule, LRScheduler):
        raise UsageError(
            f"task {name}: schedule is already made ({type(schedule).__name__}): give a function that makes it, as in"
            f" schedule=lambda optimizer: {type(schedule).__name__}(optimizer, ...)"
        )
    if schedule is None:
        return
    if isinstance(schedule, type) and issubclass(schedule, LRScheduler):
        fix = f"schedule=lambda optimizer: {schedule.__name__}(optimizer, ...)"
    try:
        parameters = list(inspect.signature(schedule).parameters.values()) if callable(schedule) else []
    except (TypeError, ValueError):
        parameters = []
    needed = [each.name for each in parameters[1:] if each.default is each.empty and each.kind not in _ANY]
    strange = [each for each in needed if each not in LENGTHS]
    if strange:
        raise UsageError(
            f"task {name}: schedule needs {strange[0]!r}, which is not known: after the step or the optimizer it can ask for"
            f" {', '.join(LENGTHS[:-1])} or {LENGTHS[-1]} (the length of the run); write {fix}"
        )
    if not needed:
        _check_call(name, "schedule", schedule, ("step",), fix)


_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_one_of(name: str, field: str, own: Any, defaults: Any) -> None:
    """Raise a UsageError if a task has both its own optimizer or schedule and a built-in one as its default."""
    chosen = defaults.get(field, "own")
    if own is not None and chosen != "own":
        raise UsageError(
            f"task {name} has its own {field}, and {chosen!r} among its defaults: leave one of them out"
            f" ({flag(field)} {chosen} on the command line replaces the task's own)"
        )


def check_predict(name: str, predict: Any) -> None:
    """A function of (model, batch), or None."""
    if predict is not None:
        _check_call(name, "predict", predict, ("model", "batch"), "def predict(model, batch): return model(batch[0])")


def check_collate(name: str, collate: Any) -> None:
    """A function of a list of samples, or None."""
    if collate is not None:
        _check_call(name, "collate", collate, ("samples",), "def collate(samples): return batch")


def check_defaults(name: str, defaults: Any) -> dict[str, Any]:
    """The options of a dict, or those that a Config was given."""
    if isinstance(defaults, Config):
        defaults = {key: getattr(defaults, key) for key in sorted(defaults.given)}
    if not isinstance(defaults, Mapping):
        raise UsageError(
            f"task {name}: defaults is {name_type(defaults)}: it must be a dict of options, as in {{'epochs': 10}}"
        )
    for key in defaults:
        if not isinstance(key, str):
            raise UsageError(f"task {name}: defaults has the key {short(repr(key))}: keys are options, as in {{'epochs': 10}}")
        if key in names_with(Role.PLACE):
            raise UsageError(f"task {name}: {key!r} says where a run happens: it cannot be one of the task's defaults")
        if key == "set":
            raise UsageError(f"task {name}: 'set' cannot be one of the task's defaults: give the parameters of task() defaults")
    try:
        check_options(defaults)
    except UsageError as error:
        raise UsageError(f"task {name}, its defaults: {error}") from None
    return dict(defaults)


def is_factory(given: Any) -> bool:
    """Whether this is a function to call, or a class, and not data. A Dataset may be callable, too."""
    if isinstance(given, type):
        return True
    looks_like_data = hasattr(type(given), "__getitem__") and hasattr(type(given), "__len__")
    return callable(given) and not looks_like_data and not isinstance(given, Dataset | nn.Module)


_FEW = 4  # a list with at most this many arrays holds inputs and targets, not samples


def check_data(name: str, field: str, data: Any) -> Data:
    """Data as the loaders take it: a tuple of arrays becomes Arrays. Raises a UsageError for anything else."""
    what = f"task {name}: {field}"
    if data is None:
        none = " (or give validation=None for a run without validation)" if field == "validation" else ""
        raise UsageError(f"{what} returned None: its function must return the data; is a `return` missing?{none}")
    if isinstance(data, DataLoader):
        raise UsageError(
            f"{what} is a DataLoader: give its Dataset instead, and its collate_fn as Task(collate=...); --global-batch,"
            " --loader-workers, --prefetch and --pin-memory replace its options"
        )
    if isinstance(data, Stream):
        return data
    if isinstance(data, IterableDataset) or (hasattr(data, "num_shards") and not hasattr(type(data), "__getitem__")):
        return _as_stream(what, data)
    if isinstance(data, Tensor | np.ndarray):
        raise UsageError(f"{what} is {name_type(data)}: give Arrays((x,)), or Arrays((x, y)) with targets")
    if isinstance(data, tuple) and any(isinstance(item, Tensor | np.ndarray) for item in data):
        return Arrays(data)
    if isinstance(data, list) and 0 < len(data) <= _FEW and all(isinstance(item, Tensor | np.ndarray) for item in data):
        raise UsageError(f"{what} is a list of {len(data)} arrays: give Arrays((x, y)), or a tuple of them")
    if isinstance(data, tuple | list) and any(isinstance(item, Dataset | Arrays) for item in data):
        raise UsageError(f"{what} is {name_type(data)} of {len(data)} data sets: give one of them")
    if isinstance(data, str | bytes | Mapping | nn.Module | type):
        raise UsageError(f"{what} is {name_type(data)}: {_DATA_RULE}")
    for method, purpose in (("__len__", "the number of samples"), ("__getitem__", "the sample with a given number")):
        own = getattr(type(data), method, None)
        if own is None or own is getattr(Dataset, method, None):
            raise UsageError(f"{what} is {name_type(data)} without {method}, which must return {purpose}: {_DATA_RULE}")
    return cast(Data, data)


def _as_stream(what: str, data: Any) -> Data:
    """A stream of an iterable data set, which must know its length."""
    try:
        samples = len(data)
    except (TypeError, NotImplementedError):
        raise UsageError(
            f"{what} is an iterable data set, {type(data).__name__}, without __len__: say how many samples an epoch has, as in"
            f" {what.rpartition(' ')[2]}=Stream(data, samples=N)"
        ) from None
    return Stream(data, samples, about=type(data).__name__)


def check_length(name: str, field: str, data: Data) -> None:
    """Raise a UsageError unless `__len__` returns a number of samples."""
    try:
        len(cast(Sized, data))
    except (TypeError, ValueError, OverflowError) as error:
        if traceback.extract_tb(error.__traceback__)[-1].filename != __file__:  # an error in the user's __len__ itself
            raise
        raise UsageError(
            f"task {name}: {field} is {name_type(data)} whose __len__ failed ({error}): it must return the number of samples"
        ) from None


def check_made_model(name: str, model: Any) -> nn.Module:
    """What a task's model function returned. Raises a UsageError if it cannot be trained."""
    what = f"task {name}: its model function returned {name_type(model)}"
    if not isinstance(model, nn.Module):
        hint = "; is a `return` missing?" if model is None else " itself" if isinstance(model, tuple) else ""
        raise UsageError(f"{what}: it must return an nn.Module, the model{hint}")
    if isinstance(model, nn.DataParallel | DistributedDataParallel):
        raise UsageError(f"{what}: return the model that it wraps; Paceline spreads the work over --workers")
    lazy = next((path for path, tensor in _tensors(model) if is_lazy(tensor)), None)
    if lazy is not None:
        raise UsageError(
            f"{what} whose {lazy} has no shape yet, because its layer is lazy: call the model once on inputs of the right shape"
            " before returning it, as in model(torch.zeros(2, ...)), or use a layer that is not lazy"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        count = sum(1 for _ in model.parameters())
        frozen = f"all {count} of its parameters are frozen (requires_grad=False)" if count else "it has no parameters"
        raise UsageError(f"{what}, and {frozen}: at least one parameter must be trainable")
    return model


def _tensors(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _check_call(name: str, field: str, function: Any, arguments: tuple[str, ...], fix: str) -> None:
    """Raise a UsageError unless this can be called with these arguments, as far as its signature tells."""
    called = f"({', '.join(arguments)})" if arguments else "no arguments"
    if not callable(function):
        raise UsageError(f"task {name}: {field} is {name_type(function)}: it must be a function; write {fix}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        shown = getattr(function, "__name__", type(function).__name__)
        if isinstance(function, type):
            fix = f"{field}=lambda: {shown}(...)"
        raise UsageError(
            f"task {name}: {field}, {shown}{signature}, cannot be called with {called} ({error}): write {fix}"
        ) from None
