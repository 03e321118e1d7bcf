"""fp16 on several workers: all of them skip the same steps, and exact mode has the same bits for any number of workers."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from harness.processes import run_workers
from harness.training import Trained, blobs, first_two, train_in
from paceline.dist.world import World
from paceline.training import precision, scaler
from paceline.training.precision import Trial
from paceline.training.task import Task, classify


def overflowing(**fields: Any) -> Task:
    """A loss whose gradients overflow in some steps, in one part only: where sample 5, and later where sample 40, is."""

    def objective(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        values: dict[str, Tensor] = first_two(classify())(model, batch)
        large = torch.where(torch.isin(batch[2], torch.tensor([5, 40])), 2000.0, 1.0)
        return {**values, "loss": values["loss"] * large}

    return blobs(objective=objective, **fields)


CASES: dict[str, dict[str, Any]] = {
    "sgd, clipped": {"clip_norm": 0.5},
    "adamw, averaged, noise measured": {"optimizer": "adamw", "base_lr": 0.01, "ema": 0.9, "measure_noise": True},
    "sharpness-aware": {"sam_rho": 0.05},
    "muon, adascale": {"optimizer": "muon", "lr_rule": "adascale", "reference_batch": 6},
}


def train(here: World, reduce: str) -> dict[str, Trained]:
    precision.run_trial = lambda threads, code, limit_s: Trial(ratio=2.0)
    scaler.GROWTH_STEPS = 4
    options = {"precision": "fp16", "reduce": reduce, "virtual_workers": 6, "epochs": 2}
    if reduce == "fast":
        options |= {"max_steps": 3, "base_lr": 0.02}
    task = overflowing(samples=96, norm=True, dropout=0.2)
    return {case: train_in(here, task, {**options, **more}) for case, more in CASES.items()}


def numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if "time" not in name and "per_s" not in name} for row in rows]


def test_exact_mode_has_the_same_bits_and_skips_the_same_steps_on_1_2_and_3_workers() -> None:
    (alone,) = run_workers(train, 1, "exact")
    for case, trained in alone.items():
        assert 0 < trained.watcher.steps[-1]["skipped_steps"] < 12, case
        assert len({row["loss_scale"] for row in trained.watcher.steps}) > 2, case
    for workers in (2, 3):
        for worker in run_workers(train, workers, "exact"):
            for case, trained in worker.items():
                assert trained.result.model_sha256 == alone[case].result.model_sha256, case
                assert numbers(trained.watcher.steps) == numbers(alone[case].watcher.steps), case


def test_fast_mode_agrees_to_rounding_and_all_workers_skip_alike() -> None:
    """Which steps overflow may depend on P there: DDP's workers compute P times their share of the gradient, then its mean."""
    (alone,), team = run_workers(train, 1, "fast"), run_workers(train, 2, "fast")
    for case in CASES:
        one, other = (numbers(worker[case].watcher.steps) for worker in team)
        assert one == other
        assert team[0][case].result.model_sha256 == team[1][case].result.model_sha256
        if one[-1]["skipped_steps"] == alone[case].watcher.steps[-1]["skipped_steps"]:
            for name, value in team[0][case].weights.items():
                np.testing.assert_allclose(value, alone[case].weights[name], atol=1e-2, err_msg=f"{case}: {name}")
