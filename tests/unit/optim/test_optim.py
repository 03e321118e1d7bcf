"""Optimizers by name, and which parameters decay."""

import pytest
import torch
from torch import nn

from paceline.config import Config
from paceline.errors import UsageError
from paceline.optim import OPTIMIZERS, check_optimizer, make_optimizer, parameter_groups


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2), nn.LayerNorm(2))


def names(model: nn.Module, group: dict) -> set[str]:
    chosen = {id(parameter) for parameter in group["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in chosen}


def test_norms_and_biases_do_not_decay(model):
    decayed, others = parameter_groups(model, 0.01)
    assert names(model, decayed) == {"0.weight", "3.weight"}
    assert decayed["weight_decay"] == 0.01
    assert names(model, others) == {"0.bias", "1.weight", "1.bias", "3.bias", "4.weight", "4.bias"}
    assert others["weight_decay"] == 0.0


def test_all_decay_where_asked(model):
    (group,) = parameter_groups(model, 0.01, decay_all=True)
    assert len(group["params"]) == len(list(model.parameters()))
    assert group["weight_decay"] == 0.01


def test_frozen_parameters_are_left_out(model):
    model[0].requires_grad_(False)
    model[3].requires_grad_(False)
    (group,) = parameter_groups(model, 0.01)
    assert names(model, group) == {"1.weight", "1.bias", "4.weight", "4.bias"}
    assert group["weight_decay"] == 0.0


def test_sgd_as_configured(model):
    made = make_optimizer(model, Config(base_lr=0.3, momentum=0.8, nesterov=True, weight_decay=0.02))
    assert isinstance(made, torch.optim.SGD)
    assert [group["weight_decay"] for group in made.param_groups] == [0.02, 0.0]
    for group in made.param_groups:
        assert (group["lr"], group["momentum"], group["nesterov"]) == (0.3, 0.8, True)


def test_sgd_without_momentum(model):
    made = make_optimizer(model, Config(momentum=0.0))
    assert [group["nesterov"] for group in made.param_groups] == [False, False]


def test_adamw_as_configured(model):
    made = make_optimizer(
        model, Config(optimizer="adamw", base_lr=0.001, beta1=0.8, beta2=0.95, weight_decay=0.1, decay_all=True)
    )
    assert isinstance(made, torch.optim.AdamW)
    (group,) = made.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.001, (0.8, 0.95), 0.1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_takes_a_step(name, model):
    made = make_optimizer(model, Config(optimizer=name))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step()
    assert all((old != new).all() for old, new in zip(before, model.parameters(), strict=True))
    assert OPTIMIZERS[name].about


def test_an_unknown_optimizer_names_the_nearest(model):
    check_optimizer("sgd")
    with pytest.raises(UsageError, match="unknown optimizer 'adam': did you mean 'adamw'"):
        check_optimizer("adam")
    with pytest.raises(UsageError, match="unknown optimizer"):
        make_optimizer(model, Config(optimizer="adam"))
