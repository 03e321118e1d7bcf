"""Optimizers by name: torch's SGD and AdamW, and LARS, LAMB, NovoGrad and Muon for large batches.

Owns the optimizers, one file each, parameter groups (`groups.py`) and several optimizers used as one (`combined.py`). `flat.py`
updates many tensors in few kernels. A task's own optimizer is checked in `training/own.py`.
May import: config, errors. Start reading at `OPTIMIZERS` below, then `lars.py`.
To add an optimizer, write its class in a new file, and below a function `_name(model, config)` that makes it and an entry in
`OPTIMIZERS`. It must accept a learning rate in a tensor and work in a CUDA graph, as all of these do.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import SGD as SGD
from torch.optim import AdamW as AdamW
from torch.optim import Optimizer

from paceline.config import Config
from paceline.errors import UsageError, unknown
from paceline.optim.combined import Combined as Combined
from paceline.optim.combined import Paired as Paired
from paceline.optim.flat import Flat
from paceline.optim.groups import Groups, adapted_groups, decay_groups
from paceline.optim.groups import parameter_groups as parameter_groups
from paceline.optim.lamb import Lamb as Lamb
from paceline.optim.lars import Lars as Lars
from paceline.optim.muon import Muon as Muon
from paceline.optim.muon import split_matrices
from paceline.optim.novograd import NovoGrad as NovoGrad


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What Paceline knows about an optimizer."""

    make: Callable[[nn.Module, Config], Optimizer]
    about: str
    reference: str
    adapts: bool = False
    """Whether the step of each layer is scaled by norms of that layer."""
    state: int = 1
    """How many values it keeps per weight."""
    sparse: bool = False
    """Whether it accepts sparse gradients."""


def _sgd(model: nn.Module, config: Config) -> Optimizer:
    return _sgd_over(parameter_groups(model, config.weight_decay, config.decay_all), config)


def _adamw(model: nn.Module, config: Config) -> Optimizer:
    return _adamw_over(parameter_groups(model, config.weight_decay, config.decay_all), config)


def _lars(model: nn.Module, config: Config) -> Optimizer:
    groups = adapted_groups(model, config)
    return Lars(groups, lr=config.base_lr, momentum=config.momentum, trust_coefficient=config.trust_coefficient)


def _lamb(model: nn.Module, config: Config) -> Optimizer:
    return Lamb(adapted_groups(model, config), lr=config.base_lr, betas=_betas(config))


def _novograd(model: nn.Module, config: Config) -> Optimizer:
    groups = parameter_groups(model, config.weight_decay, config.decay_all)
    return NovoGrad(groups, lr=config.base_lr, betas=_betas(config), grad_averaging=config.grad_averaging)


def _muon(model: nn.Module, config: Config) -> Optimizer:
    """Muon for the matrices, `config.rest` for the rest. `lr_scale` is a group's learning rate relative to the schedule's."""
    matrices, rest = split_matrices(model)
    if not matrices:
        raise UsageError("--optimizer muon trains hidden matrices, but this model has none: use sgd or adamw")
    group = {"params": matrices, "weight_decay": config.weight_decay, "lr_scale": 1.0}
    muon = Muon([group], lr=config.base_lr, momentum=config.momentum, nesterov=config.nesterov, fixed_norm=config.fixed_norm)
    if not rest:
        return muon
    rest_lr = config.base_lr if config.rest_lr is None else config.rest_lr
    groups = [
        {**each, "lr_scale": rest_lr / config.base_lr} for each in decay_groups(rest, config.weight_decay, config.decay_all)
    ]
    make = {"sgd": _sgd_over, "adamw": _adamw_over}[config.rest]
    return Paired(muon, make(groups, replace(config, base_lr=rest_lr)))


def _sgd_over(groups: Groups, config: Config) -> Optimizer:
    fused = _fuses(groups, config)
    optimizer = SGD(groups, lr=config.base_lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused)
    if fused and config.momentum:  # torch's fused kernel fails if parameters get their first gradient in different steps
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _adamw_over(groups: Groups, config: Config) -> Optimizer:
    fused = _fuses(groups, config)
    capturable = bool(fused) and _on_gpu(groups)
    return AdamW(groups, lr=config.base_lr, betas=_betas(config), fused=fused, capturable=capturable)


def _betas(config: Config) -> tuple[float, float]:
    assert config.beta1 is not None  # Config sets them
    assert config.beta2 is not None
    return config.beta1, config.beta2


def _fuses(groups: Groups, config: Config) -> bool | None:
    """Whether to use one kernel for all parameters (a third less time, on a CPU too); None lets torch choose.

    Fused kernels can also skip a step on the device, which fp16 needs.
    """
    wanted = config.fast != "off" or config.precision == "fp16"
    return True if wanted and all(p.is_floating_point() for group in groups for p in group["params"]) else None


def _on_gpu(groups: Groups) -> bool:
    return all(parameter.device.type == "cuda" for group in groups for parameter in group["params"])


OPTIMIZERS = {
    "sgd": Entry(
        make=_sgd, about="SGD with momentum, Nesterov's form by default", reference="Sutskever et al. 2013", sparse=True
    ),
    "adamw": Entry(make=_adamw, about="Adam with decoupled weight decay", reference="arXiv:1711.05101", state=2),
    "lars": Entry(
        make=_lars, about="SGD with momentum, each layer's step scaled to its norm", reference="arXiv:1708.03888", adapts=True
    ),
    "lamb": Entry(
        make=_lamb,
        about="Adam, each layer's step scaled to its norm",
        reference="arXiv:1904.00962",
        adapts=True,
        state=2,
    ),
    "novograd": Entry(
        make=_novograd,
        about="momentum of gradients that are normalized layer by layer",
        reference="arXiv:1905.11286",
        adapts=True,
    ),
    "muon": Entry(
        make=_muon,
        about="orthogonal momentum for hidden matrices, sgd or adamw for the rest",
        reference="kellerjordan.github.io/posts/muon",
    ),
}


def check_optimizer(name: str) -> None:
    """Raise a UsageError that suggests the nearest name if this optimizer does not exist."""
    if name not in OPTIMIZERS:
        raise unknown("optimizer", name, OPTIMIZERS)


def make_optimizer(model: nn.Module, config: Config) -> Optimizer:
    """The configured optimizer over the model's parameters. Those without weight decay are in a separate group."""
    check_optimizer(config.optimizer)
    entry = OPTIMIZERS[config.optimizer]
    if any(getattr(module, "sparse", False) for module in model.modules()):
        if not entry.sparse:
            raise UsageError(f"--optimizer {config.optimizer} does not support the sparse gradients of this model: use sgd")
        config = replace(config, fast="off")  # fused kernels do not support sparse gradients
    optimizer = entry.make(model, config)
    leave_graphs_to_loop(optimizer)
    return optimizer


def leave_graphs_to_loop(optimizer: Optimizer) -> None:
    """Keep our own optimizers from recording their step as a graph: the training loop captures whole steps."""
    for each in optimizer.inner if isinstance(optimizer, Combined) else (optimizer,):
        if isinstance(each, Flat):
            each.uses_graph = False
