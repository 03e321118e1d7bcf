"""Law 6: after every step all workers hold the same weights; a run checks this and says so."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.processes import run_workers
from harness.training import Trained, blobs, train_in
from paceline.dist.agree import fingerprints
from paceline.dist.world import World
from paceline.errors import WorkersDisagree
from paceline.training.task import classify

OPTIONS: list[dict[str, Any]] = [{}, {"optimizer": "adamw", "base_lr": 0.01}, {"clip_norm": 0.1, "accumulate": 4}]


def honest(world: World) -> list[Trained]:
    return [train_in(world, blobs(31, norm=True, dropout=0.1), {"global_batch": 24, **options}) for options in OPTIONS]


def test_workers_end_with_the_same_weights() -> None:
    for first, *others in zip(*run_workers(honest, 3), strict=True):
        for other in others:
            assert first.result.model_sha256 == other.result.model_sha256
            assert first.watcher.epochs[0]["val_loss"] == other.watcher.epochs[0]["val_loss"]
            for name, weights in first.weights.items():
                np.testing.assert_array_equal(weights, other.weights[name])


def faulty(world: World, kind: str) -> str:
    """Worker 1 changes one bit of one weight on its third forward pass."""
    passes = 0

    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        nonlocal passes
        passes += model.training
        if world.rank == 1 and passes == 3 and model.training:
            with torch.no_grad():
                bias = dict(model.named_parameters())["3.bias"]
                bias[2] = torch.nextafter(bias[2], torch.tensor(9.0))
        return classify()(model, batch[:2])

    options = {"check_every": 5} if kind == "step" else {"check_every": 0}
    try:
        train_in(world, blobs(objective=objective), {"base_lr": 1e-6, **options})
    except WorkersDisagree as error:
        return str(error)
    return "nobody noticed"


def faulty_both(world: World) -> list[str]:
    return [faulty(world, kind) for kind in ("step", "epoch")]


def test_one_wrong_bit_is_found_on_every_worker() -> None:
    for messages in run_workers(faulty_both, 3):
        for when, message in zip(("after step 5", "after epoch 1"), messages, strict=True):
            assert when in message
            assert "3.bias" in message
            assert "between worker 0 and worker 1;" in message


def test_fingerprints_see_value_place_and_type() -> None:
    plain = torch.arange(1000.0)
    swapped = plain.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    changed = plain.clone()
    changed[999] = torch.nextafter(changed[999], torch.tensor(0.0))
    zeros, negative = torch.zeros(8), -torch.zeros(8)
    kinds = [plain, swapped, changed, plain.double(), plain.bfloat16(), zeros, negative, torch.zeros(9), torch.tensor(3)]
    assert len(set(fingerprints(kinds).tolist())) == len(kinds)
    assert fingerprints([plain]).equal(fingerprints([plain.clone()]))


def test_fingerprints_of_a_tensor_larger_than_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    big = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    whole = fingerprints([big])
    monkeypatch.setattr("paceline.dist.agree._CHUNK", 999)
    assert fingerprints([big]).equal(whole)
