"""Steps of several rounds, and what a script of one's own does once for all workers, on 1, 2 and 3 workers."""

import contextlib
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from harness.processes import run_workers
from paceline.dist.world import World
from paceline.training.weights import model_sha256

X = torch.randn(103, 5, generator=torch.Generator().manual_seed(1))


class Pair(nn.Module):
    """A critic, and a generator with batch norm and dropout that draws noise."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 5))
        self.critic = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))


def alternate(world: World, reduce: Any, freeze: bool) -> tuple[str, list[float], list[float]]:
    torch.manual_seed(0)
    model = Pair()
    loader = DataLoader(TensorDataset(X), batch_size=24)
    team = paceline.Parts(model, loader, virtual_workers=6, reduce=reduce, seed=3)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9) for part in (model.critic, model.generator)]
    told = []

    def judge(batch: list[Tensor]) -> Tensor:
        drawn = model.generator(torch.randn(len(batch[0]), 3)).detach()
        return F.softplus(-model.critic(batch[0])) + F.softplus(model.critic(drawn))

    def deceive(batch: list[Tensor]) -> Tensor:
        return F.softplus(-model.critic(model.generator(torch.randn(len(batch[0]), 3))))

    for epoch in range(2):
        for step in team.epoch(epoch):
            told.append(step.backward(judge)["loss"].item())
            optimizers[0].step()
            model.critic.requires_grad_(not freeze)
            told.append(step.backward(deceive)["loss"].item())
            optimizers[1].step()
            model.critic.requires_grad_(True)
    values = [value for tensor in model.state_dict().values() for value in tensor.double().flatten().tolist()]
    return model_sha256(model), told, values


@pytest.mark.parametrize("freeze", [False, True])
def test_two_rounds_train_the_same_bits_on_1_2_and_3_workers(freeze: bool) -> None:
    found = [result[:2] for workers in (1, 2, 3) for result in run_workers(alternate, workers, "exact", freeze)]
    assert all(other == found[0] for other in found[1:])


def test_two_rounds_agree_to_rounding_in_fast_mode() -> None:
    found = [result for workers in (1, 2, 3) for result in run_workers(alternate, workers, "fast", True)]
    for _, told, values in found[1:]:
        assert told == pytest.approx(found[0][1], rel=1e-4, abs=1e-5)
        assert values == pytest.approx(found[0][2], rel=1e-3, abs=1e-4)


def once(world: World) -> tuple[str, Any, Any, Any]:
    team = paceline.Parts(nn.Linear(5, 1), samples=103, global_batch=24, virtual_workers=3)
    loader = DataLoader(TensorDataset(X, torch.arange(103)), batch_size=20)
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        paceline.print("hello")
    seen, total, squares = 0, 0, torch.zeros(2)
    for points, numbers in team.deal(loader):
        seen += len(numbers)
        total += points.sum(dtype=torch.float64).item()
        squares += torch.tensor([len(numbers), numbers.sum()])
    exact = team.evaluate(loader, lambda batch: {"number": batch[1], "first": batch[0][:, 0]})
    return written.getvalue(), paceline.total(seen, total), paceline.total(squares).tolist(), exact


def test_dealt_batches_add_up_and_rank_0_alone_prints() -> None:
    for workers in (1, 2, 3):
        found = run_workers(once, workers)
        assert [said for said, *_ in found] == ["hello\n"] + [""] * (workers - 1)
        for _, (seen, total), squares, exact in found:
            assert (seen, squares) == (103, [103, 103 * 51])
            assert total == pytest.approx(X.double().sum().item(), rel=1e-12)
            assert exact == {"number": 51.0, "first": X[:, 0].double().mean().item()}


def few(world: World) -> Any:
    """One batch for two workers: the second has none, and its sum is the integer 0."""
    team = paceline.Parts(nn.Linear(5, 1), samples=103, global_batch=24)
    total = 0
    for (points,) in team.deal(DataLoader(TensorDataset(X), batch_size=103)):
        total += float(points[0, 0])
    return paceline.total(total)


def test_a_worker_without_a_batch_takes_part() -> None:
    assert run_workers(few, 2) == [float(X[0, 0])] * 2
