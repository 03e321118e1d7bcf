"""The update: from a step's gradient to new weights, with all that belongs to it."""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.config import Config
from paceline.core.noise import Noise
from paceline.core.schedules import Schedule
from paceline.training.ema import Ema
from paceline.training.gradients import Jitter
from paceline.training.scaler import Scaler


class Update:
    """Learning rate, clipping, gradient noise, AdaScale's gain, the optimizer's step, and averaged weights."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, schedule: Schedule, config: Config, noise: Noise | None = None
    ) -> None:
        self.optimizer, self.schedule = optimizer, schedule
        self._parameters = list(model.parameters())
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        device = self._parameters[0].device
        self._clip_norm, self._reference_batch = config.clip_norm, config.reference_batch
        self._adascale = noise if config.lr_rule == "adascale" else None
        self._jitter = Jitter(trained, config.gradient_noise, config.seed) if config.gradient_noise else None
        self.ema = Ema(model, config.ema) if config.ema else None
        self.scaler = Scaler(device) if config.precision == "fp16" else None
        if noise is not None and self.scaler is not None:
            noise.unit = self.scaler.scale
        scales = {group.setdefault("lr_scale", 1.0) for group in optimizer.param_groups}
        reads_tensors = all(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
        self.lrs: dict[float, Tensor] = {}
        """The learning rate as a tensor, by the factor that some parameter groups multiply it with. So the rate of a captured
        step can change. Empty if the optimizer reads the rate on the host."""
        if device.type == "cuda" and reads_tensors:
            self.lrs = {scale: torch.zeros((), device=device) for scale in scales}

    def begin(self, step: int) -> None:
        """Set what differs from step to step."""
        lr = self.schedule.lr(step)
        for scale, tensor in self.lrs.items():
            tensor.fill_(lr * scale)  # the number travels with the kernel launch: no copy to wait for
        for group in self.optimizer.param_groups:
            scale = group["lr_scale"]
            group["lr"] = self.lrs[scale] if self.lrs else lr * scale
        if self._jitter is not None:
            self._jitter.begin(step)
        if self.ema is not None:
            self.ema.begin(step)

    def __call__(self, averages: bool = True) -> None:
        """The optimizer's step. `averages=False` leaves the averaged weights alone."""
        if self.scaler is not None:
            self.scaler.unscale(self._parameters)
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
        if averages and self.ema is not None:
            self.ema.update()

    def averages(self) -> dict[str, Tensor]:
        """The averaged weights, by name in a checkpoint; empty without `--ema`."""
        return {} if self.ema is None else {f"ema.{i}": tensor for i, tensor in enumerate(self.ema.tensors())}
