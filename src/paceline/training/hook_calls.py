"""Calling a run's hooks, and checking that they leave the model as it was.

In exact mode a hook must not change the model, unless it is declared with `changes_model=True`. Each call compares the address
and the version counter of every parameter and buffer before and after, which costs no time on the device. Version counters miss
changes through `.data`. So fingerprints of all bits are compared too, around every call of the other hooks and
around the first three calls of on_step and every 100th.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.dist.agree import fingerprints
from paceline.errors import UsageError
from paceline.explanation import explain
from paceline.training.build import Run
from paceline.training.hooks import Hook, Hooks, Moment, OwnHooks

_FIRST, _EVERY = 3, 100  # calls of on_step around which fingerprints are compared
_MAY_CHANGE = ("on_step", "on_epoch")


class HookCalls:
    """The hooks of one run, on one worker."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._mine = [_Called(hooks) for hooks in run.hooks if hooks.every_rank or run.world.is_main]
        self._record = Path(run.contract.record) if run.contract.record else None
        self._steps = 0
        self.mark: Callable[[str], None] = lambda stage: None
        """Tells the watch what this worker is doing."""
        self.waits = any(hooks.changes_model and hooks.on_step is not None for hooks in run.hooks)
        """Whether a step's metrics must arrive before the next step: a hook may change the weights for it."""
        if self.waits and run.config.local_steps:
            raise UsageError(
                "hooks: on_step with changes_model=True cannot be combined with --local-steps: parts that train by themselves"
                " have no common weights; use on_epoch"
            )

    def has(self, name: str) -> bool:
        """Whether a function of this name is to be called, here or on another worker."""
        return any(getattr(hooks, name) is not None for hooks in self._run.hooks)

    def row(self, row: Mapping[str, Any]) -> None:
        """Keep a row of metrics.jsonl for the next call of each."""
        for each in self._mine:
            each.rows.append(row)

    def call(self, name: str, **about: Any) -> None:
        """Call all functions of this name; `about` has the fields of the moment."""
        self._steps += name == "on_step"
        for each in self._mine:
            self._call(each, name, about)

    def end(self, failed: bool, **about: Any) -> list[str]:
        """Call on_end. After a failure, errors in it are returned as lines: the run raises the first error."""
        if not failed:
            self.call("on_end", **about)
            return []
        said = []
        for each in self._mine:
            try:
                self._call(each, "on_end", about)
            except (Exception, SystemExit) as error:
                said.append(f"the hook on_end failed too: {explain(error).why}")
        return said

    def _call(self, each: "_Called", name: str, about: Mapping[str, Any]) -> None:
        function: Hook | None = getattr(each.hooks, name)
        if function is None:
            return
        rows, each.rows = tuple(each.rows), []
        run = self._run
        moment = Moment(model=run.model, rank=run.world.rank, workers=run.world.size, record=self._record, rows=rows, **about)
        self.mark("hook")
        with self._unchanged(name, function, each.hooks), torch.no_grad():
            function(moment)

    @contextmanager
    def _unchanged(self, name: str, function: Hook, hooks: Hooks) -> Iterator[None]:
        """Undo `model.eval()`; in exact mode raise a UsageError if the model has changed."""
        model = self._run.model
        if isinstance(hooks, OwnHooks):
            yield
            return
        modes = [(module, module.training) for module in model.modules()]
        exact = self._run.config.reduce == "exact" and name != "on_end"
        allowed = hooks.changes_model and name in _MAY_CHANGE
        tensors = list(_tensors(model)) if exact or allowed else []
        before = [_identity(tensor, versions=not allowed) for _, tensor in tensors]
        deep = exact and not allowed and (name != "on_step" or self._steps <= _FIRST or self._steps % _EVERY == 0)
        bits = fingerprints(tensor for _, tensor in tensors) if deep and tensors else None
        yield
        for module, training in modes:
            module.training = training
        if not tensors:
            return
        after = list(_tensors(model))
        shown = getattr(function, "__name__", type(function).__name__)
        if allowed:
            if [_identity(tensor, versions=False) for _, tensor in after] != before:
                raise UsageError(
                    f"hook {name} ({shown}) replaced tensors of the model: change weights in place, as in"
                    " parameter.clamp_(-1, 1)"
                )
            return
        changed = _find_changed(tensors, before, after, bits)
        if changed:
            fix = (
                "use Hooks(changes_model=True, every_rank=True) if it has to"
                if name in _MAY_CHANGE
                else "only on_step and on_epoch can, with changes_model=True"
            )
            raise UsageError(f"hook {name} ({shown}) changed the model ({changed}), which exact mode does not allow: {fix}")


class _Called:
    """One `Hooks`, with the rows that its next call gets."""

    def __init__(self, hooks: Hooks) -> None:
        self.hooks = hooks
        self.rows: list[Mapping[str, Any]] = []


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _identity(tensor: Tensor, versions: bool) -> tuple[int, ...]:
    return (tensor.data_ptr(), tensor._version) if versions else (tensor.data_ptr(),)


def _find_changed(
    tensors: Sequence[tuple[str, Tensor]],
    before: Sequence[tuple[int, ...]],
    after: Sequence[tuple[str, Tensor]],
    bits: Tensor | None,
) -> str:
    """The name of the first tensor that is not as before; "" if all are."""
    if [name for name, _ in tensors] != [name for name, _ in after]:
        return "its parameters and buffers have other names"
    for (name, tensor), known in zip(after, before, strict=True):
        if _identity(tensor, versions=True) != known:
            return name
    if bits is None:
        return ""
    differs = (fingerprints(tensor for _, tensor in after) != bits).nonzero().flatten().tolist()
    return after[differs[0]][0] if differs else ""
