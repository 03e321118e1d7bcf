"""Optimizers by name, and which parameters decay and have scaled steps."""

import pytest
import torch
from torch import nn

from paceline.config import Config
from paceline.errors import UsageError
from paceline.optim import (
    OPTIMIZERS,
    SGD,
    AdamW,
    Lamb,
    Lars,
    Muon,
    NovoGrad,
    Paired,
    check_optimizer,
    make_optimizer,
    parameter_groups,
)


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
    entry = OPTIMIZERS[name]
    assert entry.about
    assert entry.reference
    kept = sum(value.numel() for state in made.state.values() for value in state.values() if value.ndim)
    trained = sum(parameter.numel() for parameter in model.parameters())
    assert kept == entry.state * trained


@pytest.mark.parametrize("kind", ["lars", "lamb"])
@pytest.mark.parametrize(("decay_all", "adapt_all"), [(False, False), (True, False), (False, True), (True, True)])
def test_decay_and_ratio_are_two_flags(model, kind, decay_all, adapt_all):
    made = make_optimizer(model, Config(optimizer=kind, weight_decay=0.02, decay_all=decay_all, adapt_all=adapt_all))
    weights, others = made.param_groups
    assert names(model, weights) == {"0.weight", "3.weight"}
    assert (weights["weight_decay"], weights["adapt"]) == (0.02, True)
    assert (others["weight_decay"], others["adapt"]) == (0.02 if decay_all else 0.0, adapt_all)


def test_steps_are_scaled_without_weight_decay_too(model):
    made = make_optimizer(model, Config(optimizer="lars", weight_decay=0.0))
    assert [group["adapt"] for group in made.param_groups] == [True, False]


def test_lars_as_configured(model):
    made = make_optimizer(model, Config(optimizer="lars", base_lr=2.0, momentum=0.8, trust_coefficient=0.02))
    assert isinstance(made, Lars)
    for group in made.param_groups:
        assert (group["lr"], group["momentum"], group["trust_coefficient"], group["nesterov"]) == (2.0, 0.8, 0.02, False)


@pytest.mark.parametrize(("kind", "cls", "betas"), [("lamb", Lamb, (0.9, 0.999)), ("novograd", NovoGrad, (0.95, 0.98))])
def test_betas_as_configured(model, kind, cls, betas):
    made = make_optimizer(model, Config(optimizer=kind, base_lr=0.01))
    assert isinstance(made, cls)
    assert {group["betas"] for group in made.param_groups} == {betas}
    made = make_optimizer(model, Config(optimizer=kind, beta1=0.5, beta2=0.0))
    assert {group["betas"] for group in made.param_groups} == {(0.5, 0.0)}


def test_novograd_as_configured(model):
    made = make_optimizer(model, Config(optimizer="novograd", grad_averaging=True, weight_decay=0.02))
    assert [(group["weight_decay"], group["grad_averaging"]) for group in made.param_groups] == [(0.02, True), (0.0, True)]


@pytest.mark.parametrize(("rest", "cls"), [("sgd", SGD), ("adamw", AdamW)])
def test_muon_as_configured(model, rest, cls):
    config = Config(
        optimizer="muon", base_lr=0.2, rest=rest, rest_lr=0.05, momentum=0.8, weight_decay=0.02, fixed_norm=True, nesterov=False
    )
    made = make_optimizer(model, config)
    assert isinstance(made, Paired)
    assert [type(inner) for inner in made.inner] == [Muon, cls]
    matrices, weights, others = made.param_groups
    assert names(model, matrices) == {"0.weight"}  # 3.weight is the head
    assert (matrices["lr"], matrices["lr_scale"], matrices["weight_decay"], matrices["momentum"]) == (0.2, 1.0, 0.02, 0.8)
    assert (matrices["fixed_norm"], matrices["nesterov"], matrices["capturable"]) == (True, False, True)
    assert names(model, weights) == {"3.weight"}
    assert names(model, others) == {"0.bias", "1.weight", "1.bias", "3.bias", "4.weight", "4.bias"}
    for group, decay in ((weights, 0.02), (others, 0.0)):
        assert (group["lr"], group["lr_scale"], group["weight_decay"], group["fused"]) == (0.05, 0.25, decay, True)


def test_muons_rest_has_the_same_learning_rate_by_default(model):
    made = make_optimizer(model, Config(optimizer="muon", base_lr=0.2))
    assert {(group["lr"], group["lr_scale"]) for group in made.param_groups} == {(0.2, 1.0)}


def test_muon_alone_without_other_parameters():
    made = make_optimizer(nn.Conv2d(1, 2, 3, bias=False), Config(optimizer="muon"))
    assert isinstance(made, Muon)


def test_muon_needs_a_hidden_matrix():
    with pytest.raises(UsageError, match="this model has none"):
        make_optimizer(nn.Linear(4, 2), Config(optimizer="muon"))


@pytest.mark.parametrize("kind", ["lars", "lamb", "novograd", "muon"])
def test_sparse_gradients_are_refused_with_a_fix(kind):
    sparse = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 2))
    with pytest.raises(UsageError, match="sparse gradients"):
        make_optimizer(sparse, Config(optimizer=kind))
    assert isinstance(make_optimizer(sparse, Config()), SGD)


def test_an_unknown_optimizer_names_the_nearest(model):
    check_optimizer("sgd")
    with pytest.raises(UsageError, match="unknown optimizer 'adam': did you mean 'adamw'"):
        check_optimizer("adam")
    with pytest.raises(UsageError, match="unknown optimizer"):
        make_optimizer(model, Config(optimizer="adam"))
