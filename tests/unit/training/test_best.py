"""--monitor, --save-best and --stop-after."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from harness.training import ALONE, blobs, train_in
from paceline import Hooks, Moment
from paceline.errors import UsageError
from paceline.records import read_result
from paceline.training.best import _read_header
from paceline.training.run import train
from paceline.training.task import Task, classify


def scripted(*scores: float, **fields: Any) -> Task:
    """A task whose validation reports these scores, one per epoch."""
    epoch = {"now": 0}

    def start(moment: Moment) -> None:  # a checkpoint at the end of an epoch is from before its validation
        epoch["now"] = max(0, moment.step - 1) // 9

    def count(moment: Moment) -> None:
        epoch["now"] = moment.epoch

    def objective(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, Tensor]:
        values = classify()(model, batch[:2])
        if not model.training:
            values["score"] = torch.full_like(values["loss"], scores[min(epoch["now"], len(scores) - 1)])
        return values

    return blobs(objective=objective, hooks=Hooks(on_start=start, on_epoch=count), **fields)


LONG = {"epochs": 6, "monitor": "score", "name": "x"}


def test_it_stops_after_epochs_without_a_better_one(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(scripted(1, 3, 2, 3, 9, 9), stop_after=2, **LONG)  # as good is not better
    assert (result.status, result.epochs, result.steps) == ("stopped early", 4, 36)
    assert result.best == {"epoch": 2, "step": 18, "metric": "score", "mode": "max", "value": 3.0}
    assert read_result(runs / "x")["best"] == result.best
    out = capsys.readouterr().out
    assert "stopped early: loss" in out
    assert "best: score 3.0000 after epoch 2\n" in out


@pytest.mark.parametrize(
    ("options", "epochs", "best"),
    [
        ({"stop_after": 1}, 3, 2),
        ({"stop_after": 3}, 5, 2),
        ({"stop_after": 1, "mode": "min"}, 2, 1),
        ({"stop_after": 0}, 6, 6),
    ],
)
def test_when_it_stops(runs: Path, options: dict[str, Any], epochs: int, best: int) -> None:
    result = train(scripted(1, 3, 2, 3, 2, 9), **{**LONG, **options})
    assert (result.epochs, result.best["epoch"]) == (epochs, best)
    assert result.status == ("done" if epochs == 6 else "stopped early")


def test_a_score_that_is_not_a_number_is_never_the_best(runs: Path) -> None:
    nan = float("nan")
    result = train(scripted(nan, nan, 1, 1, 1, 1), stop_after=2, **LONG)
    assert (result.epochs, result.best) == (2, {})


def test_the_best_weights_are_kept(runs: Path) -> None:
    weights: list[dict[str, Tensor]] = []

    def keep(moment: Moment) -> None:
        weights.append({name: tensor.clone() for name, tensor in moment.model.state_dict().items()})

    task = scripted(1, 3, 2)
    task = Task(**{**vars(task), "hooks": [*task.hooks, Hooks(on_validation=keep)]})
    for options in ({}, {"ema": 0.9}):
        weights.clear()
        result = train(task, **{**LONG, "epochs": 3, **options}, save_best=True)
        record = Path(result.record)
        assert result.best == {
            "epoch": 2,
            "step": 18,
            "metric": "score",
            "mode": "max",
            "value": 3.0,
            "file": "best.safetensors",
        }
        assert _read_header(record / "best.safetensors") == result.best
        found = load_file(record / "best.safetensors")
        assert found.keys() == weights[1].keys()
        assert all(torch.equal(found[name], weights[1][name]) for name in found), "those that were validated"
        assert not torch.equal(load_file(record / "model.safetensors")["0.weight"], found["0.weight"])


def test_without_being_asked_a_run_has_no_best_epoch(runs: Path) -> None:
    result = train(scripted(1, 2), epochs=2)
    assert result.best == {}
    assert not (Path(result.record) / "best.safetensors").exists()


def fails_at(step: int) -> Hooks:
    """A hook that ends the run once."""
    done: list[int] = []

    def fail(moment: Moment) -> None:
        if moment.step == step and not done:
            done.append(step)
            raise InterruptedError("for the test")

    return Hooks(on_step=fail)


@pytest.mark.parametrize("step", [2, 20, 30])
def test_a_resumed_run_has_the_same_best_epoch(runs: Path, step: int) -> None:
    """Checkpoints every 8 steps, epochs of 9: the best epoch is behind the checkpoint, or ahead of it."""
    options = {**LONG, "checkpoint_every": "8", "save_best": True, "stop_after": 2, "reduce": "exact"}
    scores = (1, 3, 2, 3, 9, 9)
    calm = train(scripted(*scores), **{**options, "name": "calm"})
    task = scripted(*scores)
    task = Task(**{**vars(task), "hooks": [*task.hooks, fails_at(step)]})
    with pytest.raises(InterruptedError):
        train(task, **options)
    again = train(task, resume="x")
    assert (again.status, again.epochs, again.best, again.model_sha256) == (
        calm.status,
        calm.epochs,
        calm.best,
        calm.model_sha256,
    )
    files = [load_file(runs / name / "best.safetensors") for name in ("calm", "x")]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


def test_a_lost_file_is_written_at_the_next_validation(runs: Path) -> None:
    task = scripted(5, 1, 2)
    task = Task(**{**vars(task), "hooks": [*task.hooks, fails_at(14)]})
    with pytest.raises(InterruptedError):
        train(task, **{**LONG, "epochs": 3}, save_best=True, checkpoint_every="12")
    (runs / "x" / "best.safetensors").write_bytes(b"damaged")
    result = train(task, resume="x")
    assert (result.best["epoch"], result.best["value"]) == (3, 2.0), "what is known is what the file holds"
    assert _read_header(runs / "x" / "best.safetensors") == result.best


def test_a_run_that_stopped_early_can_be_extended(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = (1, 3, 2, 2, 9, 8)
    assert train(scripted(*scores), stop_after=2, save_best=True, **LONG).epochs == 4
    assert train(scripted(*scores), resume="x").epochs == 4
    assert "already done" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"stopped early: to extend it, give --stop-after above 2, or 0 to train to the end"):
        train(scripted(*scores), resume="x", epochs=8)
    result = train(scripted(*scores), resume="x", stop_after=0)
    assert (result.status, result.epochs, result.best["epoch"]) == ("done", 6, 5)
    calm = train(scripted(*scores), **{**LONG, "name": "calm"})
    assert result.model_sha256 == calm.model_sha256


def test_a_target_comes_before_a_stop(runs: Path) -> None:
    result = train(blobs(300), epochs=9, target_accuracy=0.4, monitor="accuracy", mode="min", stop_after=1)
    assert result.status == "target reached"


def test_a_metric_that_does_not_exist_is_one_line(runs: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown validation metric for --monitor 'acuracy'.*accuracy"):
        train(blobs(), monitor="acuracy", name="x")
    assert read_result(runs / "x")["epochs"] == 0


@pytest.mark.parametrize("option", [{"monitor": "loss"}, {"save_best": True}, {"stop_after": 2}])
def test_the_best_epoch_needs_validation(runs: Path, option: dict[str, Any]) -> None:
    task = Task(**{**vars(blobs()), "validation": None})
    (name,) = option
    with pytest.raises(UsageError, match=rf"^--{name.replace('_', '-')}: task blobs has no validation data"):
        train(task, **option)
    assert not runs.exists()


@pytest.mark.parametrize("monitor", ["acuracy", "other/acuracy"])
def test_an_unknown_metric_is_reported_before_the_first_step(runs: Path, monitor: str) -> None:
    """Not after an epoch, which can take hours."""
    steps: list[int] = []
    task = blobs()
    sets: Any = {"main": task.validation, "other": task.validation}
    with pytest.raises(UsageError, match="--monitor"):
        train(replace(task, validation=sets, hooks=Hooks(on_step=lambda moment: steps.append(1))), monitor=monitor, epochs=1)
    assert not steps
    assert train(replace(task, validation=sets), monitor="other/accuracy", epochs=1).best["metric"] == "other/accuracy"


def test_an_unknown_metric_is_refused_before_the_first_step() -> None:
    called: list[bool] = []
    objective = blobs().objective
    task = blobs(objective=lambda model, batch: called.append(model.training) or objective(model, batch))
    with pytest.raises(UsageError, match=r"unknown validation metric for --monitor 'shifted/loss'"):
        train_in(ALONE, task, {"monitor": "shifted/loss"})
    assert True not in called
