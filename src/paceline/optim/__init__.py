"""Optimizers, and the rules that turn a trusted learning rate into that of a large batch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.config import Config
from paceline.errors import unknown


@dataclass(frozen=True)
class Entry:
    """What Paceline knows about an optimizer."""

    make: Callable[[list[dict[str, Any]], Config], Optimizer]
    about: str


def _sgd(groups: list[dict[str, Any]], config: Config) -> Optimizer:
    fused = _fuses(groups, config)
    optimizer = torch.optim.SGD(groups, lr=config.base_lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused)
    if fused and config.momentum:  # torch's fused kernel fails where one parameter's first gradient comes later than another's
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _adamw(groups: list[dict[str, Any]], config: Config) -> Optimizer:
    betas, fused = (config.beta1, config.beta2), _fuses(groups, config)
    return torch.optim.AdamW(groups, lr=config.base_lr, betas=betas, fused=fused, capturable=bool(fused) and _on_gpu(groups))


def _fuses(groups: list[dict[str, Any]], config: Config) -> bool | None:
    """One kernel for all parameters, which takes a third less time on a CPU too; None is torch's own choice."""
    return True if config.fast != "off" and all(p.is_floating_point() for group in groups for p in group["params"]) else None


def _on_gpu(groups: list[dict[str, Any]]) -> bool:
    return all(parameter.device.type == "cuda" for group in groups for parameter in group["params"])


OPTIMIZERS = {
    "sgd": Entry(_sgd, "SGD with momentum, Nesterov's form by default"),
    "adamw": Entry(_adamw, "Adam with decoupled weight decay"),
}


def check_optimizer(name: str) -> None:
    """Raise a UsageError with the nearest name if there is no such optimizer."""
    if name not in OPTIMIZERS:
        raise unknown("optimizer", name, OPTIMIZERS)


def make_optimizer(model: nn.Module, config: Config) -> Optimizer:
    """The configured optimizer over the model's parameters, those without weight decay in a group of their own."""
    check_optimizer(config.optimizer)
    if any(getattr(module, "sparse", False) for module in model.modules()):
        config = replace(config, fast="off")  # fused kernels do not take the sparse gradients of such a layer
    return OPTIMIZERS[config.optimizer].make(parameter_groups(model, config.weight_decay, config.decay_all), config)


def parameter_groups(model: nn.Module, weight_decay: float, decay_all: bool = False) -> list[dict[str, Any]]:
    """Weights in one group; norms and biases (every parameter of at most one dimension) in another, which has no decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = [parameter for parameter in trained if decay_all or parameter.ndim > 1]
    others = [parameter for parameter in trained if not decay_all and parameter.ndim <= 1]
    groups = [{"params": weights, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
