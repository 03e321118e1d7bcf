"""The wide residual net of the course, layer for layer: 17,117,466 parameters on Fashion-MNIST.

Based on Zagoruyko & Komodakis 2016 (arXiv:1605.07146), but not identical (`wide_resnet.py` is): blocks are conv-norm-ReLU
instead of pre-activated, nothing follows the addition, the projections have a bias, and max-pooling instead of strides halves
the image. The course's figures were measured on it, so its structure, dropout and initial weights (torch's defaults) must not
change.
"""

from functools import partial

from torch import Tensor, nn

from paceline.core.norms import NormKind, make_norm
from paceline.models.spec import Count, Fraction, require_image_size

STEM = 16
WIDTHS = (160, 320, 640)


def course_wide_resnet(
    *,
    in_channels: int,
    image_size: int,
    classes: int,
    dropout: Fraction = 0.01,
    norm: NormKind = "batch",
    part_size: Count = 32,
) -> nn.Module:
    """A stem of 16 channels, two blocks each of 160, 320 and 640 channels, the mean over the remaining 7x7 pixels, linear."""
    require_image_size("course_wide_resnet", image_size, 4)
    make = partial(make_norm, norm, dims=2, part_size=part_size)
    layers: list[nn.Module] = [nn.Conv2d(in_channels, STEM, 3, padding=1, bias=False), make(STEM), nn.ReLU(inplace=True)]
    inputs = STEM
    for width in WIDTHS:
        if inputs != STEM:
            layers.append(nn.MaxPool2d(2))
        for _ in range(2):
            path = nn.Sequential(
                nn.Conv2d(inputs, width, 3, padding=1, bias=False),
                make(width),
                nn.ReLU(inplace=True),
                nn.Dropout(dropout),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                make(width),
                nn.ReLU(inplace=True),
            )
            layers.append(_Block(path, project=nn.Conv2d(inputs, width, 1) if inputs != width else nn.Identity()))
            inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class _Block(nn.Module):
    def __init__(self, path: nn.Module, project: nn.Module) -> None:
        super().__init__()
        self.path = path
        self.project = project

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.project(x) + self.path(x)
        return y
