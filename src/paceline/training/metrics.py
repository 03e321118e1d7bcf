"""Metrics of the whole validation set (`Task.metrics`): F1, AUC, RMSE, perplexity.

Rank 0 gets the objective's "outputs" of all samples in sample order and computes the metrics on its CPU; the others get the
numbers. So they have the same bits on any number of workers, and are what one process would compute for the whole set.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline.data.conversion import name_type
from paceline.dist.world import World
from paceline.errors import UsageError
from paceline.explanation import Explanation, explain, headline
from paceline.output import plural


class WholeSet:
    """Feeds the outputs of a validation set to its metrics. Only rank 0 is fed."""

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self._functions = {name: metric for name, metric in metrics.items() if not is_object(metric)}
        # Copies: a run must not change what the user, or another run in this process, has.
        self._objects = {name: _own(metric) for name, metric in metrics.items() if is_object(metric)}
        self._order = list(metrics)
        self._kept: list[Any] = []
        self._failed: UsageError | None = None

    def begin(self) -> None:
        """Forget everything."""
        self._kept, self._failed = [], None
        self._keep_error(lambda: [_call(name, metric.reset) for name, metric in self._objects.items()])

    def feed(self, outputs: Any) -> None:
        """Take in the outputs of the next samples. An error is kept for `finish`, because other workers are waiting."""
        if self._failed is None:
            self._keep_error(lambda: [_call(name, metric.update, outputs) for name, metric in self._objects.items()])
            if self._functions:  # a function needs the whole set in memory
                self._kept.append(outputs)

    def finish(self, world: World, taken: Mapping[str, float]) -> dict[str, float]:
        """The metrics; the same numbers, or the same error, on every worker. Collective: call on every rank.

        `taken`: metrics of the objective, whose names are in use.
        """
        found: dict[str, float] = {}
        if world.is_main and self._failed is None:
            self._keep_error(lambda: found.update(self._compute(taken)))
        error = self._failed
        self.begin()  # or rank 0 would hold the whole set until the next validation
        told = world.broadcast([found, None if error is None else asdict(explain(error))])
        if error is not None:
            raise error
        if told[1] is not None:
            error = UsageError(told[1]["why"])
            error.explanation = Explanation(**told[1])  # type: ignore[attr-defined]
            raise error
        return {name: float(value) for name, value in told[0].items()}

    def _compute(self, taken: Mapping[str, float]) -> dict[str, float]:
        whole = _join(self._kept) if self._functions else None
        found: dict[str, float] = {}
        for name in self._order:
            is_function = name in self._functions
            result = _call(name, self._functions[name], whole) if is_function else _call(name, self._objects[name].compute)
            found |= _read(name, result, {**taken, **found})
        return found

    def _keep_error(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except UsageError as error:
            self._failed = error


def _call(name: str, function: Callable[..., Any], *outputs: Any) -> Any:
    """Call a user's function, with outputs as its arguments: tuples by position, dicts by name."""
    given = outputs[0] if outputs else ()
    named = given if isinstance(given, Mapping) else {}
    placed = given if isinstance(given, tuple | list) else () if isinstance(given, Mapping) else (given,)
    try:
        with torch.no_grad():
            return function(*placed, **named)
    except Exception as error:
        why = headline(error)
        if not _accepts(function, placed, named):
            found = ", ".join(named) if named else plural(len(placed), "value")
            why += f"; its arguments are the 'outputs' of the objective (one tensor, a tuple or a dict), here {found}"
        raise UsageError(f"metric {name!r} failed: {why}") from error


def _accepts(function: Callable[..., Any], placed: Sequence[Any], named: Mapping[str, Any]) -> bool:
    """Whether a function can be called with these arguments; True if it does not say."""
    try:
        inspect.signature(function).bind(*placed, **named)
    except (TypeError, ValueError) as error:  # ValueError: some built-in functions have no signature
        return isinstance(error, ValueError)
    return True


def is_object(metric: Any) -> bool:
    """Whether this is an object such as those of torchmetrics, and not a function."""
    return not isinstance(metric, type) and all(callable(getattr(metric, name, None)) for name in _METHODS)


_METHODS = ("update", "compute", "reset")


def _own(metric: Any) -> Any:
    """A copy of a metric, on the CPU. One of torchmetrics does not look for other processes: they have nothing to add."""
    with suppress(Exception):  # some objects cannot be copied; `reset` must do for those
        metric = copy.deepcopy(metric)
    if isinstance(metric, nn.Module):
        metric.to("cpu")
        for module in metric.modules():
            if hasattr(module, "distributed_available_fn"):
                module.distributed_available_fn = cast(Any, _alone)
    return metric


def _alone() -> bool:
    """False: torchmetrics must not look for other processes."""
    return False


def _join(kept: list[Any]) -> Any:
    """The outputs of all chunks as one."""
    first = kept[0]
    if isinstance(first, Mapping):
        return {key: _join([each[key] for each in kept]) for key in first}
    if isinstance(first, tuple | list):
        return tuple(_join(list(column)) for column in zip(*kept, strict=True))
    shapes = {tuple(each.shape[1:]) for each in kept}
    if len(shapes) > 1:
        one, other = sorted(shapes)[:2]
        raise UsageError(
            f"a metric that is a function needs outputs of one shape: rows of shape {one} and of {other} were found; pad them"
            " to the same length, or use an object with update, compute and reset"
        )
    return torch.cat(kept)


def _read(name: str, result: Any, taken: Mapping[str, float]) -> dict[str, float]:
    """A metric's result as numbers by name; a dict of them has names such as "NAME_key"."""
    if isinstance(result, Mapping):
        found: dict[str, float] = {}
        for key, value in result.items():
            found |= _read(f"{name}_{key}", value, {**taken, **found})
        return found
    if isinstance(result, Tensor) and result.numel() != 1:
        raise UsageError(
            f"metric {name!r} returned a tensor of shape {tuple(result.shape)}: it must return one number, or a dict of numbers"
        )
    if name in taken:
        raise UsageError(f"metric {name!r}: there is already a metric of this name; use another name in Task.metrics")
    try:
        return {name: float(result)}
    except (TypeError, ValueError):
        raise UsageError(f"metric {name!r} returned {name_type(result)}: it must return one number") from None
