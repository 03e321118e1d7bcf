"""Laws 1, 2 and 5 while the global batch changes during a run, by a fixed schedule or by the noise scale."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from harness.processes import run_workers
from harness.training import ALONE, Trained, blobs, train_in
from paceline.core.sampler import Sampler
from paceline.dist.world import World
from paceline.phases import Phase, make_phases
from paceline.training.task import classify

FIXED = {"batch_schedule": "0:8 0.4:16 1.5:32", "virtual_workers": 4, "smallest_part": 4, "epochs": 3, "global_batch": 32}
"""2, 4 and 4 parts. Phases change in the middle of epochs 0 and 1. 103 samples leave tails."""
AUTO = {**FIXED, "batch_schedule": "auto:8", "batch_noise_ratio": 0.2, "epochs": 6}
EXACT = {"reduce": "exact"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fixed": ({"norm": True, "dropout": 0.2}, FIXED),
    "fixed, averaged": ({"norm": True}, {**FIXED, "ema": 0.9, "batch_lr_power": 1.0, "schedule": "cosine"}),
    "fixed, sharpness-aware": ({"norm": True}, {**FIXED, "sam_rho": 0.05}),
    "fixed, micro-batches": ({}, {**FIXED, "accumulate": 2}),
    "fixed, streamed": ({}, {**FIXED, "loader": "streaming", "loader_workers": 1}),
    "fixed, shrinking": ({"norm": True}, {**FIXED, "batch_schedule": "0:32 0.5:8 1.2:16"}),
    "auto": ({"norm": True}, AUTO),
    "auto, averaged": ({}, {**AUTO, "ema": 0.9, "schedule": "linear", "optimizer": "adamw", "base_lr": 0.01}),
    "auto, warmed up": ({}, {**AUTO, "schedule": "cosine", "warmup_epochs": 2.5}),
    "auto, sharpness-aware": ({}, {**AUTO, "sam_rho": 0.05}),
    "auto, streamed": ({}, {**AUTO, "loader": "streaming", "loader_workers": 1}),
}


def train_all(world: World) -> dict[str, Trained]:
    return {name: train_in(world, blobs(**task), {**options, **EXACT}) for name, (task, options) in CASES.items()}


def timeless(trained: Trained) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if "time" not in name} for row in trained.watcher.steps]


def batches(trained: Trained) -> list[tuple[float, int]]:
    return [(row["epoch"], row["global_batch"]) for row in trained.watcher.phases]


@pytest.fixture(scope="module")
def alone() -> dict[str, Trained]:
    (found,) = run_workers(train_all, 1, timeout_s=120)
    return found


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_same_bits_on_any_number_of_workers(alone: dict[str, Trained], workers: int) -> None:
    """Up to half of the workers have no part in the first phase."""
    for rank, found in enumerate(run_workers(train_all, workers, timeout_s=170)):
        for name, trained in found.items():
            assert trained.result.model_sha256 == alone[name].result.model_sha256, (name, rank)
            assert timeless(trained) == timeless(alone[name]), (name, rank)
            assert batches(trained) == batches(alone[name])
            for key, value in alone[name].optimizer.items():
                np.testing.assert_array_equal(trained.optimizer[key], value)


def train_fast(world: World) -> Trained:
    task, options = CASES["fixed"]
    return train_in(world, blobs(**task), options)


def test_fast_mode_agrees_to_rounding_with_idle_workers() -> None:
    """Two of four workers have no part in the first phase: DDP averages over all of them."""
    alone = train_in(ALONE, blobs(**CASES["fixed"][0]), CASES["fixed"][1])
    for trained in run_workers(train_fast, 4, timeout_s=120):
        assert batches(trained) == batches(alone)
        losses, expected = ([row["loss"] for row in found.watcher.steps] for found in (trained, alone))
        np.testing.assert_allclose(losses, expected, rtol=1e-3)
        for name, value in alone.weights.items():
            np.testing.assert_allclose(trained.weights[name], value, rtol=1e-3, atol=1e-5)


def test_phases_begin_where_the_schedule_says(alone: dict[str, Trained]) -> None:
    """At the first step that starts at the time or later: sample 41.2 of 103 is within the step from 40 to 48."""
    assert batches(alone["fixed"]) == [(0, 8), (48 / 103, 16), (1 + 64 / 103, 32)]
    assert [row["lr_scale"] for row in alone["fixed"].watcher.phases] == [0.25**0.25, 0.5**0.25, 1]
    assert [row["virtual_workers"] for row in alone["fixed"].watcher.phases] == [2, 4, 4]
    assert [row["virtual_workers"] for row in alone["fixed, shrinking"].watcher.phases] == [4, 2, 4]


def test_auto_grows_by_doubling_and_never_shrinks(alone: dict[str, Trained]) -> None:
    for name in CASES:
        if name.startswith("auto"):
            sizes = [size for _, size in batches(alone[name])]
            assert sizes == [8, 16, 32], (name, batches(alone[name]))
            begun = [row["step"] for row in alone[name].watcher.phases]
            assert min(np.diff(begun)) >= 8, "a decision from fewer steps of a phase"


def test_auto_grows_at_the_first_place_after_eight_steps() -> None:
    """Places are 12.9 samples apart: the eighth step (to sample 64) passes none, the ninth (to 72) does. In epoch 1 the eighth
    step of the next phase is one of the two smaller ones at the end, after which nothing is decided: so after step 18.
    """
    trained = train_in(ALONE, blobs(), {**AUTO, **EXACT, "batch_noise_ratio": 1e-9})
    assert [row["step"] for row in trained.watcher.phases] == [0, 9, 19]


def test_auto_that_does_not_reach_the_largest_batch_says_so() -> None:
    stays = train_in(ALONE, blobs(), {**AUTO, **EXACT, "batch_noise_ratio": 1e9})
    assert stays.watcher.notes[-1].startswith("the batch stayed at 8: ")
    short = train_in(ALONE, blobs(), {**AUTO, **EXACT, "batch_noise_ratio": 1e-9, "max_steps": 12})
    assert short.watcher.notes[-1].endswith(", and did not reach 32")


def test_auto_decides_in_the_last_step_only_for_a_longer_run() -> None:
    """The first decision comes after step 9 (see above): it begins no phase in a run of 9 steps."""
    options = {**AUTO, **EXACT, "batch_noise_ratio": 1e-9}
    trained = train_in(ALONE, blobs(), {**options, "max_steps": 9})
    assert batches(trained) == [(0, 8)]
    assert trained.watcher.notes[-1] == "the batch stayed at 8: it doubles when the noise scale is 1e-09 times as large"
    assert batches(train_in(ALONE, blobs(), {**options, "max_steps": 10})) == [(0, 8), (72 / 103, 16)]


def test_auto_reports_only_batches_that_were_trained_if_the_target_is_reached() -> None:
    """64 samples: the first decision comes after the eighth step, the last of an epoch after which the run ends."""
    options = {**AUTO, **EXACT, "batch_noise_ratio": 1e-9, "target_accuracy": 0.01}
    trained = train_in(ALONE, blobs(64), options)
    assert (trained.result.status, trained.result.steps) == ("target reached", 8)
    assert trained.watcher.notes[-1].startswith("the batch stayed at 8: ")
    assert len(batches(train_in(ALONE, blobs(64), {**options, "target_accuracy": 0.0}))) > 1


def test_auto_that_cannot_start_lower_says_so_at_its_start_and_end() -> None:
    trained = train_in(ALONE, blobs(), {**AUTO, **EXACT, "batch_schedule": "auto:32"})
    assert any(note.startswith("--batch-schedule auto:32 starts at the global batch of 32") for note in trained.watcher.notes)
    assert trained.watcher.notes[-1] == "the batch was 32 from the start: it could not grow"


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("auto")])
def test_the_phases_that_auto_found_train_the_same_model(alone: dict[str, Trained], name: str) -> None:
    found = alone[name].watcher.notes[-1]
    prefix = 'the batch grew by --batch-schedule "'
    assert found.startswith(prefix)
    task, options = CASES[name]
    fixed = {**options, **EXACT, "batch_schedule": found.removeprefix(prefix).rstrip('"'), "measure_noise": True}
    again = train_in(ALONE, blobs(**task), fixed)
    assert batches(again) == batches(alone[name])
    assert again.result.model_sha256 == alone[name].result.model_sha256


def interrupt(world: World, folder: Path, name: str, at: int) -> None:
    """Train up to a step, as if the machine had failed there: what is kept is the last checkpoint."""
    task, options = CASES[name]
    seen: list[int] = []

    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        if model.training and (folder / f"step-{at:09d}.safetensors").exists():
            seen.append(1)
            if len(seen) > 3:
                raise KeyboardInterrupt
        return classify()(model, batch[:2])

    whole = {**options, **EXACT, "checkpoint_every": str(at)}
    with pytest.raises(KeyboardInterrupt):
        train_in(world, blobs(objective=objective, **task), whole, folder)


def resume(world: World, folder: str, name: str, at: int) -> Trained:
    task, options = CASES[name]
    return train_in(world, blobs(**task), {**options, **EXACT, "checkpoint_every": str(at)}, Path(folder), resumes=True)


@pytest.mark.parametrize("name", ["fixed", "fixed, averaged", "fixed, shrinking", "auto", "auto, averaged", "auto, streamed"])
@pytest.mark.parametrize("at", [3, 6, 9])
def test_interrupted_in_one_phase_and_resumed_on_other_workers(
    alone: dict[str, Trained], tmp_path: Path, name: str, at: int
) -> None:
    interrupt(ALONE, tmp_path, name, at)
    for trained in run_workers(resume, 2 if at % 2 else 3, str(tmp_path), name, at, timeout_s=60):
        assert trained.watcher.steps[0]["step"] > at - 1
        assert trained.result.model_sha256 == alone[name].result.model_sha256
        steps = timeless(alone[name])
        assert timeless(trained) == steps[len(steps) - len(trained.watcher.steps) :]


def test_a_decision_does_not_depend_on_when_a_run_was_resumed(alone: dict[str, Trained], tmp_path: Path) -> None:
    """Resumed after every fourth step."""
    task, options = CASES["auto"]
    steps = len(alone["auto"].watcher.steps)
    for stop in range(1, steps, 4):
        length = {"max_steps": stop, "schedule": "constant", "checkpoint_every": "1"}
        train_in(ALONE, blobs(**task), {**options, **EXACT, **length}, tmp_path, resumes=stop > 1)
    last = {"schedule": "constant", "checkpoint_every": "1"}
    trained = train_in(ALONE, blobs(**task), {**options, **EXACT, **last}, tmp_path, resumes=True)
    whole = train_in(ALONE, blobs(**task), {**options, **EXACT, **last})
    assert trained.result.model_sha256 == whole.result.model_sha256


# --- law 2 ---


@st.composite
def samplers(draw: st.DrawFn, dealt: bool = False) -> Sampler:
    parts = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    starts = sorted(draw(st.sets(st.floats(0.001, 3.9), min_size=len(sizes) - 1, max_size=len(sizes) - 1)))
    pairs = [(start, size * parts) for start, size in zip([0.0, *starts], sizes, strict=True)]
    smallest = 1 if dealt else draw(st.integers(1, 4))
    largest = max(size for _, size in pairs)
    cut = [Phase(s, b, parts if b == largest or dealt else min(parts, max(1, b // smallest))) for s, b in pairs]
    phases = tuple(Phase(p.start, p.global_batch // p.parts * p.parts, p.parts) for p in cut)
    return Sampler(draw(st.integers(parts, 200)), largest, parts, 0, None, dealt, phases)


@settings(max_examples=200, deadline=None)
@given(st.booleans().flatmap(lambda dealt: samplers(dealt)))
def test_every_epoch_of_any_schedule_uses_each_sample_once(sampler: Sampler) -> None:
    before = 0
    for epoch in range(6):
        cut = sampler.cut(epoch)
        assert sampler.first_step(epoch) == before
        before += cut.steps
        assert cut.bounds[0] == 0
        assert cut.bounds[-1] == sampler.samples
        assert (np.diff(cut.bounds) > 0).all()
        assert (np.diff(cut.phases) >= 0).all()
        order = sampler.order(epoch)
        assert sorted(order.tolist()) == list(range(sampler.samples))
        used = []
        for number in range(cut.steps):
            step, phase = sampler.first_step(epoch) + number, sampler.phases[cut.phases[number]]
            assert sampler.place(step) == (epoch, number)
            assert sampler.phase_of(step) == phase
            assert sampler.samples_before(step) == epoch * sampler.samples + cut.bounds[number]
            bounds = sampler.part_bounds(epoch, number)
            assert len(bounds) == phase.parts + 1
            assert (bounds[0], bounds[-1]) == tuple(cut.bounds[number : number + 2])
            sizes = np.diff(bounds)
            assert sizes.min() >= 1, "an empty part"
            assert sizes.max() - sizes.min() <= 1
            used += order[bounds[0] : bounds[-1]].tolist()
        assert sorted(used) == list(range(sampler.samples))
    assert sum(sampler.count_by_phase(before)) == before


@settings(max_examples=100, deadline=None)
@given(samplers())
def test_a_phase_begins_with_the_first_step_at_its_time_or_later(sampler: Sampler) -> None:
    for epoch in range(5):
        cut = sampler.cut(epoch)
        for number, phase in enumerate(cut.phases):
            at = epoch + cut.bounds[number] / sampler.samples
            assert sampler.phases[phase].start <= at + 0.011 / sampler.samples, "a phase began before its time"
        begun = [[each for each in sampler.phases if each.start <= epoch + late / sampler.samples][-1] for late in (0, 0.01)]
        assert sampler.phases[cut.phases[0]] in begun


def test_the_samples_of_each_phase_are_trained_on_once() -> None:
    """As the objective sees them, on three workers."""
    seen = run_workers(watch, 3)
    for epoch in range(3):
        samples = [sample for one in seen for at, numbers in one if at == epoch for sample in numbers]
        assert sorted(samples) == list(range(103))


def watch(world: World) -> list[tuple[int, list[int]]]:
    seen: list[tuple[int, list[int]]] = []
    epoch = 0

    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        nonlocal epoch
        if model.training:
            seen.append((epoch, batch[2].tolist()))
        elif torch.is_grad_enabled() is False and seen and seen[-1][0] == epoch:
            epoch += 1
        return classify()(model, batch[:2])

    train_in(world, blobs(objective=objective), {**FIXED, **EXACT})
    return seen


def test_parts_of_a_phase_do_not_depend_on_workers() -> None:
    phases = make_phases([(0.0, 8), (0.4, 16), (1.5, 32)], 4, 4)
    assert [(phase.parts, phase.part_batch) for phase in phases] == [(2, 4), (4, 4), (4, 8)]
