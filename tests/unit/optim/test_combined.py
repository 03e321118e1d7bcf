"""Several optimizers used as one. (Pairs of Muon and another are tested in test_muon.py.)"""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, RMSprop

from paceline.optim import Combined


def players() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"generator": nn.Linear(3, 3), "critic": nn.Linear(3, 1)})


def combined(model: nn.ModuleDict) -> Combined:
    return Combined(
        {"generator": Adam(model["generator"].parameters(), lr=0.01), "critic": RMSprop(model["critic"].parameters(), lr=0.1)}
    )


def weights(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(dict(model.state_dict()))


def backward(model: nn.ModuleDict, step: int) -> None:
    inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
    model["critic"](model["generator"](inputs)).square().mean().backward()


def test_members_are_reached_by_name_and_step_alone():
    model = players()
    optimizer, before = combined(model), weights(model)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.1]
    backward(model, 0)
    optimizer["critic"].step()
    moved = {name for name, value in weights(model).items() if not torch.equal(value, before[name])}
    assert moved == {"critic.weight", "critic.bias"}
    assert set(optimizer.state) == set(model["critic"].parameters()), "the state of all is one"
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer["generator"].param_groups[0]["lr"] == 0.5


def test_interrupted_equals_uninterrupted():
    def train(model, optimizer, steps):
        for step in steps:
            optimizer.zero_grad()
            backward(model, step)
            optimizer["critic"].step()
            if step % 2:
                optimizer["generator"].step()

    whole, model = players(), players()
    train(whole, combined(whole), range(6))
    optimizer = combined(model)
    train(model, optimizer, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    assert sorted(state["state"]) == [0, 1, 2, 3]
    again = combined(model)
    again.load_state_dict(state)
    train(model, again, range(3, 6))
    assert all(torch.equal(value, weights(whole)[name]) for name, value in weights(model).items())


def test_a_parameter_has_one_optimizer():
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="more than one parameter group"):
        Combined({"one": Adam(layer.parameters()), "two": Adam([layer.bias])})
    with pytest.raises(TypeError, match="accept no more parameters"):
        combined(players()).add_param_group({"params": list(layer.parameters())})
