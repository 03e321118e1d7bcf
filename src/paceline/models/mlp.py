"""A multi-layer perceptron on flattened pixels."""

from typing import Annotated

from torch import nn

from paceline.core.norms import NormKind, make_norm
from paceline.models.spec import Count, Rule

Width = Annotated[int, Rule("a whole number, 2 or more", lambda n: n >= 2)]


def mlp(
    *,
    in_channels: int,
    image_size: int,
    classes: int,
    depth: Count = 2,
    width: Width = 256,
    norm: NormKind = "none",
    part_size: Count = 32,
) -> nn.Module:
    """`depth` hidden layers of `width`, each linear-norm-ReLU, then the logits: 269,322 parameters on Fashion-MNIST."""
    layers: list[nn.Module] = [nn.Flatten()]
    inputs = in_channels * image_size**2
    for _ in range(depth):
        hidden = nn.Linear(inputs, width, bias=norm == "none")
        nn.init.kaiming_normal_(hidden.weight, nonlinearity="relu")
        layers += [hidden, make_norm(norm, width, dims=1, part_size=part_size), nn.ReLU(inplace=True)]
        inputs = width
    return nn.Sequential(*layers, nn.Linear(inputs, classes))
