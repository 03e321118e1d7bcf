"""A task's own step function on one worker; tests/ranks/test_task_step.py has several, and the GAN of the examples."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from harness.training import ALONE, blobs, train_in
from paceline import Task
from paceline.errors import UsageError
from paceline.training import tasks

PLAIN = {"schedule": "constant", "optimizer": "sgd", "momentum": 0.9, "epochs": 2, "virtual_workers": 3}


def classify(step: Any, model: nn.Module, optimizers: Any) -> Any:
    def work(batch: Any) -> dict[str, torch.Tensor]:
        logits = model(batch[0])
        return {
            "loss": F.cross_entropy(logits, batch[1], reduction="none"),
            "accuracy": (logits.argmax(1) == batch[1]).float(),
        }

    found = step.backward(work)
    optimizers["optimizer"].step()
    return found


@pytest.mark.parametrize("options", [{}, {"reduce": "exact"}, {"accumulate": 2}, {"ema": 0.9}])
def test_a_step_that_does_what_the_plain_step_does_trains_the_same_model(options: dict[str, Any]) -> None:
    given = {**PLAIN, **options, "parts_at_once": 1}
    plain = train_in(ALONE, blobs(norm=True, dropout=0.3), given)
    own = train_in(ALONE, blobs(norm=True, dropout=0.3, step=classify), given)
    assert own.result.model_sha256 == plain.result.model_sha256
    assert own.result.metrics == plain.result.metrics
    timeless = [[{k: v for k, v in row.items() if "time" not in k} for row in each.watcher.steps] for each in (own, plain)]
    assert timeless[0] == timeless[1]


def test_without_a_return_the_metrics_are_those_of_the_last_reduction() -> None:
    def silent(*given: Any) -> None:
        classify(*given)

    own = train_in(ALONE, blobs(step=silent), PLAIN)
    assert {"loss", "accuracy"} <= set(own.watcher.steps[0])


def two(model: nn.Module, config: Any) -> dict[str, torch.optim.Optimizer]:
    return {
        "first": torch.optim.SGD(model[0].parameters(), lr=0.1),
        "last": torch.optim.Adam(model[3].parameters(), lr=0.01),
    }


def alternate(step: Any, model: nn.Module, optimizers: Any) -> Any:
    found = {}
    for name, optimizer in optimizers.items():
        found[name] = step.backward(lambda batch: F.cross_entropy(model(batch[0]), batch[1]))["loss"]
        optimizer.step()
    rates = {f"lr_{name}": optimizer.param_groups[0]["lr"] for name, optimizer in optimizers.items()}
    return {"loss": found["last"], "before": found["first"], **rates}


def test_the_schedule_applies_to_all_optimizers() -> None:
    own = train_in(
        ALONE, blobs(step=alternate, optimizer=two, schedule=lambda step: 0.5**step), {"max_steps": 3, "virtual_workers": 1}
    )
    rows = own.watcher.steps
    assert [row["lr_first"] for row in rows] == pytest.approx([0.1, 0.05, 0.025])
    assert [row["lr_last"] for row in rows] == pytest.approx([0.01, 0.005, 0.0025])
    assert all(row["loss"] < row["before"] for row in rows), "the second round sees the weights that the first has changed"


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("sam_rho", 0.05, "--sam-rho"),
        ("lr_rule", "adascale", "--lr-rule adascale"),
        ("measure_noise", True, "--measure-noise"),
        ("local_steps", 4, "--local-steps"),
        ("clip_norm", 1.0, "--clip-norm"),
        ("gradient_noise", 0.1, "--gradient-noise"),
        ("parts_at_once", 3, "--parts-at-once"),
    ],
)
def test_options_that_change_the_step_are_refused(option: str, value: Any, said: str) -> None:
    with pytest.raises(UsageError, match=f"{said}.*the task has its own step function") as caught:
        train_in(ALONE, blobs(step=classify), {**PLAIN, option: value})
    assert "\n" not in str(caught.value)


def test_fp16_needs_the_built_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """auto does not choose it: on a V100, a GAN trains in fp32."""
    monkeypatch.setattr("paceline.training.build.choose_precision", lambda config, world: ("fp16", ()))
    with pytest.raises(UsageError, match="fp16 needs the built-in step's loss scale: use --precision fp32 or bf16"):
        train_in(ALONE, blobs(step=classify), {**PLAIN, "precision": "fp16"})
    chosen = train_in(ALONE, blobs(step=classify), {**PLAIN, "precision": "auto"})
    monkeypatch.undo()
    plain = train_in(ALONE, blobs(step=classify), {**PLAIN, "precision": "fp32"})
    assert chosen.result.model_sha256 == plain.result.model_sha256


def half_done(step: Any, model: nn.Module, optimizers: Any) -> Any:
    for part in step:
        part.backward(F.cross_entropy(model(part.batch[0]), part.batch[1]))


def returning(change: Callable[[dict[str, Any]], Any]) -> Any:
    return lambda step, model, optimizers: change(classify(step, model, optimizers))


def names_by_step(step: Any, model: nn.Module, optimizers: Any) -> Any:
    found = classify(step, model, optimizers)
    return found if step.number == 0 else {"loss": found["loss"]}


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda step, model, optimizers: None, "ended before a reduction: call step.backward"),
        (half_done, r"ended before a reduction: call step.reduce\(\)"),
        (returning(lambda found: found["loss"]), "returned a tensor|returned a Tensor|it must return a dict of metrics"),
        (returning(lambda found: {"accuracy": found["loss"]}), "a dict with 'accuracy': it must have 'loss'"),
        (returning(lambda found: {**found, "many": torch.ones(3)}), "returned 'many' as .*: it must be one number"),
        (returning(lambda found: {**found, "step": found["loss"]}), "returned a metric named 'step'"),
        (returning(lambda found: {**found, **{f"m{i}": 0.0 for i in range(15)}}), "returned 17 metrics"),
        (names_by_step, "returned loss, and before loss, accuracy: return the same"),
    ],
)
def test_mistakes_in_the_function_are_one_line(function: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why) as caught:
        train_in(ALONE, blobs(step=function), PLAIN)
    assert "\n" not in str(caught.value)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.mean()
        return self.net(x)


def test_exact_mode_refuses_a_buffer_that_a_step_changes() -> None:
    task = Task(name="counting", model=Counting, train=blobs().train, objective=blobs().objective, step=classify)
    with pytest.raises(UsageError, match="the step changes the buffer seen"):
        train_in(ALONE, task, {**PLAIN, "reduce": "exact", "global_batch": 12})


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (3, "step is a number|step is an int|it must be a function; write def step"),
        (lambda batch: None, r"cannot be called with \(step, model, optimizers\)"),
    ],
)
def test_the_field_is_checked(step: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        blobs(step=step)


def test_a_dict_of_optimizers_needs_a_step() -> None:
    with pytest.raises(UsageError, match="only a task with its own `step` can have several"):
        train_in(ALONE, blobs(optimizer=two), {"max_steps": 1})


def test_the_name_that_lightning_has_is_known() -> None:
    with pytest.raises(UsageError, match="did you mean 'step'"):
        blobs(training_step=classify)


def test_only_a_step_without_validation_needs_no_objective() -> None:
    fields = {"name": "own", "model": blobs().model, "train": blobs().train}
    result = train_in(ALONE, Task(**fields, step=classify), PLAIN)
    assert result.result.status == "done"
    with pytest.raises(UsageError, match="task own has no objective, and it says what to minimize: give objective="):
        Task(**fields)
    with pytest.raises(UsageError, match="task own has no objective, and its validation data needs one: give objective="):
        Task(**fields, step=classify, validation=blobs().validation)
    with pytest.raises(UsageError, match="--ema: task own has no objective"):
        tasks.resolve(Task(**fields, step=classify), {"ema": 0.9})
