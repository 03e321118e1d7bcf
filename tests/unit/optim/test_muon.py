"""Muon: what its steps are, and the pair that trains a whole network."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

from paceline.optim import Muon, Paired
from paceline.optim.muon import describe_split, orthogonal, split_matrices


def oracle(weight: Tensor, gradients: list[Tensor], *, lr, mu=0.95, nesterov=True, decay=0.0, steps=5) -> Tensor:
    """One matrix at a time, as in the original: transposed if tall, in float64."""
    w, b = weight.reshape(len(weight), -1).double(), torch.zeros(len(weight), weight[0].numel(), dtype=torch.float64)
    for gradient in gradients:
        g = gradient.reshape(b.shape).double()
        b = mu * b + g
        x = g + mu * b if nesterov else b
        x = x.T if (tall := len(x) > len(x[0])) else x
        x = x / (x.square().sum().sqrt() + 1e-7)
        for _ in range(steps):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
        x = x.T if tall else x
        w = w * (1 - lr * decay) - lr * max(1, len(x) / len(x[0])) ** 0.5 * x
    return w.reshape(weight.shape)


@pytest.mark.parametrize("nesterov", [True, False])
def test_fifty_steps_of_the_formula(nesterov):
    source = torch.Generator().manual_seed(1)
    made = ((4, 6), (6, 4), (4, 6), (8, 3, 3, 3), (40, 2, 3, 3), (4, 6))
    weights = [torch.randn(shape, generator=source, dtype=torch.float64) for shape in made]
    weights[3] = weights[3].contiguous(memory_format=torch.channels_last)
    gradients = [[torch.randn(w.shape, generator=source, dtype=torch.float64) for w in weights] for _ in range(50)]
    found = [nn.Parameter(weight.clone(memory_format=torch.preserve_format)) for weight in weights]
    groups = [{"params": found[:4], "weight_decay": 0.1}, {"params": found[4:], "lr": 0.003, "momentum": 0.5}]
    optimizer = Muon(groups, lr=0.02, nesterov=nesterov)
    for step in gradients:
        for parameter, gradient in zip(found, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    for number, parameter in enumerate(found):
        options = {"lr": 0.02, "decay": 0.1} if number < 4 else {"lr": 0.003, "mu": 0.5}
        expected = oracle(weights[number], [step[number] for step in gradients], nesterov=nesterov, **options)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("shape", [(16, 16), (8, 50), (50, 8), (32, 64)])
def test_singular_values_of_a_step_are_near_one(shape):
    source = torch.Generator().manual_seed(2)
    matrices = torch.randn(6, *shape, generator=source)
    values = torch.linalg.svdvals(orthogonal(matrices))
    if shape[0] != shape[1]:  # a square one may have singular values too close to 0 for five steps
        assert values.min() > 0.6
    assert values.median() > 0.6
    assert values.max() < 1.3


def test_a_convolution_is_a_matrix():
    weight, gradient = torch.randn(4, 3, 3, 3), torch.randn(4, 3, 3, 3)
    steps = []
    for shape in ((4, 3, 3, 3), (4, 27)):
        found = nn.Parameter(weight.view(shape).clone())
        found.grad = gradient.view(shape)
        Muon([found], lr=0.1).step()
        steps.append(found.detach().view(4, 27))
    torch.testing.assert_close(*steps)


def test_fixed_norm():
    found = [nn.Parameter(torch.randn(shape)) for shape in ((4, 6), (9, 2), (4, 3, 3, 3), (4, 6))]
    free = copy.deepcopy(found)
    for parameter, other in zip(found, free, strict=True):
        parameter.grad = torch.randn_like(parameter)
        other.grad = parameter.grad
    Muon(found, lr=0.1, fixed_norm=True, weight_decay=0.3).step()
    Muon(free, lr=0.1, weight_decay=0.3).step()
    for parameter, other in zip(found, free, strict=True):
        assert float(parameter.detach().norm()) == pytest.approx(len(parameter) ** 0.5, rel=1e-5)
        torch.testing.assert_close(parameter.detach(), (other / other.norm() * len(other) ** 0.5).detach())


def test_vectors_are_refused():
    with pytest.raises(ValueError, match=r"two or more dimensions, not with shape \(3,\)"):
        Muon([nn.Parameter(torch.ones(3))])


def test_split_matrices():
    tokens, hidden, head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)
    model = nn.Sequential(tokens, hidden, nn.LayerNorm(4), head)
    matrices, rest = split_matrices(model)
    assert [id(p) for p in matrices] == [id(hidden.weight)]
    assert {id(p) for p in rest} == {id(p) for p in model.parameters()} - {id(hidden.weight)}
    convolutions = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 1))
    assert [p.ndim for p in split_matrices(convolutions)[0]] == [4, 4]  # no linear head: all of them
    hidden.weight.requires_grad_(False)
    assert split_matrices(model)[0] == []


def pair(model: nn.Module, rest: str) -> Paired:
    matrices, others = split_matrices(model)
    muon = Muon([{"params": matrices, "lr_scale": 1.0}], lr=0.05)
    groups = [{"params": others, "lr_scale": 2.0}]
    fused = {"fused": True}
    return Paired(
        muon, torch.optim.SGD(groups, lr=0.1, momentum=0.9, **fused) if rest == "sgd" else torch.optim.AdamW(groups, **fused)
    )


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 2)
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, Tensor]:
    for step in steps:
        images = torch.randn(8, 1, 8, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()
    return copy.deepcopy(dict(model.named_parameters()))


@pytest.mark.parametrize("rest", ["sgd", "adamw"])
def test_a_pair_is_its_two_optimizers(rest):
    model, other = network(), network()
    optimizer, (first, second) = pair(model, rest), pair(other, rest).inner

    class Both:
        def zero_grad(self) -> None:
            other.zero_grad()

        def step(self) -> None:
            first.step()
            second.step()

    assert [group["lr_scale"] for group in optimizer.param_groups] == [1.0, 2.0]
    found, expected = train(model, optimizer, range(4)), train(other, Both(), range(4))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    start = dict(network().named_parameters())
    biases = {"0.bias", "2.bias"}  # before batch norm, or unused
    assert all(not torch.equal(found[name], start[name]) for name in found if name not in biases)
    assert set(optimizer.state) == set(model.parameters())


@pytest.mark.parametrize("rest", ["sgd", "adamw"])
@pytest.mark.parametrize("way", ["dict", "file", "pickle", "copy"])
def test_a_pair_interrupted_equals_uninterrupted(rest, way):
    whole = network()
    expected = train(whole, pair(whole, rest), range(6))
    model = network()
    optimizer = pair(model, rest)
    train(model, optimizer, range(3))
    if way in ("pickle", "copy"):
        both = (model, optimizer)
        model, optimizer = copy.deepcopy(both) if way == "copy" else pickle.loads(pickle.dumps(both))
    else:
        state = optimizer.state_dict()
        if way == "file":
            torch.save(state, file := io.BytesIO())
            file.seek(0)
            state = torch.load(file)
        model = copy.deepcopy(model)
        optimizer = pair(model, rest)
        optimizer.load_state_dict(state)
    found = train(model, optimizer, range(3, 6))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    again = optimizer.state_dict()
    assert sorted(again["state"]) == list(range(len(expected)))
    for group in optimizer.param_groups:  # the groups that users see are those that are read
        group["lr"] = 0.0
    found = train(model, optimizer, range(1))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_pair_refuses_more_groups_and_other_state():
    model = network()
    optimizer = pair(model, "sgd")
    with pytest.raises(TypeError, match="no more parameters"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="number of parameter groups"):
        optimizer.load_state_dict({**state, "param_groups": state["param_groups"][:1]})


def test_a_pair_evaluates_a_closure_once():
    model = network()
    optimizer, calls = pair(model, "adamw"), []

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(4, 1, 8, 8)).square().mean()
        loss.backward()
        calls.append(loss.item())
        return loss.item()

    assert optimizer.step(closure) == calls[0]
    assert len(calls) == 1


def test_describe_split():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    assert describe_split(model, "sgd") == "muon trains 1 matrix; sgd trains norms, biases, 3.weight"


def test_a_single_row_is_not_a_matrix():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, 1, 8))
            self.hidden, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    matrices, rest = split_matrices(model := Net())
    assert [id(each) for each in matrices] == [id(model.hidden.weight)]
    assert len(rest) == 4
