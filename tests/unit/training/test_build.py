"""What a run is put together from: the layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from harness.training import blobs, train_in
from paceline.config import make_config
from paceline.dist.world import world
from paceline.errors import UsageError
from paceline.training import tasks
from paceline.training.build import build
from paceline.training.model import suits_channels_last


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"fast": "off"}, False),
        ({"model": "mlp"}, False),
        ({"virtual_workers": 2}, False),
        ({"virtual_workers": 2, "parts_at_once": 1}, True),
        ({"model": "cnn:width=4,norm=part"}, False),
        ({"global_batch": 7}, False),
        ({"global_batch": 28, "accumulate": 4}, False),
    ],
)
def test_where_channels_come_last(options: dict[str, Any], expected: bool) -> None:
    with world() as here:
        run = build(*tasks.resolve("fashion-mnist-mini", {"model": "cnn:width=4", "global_batch": 64, **options}), here)
    convs = [module for module in run.model.modules() if isinstance(module, nn.Conv2d)]
    assert all(conv.weight.is_contiguous(memory_format=torch.channels_last) for conv in convs[1:]) == (expected or not convs)
    assert suits_channels_last(run.model, run.config, run.sampler.global_batch // run.sampler.parts) == expected


def test_the_layout_changes_nothing_but_rounding() -> None:
    options = {"model": "resnet:depth=8,width=4", "max_steps": 4, "global_batch": 16, "log_every": 1}
    with world() as here:
        plain, fast = (train_in(here, *_task({**options, "fast": mode})) for mode in ("off", "auto"))
    losses = [[row["loss"] for row in trained.watcher.steps] for trained in (plain, fast)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert plain.result.model_sha256 != fast.result.model_sha256  # or nothing was tested


class Flattens(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv, self.linear, self.how = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4 * 28 * 28, 10), how

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.linear(x.view(x.size(0), -1) if self.how == "view" else x.flatten(1))


@pytest.mark.parametrize("how", ["view", "flatten"])
def test_a_net_that_needs_the_usual_layout_keeps_it(how: str) -> None:
    task, _ = tasks.resolve("fashion-mnist-mini", {})
    with world() as here:
        task = replace(task, model=lambda: Flattens(how))
        trained = train_in(here, task, {"max_steps": 2, "global_batch": 16})
    assert trained.result.steps == 2
    assert [note[:40] for note in trained.watcher.notes] == ["convolutions keep torch's default layout"] * (how == "view")


class Grows(nn.Module):
    """A layer that takes part from the second pass on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.later, self.passes = nn.Linear(5, 3), nn.Linear(5, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.first(x) + self.later(x) if self.passes > 2 else self.first(x)


def test_a_parameter_whose_gradient_comes_late() -> None:
    with world() as here:
        trained = train_in(here, replace(blobs(), model=Grows), {"max_steps": 5})
    assert trained.result.steps == 5


def _task(options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    task, config = tasks.resolve("fashion-mnist-mini", options)
    assert config == make_config(vars(config))
    return task, vars(config)


def test_a_compiled_model_is_taken_as_it_was_before(tmp_path: Path) -> None:
    """Whole, or in parts: names in files are those of the bare model, and --fast decides what is compiled."""
    bare = blobs()
    assert bare.model is not None

    def whole() -> nn.Module:
        return torch.compile(bare.model())  # type: ignore[misc,return-value]

    def parts() -> nn.Module:
        model = bare.model()  # type: ignore[misc]
        model[0] = torch.compile(model[0])  # type: ignore[index]
        return model

    with world() as here:
        config = make_config(bare.defaults, {"epochs": 1})
        expected = build(bare, config, here)
        for made in (whole, parts):
            run = build(replace(bare, model=made), config, here)
            assert list(run.model.state_dict()) == list(expected.model.state_dict())
            assert any("--fast decides what to compile" in note for note in run.notes)
            assert not expected.notes


@pytest.mark.parametrize(("asked", "used"), [(1, 1), (6, 6), (7, 6), (64, 6)])
def test_more_micro_batches_than_a_part_has_pairs_of_samples(asked: int, used: int) -> None:
    with world() as here:
        run = build(blobs(), make_config(blobs().defaults, {"accumulate": asked}), here)
    assert run.contract.accumulate == used == len(run.steps(0, range(1))[0].passes)
    said = f"--accumulate is {asked}, but a part has 12 samples and a micro-batch needs two: --accumulate 6 is used"
    assert run.notes == ((said,) if asked > used else ())


def test_a_built_in_net_needs_images() -> None:
    task = replace(blobs(), model=None, classes=3, train=[{"x": 3}] * 24)
    with (
        world() as here,
        pytest.raises(UsageError, match="--model builds nets for images as tensors; task blobs has samples"),
    ):
        build(task, make_config(task.defaults, {"loader_workers": 0}), here)


def test_the_contract_says_how_samples_are_augmented() -> None:
    def said(task: Any, options: dict[str, Any]) -> str:
        made, config = tasks.resolve(task, {"train_samples": 20, "model": "linear", **options} if task == MINI else options)
        with world() as here:
            contract = build(made, config, here).contract
        return dict(contract.lines())["augmentation"]

    options = {"crop": 2, "erase": 0.25, "label_smoothing": 0.1, "pixels": "unit"}
    words = "flip left to right, crop after padding by 2, erase with probability 0.25; pixels in [0, 1]; label smoothing 0.1"
    assert said(MINI, options) == words
    assert said(MINI, {"flip": False}) == "none; pixels standardized (mean 0.286, deviation 0.353)"
    assert said(blobs(), {}) == "none"
    assert said(blobs(prepare=lambda batch, samples, epoch: batch), {}) == "the task's own prepare"


MINI = "fashion-mnist-mini"


def test_an_option_of_another_schedule_is_noted() -> None:
    config = make_config(blobs().defaults, {"schedule": "cosine", "step_at": "2,4"})
    with world() as here:
        assert build(blobs(), config, here).notes == (
            "--step-at does nothing with --schedule cosine: it belongs to --schedule step",
        )
