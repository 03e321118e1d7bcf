"""--watch-layers: norms of gradients, update-to-weight ratios, and which layers are said to be too fast or too slow."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.training import ALONE, Trained, blobs, first_two, train_in
from paceline import Hooks, Moment
from paceline.config import make_config
from paceline.errors import UsageError
from paceline.records import read_metrics
from paceline.training.layers import FarLayers, GradientNorms, LayerWatch, layers_of
from paceline.training.run import train
from paceline.training.task import Task, classify

PLAIN = {"momentum": 0.0, "weight_decay": 0.0, "schedule": "constant", "max_steps": 4, "watch_layers": 1}


def recorded(task: Task, **options: Any) -> tuple[Trained, list[dict[str, np.ndarray]]]:
    """Train, and the weights before the first step and after each."""
    seen: list[dict[str, np.ndarray]] = []

    def look(moment: Moment) -> None:
        seen.append({name: value.detach().numpy().copy() for name, value in moment.model.named_parameters()})

    task = replace(task, hooks=Hooks(on_start=look, on_step=look))
    return train_in(ALONE, task, {**PLAIN, **options}), seen


def length(*values: np.ndarray) -> float:
    return math.sqrt(sum(float((value.astype(np.float64) ** 2).sum()) for value in values))


def weighted(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
    values: dict[str, Tensor] = first_two(classify())(model, batch)
    return {**values, "weight": (batch[2] % 3).float()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"virtual_workers": 4, "accumulate": 2},
        {"reduce": "exact", "virtual_workers": 3},
        {"precision": "fp16"},
        {"ema": 0.9},
        {"objective": weighted},
    ],
)
def test_a_row_has_the_gradient_and_how_far_the_weights_moved(options: dict[str, Any]) -> None:
    """With plain SGD the gradient is the change of the weights divided by the learning rate."""
    given = {name: value for name, value in options.items() if name != "objective"}
    trained, seen = recorded(blobs(objective=options.get("objective")), **given)
    rows = trained.watcher.layers_rows
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row, before, after in zip(rows, seen, seen[1:], strict=False):
        assert (row["epoch"], row["names"]) == (1, ["0", "3"])
        for place, name in enumerate(row["names"]):
            old, new = ([at[f"{name}.weight"], at[f"{name}.bias"]] for at in (before, after))
            moved = length(*(a - b for a, b in zip(old, new, strict=True)))
            assert moved > 0
            assert row["update_ratio"][place] == pytest.approx(moved / length(*old), rel=2e-3)
            assert row["gradient_norm"][place] == pytest.approx(moved / 0.05, rel=2e-3)


@pytest.mark.parametrize("changed", [{"clip_norm": 1e-3}, {"gradient_noise": 0.5}])
def test_the_gradient_is_that_before_clipping_and_noise(changed: dict[str, Any]) -> None:
    (first, *_), (same, *_) = (train_in(ALONE, blobs(), {**PLAIN, **more}).watcher.layers_rows for more in ({}, changed))
    assert first["gradient_norm"] == same["gradient_norm"]
    assert first["update_ratio"] != same["update_ratio"]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars", "lamb", "novograd", "muon"])
def test_the_weights_are_the_same_bits(optimizer: str) -> None:
    options = {"optimizer": optimizer, "virtual_workers": 2, "clip_norm": 1.0}
    plain, watched = (train_in(ALONE, blobs(norm=True, dropout=0.2), {**options, "watch_layers": every}) for every in (0, 4))
    assert watched.result.model_sha256 == plain.result.model_sha256
    assert [row["step"] for row in watched.watcher.layers_rows] == [4, 8, 12, 16]
    assert all(ratio > 0 for row in watched.watcher.layers_rows for ratio in row["update_ratio"])
    assert not plain.watcher.layers_rows


def test_a_tasks_own_optimizer() -> None:
    task = blobs(optimizer=lambda model, config: torch.optim.RMSprop(model.parameters(), lr=0.01))
    rows = train_in(ALONE, task, {"watch_layers": 3, "optimizer": "own"}).watcher.layers_rows
    assert len(rows) == 6
    assert all(ratio > 0 for row in rows for ratio in row["update_ratio"])


def test_rows_are_in_the_record_and_not_twice_after_a_resume(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[Any] = []
    task = blobs(hooks=Hooks(on_step=lambda moment: rows.extend(moment.rows)))
    train(task, watch_layers=2, name="x", epochs=1)
    train(task, watch_layers=2, resume=str(runs / "x"), epochs=2)
    found = [row for row in read_metrics(runs / "x") if row["kind"] == "layers"]
    assert [row["step"] for row in found] == list(range(2, 19, 2))
    assert found[0].keys() == {"kind", "step", "epoch", "time_s", "names", "gradient_norm", "update_ratio"}
    assert [row["step"] for row in rows if row["kind"] == "layers"] == list(range(2, 19, 2))
    capsys.readouterr()


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.first, self.frozen, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.tied = nn.Linear(5, 5)
        self.tied.weight = self.first.weight
        self.unused, self.zero = nn.Linear(2, 2), nn.Linear(5, 5, bias=False)
        nn.init.zeros_(self.zero.weight)
        self.frozen.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = self.tied(self.first(inputs)).relu()
        return self.last(self.frozen(inputs) + self.zero(inputs)) * self.scale


def test_layers_are_modules_with_trained_parameters_of_their_own() -> None:
    names, places = layers_of(Odd())
    assert names == ["(model)", "first", "last", "tied", "unused", "zero"]
    assert [names[place] for place in places] == [
        "(model)",
        "first",
        "first",
        "last",
        "last",
        "tied",
        "unused",
        "unused",
        "zero",
    ]


def test_layers_without_weights_or_gradients() -> None:
    row, *_ = train_in(ALONE, replace(blobs(), model=Odd), PLAIN).watcher.layers_rows
    of = {name: (gradient, ratio) for name, gradient, ratio in zip(*list(row.values())[3:], strict=True)}
    assert of["unused"] == (0.0, 0.0)
    assert of["zero"][0] > 0
    assert of["zero"][1] is None
    assert all(min(of[name]) > 0 for name in ("(model)", "first", "last", "tied"))


def test_norms_of_all_kinds_of_gradients() -> None:
    kinds = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
    values = [nn.Parameter(torch.zeros(4, 4, dtype=dtype)) for dtype in (*kinds, torch.float32, torch.float32)]
    for value in values[:4]:
        value.grad = torch.full_like(value, 2.0**15)
    values[5].grad = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2, 4), (4, 4), check_invariants=True)
    norms = GradientNorms(values)
    norms.take()
    assert norms.values.tolist() == [0] * 6, "this step is not watched"
    norms.wanted = True
    norms.take()
    assert norms.values.tolist() == [2.0**17] * 4 + [0, 4], "2^17 does not fit into float16"


def test_what_is_not_finite_is_null() -> None:
    model = nn.Linear(2, 2, bias=False)
    norms = GradientNorms(list(model.parameters()))
    watch = LayerWatch(model, norms, 1)
    with watch.around(0):
        norms.values.fill_(math.inf)
        with torch.no_grad():
            model.weight.fill_(math.nan)
    assert watch.read(0) == {"names": ["(model)"], "gradient_norm": [None], "update_ratio": [None]}
    assert watch.read(0) is None


def test_what_has_no_common_gradient_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--local-steps cannot be combined with .*--watch-layers"):
        make_config({"watch_layers": 5, "local_steps": 2, "virtual_workers": 2})
    with pytest.raises(UsageError, match="--watch-layers: the task has its own step function, which this option cannot change"):
        train_in(ALONE, blobs(step=lambda step, model, optimizers: None), {"watch_layers": 5})


def uneven() -> Task:
    """Three layers of the same function; the first has large weights and the last has small ones."""

    def model() -> nn.Module:
        found = nn.Sequential(
            nn.Linear(5, 16, bias=False), nn.ReLU(), nn.Linear(16, 16, bias=False), nn.ReLU(), nn.Linear(16, 3, bias=False)
        )
        with torch.no_grad():
            found[0].weight.mul_(16)
            found[4].weight.div_(16)
        return found

    return replace(blobs(), model=model)


def test_lars_and_lamb_move_all_layers_alike() -> None:
    """One learning rate for all layers moves the last one more than 100 times as fast as the median. LARS and LAMB give each
    layer the rate that fits its weights."""
    options = {"watch_layers": 6, "weight_decay": 0.0}
    plain = train_in(ALONE, uneven(), {**options, "base_lr": 1e-4}).watcher.layers_rows[0]
    spread = max(plain["update_ratio"]) / min(plain["update_ratio"])
    assert spread > 100**2
    assert [line.split(";")[0].split(" (")[0].split(" as ")[1:] for line in told("sgd", plain)] == [
        ["slowly", "the median layer"],
        ["fast", "the median layer"],
    ]
    for optimizer, rate in (("lars", 5.0), ("lamb", 0.01)):
        rows = train_in(ALONE, uneven(), {**options, "optimizer": optimizer, "base_lr": rate}).watcher.layers_rows
        for row in rows:
            assert max(row["update_ratio"]) < 2 * min(row["update_ratio"]), optimizer
            assert told(optimizer, row) == []


def row_of(*ratios: float | None, gradients: list[float | None] | None = None) -> dict[str, Any]:
    names = [f"conv{number}" for number in range(len(ratios))]
    return {"names": names, "update_ratio": list(ratios), "gradient_norm": gradients or [1.0] * len(ratios)}


def told(optimizer: str, row: dict[str, Any]) -> list[str]:
    """What two equal rows say."""
    far = FarLayers(optimizer)
    assert far.lines(row) == [], "a single row may be the start of a parameter that was 0"
    return far.lines(row)


def test_far_layers_are_told_once_per_direction() -> None:
    far = FarLayers("sgd plain")
    assert far.lines(row_of(5e-4, 5e-4, 5e-4, 0.05, 5e-6, None)) == []
    assert far.lines(row_of(5e-4, 0.5, 5e-4, 5e-4)) == []
    assert far.lines(row_of(5e-4, 0.12, 5e-4, 5e-4)) == [
        "layer conv1 moves 240 times as fast as the median layer (update-to-weight ratio 0.12, median 0.0005); LARS and LAMB"
        " correct this (--optimizer lars)"
    ]
    assert far.lines(row_of(5e-4, 0.12, 5e-4, 5e-4)) == []
    assert far.lines(row_of(5e-4, 3e-6, 5e-4, 5e-4)) == []
    assert far.lines(row_of(5e-4, 2e-6, 5e-4, 5e-4)) == [
        "layer conv1 moves 250 times as slowly as the median layer (update-to-weight ratio 2e-06, median 0.0005); LARS and LAMB"
        " correct this (--optimizer lars)"
    ]
    assert far.lines(row_of(5e-4, 2e-6, 5e-4, 0.2)) == []
    assert far.lines(row_of(5e-4, 2e-6, 5e-4, 0.1)) == [
        "layer conv3 moves 200 times as fast as the median layer (update-to-weight ratio 0.1, median 0.0005); LARS and LAMB"
        " correct this (--optimizer lars)"
    ]


def test_layers_that_do_not_move() -> None:
    still = row_of(0.01, 0.0, 0.01, 0.0, gradients=[1.0, 0.0, 1.0, 2.0])
    assert told("sgd plain", {**still, "update_ratio": [0.01, 0.0, 0.01, 0.01]}) == [
        "layer conv1 does not move (update-to-weight ratio 0, median 0.01): its gradient is 0"
    ]
    assert told("sgd plain", {**still, "update_ratio": [0.01, 0.01, 0.01, 0.0]}) == [
        "layer conv3 does not move (update-to-weight ratio 0, median 0.01): it has a gradient, but its steps are 0"
    ]
    dead = told("sgd plain", row_of(0.0, 0.0, 0.1))
    assert [line.partition(" (")[0] for line in dead] == ["layer conv0 does not move", "layer conv1 does not move"]
    for none in (row_of(0.0, 0.0, 0.0), row_of(None), row_of()):
        assert told("sgd plain", none) == []


def test_advice_depends_on_the_optimizer_and_many_layers_are_few_lines() -> None:
    lines = told("lars momentum 0.9, trust 0.001", row_of(*[1.0] * 12, *[1e3] * 9))
    assert len(lines) == 6
    assert lines[0].endswith("; --adapt-all scales the steps of norm layers and biases, too")
    assert lines[-1] == "4 more layers too fast or too slow: see the report"


def test_the_printer_prints_them(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(uneven(), watch_layers=6, weight_decay=0.0, base_lr=1e-4, name="x")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("health: layer")]
    assert len(lines) == 2
    assert lines[1].startswith("health: layer 4 moves ")
