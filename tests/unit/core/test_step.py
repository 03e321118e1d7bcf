"""A step of `Parts`: one round or several, on one worker; tests/ranks/test_rounds.py has several workers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.core.determinism import deterministic
from paceline.core.keys import key, seed_all
from paceline.errors import UsageError

X = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(50) % 3


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Exact mode sets flags of the process."""
    with deterministic():
        yield


def parts(model: nn.Module, **options: Any) -> paceline.Parts:
    return paceline.Parts(model, **{"samples": 50, "global_batch": 12, "virtual_workers": 4, **options})


def losses(model: nn.Module, samples: Tensor) -> Tensor:
    return F.cross_entropy(model(X[samples]), Y[samples], reduction="none")


@pytest.mark.parametrize("reduce", ["fast", "exact"])
def test_backward_is_the_loop_over_parts_and_the_reduction(reduce: Any) -> None:
    model = nn.Linear(4, 3)
    team = parts(model, reduce=reduce)
    first, again = list(team.epoch(0)), list(team.epoch(0))
    for step, same in zip(first, again, strict=True):
        for part in step:
            part.backward(losses(model, part.samples), half=part.samples / 2)
        by_hand = {**step.reduce(), **{name: p.grad.clone() for name, p in model.named_parameters()}}
        found = same.backward(lambda i: {"loss": losses(model, i), "half": i / 2})
        assert list(found) == ["loss", "half"]
        found |= {name: p.grad for name, p in model.named_parameters()}
        assert all(torch.equal(found[name], value) for name, value in by_hand.items())


@pytest.mark.parametrize("reduce", ["fast", "exact"])
def test_a_second_round_has_its_own_gradient_and_metrics(reduce: Any) -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)})
    (step, *_) = parts(model, reduce=reduce).epoch(0)
    seen: list[list[int]] = [[], []]

    def round(number: int, name: str) -> dict[str, Tensor]:
        def work(samples: Tensor) -> Tensor:
            seen[number] += samples.tolist()
            return losses(model[name], samples)

        return step.backward(work)

    first, used = round(0, "a"), [p.grad is not None for p in model.parameters()]
    second, then = round(1, "b"), [p.grad is not None for p in model.parameters()]
    assert (used, then) == ([True, True, False, False], [False, False, True, True])
    assert seen[0] == seen[1], "both rounds have the step's samples"
    samples = torch.tensor(seen[1])
    assert first["loss"].item() == pytest.approx(losses(model["a"], samples).mean().item(), rel=1e-5)
    assert second["loss"].item() == pytest.approx(losses(model["b"], samples).mean().item(), rel=1e-5)
    expected = torch.autograd.grad(losses(model["b"], samples).mean(), list(model["b"].parameters()))
    for parameter, grad in zip(model["b"].parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_rounds_draw_their_own_numbers_keyed_by_seed_step_part_and_round() -> None:
    model = nn.Linear(4, 3)
    step = list(parts(model, seed=5).epoch(0))[2]
    drawn: list[list[Tensor]] = []
    for _ in range(3):
        drawn.append([])
        for part in step:
            drawn[-1].append(torch.rand(2))
            part.backward(losses(model, part.samples))
        step.reduce()
    for round, row in enumerate(drawn):
        for number, values in enumerate(row):
            seed_all(key(5, 2, number, 0, *([round] if round else [])))
            assert torch.equal(values, torch.rand(2)), f"round {round}, part {number}; round 0 as a step of one round"
    assert len({tuple(values.tolist()) for row in drawn for values in row}) == 12


def test_all_rounds_have_the_same_batches() -> None:
    model, data = nn.Linear(4, 3), TensorDataset(X, Y)
    team = paceline.Parts(model, DataLoader(data, batch_size=12), virtual_workers=4)
    for step in team.epoch(0):
        batches: list[list[Tensor]] = [[], []]
        for round in batches:
            step.backward(lambda batch, round=round: round.append(batch[0]) or F.cross_entropy(model(batch[0]), batch[1]))
        assert all(torch.equal(one, other) for one, other in zip(*batches, strict=True))


def test_mistakes_are_named() -> None:
    model = nn.Linear(4, 3)
    team = parts(model)

    def step() -> Any:
        return next(iter(team.epoch(0)))

    with pytest.raises(UsageError, match=r"the function given to step.backward returned NoneType: return the loss"):
        step().backward(lambda i: None)
    team.engine.forget()
    with pytest.raises(UsageError, match="returned a dict without a tensor 'loss'"):
        step().backward(lambda i: {"nll": losses(model, i)})
    with pytest.raises(UsageError, match=r"part.backward got accuracy as float: give a tensor"):
        step().backward(lambda i: {"loss": losses(model, i), "accuracy": 0.5})
    done = step()
    done.backward(lambda i: losses(model, i))
    with pytest.raises(UsageError, match="step 0 is reduced already: call reduce once after each `for part in step`"):
        done.reduce()
    half = step()
    for part in half:
        part.backward(losses(model, part.samples))
    with pytest.raises(UsageError, match="the last step was not reduced"):
        next(iter(half))


def test_noise_needs_one_reduction_per_step() -> None:
    model = nn.Linear(4, 3)
    step = next(iter(parts(model, measure_noise=True).epoch(0)))
    step.backward(lambda i: losses(model, i))
    with pytest.raises(UsageError, match="step 0 is reduced more than once: measure_noise needs one reduction per step"):
        step.backward(lambda i: losses(model, i))
