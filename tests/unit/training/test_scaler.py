"""fp16 with a loss scale: overflows skip a step, the scale adjusts itself, and everything else sees plain gradients."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.training import ALONE, Trained, blobs, first_two, train_in
from paceline.config import make_config
from paceline.dist.world import World, world
from paceline.errors import Diverged
from paceline.optim import OPTIMIZERS, make_optimizer
from paceline.training import precision, scaler
from paceline.training.build import build
from paceline.training.loop import fit
from paceline.training.precision import Trial
from paceline.training.scaler import FIRST_SCALE, MOST_IN_A_ROW, Scaler
from paceline.training.task import classify

PLAIN = {"momentum": 0.0, "weight_decay": 0.0, "schedule": "constant", "epochs": 1}


@pytest.fixture(scope="module")
def here() -> Iterator[World]:
    with world() as found:
        yield found


@pytest.fixture(autouse=True)
def no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the trial in a child process by its answer."""
    monkeypatch.setattr(precision, "run_trial", lambda threads, code, limit_s: Trial(ratio=2.0))
    monkeypatch.setattr(precision, "_known", {})


def times(factor: float) -> Any:
    """The loss of `blobs`, multiplied: its scaled gradients do not fit into float16 until the scale is small enough."""

    def objective(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        values: dict[str, Tensor] = first_two(classify())(model, batch)
        return {**values, "loss": values["loss"] * factor}

    return objective


def nan_for(samples: set[int]) -> Any:
    """An objective whose loss is nan for these training samples."""

    def objective(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        bad = torch.isin(batch[2], torch.tensor(sorted(samples))) & model.training
        values: dict[str, Tensor] = classify()(model, (torch.where(bad[:, None], math.nan, batch[0]), batch[1]))
        return values

    return objective


def fp16(here: World, task: Any, **options: Any) -> Trained:
    return train_in(here, task, {"precision": "fp16", **options})


def test_it_learns_and_weights_stay_float32(here: World) -> None:
    for options in ({}, {"optimizer": "adamw", "base_lr": 0.01}, {"optimizer": "lamb", "base_lr": 0.02}, {"fast": "off"}):
        trained = fp16(here, blobs(300), epochs=4, **options)
        assert trained.watcher.epochs[-1]["val_accuracy"] > 0.6, options
        assert all(value.dtype == np.float32 for value in trained.weights.values())
        assert {row["loss_scale"] for row in trained.watcher.steps} == {FIRST_SCALE}
        assert not any("skipped" in note for note in trained.watcher.notes)


def test_the_loss_and_the_update_are_those_of_fp32_up_to_rounding(here: World) -> None:
    """The scale must show nowhere: not in the loss, not behind clipping, noise scale, AdaScale, SAM or averaged weights."""
    cases: list[dict[str, Any]] = [
        {},
        {"clip_norm": 0.01},
        {"measure_noise": True},
        {"lr_rule": "adascale", "reference_batch": 6},
        {"sam_rho": 0.1},
        {"ema": 0.9},
        {"gradient_noise": 0.01},
        {"accumulate": 2},
    ]
    for options in cases:
        options = {"virtual_workers": 2, "epochs": 1, **options}
        half, full = fp16(here, blobs(), **options), train_in(here, blobs(), {"precision": "fp32", **options})
        for one, other in zip(half.watcher.steps, full.watcher.steps, strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=0.02), options
            if "noise_scale" in other and math.isfinite(other["noise_scale"]):
                assert one["noise_scale"] == pytest.approx(other["noise_scale"], rel=0.05)
        for name, value in half.weights.items():
            np.testing.assert_allclose(value, full.weights[name], atol=0.02, err_msg=f"{options}: {name}")


def test_an_overflow_skips_the_step_and_halves_the_scale(here: World) -> None:
    """A loss that is a hundred times larger overflows at first. The weights do not move until the scale is small enough."""
    trained = fp16(here, blobs(objective=times(100.0)), **PLAIN, base_lr=1e-5)
    rows = trained.watcher.steps
    skipped = int(rows[-1]["skipped_steps"])
    assert 0 < skipped < len(rows)
    assert [row["loss_scale"] for row in rows[: skipped + 1]] == [
        *(FIRST_SCALE / 2 ** (i + 1) for i in range(skipped)),
        FIRST_SCALE / 2**skipped,
    ]
    assert all(math.isfinite(row["loss"]) for row in rows), "the scale shows in the loss"
    (said,) = [note for note in trained.watcher.notes if "skipped" in note]
    assert said.startswith(f"fp16: {skipped} steps skipped in this epoch, {skipped} in the run, because gradients overflowed")
    short = fp16(here, blobs(objective=times(100.0)), **PLAIN, base_lr=1e-5, max_steps=skipped)
    one_more = fp16(here, blobs(objective=times(100.0)), **PLAIN, base_lr=1e-5, max_steps=skipped + 1)
    untrained = fp16(here, blobs(objective=times(100.0)), **PLAIN, base_lr=1e-30, max_steps=1)
    assert short.result.model_sha256 == untrained.result.model_sha256 != one_more.result.model_sha256


def test_the_scale_doubles_after_enough_good_steps(here: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaler, "GROWTH_STEPS", 3)
    rows = fp16(here, blobs(), **PLAIN, max_steps=7).watcher.steps
    assert [row["loss_scale"] / FIRST_SCALE for row in rows] == [1, 1, 2, 2, 2, 4, 4]


def test_one_bad_sample_costs_one_step_and_only_nan_is_a_divergence(here: World) -> None:
    trained = fp16(here, blobs(objective=nan_for({5})), epochs=2)
    assert trained.watcher.steps[-1]["skipped_steps"] == 2  # once per epoch
    assert all(math.isfinite(epoch["train_loss"]) for epoch in trained.watcher.epochs)
    with pytest.raises(Diverged, match=rf"diverged: {MOST_IN_A_ROW + 1} steps in a row were skipped .*\(loss nan\)"):
        fp16(here, blobs(600, objective=nan_for(set(range(600)))), epochs=2)


def test_a_resumed_run_has_the_scale_and_the_bits_of_one_that_was_not_stopped(
    here: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaler, "GROWTH_STEPS", 5)
    options = {"checkpoint_every": "3", "reduce": "exact", "base_lr": 1e-5, "virtual_workers": 2, "optimizer": "adamw"}
    objective = times(100.0)
    calm = fp16(here, blobs(objective=objective), **options)
    passes = 0

    def failing(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        nonlocal passes
        passes += 1
        if passes == 29:  # in step 13 of 18, after an overflow
            raise InterruptedError
        found: dict[str, Tensor] = objective(model, batch)
        return found

    with pytest.raises(InterruptedError):
        train_in(here, blobs(objective=failing), {"precision": "fp16", **options}, tmp_path)
    resumed = train_in(here, blobs(objective=failing), {"precision": "fp16", **options}, tmp_path, resumes=True)
    assert resumed.result.model_sha256 == calm.result.model_sha256
    ours, theirs = resumed.watcher.steps, calm.watcher.steps[-len(resumed.watcher.steps) :]
    assert len(ours) < len(calm.watcher.steps)
    for name in ("step", "loss", "loss_scale", "skipped_steps"):
        assert [row[name] for row in ours] == [row[name] for row in theirs]
    assert len({row["loss_scale"] for row in theirs}) > 1, "the scale did not change: the test shows nothing"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_undone_where_an_optimizer_does_not_look(name: str) -> None:
    """On a GPU, without waiting for it: the bits of weights and state from before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer, tested = make_optimizer(model, make_config({"optimizer": name, "fast": "off"})), Scaler(ALONE.device)

    def train(overflow: bool) -> dict[str, Tensor]:
        model(torch.randn(12, 6)).square().mean().backward()
        if overflow:
            next(model.parameters()).grad.fill_(math.inf)  # type: ignore[union-attr]
        tested.unscale(model.parameters())
        tested._step_or_restore(optimizer)
        optimizer.zero_grad()
        state = {f"{n}.{k}": v for n, each in optimizer.state_dict()["state"].items() for k, v in each.items()}
        return {name: torch.as_tensor(v).clone() for name, v in {**dict(model.named_parameters()), **state}.items()}

    one, two, three = train(False), train(True), train(False)
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    assert not torch.equal(two["0.weight"], three["0.weight"])
    assert all(value.isfinite().all() for value in three.values())


def test_a_fused_optimizer_skips_by_itself() -> None:
    """What the GPU path relies on, tried with torch's fused kernels of the CPU."""
    for kind, options in ((torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {})):
        weight = nn.Parameter(torch.ones(3))
        optimizer = kind([weight], lr=0.1, fused=True, **options)
        assert optimizer._step_supports_amp_scaling
        for overflow in (0.0, 1.0):
            before = weight.detach().clone()
            weight.grad = torch.full((3,), math.nan if overflow else 1.0)
            optimizer.found_inf = torch.tensor(overflow)
            optimizer.step()
            assert torch.equal(before, weight) == bool(overflow)
        assert all(value.isfinite().all() for value in optimizer.state[weight].values())


def test_the_noise_scale_is_measured_on_plain_gradients(here: World) -> None:
    """Its two parts are kept across steps, so they must not be in units of a scale that changes."""
    states = []
    for kind in ("fp16", "fp32"):
        run = build(
            blobs(), make_config(blobs().defaults, {"precision": kind, "measure_noise": True, "virtual_workers": 2}), here
        )
        fit(run, [])
        assert run.parts.engine.noise is not None
        states.append(run.parts.engine.noise.state.tolist())
    assert states[0] == pytest.approx(states[1], rel=0.05)
