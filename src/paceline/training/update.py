"""The update: from a step's gradient to new weights, with all that belongs to it."""

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.config import Config
from paceline.core.noise import Noise
from paceline.core.schedules import Schedule
from paceline.training.ema import Ema
from paceline.training.gradients import Jitter
from paceline.training.layers import GradientNorms
from paceline.training.plain_state import find_changes, merge, snapshot
from paceline.training.rates import Rates
from paceline.training.scaler import Scaler

_LATE = 64
"""Steps whose learning rate is remembered: metrics arrive a few steps late."""


class Update:
    """Learning rate, clipping, gradient noise, AdaScale's gain, the optimizer's step, and averaged weights."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, rates: Rates, config: Config, noise: Noise | None = None
    ) -> None:
        self.optimizer, self.rates = optimizer, rates
        self._parameters = list(model.parameters())
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._not_held = [parameter for parameter in trained if id(parameter) not in held]
        device = self._parameters[0].device
        self._clip_norm, self._reference_batch = config.clip_norm, config.reference_batch
        self._adascale = noise if config.lr_rule == "adascale" else None
        self._jitter = Jitter(trained, config.gradient_noise, config.seed) if config.gradient_noise else None
        self.norms = GradientNorms(trained) if config.watch_layers else None
        self.ema = Ema(model, config.ema) if config.ema else None
        self.is_own = config.optimizer == "own"
        """Whether the task makes the optimizer."""
        self._fresh = self._settings()
        self._lrs_begun: dict[int, float] = {}
        self.scaler = Scaler(device) if config.precision == "fp16" else None
        if noise is not None and self.scaler is not None:
            noise.unit = self.scaler.scale
        reads_tensors = all(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
        self.lrs: dict[Hashable, Tensor] = {}
        """The learning rates as tensors, so that the rate of a captured step can change. Groups with equal rates share one.
        Empty if the optimizer reads the rate on the host."""
        if device.type == "cuda" and reads_tensors:
            self.lrs = {key: torch.zeros((), device=device) for key in rates.keys}

    @property
    def schedule(self) -> Schedule:
        """That of the first parameter group."""
        return self.rates.schedule

    def lr(self, step: int) -> float:
        """The learning rate of the first parameter group in one of the last steps. A run that has not begun a step knows that
        of its first one or, if it is resumed, of the last one before.
        """
        return self._lrs_begun[step] if step in self._lrs_begun else self.rates.reached(step)

    def begin(self, step: int) -> None:
        """Set what differs from step to step."""
        rates = self.rates.at(step)
        self._lrs_begun[step] = rates[0]
        if len(self._lrs_begun) > _LATE:
            del self._lrs_begun[next(iter(self._lrs_begun))]
        by_key = dict(zip(self.rates.keys, rates, strict=True))
        for key, tensor in self.lrs.items():
            tensor.fill_(by_key[key])  # the number travels with the kernel launch: no copy to wait for
        for group, key in zip(self.optimizer.param_groups, self.rates.keys, strict=True):
            group["lr"] = self.lrs[key] if self.lrs else by_key[key]
        if self._jitter is not None:
            self._jitter.begin(step)
        if self.ema is not None:
            self.ema.begin(step, self.schedule.batch_share(step))

    def __call__(self, averages: bool = True) -> None:
        """The optimizer's step. `averages=False` leaves the averaged weights alone."""
        if self.scaler is not None:
            self.scaler.unscale(self._parameters)
        if self.norms is not None:
            self.norms.take()
        if self._clip_norm:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        if self._jitter is not None:
            self._jitter.add()
        if self._adascale is not None:
            gain = self._adascale.gain(self._reference_batch)
            for tensor in self.lrs.values():
                tensor.mul_(gain)
            for group in () if self.lrs else self.optimizer.param_groups:
                group["lr"] *= float(gain)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in self._not_held:
            parameter.grad = None
        if averages and self.ema is not None:
            self.ema.update()

    def averages(self) -> dict[str, Tensor]:
        """The averaged weights, by name in a checkpoint; empty without `--ema`."""
        return {} if self.ema is None else {f"ema.{i}": tensor for i, tensor in enumerate(self.ema.tensors())}

    def facts(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors: the scheduler's state, and settings of groups that have changed."""
        named = enumerate(zip(self._fresh, self._settings(), strict=True))
        groups = {str(number): find_changes(old, now, "the optimizer") for number, (old, now) in named}
        found = {"groups": {number: changes for number, changes in groups.items() if changes}, "rates": self.rates.facts()}
        return {name: value for name, value in found.items() if value}

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's facts. The optimizer's state is restored before."""
        for number, changes in facts.get("groups", {}).items():
            group = self.optimizer.param_groups[int(number)]
            in_tensors = {name: value for name, value in changes.items() if isinstance(group.get(name), Tensor)}
            for name, value in in_tensors.items():
                group[name].fill_(value)
            merge(group, {name: value for name, value in changes.items() if name not in in_tensors})
        if facts.get("rates"):
            self.rates.restore(facts["rates"])

    def _settings(self) -> list[dict[str, Any]]:
        """What is in the parameter groups besides the parameters and their learning rate."""
        apart = ("params", "lr", "initial_lr")
        groups = [{name: value for name, value in group.items() if name not in apart} for group in self.optimizer.param_groups]
        return [{name: _number(value) for name, value in group.items()} for group in groups]


def _number(value: Any) -> Any:
    """A tensor with one element as a number; a copy of anything else."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else snapshot(value)
