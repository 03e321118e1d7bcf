"""The registry: valid specs, and the one-line error for each invalid one."""

import pytest
import torch
from torch import nn

from paceline import models
from paceline.errors import UsageError
from paceline.models import spec


def test_names_are_the_six_models():
    assert models.names() == ("linear", "mlp", "cnn", "resnet", "wide_resnet", "course_wide_resnet")


@pytest.mark.parametrize("name", models.names())
def test_every_name_checks(name):
    models.check(name)


@pytest.mark.parametrize(
    "spec",
    [
        "mlp:depth=3,width=64,norm=group",
        "cnn:width=8,dropout=0.1",
        " cnn : width = 8 , dropout = 0 ",
        "resnet:depth=8,skip=false,norm=part,part_size=16",
        "resnet:part-size=16",
        "wide_resnet:depth=10,width=1",
        "course_wide_resnet:dropout=0.0,norm=sync",
    ],
)
def test_specs_that_are_right(spec):
    models.check(spec)


@pytest.mark.parametrize("text", ["false", "no", "0", "False"])
def test_values_reach_the_model(text):
    with_skip, without = (_logits(f"resnet:depth=8,width=4,skip={value}") for value in ("true", text))
    assert not torch.equal(with_skip, without)
    assert torch.equal(with_skip, _logits("resnet:depth=8,width=4"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("resnt", "unknown model 'resnt': did you mean 'resnet'?"),
        ("", "unknown model '': known: cnn, course_wide_resnet, linear, mlp, resnet, wide_resnet"),
        ("resnet:dept=8", "unknown key of model resnet 'dept': did you mean 'depth'?"),
        ("resnet:in_channels=3", "unknown key of model resnet 'in_channels': known: depth, norm, part_size, skip, width"),
        (
            "resnet:skip",
            "model resnet:skip: found 'skip' instead of key=value; keys of resnet: depth, width, skip, norm, part_size",
        ),
        ("cnn:", "model cnn:: found '' instead of key=value; keys of cnn: width, norm, part_size, dropout"),
        ("cnn:width=8,", "model cnn:width=8,: found '' instead of key=value; keys of cnn: width, norm, part_size, dropout"),
        ("linear:width=8", "model linear has no keys, but 'width=8' was given: use linear"),
        ("cnn:width=8,width=9", "model cnn:width=8,width=9: width is given twice"),
        ("cnn:width=wide", "model cnn: width is 'wide': it must be a whole number, 1 or more"),
        ("cnn:width=8.5", "model cnn: width is '8.5': it must be a whole number, 1 or more"),
        ("cnn:width=0", "model cnn: width is '0': it must be a whole number, 1 or more"),
        ("cnn:width=", "model cnn: width is '': it must be a whole number, 1 or more"),
        ("cnn:dropout=1", "model cnn: dropout is '1': it must be a number from 0 to below 1"),
        ("cnn:dropout=nan", "model cnn: dropout is 'nan': it must be a number from 0 to below 1"),
        ("cnn:norm=bach", "model cnn: norm is 'bach': it must be one of batch, part, sync, group, none"),
        ("resnet:skip=maybe", "model resnet: skip is 'maybe': it must be true or false (or yes, no, 1, 0)"),
        ("resnet:depth=18", "model resnet: depth is '18': it must be 6n + 2 (8, 14, 20, 26, 32 ...)"),
        ("wide_resnet:depth=4", "model wide_resnet: depth is '4': it must be 6n + 4 (10, 16, 22, 28, 34, 40 ...)"),
    ],
)
def test_specs_that_are_wrong(spec, message):
    with pytest.raises(UsageError) as caught:
        models.check(spec)
    assert str(caught.value) == message
    with pytest.raises(UsageError):
        models.build(spec, in_channels=1, image_size=28, classes=10)


@pytest.mark.parametrize("given", [{"in_channels": 0}, {"image_size": 0}, {"classes": -1}])
def test_what_the_data_gives_is_checked(given):
    with pytest.raises(UsageError, match=f"{next(iter(given))} is .*: it must be 1 or more"):
        models.build("linear", **{"in_channels": 1, "image_size": 28, "classes": 10, **given})


@pytest.mark.parametrize("annotation", [int, float])
def test_plain_numbers_convert_too(annotation):
    assert spec.convert("3", annotation) == annotation(3)
    with pytest.raises(ValueError, match="number"):
        spec.convert("x", annotation)


def _logits(spec: str) -> torch.Tensor:
    torch.manual_seed(0)
    net: nn.Module = models.build(spec, in_channels=1, image_size=8, classes=3)
    with torch.no_grad():
        return net(torch.ones(2, 1, 8, 8).cumsum(3))
