"""A small convolutional net for CPUs: 29,434 parameters and 1.9 million multiplications per image on Fashion-MNIST.

On a CPU the many pixels of the first layers cost most. So the stem halves the image with its stride, and the other layers pool
before they normalize: norm and ReLU process a quarter of the values.
"""

from functools import partial

from torch import nn

from paceline.core.norms import NormKind, make_norm
from paceline.models.convs import conv3x3, he_init
from paceline.models.spec import Count, Fraction, require_image_size


def cnn(
    *,
    in_channels: int,
    image_size: int,
    classes: int,
    width: Count = 16,
    norm: NormKind = "batch",
    part_size: Count = 32,
    dropout: Fraction = 0.0,
) -> nn.Module:
    """Convolutions of `width`, 2 `width` and 4 `width` channels, each halving the image; `dropout` before the linear layer."""
    require_image_size("cnn", image_size, 8)
    make = partial(make_norm, norm, dims=2, part_size=part_size)
    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, width, 5, stride=2, padding=2, bias=norm == "none"),
        make(width),
        nn.ReLU(inplace=True),
    ]
    for inputs, outputs in ((width, 2 * width), (2 * width, 4 * width)):
        layers += [conv3x3(inputs, outputs, norm=norm), nn.MaxPool2d(2), make(outputs), nn.ReLU(inplace=True)]
    side = (image_size + 1) // 2 // 2 // 2
    net = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(dropout), nn.Linear(4 * width * side**2, classes))
    he_init(net)
    return net
