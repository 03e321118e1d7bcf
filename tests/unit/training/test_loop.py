"""The loop and the step: weighting, accumulation, limits, precision, what ends a run."""

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from harness.training import Trained, blobs, train_in
from paceline.config import make_config
from paceline.dist.place import Place
from paceline.dist.world import choose_device, world
from paceline.errors import Diverged, PacelineError, UsageError
from paceline.records import ROW_FIELDS, read_metrics, read_result
from paceline.training.build import Run, build
from paceline.training.loop import fit
from paceline.training.run import train
from paceline.training.step import TrainStep
from paceline.training.task import Task, classify
from paceline.training.weights import model_sha256


def alone(task: Task, **options: Any) -> Trained:
    with world() as here:
        return train_in(here, task, options)


PLAIN = {"momentum": 0.0, "weight_decay": 0.0, "schedule": "constant", "epochs": 1}


def test_a_run_repeats_bit_for_bit() -> None:
    first, second, other = (alone(blobs(norm=True, dropout=0.2), seed=seed) for seed in (0, 0, 1))
    assert first.result.model_sha256 == second.result.model_sha256
    assert [row["loss"] for row in first.watcher.steps] == [row["loss"] for row in second.watcher.steps]
    assert other.result.model_sha256 != first.result.model_sha256


def test_the_training_loss_is_the_mean_over_the_epochs_samples() -> None:
    """The last step is smaller: 103 samples in steps of 12."""
    watcher = alone(blobs(), epochs=2, log_every=1).watcher
    sizes = [12] * 8 + [7]
    for epoch in watcher.epochs:
        steps = [row for row in watcher.steps if row["epoch"] == epoch["epoch"]]
        for name in ("loss", "accuracy"):
            mean = sum(size * row[name] for size, row in zip(sizes, steps, strict=True)) / 103
            assert epoch[f"train_{name}"] == pytest.approx(mean)


def test_a_validation_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int, int]] = []
    monkeypatch.setattr("harness.training.Watcher.validating", lambda self, *numbers: told.append(numbers))
    alone(blobs(), epochs=1)
    assert told == [(1, done, 5) for done in range(1, 6)]  # 41 samples, 10 at a time


def test_it_learns_with_each_optimizer_and_precision() -> None:
    options: list[dict[str, Any]] = [{}, {"optimizer": "adamw", "base_lr": 0.01}, {"precision": "bf16"}, {"clip_norm": 0.5}]
    for option in options:
        trained = alone(blobs(600), epochs=6, **option)
        first, last = trained.watcher.steps[0], trained.watcher.epochs[-1]
        assert last["val_loss"] < 0.7 * first["loss"], option
        assert last["val_accuracy"] > 0.6, option  # chance is a third
        assert all(value.dtype == np.float32 for value in trained.weights.values())


def test_rows_are_written_where_the_learning_rate_turns() -> None:
    options = {"global_batch": 20, "reference_batch": 20, "base_lr": 0.25, "schedule": "one-cycle", "log_every": 25}
    trained = alone(blobs(600), epochs=3, **options)  # 90 steps, and the peak after 30% of them
    steps = [row["step"] for row in trained.watcher.steps]
    assert steps == [25, 28, 30, 55, 60, 85, 90]  # a row's step counts from 1
    rates = [row["lr"] for row in trained.watcher.steps]
    assert max(rates) == rates[steps.index(28)] == 0.25


def test_bf16_is_really_used() -> None:
    seen = set()

    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        logits = model(batch[0])
        seen.add(logits.dtype)
        return {"loss": torch.nn.functional.cross_entropy(logits.float(), batch[1], reduction="none")}

    alone(blobs(objective=objective), epochs=1, precision="bf16")
    assert seen == {torch.bfloat16}


def test_clipping_bounds_the_update() -> None:
    """With plain SGD the first step moves the weights by lr times the gradient's norm: at most lr times the bound."""
    start = alone(blobs(), max_steps=1, base_lr=1e-30, **{**PLAIN, "weight_decay": 0.0})
    for bound in (0.01, 0.0):
        end = alone(blobs(), max_steps=1, base_lr=1.0, clip_norm=bound, **PLAIN)
        moved = sum(float(np.square(end.weights[name] - start.weights[name]).sum()) for name in start.weights) ** 0.5
        assert (moved <= 0.01 * 1.001) if bound else (moved > 0.02)


def test_limits() -> None:
    assert alone(blobs(), max_steps=5).result.steps == 5
    assert len(alone(blobs(), epochs=3).watcher.epochs) == 3
    stopped = alone(blobs(300), epochs=30, target_accuracy=0.5, patience=3)
    assert stopped.result.status == "target reached"
    reached = [row["val_accuracy"] >= 0.5 for row in stopped.watcher.epochs]
    assert reached[-3:] == [True] * 3
    assert not any(all(reached[i : i + 3]) for i in range(len(reached) - 3)), "it went on after the target was reached"
    assert alone(blobs(), target_accuracy=1.0).result.status == "done"


def test_patience_counts_epochs_in_a_row() -> None:
    """Accuracy by script: over the target in epochs 1, 3 and 4. Two in a row are reached after the fourth.

    The first value is for the look before training: does the objective report an accuracy at all?
    """
    script = iter([0.0, 0.9, 0.1, 0.9, 0.9, 0.9, 0.9])

    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        values = classify()(model, batch[:2])
        if not model.training:
            values["accuracy"] = torch.full_like(values["accuracy"], next(script))
        return values

    trained = alone(blobs(objective=objective), epochs=6, target_accuracy=0.85, patience=2, eval_batch=1000)
    assert trained.result.epochs == 4


def test_learning_rates_are_the_schedules_own() -> None:
    by_step = alone(blobs(120), schedule="linear", epochs=2, base_lr=0.1)
    lrs = [row["lr"] for row in by_step.watcher.steps]
    assert lrs == pytest.approx([0.1 * (1 - i / 20) for i in range(20)])
    by_epoch = alone(blobs(120), schedule="linear", schedule_by="epoch", epochs=2, base_lr=0.1)
    assert [row["lr"] for row in by_epoch.watcher.steps] == pytest.approx([0.1] * 10 + [0.05] * 10)


def test_a_validation_loss_that_is_not_finite_is_divergence_too() -> None:
    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        values = classify()(model, batch[:2])
        return values if model.training else {**values, "loss": values["loss"] * float("nan")}

    with pytest.raises(Diverged, match=r"the validation loss is nan at step 9 \(epoch 1\)"):
        alone(blobs(objective=objective))


@pytest.mark.parametrize(
    ("first", "last", "validation", "diverges"),
    [
        (1.0, 2e4, 2e4, True),
        (0.01, 2e4, 2e4, True),
        (50.0, 2e4, 2e4, False),
        (50.0, 6e5, 6e5, True),
        (1.0, 2e4, 3.0, False),
        (1.0, 1.0, 2e4, False),
        (1.0, 1.0, 2e8, True),
    ],
)
def test_a_finite_loss_that_exploded_is_divergence(first: float, last: float, validation: float, diverges: bool) -> None:
    """Measured by the loss of the first step, or by 1 if that is less."""
    passes = 0

    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        nonlocal passes
        passes += model.training
        loss = classify()(model, batch[:2])["loss"]
        return {"loss": loss * 0 + ((first if passes == 1 else last) if model.training else validation)}

    if not diverges:
        assert alone(blobs(objective=objective), epochs=1).result.status == "done"
        return
    with pytest.raises(Diverged) as caught:
        alone(blobs(objective=objective), epochs=1)
    assert f"the validation loss is {validation:.4g} (in the first step: {first:g}) at step 9 (epoch 1), lr" in str(
        caught.value
    )


@pytest.mark.parametrize("name", ["step", "epoch", "lr", "kind", "time_s", "noise_scale", "gain", "samples_per_s", "a\nb", 7])
def test_a_metric_cannot_take_the_place_of_a_field_of_the_record(name: Any) -> None:
    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        values = classify()(model, batch[:2])
        return {**values, name: values["loss"]}

    with pytest.raises(UsageError, match=r"returned a metric named .*: use plain text other than") as caught:
        alone(blobs(objective=objective), epochs=1)
    assert "\n" not in str(caught.value)


def test_every_field_of_a_row_is_known_as_ours() -> None:
    """So that no metric can overwrite it."""
    options = {"epochs": 1, "measure_noise": True, "virtual_workers": 2, "lr_rule": "adascale"}
    watcher = alone(blobs(), **options).watcher
    fields = {name for row in (*watcher.steps, *watcher.epochs) for name in row if not name.startswith(("val_", "train_"))}
    assert {"noise_scale", "gain", "samples_per_s"} <= fields
    assert fields - {"loss", "accuracy"} <= ROW_FIELDS


def test_a_tasks_name_cannot_lead_out_of_the_runs_folder() -> None:
    for name in ("../../escaped", "a/b", "..", "", "-x", "a\nb", "\x1b[2J"):
        with pytest.raises(UsageError, match=r"a task's name, .* is .*: it must (be a plain name|not contain control)"):
            Task(**{**vars(blobs()), "name": name})


def test_a_tracker_that_is_not_installed_leaves_no_record(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"TensorBoard is not installed; pip install 'paceline\[trackers\]'"):
        train(blobs(), tracker="tensorboard")
    assert not runs.exists()


def test_objectives_that_break_their_promise() -> None:
    def no_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return {"accuracy": classify()(model, batch[:2])["accuracy"]}

    with pytest.raises(UsageError, match="a dict with 'accuracy': it must have 'loss'"):
        alone(blobs(objective=no_loss))


def test_label_smoothing_leaves_validation_alone() -> None:
    model, batch = nn.Linear(5, 3), (torch.randn(4, 5), torch.tensor([0, 1, 2, 0]))
    smooth, plain = classify(0.3), classify()
    assert not smooth(model.train(), batch)["loss"].equal(plain(model.train(), batch)["loss"])
    assert smooth(model.eval(), batch)["loss"].equal(plain(model.eval(), batch)["loss"])


def test_the_objective_sees_the_model_itself() -> None:
    names = set()

    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        names.add(tuple(name for name, _ in model.named_parameters()))
        assert model.get_submodule("0").out_features == 8
        return classify()(model, batch[:2])

    alone(blobs(objective=objective), epochs=1)
    assert names == {("0.weight", "0.bias", "3.weight", "3.bias")}


def test_too_few_samples_and_empty_data() -> None:
    with pytest.raises(UsageError, match="validation data is empty"):
        alone(blobs(validation=0))
    with pytest.raises(UsageError, match="training data is empty"):
        alone(blobs(samples=0))


def test_the_model_hash_sees_names_and_bits() -> None:
    model = nn.Linear(2, 2)
    before = model_sha256(model)
    assert before == model_sha256(model)
    with torch.no_grad():
        model.weight[0, 0] = torch.nextafter(model.weight[0, 0], torch.tensor(9.0))
    assert before != model_sha256(model)


def test_backends_this_torch_does_not_have() -> None:
    if torch.distributed.is_mpi_available():
        pytest.fail("this torch has mpi: the test needs another missing backend")
    with pytest.raises(UsageError, match=r"mpi: this torch \(.*\) was built without it; use --backend (nccl or )?gloo"):
        choose_device(Place(), "mpi")


def test_more_workers_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    here = Place(rank=3, local_rank=3, size=4, local_size=4, launcher="paceline")
    with pytest.raises(UsageError, match="4 workers on a node with 2 GPU"):
        choose_device(here, "auto")
    assert choose_device(here, "gloo") == (torch.device("cuda", 1), "gloo")
    fits = Place(rank=1, local_rank=1, size=2, local_size=2, launcher="paceline")
    assert choose_device(fits, "auto") == (torch.device("cuda", 1), "nccl")


def test_what_comes_before_the_first_step_can_be_stopped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are tried, recorded and compiled there: no mark of theirs may look as if a step were to be finished."""
    stages: list[str] = []

    class Watch:
        stop = ""

        def mark(self, step: int, stage: str) -> None:
            stages.append(stage)

    def prepare(run: Run, step: TrainStep, at: int, say: Any) -> TrainStep:
        step.unwatched().enter("forward")
        stages.append("prepared")
        return step

    monkeypatch.setattr("paceline.training.loop.capture", prepare)
    with world() as here:
        task = blobs()
        fit(build(task, make_config(task.defaults, {"max_steps": 1}), here), (), watch=Watch())  # type: ignore[arg-type]
    assert stages[:3] == ["loading", "prepared", "data"]


class Cut(nn.Module):
    """Two batch norms; `cuts` is what `--norm-part` should make of them, written out with torch's own."""

    def __init__(self, cuts: int = 0) -> None:
        super().__init__()
        self.first, self.norm, self.last, self.then = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), nn.BatchNorm1d(3)
        self.cuts = cuts

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(self.then, self.last(torch.tanh(self._norm(self.norm, self.first(x)))))

    def _norm(self, norm: nn.Module, x: Tensor) -> Tensor:
        if not self.cuts or not self.training:
            return norm(x)
        pieces, outputs, moved = -(-len(x) // self.cuts), {}, []
        for piece in range(pieces):
            running = [norm.running_mean.clone(), norm.running_var.clone()]
            outputs[piece] = nn.functional.batch_norm(x[piece::pieces], *running, norm.weight, norm.bias, True, 0.1)
            moved.append(torch.stack(running))
        mean, variance = torch.stack(moved).mean(0)
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)
        norm.num_batches_tracked += 1
        return torch.stack([outputs[i % pieces][i // pieces] for i in range(len(x))])


def cut_task(cuts: int = 0) -> Task:
    return Task(**{**vars(blobs()), "model": lambda: Cut(cuts)})


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("size", [4, 5, 100])
def test_batch_norm_over_cuts_of_a_part(parts: int, size: int) -> None:
    """Steps of 24 samples, then two of other sizes: of a part's 12 or fewer, cuts of 5 are three of unequal sizes."""
    options = {"global_batch": 24, "virtual_workers": parts, "parts_at_once": 1, "base_lr": 0.02}
    found, expected = alone(cut_task(), norm_part=size, **options), alone(cut_task(size), **options)
    assert found.weights.keys() == expected.weights.keys() == Cut().state_dict().keys()
    for name, weights in expected.weights.items():
        np.testing.assert_allclose(found.weights[name], weights, rtol=1e-4, atol=1e-5, err_msg=name)
    assert found.weights["norm.num_batches_tracked"] == 10
    usual = alone(cut_task(), **options)
    assert np.allclose(usual.weights["norm.running_var"], found.weights["norm.running_var"], rtol=1e-3) == (size == 100)


def test_cuts_of_parts_that_share_a_pass() -> None:
    options = {"global_batch": 24, "virtual_workers": 4, "norm_part": 3, "base_lr": 0.02}
    together, in_turn = (alone(blobs(norm=True), parts_at_once=count, **options) for count in (0, 1))
    for name, weights in together.weights.items():
        np.testing.assert_allclose(in_turn.weights[name], weights, rtol=1e-4, atol=1e-5, err_msg=name)
    assert (together.weights["1.running_var"] > 0).all()


class Custom(nn.BatchNorm1d):
    pass


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (Custom, "--norm-part 4 cannot cut its batch: 1 is a Custom; leave"),
        (nn.SyncBatchNorm, "1 is a SyncBatchNorm, which takes its statistics over all workers; leave"),
    ],
)
def test_norms_that_cannot_be_cut(layer: Any, said: str) -> None:
    task = Task(**{**vars(blobs()), "model": lambda: nn.Sequential(nn.Linear(5, 8), layer(8), nn.Linear(8, 3))})
    with pytest.raises(UsageError, match=said):
        alone(task, norm_part=4)


def test_nothing_to_cut_is_said() -> None:
    assert alone(blobs(), norm_part=4).watcher.notes == ["--norm-part 4 changes nothing: the model has no plain batch norm"]


def test_a_timeline_that_cannot_be_written_is_left_out_and_ends_no_run(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_text

    def full(self: Path, *args: Any, **kwargs: Any) -> int:
        if "timeline" in self.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full)
    assert train(blobs(), epochs=3, profile=True, name="x").status == "done"
    notes = [row["text"] for row in read_metrics(runs / "x") if row["kind"] == "note"]
    assert [note for note in notes if "timeline" in note] == [
        "the timeline is left out: cannot write the record in runs/x: No space left on device;"
        " free some space or choose another --runs-dir"
    ]


class LoaderError(ValueError):
    """As torch makes of an error in a loader process."""

    def __str__(self) -> str:
        return "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\nValueError: bad"


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (LoaderError(), "ValueError: bad"),
        (BrokenPipeError(32, "Broken pipe"), "BrokenPipeError: [Errno 32] Broken pipe"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (PacelineError("one\ntwo"), "one\ntwo"),
    ],
)
def test_the_result_says_in_one_line_why_a_run_failed(runs: Path, error: BaseException, why: str) -> None:
    def fail(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        raise error

    with pytest.raises(type(error)):
        train(blobs(objective=fail), name="x")
    assert read_result(runs / "x")["why"] == why


def test_nan_in_the_data_is_not_blamed_on_the_learning_rate() -> None:
    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return classify()(model, (batch[0] * float("nan"), batch[1]))

    with pytest.raises(Diverged, match="the loss is nan in the first step, before any update: look for nan or inf in the data"):
        alone(blobs(objective=objective))


def synced() -> Task:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.SyncBatchNorm(8), nn.Linear(8, 3))

    return dataclasses.replace(blobs(), model=model)


def test_synchronized_norms_get_no_note_about_their_buffers() -> None:
    notes = alone(synced(), virtual_workers=2, epochs=1).watcher.notes
    assert not [note for note in notes if "does not belong to a batch norm" in note]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"batch_schedule": "auto", "smallest_part": 4}, "--batch-schedule auto"),
        ({"measure_noise": True}, "--measure-noise"),
        ({"lr_rule": "adascale"}, "--lr-rule adascale"),
        ({"sam_rho": 0.1}, "--sam-rho"),
    ],
)
def test_synchronized_norms_leave_no_gradient_of_a_part(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=f"^{named} needs each part's own gradient"):
        alone(synced(), virtual_workers=2, global_batch=32, **options)


def test_a_run_that_ends_within_an_epoch_says_how_many_samples_that_had() -> None:
    watcher = alone(blobs(), epochs=2, max_steps=13).watcher
    assert [row["samples"] for row in watcher.epochs] == [103, 48]
