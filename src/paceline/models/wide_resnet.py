"""Wide residual nets, Zagoruyko & Komodakis 2016 (arXiv:1605.07146): fewer layers with more channels, which keep a GPU busier.

WRN-depth-width: three stages of n pre-activated blocks (norm-ReLU-conv twice, He et al. 2016, arXiv:1603.05027) of 16, 32 and
64 times `width` channels at 1, 1/2 and 1/4 of the image's size; depth = 6n + 4.
"""

from functools import partial
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.norms import NormKind, make_norm
from paceline.models.convs import conv3x3, he_init
from paceline.models.spec import Count, Fraction, Rule, require_image_size

Depth = Annotated[int, Rule("6n + 4 (10, 16, 22, 28, 34, 40 ...)", lambda n: n >= 10 and n % 6 == 4)]


def wide_resnet(
    *,
    in_channels: int,
    image_size: int,
    classes: int,
    depth: Depth = 16,
    width: Count = 4,
    dropout: Fraction = 0.0,
    norm: NormKind = "batch",
    part_size: Count = 32,
) -> nn.Module:
    """The default is WRN-16-4: 2,748,602 parameters on Fashion-MNIST. `dropout` sits between the convolutions of a block."""
    require_image_size("wide_resnet", image_size, 8)
    assert depth % 6 == 4
    layers: list[nn.Module] = [conv3x3(in_channels, 16, norm=norm)]
    inputs = 16
    for stage in range(3):
        outputs = 16 * width * 2**stage
        for block in range((depth - 4) // 6):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(_Block(inputs, outputs, stride=stride, dropout=dropout, norm=norm, part_size=part_size))
            inputs = outputs
    layers += [make_norm(norm, inputs, dims=2, part_size=part_size), nn.ReLU(inplace=True)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))
    he_init(net)
    return net


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, *, stride: int, dropout: float, norm: NormKind, part_size: int) -> None:
        super().__init__()
        make = partial(make_norm, norm, dims=2, part_size=part_size)
        self.norm1 = make(inputs)
        self.conv1 = conv3x3(inputs, outputs, stride=stride, norm=norm)
        self.norm2 = make(outputs)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = conv3x3(outputs, outputs, norm=norm)
        same = inputs == outputs and stride == 1
        self.project = None if same else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        path: Tensor = self.conv2(self.dropout(F.relu(self.norm2(self.conv1(active)))))
        return path + (x if self.project is None else self.project(active))
