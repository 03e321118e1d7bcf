"""On a real GPU: weights, losses of a batch and collected outputs, with steps and validation replayed from CUDA graphs."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.tokens import MASK, X, Y, per_sample, tokens
from harness.training import Trained, train_in
from paceline.dist.world import World, world
from paceline.training.build import Run
from paceline.training.task import Task
from paceline.training.validation import _Set

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test ARGS=tests/gpu"),
]


@pytest.fixture(scope="module")
def here() -> Iterator[World]:
    with world() as found:
        yield found


def per_batch(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Without a mask as an index, which would wait for the GPU."""
    values = per_sample(model, batch)
    weight = values["weight"].sum()
    return {"loss": (values["loss"] * values["weight"]).sum() / weight.clamp(min=1), "weight": weight}


def mean(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {name: value.float().mean() for name, value in per_sample(model, batch).items() if name != "weight"}


def with_outputs(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {**per_sample(model, batch), "outputs": (model(batch[0]).squeeze(-1)[:, 0], batch[1][:, 0])}


def train(here: World, task: Task, options: dict[str, Any], fast: str) -> Trained:
    trained = train_in(here, task, {"epochs": 3, "virtual_workers": 2, **options, "fast": fast})
    if fast != "off":
        assert any(note.startswith("the step is captured") for note in trained.watcher.notes), trained.watcher.notes
    return trained


@pytest.mark.parametrize("fast", ["auto", "on"])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}])
@pytest.mark.parametrize("objective", [per_sample, per_batch, mean])
def test_captured_is_as_plain(here: World, objective: Any, options: dict[str, Any], fast: str) -> None:
    plain, quick = (train(here, tokens(objective), options, mode) for mode in ("off", fast))
    one, other = ([row["loss"] for row in trained.watcher.steps] for trained in (plain, quick))
    first, close = (5, 1e-2) if fast == "on" else (len(one), 1e-4)  # compiled kernels round differently, and steps add that up
    assert other[:first] == pytest.approx(one[:first], rel=1e-4 if fast == "auto" else 1e-3)
    assert quick.result.metrics == pytest.approx(plain.result.metrics, rel=close)
    for name, weight in plain.weights.items() if fast == "auto" else ():
        assert quick.weights[name] == pytest.approx(weight, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("objective", [per_sample, per_batch])
def test_exact_mode_has_the_same_bits(here: World, objective: Any) -> None:
    plain, quick = (train(here, tokens(objective), {"reduce": "exact", "virtual_workers": 4}, mode) for mode in ("off", "auto"))
    assert plain.result.model_sha256 == quick.result.model_sha256
    assert plain.result.metrics == quick.result.metrics


def test_a_captured_step_of_weight_zero_changes_nothing(here: World) -> None:
    task = tokens(
        per_sample, torch.zeros_like(MASK), validation_objective=lambda model, batch: {"loss": batch[1].square().mean(1)}
    )
    options = {"momentum": 0.0, "nesterov": False}
    one, other = (train(here, task, {**options, "epochs": epochs}, "auto") for epochs in (1, 3))
    assert all((one.weights[name] == other.weights[name]).all() for name in one.weights)
    assert {row["loss"] for row in other.watcher.steps} == {0.0}


def test_outputs_are_collected_from_captured_validation(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def rmse(found: Tensor, expected: Tensor) -> Tensor:
        assert found.device.type == expected.device.type == "cpu"
        assert expected.equal(Y[: len(expected), 0]), (
            "all samples, in order: no chunk of a graph was overwritten by the next replay"
        )
        return (found - expected).square().mean().sqrt()

    made: list[_Set] = []
    make = _Set.__init__

    def remember(self: _Set, run: Run, *rest: Any) -> None:
        make(self, run, *rest)
        made.append(self)

    monkeypatch.setattr(_Set, "__init__", remember)
    task = tokens(with_outputs, metrics={"rmse": rmse})
    plain, quick = (train(here, task, {}, mode) for mode in ("off", "auto"))
    assert [one._graph is not None for one in made] == [False, True]
    assert quick.result.metrics == pytest.approx(plain.result.metrics, rel=1e-4)
    assert len(X) % 7, "the last chunk is smaller, and runs without the graph"


def test_outputs_do_not_change_the_model(here: World) -> None:
    task = tokens(per_sample)
    collecting = replace(task, objective=with_outputs, metrics={"samples_seen": lambda found, expected: len(found)})
    hashes = {train(here, each, {"reduce": "exact"}, "auto").result.model_sha256 for each in (task, collecting)}
    assert len(hashes) == 1
