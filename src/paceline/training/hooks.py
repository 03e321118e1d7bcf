"""Hooks: functions of the user's own that a run calls while it trains (`Task.hooks`)."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from paceline.data.conversion import name_type
from paceline.errors import UsageError, unknown

if TYPE_CHECKING:  # the observers' module needs a Run, which holds hooks
    from paceline.training.observers import Result


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What a hook is called with: where the run is, and what is known at this point."""

    step: int
    """The number of the step that the metrics are of, starting at 1. On a GPU the model can be up to four steps further."""
    epoch: int
    """The epoch, starting at 1; 0 before the first step of a new run."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """on_step: of this one step. on_validation: of the validation. on_epoch: both kinds, as `train_loss` and `val_loss`.
    on_end: of the last validation. Otherwise empty."""
    lr: float
    """The learning rate of this step."""
    model: nn.Module
    """The model that the task made. Gradients are off in a hook, and `model.eval()` is undone after it."""
    rank: int
    workers: int
    record: Path | None = None
    """The folder of the record."""
    checkpoint: Path | None = None
    """on_checkpoint: the file that was written."""
    result: "Result | None" = None
    """on_end: how the run ended."""
    rows: Sequence[Mapping[str, Any]] = ()
    """The rows of metrics.jsonl since this `Hooks` was last called: steps (means over `--log-every` steps), epochs, health."""


Hook = Callable[[Moment], object]
"""A hook's function. What it returns is ignored."""


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """Functions that a run calls while it trains, each with one argument, a `Moment`.

    They run on rank 0, in the order given. An exception in a hook ends the run on all workers.
    """

    on_start: Hook | None = None
    """Before the first step, also of a resumed run: `step` says where it starts."""
    on_step: Hook | None = None
    """After every step, when its metrics have arrived: at once on a CPU, four steps later on a GPU, without waiting for it."""
    on_validation: Hook | None = None
    """After each validation. The model has the weights that were validated: with `--ema` the averaged ones."""
    on_epoch: Hook | None = None
    """After each epoch and its validation. The model has its training weights."""
    on_checkpoint: Hook | None = None
    """After a checkpoint is on disk. The run waits for the file, which it does not do without this hook."""
    on_end: Hook | None = None
    """Once, after the record is complete, however the run ended: `result` says how."""
    every_rank: bool = False
    """Call the hooks on every worker, not only on rank 0."""
    changes_model: bool = False
    """Allow on_step and on_epoch to change weights, in place. Needs every_rank=True. Without this, exact mode refuses such a
    change. On a GPU, on_step then waits for every step."""

    def __new__(cls, **given: Any) -> Self:
        """Raise a UsageError for a name that does not exist, with the nearest one."""
        names = [each.name for each in fields(cls)]
        for name in given:
            if name in _MEANT:
                raise UsageError(f"Hooks has no field {name!r}: did you mean {_MEANT[name]!r}?")
            if name not in names:
                raise unknown("field of Hooks", name, names)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in FUNCTIONS:
            _check_function(name, getattr(self, name))
        for name in ("every_rank", "changes_model"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"Hooks: {name} is {name_type(getattr(self, name))}: it must be True or False")
        if self.changes_model and not self.every_rank:
            raise UsageError(
                "Hooks: changes_model=True needs every_rank=True: a change on rank 0 alone would make the workers disagree"
            )
        if all(getattr(self, name) is None for name in FUNCTIONS):
            raise UsageError(f"Hooks has no function: give at least one of {', '.join(FUNCTIONS)}")


class OwnHooks(Hooks):
    """Hooks of Paceline's own, which need no checks."""


FUNCTIONS = ("on_start", "on_step", "on_validation", "on_epoch", "on_checkpoint", "on_end")
"""The names of the functions."""
_MEANT = {
    **dict.fromkeys(("on_train_start", "on_fit_start", "on_train_begin", "on_begin"), "on_start"),
    **dict.fromkeys(("on_train_batch_end", "on_batch_end", "on_step_end", "on_iteration"), "on_step"),
    **dict.fromkeys(("on_validation_end", "on_validation_epoch_end", "on_evaluate", "on_eval", "on_test_end"), "on_validation"),
    **dict.fromkeys(("on_train_epoch_end", "on_epoch_end"), "on_epoch"),
    **dict.fromkeys(("on_save", "on_save_checkpoint"), "on_checkpoint"),
    **dict.fromkeys(("on_train_end", "on_fit_end", "on_finish", "on_exception"), "on_end"),
    **dict.fromkeys(("all_ranks", "every_worker"), "every_rank"),
}
"""Names that other tools use, and the field that they mean here."""


def check_hooks(name: str, given: Any) -> tuple[Hooks, ...]:
    """The hooks of a task, as a tuple. Raises a UsageError for anything else."""
    several = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,)
    for each in several:
        if isinstance(each, Hooks):
            continue
        rule = "give Hooks(on_epoch=...), or a list of them"
        if each is Hooks:
            raise UsageError(f"task {name}: hooks is the class Hooks itself: {rule}")
        raise UsageError(f"task {name}: hooks has {name_type(each)}: {rule}")
    return several


def _check_function(name: str, function: Any) -> None:
    if function is None:
        return
    fix = f"write def {name}(moment): ..."
    if not callable(function):
        raise UsageError(f"Hooks: {name} is {name_type(function)}: it must be a function; {fix}")
    if inspect.iscoroutinefunction(function):
        raise UsageError(f"Hooks: {name} is an async function: it must be a plain one; {fix}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have none
        return
    try:
        signature.bind("moment")
    except TypeError as error:
        shown = getattr(function, "__name__", type(function).__name__)
        raise UsageError(
            f"Hooks: {name}, {shown}{signature}, cannot be called with one argument, the moment ({error}): {fix}"
        ) from None
