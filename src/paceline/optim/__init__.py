"""Optimizers, and the rules that turn a trusted learning rate into that of a large batch.

torch's SGD and AdamW, and what large batches ask for beyond them: `Lars`, `Lamb` and `NovoGrad`, which scale every layer's
step by norms of that layer (`flat.py` says how, in few kernels), and `Muon`. All of them take a learning rate in a tensor and
can be part of a CUDA graph.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import SGD as SGD
from torch.optim import AdamW as AdamW
from torch.optim import Optimizer

from paceline.config import Config
from paceline.errors import UsageError, unknown
from paceline.optim.flat import Flat
from paceline.optim.lamb import Lamb as Lamb
from paceline.optim.lars import Lars as Lars
from paceline.optim.muon import Muon as Muon
from paceline.optim.muon import Paired as Paired
from paceline.optim.muon import split_matrices
from paceline.optim.novograd import NovoGrad as NovoGrad

Groups = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What Paceline knows about an optimizer."""

    make: Callable[[nn.Module, Config], Optimizer]
    about: str
    reference: str
    adapts: bool = False
    """Whether every layer's step is scaled by norms of that layer."""
    state: int = 1
    """Values it keeps for each parameter."""
    sparse: bool = False
    """Whether it takes sparse gradients. Each takes a learning rate in a tensor and can be part of a CUDA graph."""


def _sgd(model: nn.Module, config: Config) -> Optimizer:
    return _sgd_over(parameter_groups(model, config.weight_decay, config.decay_all), config)


def _adamw(model: nn.Module, config: Config) -> Optimizer:
    return _adamw_over(parameter_groups(model, config.weight_decay, config.decay_all), config)


def _lars(model: nn.Module, config: Config) -> Optimizer:
    groups = _adapted_groups(model, config)
    return Lars(groups, lr=config.base_lr, momentum=config.momentum, trust_coefficient=config.trust_coefficient)


def _lamb(model: nn.Module, config: Config) -> Optimizer:
    return Lamb(_adapted_groups(model, config), lr=config.base_lr, betas=_betas(config))


def _novograd(model: nn.Module, config: Config) -> Optimizer:
    groups = parameter_groups(model, config.weight_decay, config.decay_all)
    return NovoGrad(groups, lr=config.base_lr, betas=_betas(config), grad_averaging=config.grad_averaging)


def _muon(model: nn.Module, config: Config) -> Optimizer:
    """Muon for the matrices, `config.rest` for the rest; `lr_scale` is what a group's learning rate is of the schedule's."""
    matrices, rest = split_matrices(model)
    if not matrices:
        raise UsageError("--optimizer muon trains hidden matrices, and this model has none: use sgd or adamw")
    group = {"params": matrices, "weight_decay": config.weight_decay, "lr_scale": 1.0}
    muon = Muon([group], lr=config.base_lr, momentum=config.momentum, nesterov=config.nesterov, fixed_norm=config.fixed_norm)
    if not rest:
        return muon
    rest_lr = config.base_lr if config.rest_lr is None else config.rest_lr
    groups = [{**each, "lr_scale": rest_lr / config.base_lr} for each in _by_decay(rest, config.weight_decay, config.decay_all)]
    make = {"sgd": _sgd_over, "adamw": _adamw_over}[config.rest]
    return Paired(muon, make(groups, replace(config, base_lr=rest_lr)))


def _sgd_over(groups: Groups, config: Config) -> Optimizer:
    fused = _fuses(groups, config)
    optimizer = SGD(groups, lr=config.base_lr, momentum=config.momentum, nesterov=config.nesterov, fused=fused)
    if fused and config.momentum:  # torch's fused kernel fails where one parameter's first gradient comes later than another's
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def _adamw_over(groups: Groups, config: Config) -> Optimizer:
    fused = _fuses(groups, config)
    capturable = bool(fused) and _on_gpu(groups)
    return AdamW(groups, lr=config.base_lr, betas=_betas(config), fused=fused, capturable=capturable)


def _betas(config: Config) -> tuple[float, float]:
    assert config.beta1 is not None  # a Config fills them in
    assert config.beta2 is not None
    return config.beta1, config.beta2


def _fuses(groups: Groups, config: Config) -> bool | None:
    """One kernel for all parameters, which takes a third less time on a CPU too; None is torch's own choice."""
    return True if config.fast != "off" and all(p.is_floating_point() for group in groups for p in group["params"]) else None


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
        about="momentum of gradients that are normalised layer by layer",
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
    """Raise a UsageError with the nearest name if there is no such optimizer."""
    if name not in OPTIMIZERS:
        raise unknown("optimizer", name, OPTIMIZERS)


def make_optimizer(model: nn.Module, config: Config) -> Optimizer:
    """The configured optimizer over the model's parameters, those without weight decay in a group of their own."""
    check_optimizer(config.optimizer)
    entry = OPTIMIZERS[config.optimizer]
    if any(getattr(module, "sparse", False) for module in model.modules()):
        if not entry.sparse:
            raise UsageError(f"--optimizer {config.optimizer} does not take the sparse gradients of this model: use sgd")
        config = replace(config, fast="off")  # fused kernels do not take the sparse gradients of such a layer
    optimizer = entry.make(model, config)
    for each in optimizer.inner if isinstance(optimizer, Paired) else (optimizer,):
        if isinstance(each, Flat):
            each.uses_graph = False  # the loop records whole steps
    return optimizer


def parameter_groups(model: nn.Module, weight_decay: float, decay_all: bool = False) -> Groups:
    """Weights in one group; norms and biases (every parameter of at most one dimension) in another, which has no decay."""
    return _by_decay([parameter for parameter in model.parameters() if parameter.requires_grad], weight_decay, decay_all)


def _by_decay(parameters: Iterable[nn.Parameter], weight_decay: float, decay_all: bool) -> Groups:
    trained = list(parameters)
    weights = [parameter for parameter in trained if decay_all or parameter.ndim > 1]
    others = [parameter for parameter in trained if not decay_all and parameter.ndim <= 1]
    groups = [{"params": weights, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _adapted_groups(model: nn.Module, config: Config) -> Groups:
    """As `parameter_groups`, by two separate flags: who decays, and whose steps are scaled to their norm."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim <= 1]
    decay = config.weight_decay
    groups = [
        {"params": weights, "weight_decay": decay, "adapt": True},
        {"params": others, "weight_decay": decay if config.decay_all else 0.0, "adapt": config.adapt_all},
    ]
    return [group for group in groups if group["params"]]
