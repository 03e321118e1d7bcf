"""Parameter groups: which parameters have weight decay, and which have their steps scaled to their norm.

By default weight decay and scaling apply to weights only. Norms and biases (parameters with at most one dimension) get neither.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from paceline.config import Config

Groups = list[dict[str, Any]]


def parameter_groups(model: nn.Module, weight_decay: float, decay_all: bool = False) -> Groups:
    """Weights in one group; norms and biases in another, without decay unless `decay_all`."""
    return decay_groups(trained_parameters(model), weight_decay, decay_all)


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float, decay_all: bool) -> Groups:
    """The same for some of a model's parameters."""
    trained = list(parameters)
    weights = [parameter for parameter in trained if decay_all or parameter.ndim > 1]
    others = [parameter for parameter in trained if not decay_all and parameter.ndim <= 1]
    groups = [{"params": weights, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def adapted_groups(model: nn.Module, config: Config) -> Groups:
    """Like `parameter_groups`, but separate flags decide whether norms and biases decay and whether their steps are scaled."""
    trained = trained_parameters(model)
    weights = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim <= 1]
    decay = config.weight_decay
    groups = [
        {"params": weights, "weight_decay": decay, "adapt": True},
        {"params": others, "weight_decay": decay if config.decay_all else 0.0, "adapt": config.adapt_all},
    ]
    return [group for group in groups if group["params"]]


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that have gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
