"""A task's own step function: several optimizers and reductions in one step, as GANs need.

def step(step, model, optimizers):
    critic = step.backward(lambda batch: ...)
    optimizers["critic"].step()
    generator = step.backward(lambda batch: ...)
    optimizers["generator"].step()
    return {"loss": generator["loss"], "critic_loss": critic["loss"]}

It replaces one step's passes, reduction and update. Everything around them stays: parts, seeds, batch-norm statistics, learning
rates, requests to save or stop, checks, checkpoints and validation.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.config import Config
from paceline.core.carrier import MOST_METRICS, PAYLOAD
from paceline.core.step import Step
from paceline.data.conversion import name_type
from paceline.data.loaders import Inputs
from paceline.dist.agree import check_agreement
from paceline.errors import UsageError
from paceline.optim import Combined
from paceline.records import ROW_FIELDS
from paceline.training.step import TrainStep, Weighted
from paceline.training.task import StepFunction
from paceline.values import flag

WITHOUT_GRAPH = "the task has a step function of its own"
_RULE = "return what step.backward or step.reduce returned, which is the same on all workers"


def check_options(config: Config) -> None:
    """Raise a UsageError for options that change the step which a task's own function replaces."""
    there = {
        "sam_rho": config.sam_rho,
        "lr_rule": config.lr_rule == "adascale",
        "measure_noise": config.measure_noise,
        "local_steps": config.local_steps,
        "clip_norm": config.clip_norm,
        "gradient_noise": config.gradient_noise,
        "watch_layers": config.watch_layers,
        "parts_at_once": config.parts_at_once > 1,
    }
    if config.precision == "fp16":
        raise UsageError(
            "the task has its own step function, and fp16 needs the built-in step's loss scale: use --precision fp32 or bf16"
        )
    for name, given in there.items():
        if given:
            shown = f"{flag(name)} adascale" if name == "lr_rule" else flag(name)
            fix = " (call torch.nn.utils.clip_grad_norm_ in it)" if name == "clip_norm" else ""
            raise UsageError(f"{shown}: the task has its own step function, which this option cannot change{fix}; leave it out")


class TaskStep(TrainStep):
    """The plain step, but the task's function runs its passes, reductions and optimizers."""

    def __init__(self, function: StepFunction, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._function = function
        optimizer = self.update.optimizer
        self._optimizers = optimizer.members if isinstance(optimizer, Combined) else {"optimizer": optimizer}
        self._names: tuple[str, ...] = ()

    def run(self, step: Step, inputs: Iterator[Inputs], weighted: Weighted | None = None) -> Tensor:
        """One call of the function. `weighted` is not used."""
        first = not self._names
        step.batches, step.make, step.within, step.enter = inputs, self.forward.make, self.forward.autocast, self.enter
        before = self._buffers() if first else {}
        returned = self._function(step, self.parts.model, self._optimizers)
        metrics = self._read(step, returned)
        if first:
            self._check_first(before, metrics)
        self.update.optimizer.zero_grad(set_to_none=True)
        if self.update.ema is not None:
            self.enter("update")
            self.update.ema.update()
        self.enter("other")
        rest = torch.zeros(MOST_METRICS - len(metrics), device=metrics.device)
        return torch.cat((metrics, rest, step.payload[MOST_METRICS:PAYLOAD]))

    def _read(self, step: Step, returned: Any) -> Tensor:
        """The step's metrics, loss first."""
        if step.round < 0 or not step.reduced:
            missing = "call step.backward" if step.round < 0 else "call step.reduce() after `for part in step`"
            raise UsageError(f"the task's step function ended before a reduction: {missing}, on every worker")
        values = step.metrics if returned is None else returned
        if not isinstance(values, Mapping):
            raise UsageError(
                f"the task's step function returned {name_type(values)}: it must return a dict of metrics, or None"
            )
        if "loss" not in values:
            found = ", ".join(map(repr, values)) or "nothing"
            raise UsageError(f"the task's step function returned a dict with {found}: it must have 'loss', which is watched")
        names = ("loss", *sorted(name for name in values if name != "loss"))
        if names != (self._names or names):
            raise UsageError(
                f"the task's step function returned {', '.join(names)}, and before {', '.join(self._names)}: return the same"
                " metrics in every step"
            )
        if not self._names:
            self._check_names(values)
            self._names = self.forward.names = names
        device = self.parts.world.device
        read = [torch.as_tensor(values[name], dtype=torch.float32, device=device) for name in names]
        return torch.stack([value.detach().reshape(()) for value in read])

    def _check_names(self, values: Mapping[Any, Any]) -> None:
        if len(values) > MOST_METRICS:
            raise UsageError(f"the task's step function returned {len(values)} metrics: it may return at most {MOST_METRICS}")
        for name, value in values.items():
            if not isinstance(name, str) or not name.isprintable() or name in ROW_FIELDS:
                taken = ", ".join(sorted(ROW_FIELDS))
                raise UsageError(
                    f"the task's step function returned a metric named {name!r}: use plain text other than {taken}"
                )
            if not isinstance(value, int | float) and not (isinstance(value, Tensor) and value.numel() == 1):
                raise UsageError(
                    f"the task's step function returned {name!r} as {name_type(value)}: it must be one number; {_RULE}"
                )

    def _buffers(self) -> dict[str, tuple[int, int]]:
        """Which buffers there are besides batch-norm statistics, and how often each was changed."""
        model, by_part = self.parts.model, self.parts.statistics.names(self.parts.model)
        named = [(name, buffer) for name, buffer in model.named_buffers() if name not in by_part]
        return {name: (id(buffer), buffer._version) for name, buffer in named}

    def _check_first(self, before: Mapping[str, tuple[int, int]], metrics: Tensor) -> None:
        """After the first step: metrics must be the same on all workers, and buffers too. Collective: call on every rank."""
        parts, world = self.parts, self.parts.world
        check_agreement({"metrics": metrics}, world, "about the metrics of the step", _RULE)
        after = self._buffers()
        changed = next((name for name, seen in after.items() if seen != before.get(name)), None)
        if changed is not None and parts.exact:
            raise UsageError(
                f"--reduce exact: the step changes the buffer {changed}, which does not belong to a batch norm and would depend"
                " on the number of workers; use --reduce fast"
            )
        buffers = dict(parts.model.named_buffers())
        rule = "the step changes it, and each worker has seen other samples; train with one worker, or do not register it"
        check_agreement({name: buffers[name] for name in after}, world, "after the first step", rule)
