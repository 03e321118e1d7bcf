"""The nets: sizes, shapes, and that each one trains with every norm."""

from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline import models
from paceline.core.norms import NormKind
from paceline.errors import UsageError

# Small members of each family, for what does not depend on size.
SMALL = ["linear", "mlp:width=32", "cnn:width=8", "resnet:depth=8,width=8", "wide_resnet:depth=10,width=1"]
WITH_NORM = [*SMALL[1:], "course_wide_resnet:dropout=0.01"]


@pytest.mark.parametrize(
    ("spec", "in_channels", "count"),
    [
        ("linear", 1, 7_850),
        ("mlp", 1, 269_322),
        ("cnn", 1, 29_434),
        ("resnet", 1, 269_434),
        ("resnet", 3, 269_722),  # the 0.27M of He et al., table 6
        ("resnet:skip=false", 3, 269_722),
        ("resnet:depth=110", 3, 1_727_962),  # 1.7M, same table
        ("wide_resnet", 1, 2_748_602),
        ("wide_resnet", 3, 2_748_890),  # the 2.7M of Zagoruyko & Komodakis
        ("wide_resnet:depth=28,width=10", 3, 36_479_194),  # 36.5M, their table 4
        ("course_wide_resnet", 1, 17_117_466),
    ],
)
def test_parameter_count(spec, in_channels, count):
    assert _parameters(models.build(spec, in_channels=in_channels, image_size=28, classes=10)) == count


@pytest.mark.parametrize(("in_channels", "image_size"), [(1, 28), (3, 32)])
@pytest.mark.parametrize("spec", [*SMALL, "course_wide_resnet"])
def test_logits_for_both_kinds_of_image(spec, in_channels, image_size):
    net = models.build(spec, in_channels=in_channels, image_size=image_size, classes=10).eval()
    with torch.no_grad():
        logits = net(torch.randn(2, in_channels, image_size, image_size))
    assert logits.shape == (2, 10)
    assert logits.isfinite().all()
    assert (logits.sum(1).exp() - 1).abs().max() > 1e-3  # neither probabilities nor their logarithms


@pytest.mark.parametrize(
    ("name", "least"), [("linear", 1), ("mlp", 1), ("cnn", 8), ("resnet", 8), ("wide_resnet", 8), ("course_wide_resnet", 4)]
)
def test_smallest_image(name, least):
    net = models.build(name, in_channels=1, image_size=least, classes=4).eval()
    with torch.no_grad():
        assert net(torch.randn(3, 1, least, least)).shape == (3, 4)
        odd = 2 * least - 1
        odd_net = models.build(name, in_channels=1, image_size=odd, classes=4).eval()
        assert odd_net(torch.randn(3, 1, odd, odd)).shape == (3, 4)
    if least > 1:
        expected = f"^model {name}: images are {least - 1}x{least - 1}: they must be {least}x{least} or larger$"
        with pytest.raises(UsageError, match=expected):
            models.build(name, in_channels=1, image_size=least - 1, classes=4)


@pytest.mark.parametrize("norm", get_args(NormKind))
@pytest.mark.parametrize("spec", WITH_NORM)
def test_trains_one_step(spec, norm):
    torch.manual_seed(0)
    size = 8 if spec.startswith("course") else 16
    net = models.build(f"{spec},norm={norm},part_size=4", in_channels=1, image_size=size, classes=5)
    images, labels = torch.randn(8, 1, size, size), torch.arange(8) % 5
    F.cross_entropy(net(images), labels).backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 1e-3 * parameter.grad
    assert F.cross_entropy(net(images), labels).isfinite()
    assert net.eval()(images).isfinite().all()


def test_linear_trains_one_step():
    net = models.build("linear", in_channels=1, image_size=4, classes=5)
    F.cross_entropy(net(torch.randn(8, 1, 4, 4)), torch.arange(8) % 5).backward()
    assert all(parameter.grad.any() for parameter in net.parameters())


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet", "wide_resnet", "course_wide_resnet"])
def test_norms_share_parameter_names(name):
    batch, part, sync = (
        models.build(f"{name}:norm={norm}", in_channels=1, image_size=28, classes=10) for norm in ("batch", "part", "sync")
    )
    assert list(batch.state_dict()) == list(part.state_dict()) == list(sync.state_dict())


def test_without_skip_the_layers_are_the_same_and_the_function_is_not():
    nets = []
    for skip in ("true", "false"):
        torch.manual_seed(0)
        nets.append(models.build(f"resnet:depth=8,width=4,skip={skip}", in_channels=1, image_size=8, classes=3))
    with_skip, without = (net.state_dict() for net in nets)
    assert list(with_skip) == list(without)
    assert all(torch.equal(with_skip[name], without[name]) for name in with_skip)
    # With the convolutions silenced, only a skip path carries the image to the logits.
    images = torch.randn(2, 1, 8, 8)
    for net in nets:
        for block in net[3:-3]:
            nn.init.zeros_(block.path[3].weight)
    assert (nets[0](images)[0] - nets[0](images)[1]).abs().max() > 1e-3
    assert torch.allclose(nets[1](images)[0], nets[1](images)[1])


def test_the_course_net_is_what_the_course_says():
    net = models.build("course_wide_resnet", in_channels=1, image_size=28, classes=10)
    kinds = [type(layer).__name__ for layer in net]
    assert kinds == [
        *("Conv2d", "BatchNorm2d", "ReLU"),
        *("_Block", "_Block", "MaxPool2d", "_Block", "_Block", "MaxPool2d", "_Block", "_Block"),
        *("AdaptiveAvgPool2d", "Flatten", "Linear"),
    ]
    blocks = [layer for layer in net if type(layer).__name__ == "_Block"]
    assert [block.path[0].in_channels for block in blocks] == [16, 160, 160, 320, 320, 640]
    assert [isinstance(block.project, nn.Conv2d) for block in blocks] == [True, False] * 3
    assert {layer.p for layer in net.modules() if isinstance(layer, nn.Dropout)} == {0.01}
    assert min(block(torch.randn(1, block.path[0].in_channels, 4, 4)).min() for block in blocks) < 0  # no ReLU after the add


def test_same_seed_same_weights():
    first, second = (_seeded("cnn") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def _seeded(spec: str) -> nn.Module:
    torch.manual_seed(3)
    return models.build(spec, in_channels=1, image_size=28, classes=10)


def _parameters(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())
