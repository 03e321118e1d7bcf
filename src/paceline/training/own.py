"""A task's own optimizer and schedule: make them, check them, and put them into words.

Task(
    optimizer=lambda model, config: Adadelta(model.parameters(), lr=1.0),
    schedule=lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.7),
)
"""

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

from paceline.config import Config, names_with
from paceline.core.schedules import Schedule, scale_lr
from paceline.data.conversion import name_type
from paceline.errors import UsageError, first_line
from paceline.optim import Combined, leave_graphs_to_loop, make_optimizer
from paceline.optim.groups import trained_parameters
from paceline.options import Role
from paceline.output import plural
from paceline.training.monitor import make_monitor
from paceline.training.rates import Rates, SchedulerRates, check_mode, plan_rates, takes_metrics
from paceline.training.task import Task
from paceline.training.task_fields import LENGTHS
from paceline.values import flag

OWN = "own"
_STARTS_AT_ZERO = ("SGD", "Adam", "AdamW", "Adamax", "Adadelta", "RAdam", "RMSprop")
"""Optimizers of torch whose whole state starts at zero."""


def make_task_optimizer(task: Task, model: nn.Module, config: Config) -> tuple[Optimizer, tuple[str, ...]]:
    """The configured optimizer, or the task's own; and notes for the user."""
    if config.optimizer != OWN:
        replaced = (f"--optimizer {config.optimizer} replaces the task's own optimizer",) if task.optimizer else ()
        return make_optimizer(model, config), replaced
    assert task.optimizer is not None  # `tasks.configure` checks it
    what = f"task {task.name}: its optimizer function"
    made, read = _call_noting_reads(task.optimizer, model, config)
    if isinstance(made, Mapping):
        made = _combine(made, what, stepped=getattr(task, "step", None) is not None)
    _check_kind(made, what)
    notes = _check_parameters(made, model, what)
    for number, group in enumerate(made.param_groups):
        group["lr"] = _read_lr(group, f"{what} returned {type(made).__name__}, and its group {number}")
    if config.local_steps and not all(starts_at_zero(each) for each in members(made)):
        raise UsageError(
            f"--local-steps needs an optimizer whose state starts at zero, which is not known of {type(made).__name__}: use a"
            f" built-in one, or torch's {', '.join(_STARTS_AT_ZERO[:-1])} or {_STARTS_AT_ZERO[-1]}"
        )
    leave_graphs_to_loop(made)
    sparse = any(getattr(module, "sparse", False) for module in model.modules())
    if config.fast != "off" and not sparse and next(model.parameters()).device.type == "cuda":
        for each in members(made):
            _make_capturable(each)
    return made, notes + _describe_unread(task, config, read)


def make_rates(task: Task, optimizer: Optimizer, config: Config, schedule: Schedule, k: float) -> tuple[Rates, tuple[str, ...]]:
    """The learning rates of the run, and notes for the user. Call it once: a scheduler registers itself with the optimizer."""
    own_optimizer = config.optimizer == OWN
    bases = [float(group["lr"]) for group in optimizer.param_groups] if own_optimizer else None
    peaks = [scale_lr(base, k, config.lr_rule) for base in bases] if bases else None
    words = f"{config.schedule} by {schedule.by}"
    if config.schedule != OWN:
        notes = (f"--schedule {config.schedule} replaces the task's own schedule",) if task.schedule else ()
        return plan_rates(optimizer, schedule, words, peaks), notes
    assert task.schedule is not None  # `tasks.configure` checks it
    for group in optimizer.param_groups:  # what a scheduler of torch reads: each group's rate at reference_batch
        group["lr"] = (group["lr"] if own_optimizer else config.base_lr) * group.get("lr_scale", 1.0)
    made, asks = _call_schedule(task, optimizer, schedule)
    schedule = replace(schedule, follows_length=bool(asks))
    if not isinstance(made, LRScheduler):
        words = f"the task's own schedule by {schedule.by}"
        return plan_rates(optimizer, replace(schedule, factor=made), words, peaks), ()
    counts_steps = isinstance(made, OneCycleLR | CyclicLR) or bool({"steps", "steps_per_epoch"} & set(asks))
    by = config.schedule_by if config.schedule_by != "auto" else "step" if counts_steps else "epoch"
    monitor = make_monitor(config) if takes_metrics(made) else None
    if monitor is not None:
        _check_monitored(task, config, made)
        check_mode(made, monitor)
    main = optimizer.param_groups[0]
    peak = scale_lr(float(main.get("max_lr", main.get("initial_lr", main["lr"]))), k, config.lr_rule)
    growth = scale_lr(1.0, k, config.lr_rule)
    return SchedulerRates(made, replace(schedule, peak_lr=peak), growth=growth, by=by, monitor=monitor), ()


def describe_own(optimizer: Optimizer) -> dict[str, Any]:
    """A task's own optimizer in words, and the learning rate of its first group at `reference_batch`, for the contract.

    Call it before `make_rates`, which may let a scheduler change the groups.
    """
    bases = [group["lr"] * group.get("lr_scale", 1.0) for group in optimizer.param_groups]
    name = type(optimizer).__name__
    if isinstance(optimizer, Combined):
        name = " and ".join(f"{type(each).__name__} for {key}" for key, each in optimizer.members.items())
    rates = list(dict.fromkeys(f"{base:g}" for base in bases))
    if len(rates) > 4:
        rates = [f"{min(bases):g} to {max(bases):g}"]
    groups = f" in {plural(len(bases), 'group')}" if len(bases) > 1 else ""
    return {"words": f"{name} (the task's own){groups} at lr {', '.join(rates)}", "base_lr": bases[0]}


def describe_kind(optimizer: Optimizer) -> str:
    """The class, and how many parameters each group has: a resumed run must have the same."""
    sizes = ", ".join(str(len(group["params"])) for group in optimizer.param_groups)
    return f"{' and '.join(type(each).__name__ for each in members(optimizer))} over {sizes} parameters"


def members(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers that this one consists of; itself if it is one."""
    return optimizer.inner if isinstance(optimizer, Combined) else (optimizer,)


def starts_at_zero(optimizer: Optimizer) -> bool:
    """Whether all of its state is known to start at zero, as that of all built-in optimizers does."""
    kind = type(optimizer)
    torchs = kind.__module__.startswith("torch.optim.") and kind.__name__ in _STARTS_AT_ZERO
    return torchs or kind.__module__.startswith("paceline.optim.")


def _combine(made: Mapping[Any, Any], what: str, stepped: bool) -> Combined:
    if not stepped:
        raise UsageError(
            f"{what} returned a dict of optimizers: only a task with its own `step` can have several; return one optimizer"
            " with several parameter groups, or give the task a step function"
        )
    for name, each in made.items():
        if not isinstance(name, str):
            raise UsageError(f"{what} returned a dict with the key {name!r}: keys are the optimizers' names, as text")
        _check_kind(each, f"{what}, under {name!r},")
    if not made:
        raise UsageError(f"{what} returned an empty dict: it must hold at least one optimizer")
    try:
        return Combined(made)
    except ValueError as error:
        raise UsageError(f"{what} returned optimizers that share parameters: each must be in one of them ({error})") from None


def _check_kind(made: Any, what: str) -> None:
    """Raise a UsageError unless this is an optimizer that the loop can step."""
    if not isinstance(made, Optimizer):
        hint = "; is a `return` missing?" if made is None else ""
        hint = "; the scheduler goes into schedule=..." if isinstance(made, tuple | list) else hint
        raise UsageError(f"{what} returned {name_type(made)}: it must return a torch.optim.Optimizer{hint}")
    name = type(made).__name__
    closure = inspect.signature(type(made).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise UsageError(
            f"{what} returned {name}, whose step() computes the loss several times by a closure: a step here has one gradient,"
            " so use another optimizer"
        )
    if callable(getattr(made, "train", None)) and callable(getattr(made, "eval", None)):
        raise UsageError(
            f"{what} returned {name}, which swaps weights for validation by train() and eval(): Paceline does not call them, so"
            " use another optimizer, with --ema for averaged weights"
        )


def _check_parameters(optimizer: Optimizer, model: nn.Module, what: str) -> tuple[str, ...]:
    """A note about parameters that no group holds. Raises a UsageError if nothing is trained, or something else is."""
    own = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = [tuple(parameter.shape) for parameter in held if id(parameter) not in own]
    name = type(optimizer).__name__
    if foreign:
        raise UsageError(
            f"{what} returned {name} with {plural(len(foreign), 'parameter')} that the model does not have (the first has shape"
            f" {foreign[0]}): use the parameters of the model that it is called with"
        )
    found = {id(parameter) for parameter in held}
    missing = [key for key, each in model.named_parameters() if each.requires_grad and id(each) not in found]
    trained = len(trained_parameters(model))
    if len(missing) >= trained:
        raise UsageError(
            f"{what} returned {name} that holds none of the model's {trained} trained parameters: nothing would train"
        )
    if not missing:
        return ()
    shown = ", ".join(missing[:3]) + (" and more" if len(missing) > 3 else "")
    return (f"{len(missing)} of {plural(trained, 'parameter')} are in no group of the optimizer and stay as they are: {shown}",)


def _read_lr(group: Mapping[str, Any], what: str) -> float:
    if "lr" not in group:
        raise UsageError(f"{what} has no 'lr': the lr rule and the schedule act on it, so give the group one")
    lr = group["lr"]
    if isinstance(lr, bool) or not isinstance(lr, int | float | torch.Tensor) or not 0 <= float(lr) < math.inf:
        raise UsageError(f"{what} has lr {lr!r}: it must be a number of 0 or more, the learning rate at reference_batch")
    return float(lr)


def _call_noting_reads(make: Callable[[nn.Module, Config], Any], model: nn.Module, config: Config) -> tuple[Any, set[str]]:
    """What the task's function returns, and the names of the options that it read."""
    read: set[str] = set()

    class Noted(Config):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return object.__getattribute__(self, name)

    noted = object.__new__(Noted)
    vars(noted).update(vars(config))
    object.__setattr__(noted, "given", config.given)
    read.clear()
    made = make(model, noted)
    return made, {field.name for field in fields(Config)} if "__dict__" in read else read


def _describe_unread(task: Task, config: Config, read: Collection[str]) -> tuple[str, ...]:
    """A note about given options that configure built-in optimizers and that the task's function did not read."""
    usual = {**vars(Config()), **cast(Mapping[str, Any], task.defaults)}
    unread = [name for name in sorted(names_with(Role.OPTIMIZER) - set(read)) if getattr(config, name) != usual[name]]
    if not unread:
        return ()
    names, do, them = ", ".join(map(flag, unread)), *(("does", "it") if len(unread) == 1 else ("do", "them"))
    return (f"{names} {do} nothing here: the task has its own optimizer, and its function does not read {them}",)


def _make_capturable(optimizer: Optimizer) -> None:
    """Let one of torch's optimizers read its learning rate from a tensor, so that a CUDA graph can contain its step."""
    if not type(optimizer).__module__.startswith("torch.optim.") or optimizer.state:
        return
    for group in optimizer.param_groups:
        if group.get("differentiable") or not all(parameter.is_floating_point() for parameter in group["params"]):
            continue
        if "capturable" in group:
            group["capturable"] = True  # a fused Adam needs it too
        elif type(optimizer) is SGD and group.get("foreach") is None and not group.get("fused"):
            group["fused"] = True
            for parameter in group["params"] if group["momentum"] else ():  # as for the built-in SGD
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _check_monitored(task: Task, config: Config, scheduler: LRScheduler) -> None:
    name = type(scheduler).__name__
    if task.validation is None:
        raise UsageError(
            f"task {task.name}: its schedule, {name}, looks at a validation metric, but the task has no validation data: give"
            " it validation=..., or use another schedule"
        )
    if config.schedule_by == "step":
        raise UsageError(
            f"--schedule-by step: task {task.name} has {name} as its schedule, which is stepped after each validation"
        )


def _call_schedule(task: Task, optimizer: Optimizer, schedule: Schedule) -> tuple[Any, tuple[str, ...]]:
    """A scheduler, or the factor as a function of the step; and which lengths of the run the task's function asked for.

    The value that it returns decides which of the two it is. Its first parameter's name only decides what is tried first, so
    that a mistake in the function is reported as the user would see it.
    """
    function: Any = task.schedule
    asks = find_lengths(function)
    if schedule.sampler is not None and {"steps", "steps_per_epoch"} & set(asks):
        raise UsageError(
            f"task {task.name}: its schedule asks for the number of steps, but with --batch-schedule steps differ in size: let"
            " it ask for epochs, or use --schedule linear, cosine or constant"
        )
    epochs = schedule.epoch_of(schedule.total_steps - 1) + 1
    lengths = {"steps": schedule.total_steps, "epochs": epochs, "steps_per_epoch": schedule.steps_per_epoch}
    call = partial(function, **{name: lengths[name] for name in asks})
    first: Exception | None = None
    for given in (optimizer, 0) if makes_scheduler(function) else (0, optimizer):
        try:
            made = call(given)
        except Exception as error:
            first = first or error
            continue
        if isinstance(made, LRScheduler):
            _check_bound(task, made, optimizer)
            return made, asks
        if given == 0:
            factor = partial(_read_factor, call, task.name)
            for step in (0, max(0, schedule.total_steps - 1)):
                factor(step)
            return factor, asks
        first = first or _not_a_schedule(task.name, made)
    assert first is not None
    if isinstance(first, UsageError):
        raise first
    raise UsageError(f"task {task.name}: its schedule function raised {type(first).__name__}: {first_line(first)}") from first


def find_lengths(function: Any) -> tuple[str, ...]:
    """The parameters, besides the first, that a schedule function must be given."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return ()
    needed = [each for each in parameters[1:] if each.default is each.empty]
    return tuple(each.name for each in needed if each.name in LENGTHS)


def makes_scheduler(function: Any) -> bool:
    """Whether a schedule function looks like one that makes a scheduler, by its first parameter."""
    if isinstance(function, type):
        return True
    try:
        parameters: Iterable[inspect.Parameter] = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    first = next(iter(parameters), None)
    return first is not None and (first.name.startswith("opt") or "Optimizer" in str(first.annotation))


def _read_factor(call: Callable[[int], Any], task: str, step: int) -> float:
    value = call(step)
    try:
        factor = float(value)
    except (TypeError, ValueError):
        raise _not_a_schedule(task, value) from None
    if not 0 <= factor < math.inf:
        raise UsageError(
            f"task {task}: its schedule returned {factor:g} for step {step}: a factor must be a number of 0 or more"
        )
    return factor


def _not_a_schedule(task: str, made: Any) -> UsageError:
    hint = "; is a `return` missing?" if made is None else ""
    return UsageError(
        f"task {task}: its schedule function returned {name_type(made)}: it must return a factor for a step, as in"
        " schedule=lambda step: 0.99**step, or a torch LRScheduler, as in schedule=lambda optimizer: StepLR(optimizer, 1)"
        + hint
    )


def _check_bound(task: Task, scheduler: LRScheduler, optimizer: Optimizer) -> None:
    if scheduler.optimizer is not optimizer:
        raise UsageError(
            f"task {task.name}: its schedule function returned {type(scheduler).__name__} for another optimizer: make it for"
            " the one that the function is called with"
        )
