"""Weights, losses of a batch and metrics of whole sets: the same on 1, 2 and 3 workers."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from harness.processes import run_workers
from harness.tokens import MASK, X, Y, per_batch, per_sample, squares, tokens
from harness.training import ALONE, train_in
from paceline.data.loaders import Arrays
from paceline.dist.world import World
from paceline.errors import UsageError


def mixing(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """A loss that is not a mean over samples: it depends on which samples are in the batch."""
    found = model(batch[0]).squeeze(-1)
    return {"loss": (found.mean(0) - batch[1].mean(0)).square().sum() + 0.1 * found.square().mean()}


CASES: tuple[tuple[Any, dict[str, Any]], ...] = (
    (per_sample, {"reduce": "exact"}),
    (per_batch, {"reduce": "exact", "accumulate": 2}),
    (mixing, {"reduce": "exact"}),
    (per_sample, {}),
    (per_batch, {"max_steps": 6}),
    (mixing, {"max_steps": 6}),
)
EXACT = 3


def with_outputs(objective: Any) -> Any:
    def wrapped(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {**objective(model, batch), "outputs": (model(batch[0]).squeeze(-1)[:, 0], batch[1][:, 0])}

    return wrapped


def rmse(found: Tensor, expected: Tensor) -> Tensor:
    return (found - expected).square().mean().sqrt()


class Number:
    def __init__(self) -> None:
        self.number = 0

    def update(self, found: Tensor, expected: Tensor) -> None:
        assert expected.equal(Y[self.number : self.number + len(expected), 0]), "in sample order"
        self.number += len(expected)

    def compute(self) -> int:
        return self.number

    def reset(self) -> None:
        self.number = 0


def train_all(world: World) -> list[Any]:
    out = []
    for objective, options in CASES:
        task = tokens(
            with_outputs(objective),
            metrics={"rmse": rmse, "number": Number()},
            validation={"main": Arrays((X, Y, MASK)), "first": Arrays((X[:9], Y[:9], MASK[:9]))},
        )
        trained = train_in(world, task, {"virtual_workers": 4, **options})
        out.append((trained.weights, trained.result.metrics, trained.watcher.steps[-1]["loss"]))
    return out


def test_the_same_on_any_number_of_workers() -> None:
    worlds = [result for workers in (1, 2, 3) for result in run_workers(train_all, workers)]
    first, *others = worlds
    for other in others:
        for number, ((weights, metrics, loss), (weights2, metrics2, loss2)) in enumerate(zip(first, other, strict=True)):
            assert {"loss", "rmse", "first/loss", "first/rmse"} <= metrics.keys()
            assert (metrics["number"], metrics["first/number"]) == (len(X), 9)
            if number < EXACT:
                assert all((weights[name] == weights2[name]).all() for name in weights)
                assert (metrics, loss) == (metrics2, loss2)
            for name in weights:
                assert weights[name] == pytest.approx(weights2[name], rel=1e-3, abs=1e-6)
            assert metrics == pytest.approx(metrics2, rel=1e-3)
    assert first[0][1]["rmse"] != first[0][1]["first/rmse"]


def with_torchmetrics(world: World) -> dict[str, float]:
    from torchmetrics.regression import PearsonCorrCoef  # it would wait for the other workers, if it looked for them

    task = tokens(with_outputs(per_sample), metrics={"pearson": PearsonCorrCoef()})
    return train_in(world, task, {"virtual_workers": 2, "reduce": "exact", "epochs": 1}).result.metrics


def test_torchmetrics_does_not_wait_for_other_workers() -> None:
    pytest.importorskip("torchmetrics", reason="install paceline[metrics]")
    one, other = run_workers(with_torchmetrics, 2)
    assert one == other == with_torchmetrics(ALONE)


def fail(world: World, where: str) -> str:
    def broken(*outputs: Tensor) -> float:
        assert world.rank == 0
        raise ZeroDivisionError("no positives")

    class Broken:
        def update(self, *outputs: Tensor) -> None:
            broken()

        def compute(self) -> float:
            return 0.0

        def reset(self) -> None: ...

    task = tokens(with_outputs(per_sample), metrics={"auc": broken if where == "compute" else Broken()})
    with pytest.raises(UsageError) as caught:
        train_in(world, task, {"virtual_workers": 2})
    return str(caught.value)


@pytest.mark.parametrize("where", ["update", "compute"])
def test_a_metric_that_fails_on_rank_0_ends_all_workers(where: str) -> None:
    assert set(run_workers(fail, 2, where)) == {"metric 'auc' failed: ZeroDivisionError: no positives"}


def own_loop(world: World, form: str) -> tuple[list[list[float]], list[float], dict[str, float]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    team = paceline.Parts(model, samples=len(X), global_batch=8, virtual_workers=4, reduce="exact", seed=0, world=world)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    objective = per_sample if form == "sample" else per_batch
    for step in team.epoch(0):
        for part in step:
            values = objective(model, (X[part.samples], Y[part.samples], MASK[part.samples]))
            part.backward(values["loss"], weight=values["weight"])
        losses.append(float(step.reduce()["loss"]))
        optimizer.step()
    found = team.evaluate(len(X), lambda i: objective(model, (X[i], Y[i], MASK[i])), batch=7)
    return [parameter.flatten().tolist() for parameter in model.parameters()], losses, found


def test_weights_in_your_own_loop() -> None:
    """Also equal to plain torch on whole batches."""
    ends = {
        form: [end for workers in (1, 2, 3) for end in run_workers(own_loop, workers, form)] for form in ("sample", "batch")
    }
    for one in ends.values():
        assert all(end == one[0] for end in one)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    team = paceline.Parts(model, samples=len(X), global_batch=8, virtual_workers=1, seed=0)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    bounds, order = team.sampler.cut(0).bounds, torch.from_numpy(team.sampler.order(0))
    for begin, end in pairwise(bounds):
        i = order[begin:end]
        total, count = squares(model, (X[i], Y[i], MASK[i]))
        optimizer.zero_grad()
        loss = total.sum() / count.sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        total, count = squares(model, (X, Y, MASK))
    for one in ends.values():
        weights, found_losses, found = one[0]
        assert weights[0] == pytest.approx(model.weight.flatten().tolist(), rel=1e-4)
        assert found_losses == pytest.approx(losses, rel=1e-5)
        assert found["loss"] == pytest.approx(float(total.sum() / count.sum()), rel=1e-5)
