"""Shared by the convolutional nets: the 3x3 convolution next to a norm, and He initialization."""

from torch import nn

from paceline.core.norms import NormKind


def conv3x3(inputs: int, outputs: int, *, stride: int = 1, norm: NormKind) -> nn.Conv2d:
    """Keeps the size (stride 1) or halves it, rounded up (stride 2). It has a bias only without a norm, which adds its own."""
    return nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=norm == "none")


def he_init(net: nn.Module) -> None:
    """Convolutions: variance 2 / fan-out (He et al. 2015, arXiv:1502.01852), zero bias. Other layers keep torch's defaults."""
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
