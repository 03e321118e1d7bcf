"""The residual net for small images of He et al. 2015 (arXiv:1512.03385), section 4.2.

Three stages of n blocks at 1, 1/2 and 1/4 of the image's size: depth = 6n + 2 (two 3x3 convolutions per block, the stem and the
linear layer). Where a stage widens, the skip path takes every second pixel and fills the new channels with zeros (their option
A), so it has no weights: with `skip=false` the net has the same layers and parameters, just without the addition. Li et al.
2018 (arXiv:1712.09913) draw the loss surfaces of this pair.
"""

from functools import partial
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.norms import NormKind, make_norm
from paceline.models.convs import conv3x3, he_init
from paceline.models.spec import Count, Rule, require_image_size

Depth = Annotated[int, Rule("6n + 2 (8, 14, 20, 26, 32 ...)", lambda n: n >= 8 and n % 6 == 2)]


def resnet(
    *,
    in_channels: int,
    image_size: int,
    classes: int,
    depth: Depth = 20,
    width: Count = 16,
    skip: bool = True,
    norm: NormKind = "batch",
    part_size: Count = 32,
) -> nn.Module:
    """Widths `width`, 2 `width`, 4 `width`. The default has 269,434 parameters on Fashion-MNIST."""
    require_image_size("resnet", image_size, 8)
    assert depth % 6 == 2
    make = partial(make_norm, norm, dims=2, part_size=part_size)
    layers: list[nn.Module] = [conv3x3(in_channels, width, norm=norm), make(width), nn.ReLU(inplace=True)]
    inputs = width
    for stage in range(3):
        for block in range((depth - 2) // 6):
            outputs = width * 2**stage
            stride = 2 if stage > 0 and block == 0 else 1
            path = nn.Sequential(
                conv3x3(inputs, outputs, stride=stride, norm=norm),
                make(outputs),
                nn.ReLU(inplace=True),
                conv3x3(outputs, outputs, norm=norm),
                make(outputs),
            )
            layers.append(_Block(path, stride=stride, widen=outputs - inputs, skip=skip))
            inputs = outputs
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    he_init(net)
    return net


class _Block(nn.Module):
    def __init__(self, path: nn.Sequential, *, stride: int, widen: int, skip: bool) -> None:
        super().__init__()
        self.path = path
        self.stride = stride
        self.widen = widen
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.path(x)
        if self.skip:
            # F.pad counts from the last dimension: columns, rows, then channels.
            y = y + F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.widen))
        return F.relu(y)
