"""Law 1: the same V gives the same model on any number of workers: bit for bit in exact mode, to rounding over a few steps in
fast mode.

Each world runs every case once; what it ends with must not depend on how many workers it has.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from harness.processes import run_workers
from harness.training import ALONE, Trained, blobs, train_in
from paceline import models
from paceline.config import make_config
from paceline.data.augment import Images
from paceline.data.loaders import Arrays
from paceline.dist.world import World
from paceline.errors import UsageError
from paceline.training.build import build
from paceline.training.snapshots import list_snapshots
from paceline.training.task import Task, classify

PARTS = 5
"""No multiple of 2, 3 or 4: some workers have more parts than others."""


def pictures(model: str = "resnet:depth=8,width=4", **defaults: Any) -> Task:
    """A real net with batch norm on noise, augmented; 97 samples leave a tail whose parts differ in size."""

    def data(count: int, seed: int) -> Arrays:
        random = torch.Generator().manual_seed(seed)
        return Arrays((torch.randint(0, 256, (count, 1, 8, 8), dtype=torch.uint8, generator=random), torch.arange(count) % 3))

    return Task(
        name="pictures",
        model=lambda: models.build(model, in_channels=1, image_size=8, classes=3),
        train=lambda: data(97, 0),
        validation=lambda: data(23, 1),
        objective=classify(0.1),
        prepare=Images(mean=0.5, deviation=0.3, crop=1, flip=True, erase=0.5, seed=3),
        defaults={"virtual_workers": PARTS, "global_batch": 30, "base_lr": 0.05, "epochs": 2, "eval_batch": 7, **defaults},
    )


def dropping() -> Task:
    """Draws random numbers wherever a user may: in the model, and from every generator while preparing a batch."""
    task = blobs(norm=True, dropout=0.3)

    def prepare(batch: tuple[Any, ...], samples: torch.Tensor, epoch: int | None) -> tuple[Any, ...]:
        if epoch is None:
            return batch
        noise = torch.randn(batch[0].shape) * 0.1 + np.random.rand() * 0.1 + random.random() * 0.1
        return batch[0] + noise, *batch[1:]

    return replace(task, prepare=prepare, defaults={**task.defaults, "virtual_workers": PARTS, "global_batch": 20})


class Tuned(nn.Module):
    """A net as people fine-tune it: frozen weights, batch norm kept in evaluation, a layer that no pass uses, one that only
    some parts use, one used every time; called by its parts from the objective."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.never = nn.Linear(8, 3)
        self.sometimes = nn.Linear(8, 8)
        self.body.requires_grad_(False)

    def train(self, mode: bool = True) -> "Tuned":
        super().train(mode)
        self.body.eval()
        return self


def tuned(sometimes: bool) -> Task:
    """Which parts use `sometimes` depends on their samples alone; in some steps none does."""

    def objective(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        inputs, labels, numbers = batch
        features = model.body(inputs)
        if sometimes and int(numbers.sum()) % 4 == 0:
            features = features + model.sometimes(features)
        loss = nn.functional.cross_entropy(model.head(features), labels, reduction="none")
        return {"loss": loss}

    task = blobs(objective=objective)
    defaults = {**task.defaults, "virtual_workers": PARTS, "global_batch": 20, "weight_decay": 0.1, "decay_all": True}
    return replace(task, model=Tuned, defaults=defaults)


class LayerDrop(nn.Module):
    """Leaves layers out by one number for the whole pass, drawn where no layer shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))
        self.head = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if not self.training or random.random() < 0.5:
                inputs = inputs + layer(inputs).relu()
        return self.head(inputs)


def dropping_layers() -> Task:
    task = blobs()
    return replace(task, model=LayerDrop, defaults={**task.defaults, "virtual_workers": PARTS, "global_batch": 20})


def parts_of(index: bool) -> Task:
    """A model whose layers the objective calls one by one: by name, or by number."""

    def objective(model: Any, batch: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
        logits = model[1](model[0](batch[0])) if index else model.get_submodule("1")(next(iter(model.children()))(batch[0]))
        return {"loss": nn.functional.cross_entropy(logits, batch[1], reduction="none")}

    task = blobs(objective=objective)
    defaults = {**task.defaults, "virtual_workers": PARTS, "global_batch": 20}
    return replace(task, model=lambda: nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3)), defaults=defaults)


EXACT: dict[str, tuple[Task, dict[str, Any]]] = {
    "sgd, momentum, batch norm, augmentation": (pictures(), {}),
    "adamw, clipping": (pictures(), {"optimizer": "adamw", "base_lr": 0.01, "clip_norm": 0.5}),
    "micro-batches": (pictures(), {"accumulate": 2}),
    "two parts at once": (pictures(), {"parts_at_once": 2}),
    "bf16": (pictures(), {"precision": "bf16", "epochs": 1}),
    "ghosts within a part": (pictures("resnet:depth=8,width=4,norm=part,part_size=3"), {"epochs": 1}),
    "dropout, streamed": (dropping(), {"loader": "streaming", "loader_workers": 0}),
    "channels-last": (pictures("resnet:depth=8,width=4"), {"global_batch": 8 * PARTS, "epochs": 1}),
    "one sample a part": (pictures("resnet:depth=8,width=4,norm=group"), {"global_batch": PARTS, "epochs": 1}),
    "adascale, clipping, micro-batches": (
        pictures(),
        {"lr_rule": "adascale", "reference_batch": 6, "epochs": 1, "clip_norm": 1.0, "accumulate": 2},
    ),
    "sharpness-aware": (pictures(), {"sam_rho": 0.1, "epochs": 1}),
    "lars, gradient noise": (pictures(), {"optimizer": "lars", "base_lr": 2.0, "gradient_noise": 0.01, "epochs": 1}),
    "lamb": (pictures(), {"optimizer": "lamb", "base_lr": 0.01, "epochs": 1}),
    "novograd": (pictures(), {"optimizer": "novograd", "base_lr": 0.01, "epochs": 1}),
    "muon": (pictures(), {"optimizer": "muon", "fixed_norm": True, "epochs": 1}),
    "averaged weights": (pictures(), {"ema": 0.9, "epochs": 1}),
    "local steps": (pictures(), {"local_steps": 3, "epochs": 1}),
    "local steps, adamw, averaged weights": (
        pictures(),
        {"local_steps": 2, "local_after": 0.2, "ema": 0.9, "optimizer": "adamw", "base_lr": 0.01},
    ),
    "cuts of a part": (pictures(), {"norm_part": 4, "epochs": 1}),
    "frozen and unused": (tuned(sometimes=False), {}),
    "sometimes unused": (tuned(sometimes=True), {}),
    "sometimes unused, adamw, two at once": (
        tuned(sometimes=True),
        {"optimizer": "adamw", "base_lr": 0.01, "parts_at_once": 2, "epochs": 1},
    ),
}


def exact(world: World) -> dict[str, Trained]:
    cases = EXACT.items() if world.size <= 3 else list(EXACT.items())[:3]  # two parts at once leave three groups
    return {name: train_in(world, task, {"reduce": "exact", **options}) for name, (task, options) in cases}


def numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if "time" not in name and "per_s" not in name} for row in rows]


def assert_equal(one: Trained, other: Trained, case: str) -> None:
    assert one.result.model_sha256 == other.result.model_sha256, f"{case}: weights or running statistics differ"
    assert one.optimizer.keys() == other.optimizer.keys()
    for name, value in one.optimizer.items():
        np.testing.assert_array_equal(value, other.optimizer[name], err_msg=f"{case}: optimizer state {name}")
    assert numbers(one.watcher.steps) == numbers(other.watcher.steps), f"{case}: metrics of steps differ"
    assert numbers(one.watcher.epochs) == numbers(other.watcher.epochs), f"{case}: metrics of epochs differ"


def test_exact_mode_gives_the_same_bits_for_any_number_of_workers() -> None:
    (alone,) = run_workers(exact, 1)
    hashes = {trained.result.model_sha256 for trained in alone.values()}
    assert len(hashes) == len(alone), "cases that should train different models do not"
    for workers in (2, 3, 5):
        for worker in run_workers(exact, workers):
            for case, trained in worker.items():
                assert_equal(alone[case], trained, f"{case}, {workers} workers")


def looked_at(world: World, folder: Path) -> dict[str, Any]:
    """What a run ends with that keeps snapshots and looks at its layers, beside the same run without."""
    found = {}
    for name, options in (("plain", {}), ("looked at", {"snapshots": 4, "watch_layers": 3})):
        record = folder / name
        trained = train_in(world, pictures(), {"reduce": "exact", **options}, record / "checkpoints")
        files = {path.name: path.read_bytes() for _, path in list_snapshots(record)}
        found[name] = trained.result.model_sha256, numbers(trained.watcher.layers_rows), files
    return found


def test_snapshots_and_watched_layers_keep_the_bits_and_are_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    (alone,) = run_workers(looked_at, 1, tmp_path / "1")
    sha256, rows, files = alone["looked at"]
    assert alone["plain"] == (sha256, [], {})
    assert ([row["step"] for row in rows], len(files)) == ([3, 6], 4)
    main, other = run_workers(looked_at, 2, tmp_path / "2")
    assert main == alone
    assert other["looked at"][0] == sha256


FEW = {"max_steps": 3, "epochs": 1, "base_lr": 0.02, "check_every": 1}
FAST: dict[str, tuple[Task, dict[str, Any]]] = {
    "together": (pictures(), {}),
    "in turn": (pictures(), {"parts_at_once": 1}),
    "two at once": (pictures(), {"parts_at_once": 2}),
    "ghosts within a part": (pictures("resnet:depth=8,width=4,norm=part,part_size=3"), {}),
    "one norm over the step": (pictures("resnet:depth=8,width=4,norm=sync"), {}),
    "dropout": (dropping(), {}),
    "micro-batches": (pictures(), {"accumulate": 2}),
    "noise measured": (pictures(), {"measure_noise": True}),
    "adascale": (pictures(), {"lr_rule": "adascale", "reference_batch": 6}),
    "sharpness-aware": (pictures(), {"sam_rho": 0.1}),
    "gradient noise, muon": (pictures(), {"optimizer": "muon", "gradient_noise": 0.01}),
    "averaged weights": (pictures(), {"ema": 0.9}),
    "local steps": (pictures(), {"local_steps": 2, "local_after": 0.0}),
    "cuts of a part": (pictures(), {"norm_part": 4}),
    "a tail of unequal parts": (pictures(), {"global_batch": 60, "max_steps": 2}),
    "frozen and unused": (tuned(sometimes=False), {}),
    "sometimes unused": (tuned(sometimes=True), {"parts_at_once": 1, "max_steps": 5}),
    "sometimes unused, clipped, noise measured": (
        tuned(sometimes=True),
        {"parts_at_once": 1, "clip_norm": 0.5, "measure_noise": True},
    ),
    "layers called by number": (parts_of(index=True), {}),
    "random numbers that no layer shows": (dropping_layers(), {}),
    "layers called by name": (parts_of(index=False), {}),
}


def fast(world: World) -> dict[str, Trained]:
    found = {name: train_in(world, task, {**FEW, **options}) for name, (task, options) in FAST.items()}
    if world.size == PARTS:  # plain batch norm, no virtual workers at all: what one worker rehearses with V parts
        found["together"] = train_in(world, pictures(), {**FEW, "virtual_workers": None})
    return found


def test_fast_mode_agrees_to_rounding_over_a_few_steps() -> None:
    (alone,) = run_workers(fast, 1)
    for same in ("in turn", "two at once"):  # how parts run is no part of the mathematics
        assert_close(alone["together"], alone[same], same)
    for workers in (2, 3, 5):
        for worker in run_workers(fast, workers):
            for case, trained in worker.items():
                assert_close(alone[case], trained, f"{case}, {workers} workers")


def both_modes(world: World) -> dict[str, Trained]:
    options = {**FEW, "parts_at_once": 1, "max_steps": 5}
    return {mode: train_in(world, tuned(sometimes=True), {**options, "reduce": mode}) for mode in ("fast", "exact")}


def test_a_parameter_that_no_part_used_is_left_alone_in_both_modes() -> None:
    torch.manual_seed(0)
    for workers in (1, 2):
        for worker in run_workers(both_modes, workers):
            assert_close(worker["fast"], worker["exact"], f"exact against fast, {workers} workers")
            for mode, trained in worker.items():
                for name in ("never.weight", "never.bias", "body.0.weight", "body.1.running_mean"):
                    before = untrained()[name]
                    np.testing.assert_array_equal(trained.weights[name], before, err_msg=f"{mode}, {workers} workers: {name}")
                assert not np.array_equal(trained.weights["sometimes.weight"], untrained()["sometimes.weight"])
                (note,) = trained.watcher.notes
                assert "2 of 10 trainable parameters got no gradient in the first step (first: never.weight)" in note


def untrained() -> dict[str, np.ndarray]:
    """The weights that `tuned` starts from."""
    run = build(tuned(sometimes=True), make_config(tuned(sometimes=True).defaults), ALONE)
    return {name: tensor.numpy().copy() for name, tensor in run.model.state_dict().items()}


def assert_close(one: Trained, other: Trained, case: str) -> None:
    for name, weights in one.weights.items():
        np.testing.assert_allclose(other.weights[name], weights, rtol=2e-4, atol=2e-5, err_msg=f"{case}: {name}")
    for mine, theirs in zip(one.watcher.steps, other.watcher.steps, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4), case


class Custom(nn.BatchNorm1d):
    pass


class Counting(nn.Module):
    """A model with a buffer of its own that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = self.seen + 1
        return self.linear(inputs)


class Comparing(nn.Module):
    """Looks across the samples of a batch, where no layer shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(inputs)
        return logits - 9 * logits.mean(0) if self.training else logits


class Noisy(nn.Module):
    """Draws random numbers where no layer shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(nn.functional.dropout(inputs, 0.5, self.training))


def task_of(model: type[nn.Module] | nn.Module) -> Task:
    task = blobs()
    make = (lambda: model) if isinstance(model, nn.Module) else model
    return replace(task, model=make, defaults={**task.defaults, "virtual_workers": 4, "epochs": 1})


def refusals(world: World) -> dict[str, str]:
    """What cannot be the same anywhere says so, or runs in turn."""
    custom = nn.Sequential(nn.Linear(5, 8), Custom(8), nn.Linear(8, 3))
    sync = pictures("resnet:depth=8,width=4,norm=sync")
    cases = {
        "custom norm, two at once": (task_of(custom), {"parts_at_once": 2}),
        "sync norm, exact": (sync, {"reduce": "exact"}),
        "sync norm, in turn": (sync, {"parts_at_once": 1}),
        "sync norm, sharpness-aware": (sync, {"sam_rho": 0.1}),
        "sync norm, adascale": (sync, {"lr_rule": "adascale"}),
        "sync norm, noise": (sync, {"measure_noise": True}),
        "across samples": (task_of(Comparing), {}),
        "a buffer, exact": (task_of(Counting), {"reduce": "exact"}),
        "more workers than parts": (blobs(), {"virtual_workers": 1}),
        "fewer groups than workers": (blobs(), {"virtual_workers": 4, "parts_at_once": 4, "reduce": "exact"}),
    }
    said = {}
    for name, (task, options) in cases.items():
        try:
            train_in(world, task, options)
        except UsageError as error:
            said[name] = str(error)
    train_in(world, task_of(Comparing), {"parts_at_once": 1})
    said["noisy"] = " ".join(train_in(world, task_of(Noisy), {"parts_at_once": 2}).watcher.notes)
    said["noisy in turn"] = " ".join(train_in(world, task_of(Noisy), {}).watcher.notes)
    return said


def test_what_cannot_be_the_same_says_so() -> None:
    for said in run_workers(refusals, 2):
        assert "is a Custom" in said["custom norm, two at once"]
        assert "takes its statistics over all workers" in said["sync norm, exact"]
        assert "must run at once" in said["sync norm, in turn"]
        for what in ("sharpness-aware", "adascale", "noise"):
            assert "needs each part's own gradient" in said[f"sync norm, {what}"]
        assert "mixes the samples of a batch; use --parts-at-once 1" in said["across samples"]
        assert "changes the buffer seen" in said["a buffer, exact"]
        assert "use at most 1 worker," in said["more workers than parts"]
        assert "1 group of the 4 parts" in said["fewer groups than workers"]
        assert "--parts-at-once 1 keys them by part" in said["noisy"]
        assert said["noisy in turn"] == ""
