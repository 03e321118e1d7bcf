"""A task's own optimizer and schedule: the numbers of a plain PyTorch loop, true learning rates, answers to mistakes."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adadelta, Adam, AdamW, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from harness.training import ALONE, Trained, blobs, train_in
from paceline.config import Config, make_config
from paceline.errors import UsageError
from paceline.optim import Combined
from paceline.training.build import Run, build
from paceline.training.hooks import Hooks
from paceline.training.own import make_task_optimizer
from paceline.training.task import Task
from paceline.training.tasks import configure, own_defaults, resolve

STEPS = 9  # per epoch: 103 samples in steps of 12, the last two of which share 19


def own(**fields: Any) -> Task:
    """The blobs without their own defaults for optimizers, which would be options that nothing reads."""
    task = blobs()
    defaults = {key: value for key, value in task.defaults.items() if key not in ("base_lr", "weight_decay")}
    return replace(task, defaults=defaults, **fields)


def made(task: Task, **options: Any) -> Run:
    return build(task, configure(task, options), ALONE)


def rates(trained: Trained) -> list[float]:
    return [row["lr"] for row in trained.watcher.steps]


def refused(task: Callable[[], Task], **options: Any) -> str:
    with pytest.raises(UsageError) as error:
        made(task(), **options)
    assert "\n" not in str(error.value)
    return str(error.value)


class Descent(Optimizer):
    """A user's own class: plain descent, with a count on the host."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "seen": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["seen"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    parameter.sub_(group["lr"] * parameter.grad / (1 + 0.1 * state["count"] + 0.01 * group["seen"]))


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Adadelta": lambda params: Adadelta(params, lr=1.0),
    "RMSprop": lambda params: RMSprop(params, lr=0.01, momentum=0.5),
    "NAdam": lambda params: NAdam(params, lr=0.01),
    "Descent": lambda params: Descent(params, lr=0.2),
}
SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.7),
    "MultiStepLR": lambda optimizer: MultiStepLR(optimizer, [1, 2], gamma=0.5),
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "CosineAnnealingWarmRestarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, T_0=3),
    "SequentialLR": lambda optimizer: SequentialLR(
        optimizer, [ConstantLR(optimizer, 0.1, 2), MultiStepLR(optimizer, [2, 3])], milestones=[2]
    ),
    "ChainedScheduler": lambda optimizer: ChainedScheduler(
        [ConstantLR(optimizer, 0.1, 2), ExponentialLR(optimizer, 0.9)], optimizer=optimizer
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_plain_loop_of_pytorch_gives_the_same_weights(optimizer):
    """Adadelta(lr=1.0) with StepLR(step_size=1, gamma=0.7), as in PyTorch's examples/mnist, and others: bit for bit."""
    task = own(optimizer=lambda model, config: OPTIMIZERS[optimizer](model.parameters()), schedule=SCHEDULES["StepLR"])
    trained = train_in(ALONE, task, {"epochs": 3, "fast": "off"})
    run = made(task, epochs=3, fast="off")
    model, arrays = run.model, task.train()
    plain = OPTIMIZERS[optimizer](model.parameters())
    scheduler, seen = SCHEDULES["StepLR"](plain), []
    for epoch in range(3):
        order, bounds = run.sampler.order(epoch), run.sampler.cut(epoch).bounds
        for i in range(run.sampler.cut(epoch).steps):
            samples = torch.from_numpy(order[bounds[i] : bounds[i + 1]])
            plain.zero_grad()
            seen.append(plain.param_groups[0]["lr"])
            nn.functional.cross_entropy(model(arrays.tensors[0][samples]), arrays.tensors[1][samples]).backward()
            plain.step()
        scheduler.step()
    assert rates(trained) == seen
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(torch.from_numpy(trained.weights[name]), tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("by", ["step", "epoch"])
def test_each_scheduler_gives_its_rates_once_per_step_or_epoch(schedule, by):
    task = own(optimizer=lambda model, config: SGD(model.parameters(), lr=0.1), schedule=SCHEDULES[schedule])
    found = rates(train_in(ALONE, task, {"epochs": 3, "schedule_by": by}))
    plain = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler, expected = SCHEDULES[schedule](plain), []
    plain.step()
    for step in range(3 * STEPS):
        expected.append(plain.param_groups[0]["lr"])
        if by == "step" or step % STEPS == STEPS - 1:
            scheduler.step()
    assert found == expected
    assert len(set(found)) > 1


def test_the_rule_and_the_warm_up_multiply_what_the_scheduler_gives():
    task = own(optimizer=lambda model, config: SGD(model.parameters(), lr=0.1), schedule=SCHEDULES["StepLR"])
    options = {"epochs": 2, "global_batch": 24, "reference_batch": 12, "warmup_steps": 2, "warmup_from": 0.5}
    found = rates(train_in(ALONE, task, options))
    assert found == pytest.approx([0.1, 0.15, 0.2, 0.2, 0.2, *[0.14] * 5])
    found = rates(train_in(ALONE, task, {**options, "lr_rule": "none"}))
    assert found == pytest.approx([0.05, 0.075, 0.1, 0.1, 0.1, *[0.07] * 5])


def test_a_phase_multiplies_what_the_scheduler_gives():
    """Half of the largest batch: the square root of a half, and an epoch of twice as many steps."""
    task = own(optimizer=lambda model, config: SGD(model.parameters(), lr=0.1), schedule=SCHEDULES["StepLR"])
    options = {"epochs": 2, "global_batch": 24, "reference_batch": 24, "batch_schedule": "0:12 1:24", "smallest_part": 1}
    found = rates(train_in(ALONE, task, {**options, "batch_lr_power": 0.5}))
    assert found == pytest.approx([0.1 * 0.5**0.5] * 9 + [0.07] * 5)


def test_each_group_has_its_own_rate_at_the_reference_batch():
    def layers(model: nn.Module, config: Config) -> Optimizer:
        first, last = model[0], model[3]
        return SGD([{"params": first.parameters(), "lr": 0.01}, {"params": last.parameters()}], lr=config.base_lr)

    run = made(own(optimizer=layers, schedule=lambda step: 1 / (1 + step)), base_lr=0.1, global_batch=24, reference_batch=12)
    run.update.begin(3)
    assert [group["lr"] for group in run.update.optimizer.param_groups] == pytest.approx([0.02 / 4, 0.2 / 4])
    assert run.update.lr(3) == pytest.approx(0.02 / 4)
    assert run.contract.optimizer == "SGD (the task's own) in 2 groups at lr 0.01, 0.1"
    assert (run.contract.base_lr, run.contract.peak_lr) == (0.01, 0.02)
    assert run.contract.schedule == "the task's own schedule by step"
    assert not run.notes


def test_options_that_the_optimizer_function_does_not_read_are_named():
    task = own(optimizer=lambda model, config: SGD(model.parameters(), lr=config.base_lr))
    assert not made(task, base_lr=0.3, clip_norm=1.0).notes
    end = "here: the task has its own optimizer, and its function does not read"
    assert made(task, base_lr=0.3, momentum=0.5).notes == (f"--momentum does nothing {end} it",)
    assert made(task, beta1=0.5, momentum=0.5).notes == (f"--beta1, --momentum do nothing {end} them",)
    everything = own(optimizer=lambda model, config: SGD(model.parameters(), lr=vars(config)["base_lr"]))
    assert not made(everything, momentum=0.5).notes
    assert not made(replace(task, defaults={**task.defaults, "momentum": 0.5})).notes, "the task itself says so"


def test_lr_scale_of_a_group_counts():
    """As timm's layer decay has it."""
    groups = lambda model: [{"params": [p], "lr_scale": 0.5**i} for i, p in enumerate(model.parameters())]  # noqa: E731
    make = lambda model, config: SGD(groups(model), lr=0.1)  # noqa: E731
    for schedule in (None, SCHEDULES["StepLR"], lambda step: 1.0):
        run = made(own(optimizer=make, schedule=schedule))
        run.update.begin(0)
        assert [group["lr"] for group in run.update.optimizer.param_groups] == pytest.approx([0.1, 0.05, 0.025, 0.0125])


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        (lambda step: 0.5**step, [1, 0.5, 0.25]),
        (lambda t: min(1.0, (t + 1) / 2), [0.5, 1, 1]),
        (lambda step, steps: 1 - step / steps, [1, 17 / 18, 16 / 18]),
        (lambda s, epochs, steps_per_epoch: epochs * steps_per_epoch, [18, 18, 18]),
        (lambda o: LambdaLR(o, lambda step: 0.5**step), [1, 0.5, 0.25]),
        (lambda optimizer, steps: LambdaLR(optimizer, lambda step: steps - step), [18, 17, 16]),
        (lambda optimizer, factor=2.0: LambdaLR(optimizer, lambda step: factor), [2, 2, 2]),
        (partial(ExponentialLR, gamma=0.5), [1, 0.5, 0.25]),
        (lambda x: torch.tensor(0.5), [0.5, 0.5, 0.5]),
    ],
)
def test_functions_of_the_step_and_makers_of_schedulers_are_told_apart(schedule, factors):
    task = own(optimizer=lambda model, config: SGD(model.parameters(), lr=1e-3), schedule=schedule)
    found = rates(train_in(ALONE, task, {"schedule_by": "step", "max_steps": 18}))
    assert found[:3] == pytest.approx([1e-3 * factor for factor in factors])


@pytest.mark.parametrize(
    ("schedule", "by"),
    [
        (SCHEDULES["StepLR"], "epoch"),
        (lambda optimizer, steps: LambdaLR(optimizer, lambda step: 1 - step / steps), "step"),
        (lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=18), "step"),
        (lambda optimizer, epochs: LambdaLR(optimizer, lambda epoch: 1 - epoch / epochs), "epoch"),
    ],
)
def test_a_scheduler_that_counts_steps_is_stepped_by_them(schedule, by):
    run = made(own(optimizer=lambda model, config: Adam(model.parameters()), schedule=schedule))
    assert run.contract.schedule.endswith(f"(the task's own) once per {by}")


def test_one_cycle_of_torch_moves_momentum_too():
    schedule = lambda optimizer, steps: OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)  # noqa: E731
    task = own(optimizer=lambda model, config: SGD(model.parameters(), lr=0.1, momentum=0.9), schedule=schedule)
    run = made(task)
    assert (run.contract.peak_lr, run.update.rates.changes_settings) == (0.1, True)
    first = run.update.optimizer.param_groups[0]["momentum"]
    run.update.begin(5)
    assert run.update.optimizer.param_groups[0]["momentum"] < first == 0.95


def test_a_plateau_is_stepped_with_the_monitored_metric():
    values = iter((1.0, 2.0, 3.0, 4.0))
    plateau = lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0)  # noqa: E731
    task = own(optimizer=lambda model, config: SGD(model.parameters(), lr=0.1), schedule=plateau)
    run = made(task, epochs=4)
    assert run.contract.schedule == "ReduceLROnPlateau (the task's own) after each validation by its loss"
    for expected in (0.1, 0.1, 0.05, 0.025):
        run.update.begin(0)
        assert run.update.lr(0) == pytest.approx(expected)
        run.update.rates.observe({"loss": next(values), "accuracy": 0.5})
    rows = train_in(ALONE, task, {"epochs": 4, "monitor": "accuracy", "mode": "min"}).watcher.steps
    assert rows[0]["lr"] > rows[-1]["lr"], "with accuracy as if smaller were better, every epoch is a plateau"


def interrupted(task: Task, folder: Path, at: int, options: dict[str, Any]) -> Trained:
    """Stop a run by an error after `at` steps, of which a checkpoint was just written, and resume it."""
    calls, objective = 0, task.objective

    def failing(model: nn.Module, batch: Any) -> Any:
        nonlocal calls
        calls += model.training
        if calls > at:
            raise InterruptedError
        return objective(model, batch)

    with pytest.raises(InterruptedError):
        train_in(ALONE, replace(task, objective=failing), {**options, "checkpoint_every": "1"}, folder)
    return train_in(ALONE, task, options, folder, resumes=True)


@pytest.mark.parametrize(
    ("optimizer", "schedule", "at", "by"),
    [
        ("RMSprop", "StepLR", 13, "epoch"),
        ("Descent", "SequentialLR", 13, "epoch"),
        ("Adadelta", "MultiStepLR", 9, "step"),
        ("Descent", "LambdaLR", 1, "step"),
        ("NAdam", "ChainedScheduler", 18, "epoch"),
        ("RMSprop", "CosineAnnealingWarmRestarts", 5, "step"),
        ("RMSprop", "plateau", 13, "auto"),
        ("Adadelta", "plateau", 22, "auto"),
        ("RMSprop", "cycle", 13, "epoch"),
    ],
)
def test_interrupted_equals_uninterrupted(tmp_path, optimizer, schedule, at, by):
    more = {
        "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9),
        "cycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=8),
    }
    make = {**SCHEDULES, **more}[schedule]
    task = own(optimizer=lambda model, config: OPTIMIZERS[optimizer](model.parameters()), schedule=make)
    options = {"epochs": 4, "schedule_by": by, "reduce": "exact"}
    whole = train_in(ALONE, task, options)
    resumed = interrupted(task, tmp_path, at, options)
    assert resumed.result.model_sha256 == whole.result.model_sha256
    assert rates(resumed) == rates(whole)[-len(rates(resumed)) :]
    assert len(set(rates(whole))) > 1


def test_a_scheduler_that_keeps_an_array_is_refused_in_one_line():
    class Counting(StepLR):
        def get_lr(self) -> Any:
            self.seen = getattr(self, "seen", np.zeros(3)) + 1
            return super().get_lr()

    make = lambda model, config: SGD(model.parameters(), lr=0.1)  # noqa: E731
    run = made(own(optimizer=make, schedule=lambda optimizer: Counting(optimizer, 1)))
    run.update.begin(STEPS)
    with pytest.raises(UsageError, match="Counting, keeps 'seen' as ndarray"):
        run.update.facts()


@pytest.mark.parametrize("schedule", ["StepLR", "plateau"])
def test_a_resumed_run_tells_on_start_the_rate_of_its_last_step(tmp_path, schedule):
    told: list[tuple[str, int, float]] = []
    hooks = Hooks(
        on_start=lambda m: told.append(("start", m.step, m.lr)), on_step=lambda m: told.append(("step", m.step, m.lr))
    )
    plateau = lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)  # noqa: E731
    make = lambda model, config: RMSprop(model.parameters(), lr=0.01)  # noqa: E731
    interrupted(own(optimizer=make, schedule=SCHEDULES.get(schedule, plateau), hooks=hooks), tmp_path, 22, {"epochs": 4})
    steps = {step: lr for kind, step, lr in told if kind == "step"}
    assert told[0] == ("start", 0, steps[1])
    assert ("start", 22, steps[22]) in told
    assert steps[22] < steps[1]


def test_a_longer_run_goes_on_with_its_scheduler_unless_that_was_made_for_a_length(tmp_path):
    make = lambda model, config: RMSprop(model.parameters(), lr=0.01)  # noqa: E731
    for name in ("StepLR", "plateau"):
        plateau = lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)  # noqa: E731
        task = own(optimizer=make, schedule=SCHEDULES.get(name, plateau))
        train_in(ALONE, task, {"epochs": 2, "reduce": "exact"}, tmp_path / name)
        longer = train_in(ALONE, task, {"epochs": 4, "reduce": "exact"}, tmp_path / name, resumes=True)
        whole = train_in(ALONE, task, {"epochs": 4, "reduce": "exact"})
        assert longer.result.model_sha256 == whole.result.model_sha256
    task = own(optimizer=make, schedule=lambda optimizer, steps: OneCycleLR(optimizer, max_lr=0.1, total_steps=steps))
    train_in(ALONE, task, {"epochs": 2}, tmp_path / "cycle")
    with pytest.raises(
        UsageError, match=r"OneCycleLR, was made for the old length, 18 steps\. A run with it cannot become longer"
    ):
        train_in(ALONE, task, {"epochs": 4}, tmp_path / "cycle", resumes=True)


def test_a_changed_optimizer_or_metric_is_not_resumed(tmp_path):
    plateau = lambda optimizer: ReduceLROnPlateau(optimizer)  # noqa: E731
    task = own(optimizer=lambda model, config: RMSprop(model.parameters(), lr=0.01), schedule=plateau)
    train_in(ALONE, task, {"epochs": 2}, tmp_path)
    with pytest.raises(UsageError, match="--monitor was loss, is error, and the learning rate follows it"):
        train_in(ALONE, task, {"epochs": 3, "monitor": "error"}, tmp_path, resumes=True)
    other = replace(task, optimizer=lambda model, config: Adadelta(model.parameters()))
    with pytest.raises(UsageError, match="optimizer was RMSprop over 4 parameters, is Adadelta over 4 parameters"):
        train_in(ALONE, other, {"epochs": 3}, tmp_path, resumes=True)


def test_flags_replace_the_tasks_own():
    task = own(optimizer=lambda model, config: RMSprop(model.parameters(), lr=0.3), schedule=lambda step: 0.5)
    run = made(task, optimizer="adamw", schedule="cosine", base_lr=0.02)
    assert isinstance(run.update.optimizer, AdamW)
    assert run.contract.optimizer.startswith("adamw betas")
    assert run.contract.schedule == "cosine by step"
    assert "--optimizer adamw replaces the task's own optimizer" in run.notes
    assert "--schedule cosine replaces the task's own schedule" in run.notes
    only = made(own(schedule=lambda step: 0.5), base_lr=0.02)
    only.update.begin(7)
    assert only.contract.optimizer.startswith("sgd Nesterov")
    assert only.update.lr(7) == 0.01
    assert made(own(optimizer=task.optimizer)).config.schedule == "constant"


def test_built_in_muon_keeps_its_two_rates_with_a_scheduler():
    run = made(own(schedule=SCHEDULES["StepLR"]), optimizer="muon", base_lr=0.02, rest_lr=0.1, epochs=2)
    run.update.begin(STEPS)
    assert [group["lr"] for group in run.update.optimizer.param_groups] == pytest.approx([0.014, 0.07, 0.07])


def test_other_changes_to_a_step_work_with_it():
    task = own(optimizer=lambda model, config: RMSprop(model.parameters(), lr=0.01), schedule=SCHEDULES["StepLR"])
    for options in (
        {"sam_rho": 0.05},
        {"ema": 0.9},
        {"clip_norm": 0.1},
        {"gradient_noise": 0.01},
        {"virtual_workers": 2, "lr_rule": "adascale"},
        {"virtual_workers": 2, "local_steps": 2, "local_after": 0.0},
    ):
        trained = train_in(ALONE, task, {"epochs": 3, **options})
        assert trained.watcher.steps[-1]["loss"] < trained.watcher.steps[0]["loss"]
        gain = trained.watcher.steps[-1].get("gain", 1.0)
        assert rates(trained)[-1] == pytest.approx(0.01 * 0.7**2 * gain)


def test_parameters_without_a_group_stay_and_are_named():
    task = own(optimizer=lambda model, config: SGD(model[3].parameters(), lr=0.1))
    trained = train_in(ALONE, task, {"epochs": 1, "clip_norm": 0.5})
    start = made(task).model.state_dict()
    moved = [name for name, value in trained.weights.items() if not torch.equal(torch.from_numpy(value), start[name])]
    assert moved == ["3.weight", "3.bias"]
    said = "2 of 4 parameters are in no group of the optimizer and stay as they are: 0.weight, 0.bias"
    assert said in trained.watcher.notes
    run = made(task)
    run.update.begin(0)
    run.model(torch.randn(3, 5)).sum().backward()
    run.update()
    assert all(parameter.grad is None for parameter in run.model.parameters()), "gradients would add up over steps"


def frozen_first() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


def test_frozen_parameters_are_fine():
    run = made(own(model=frozen_first, optimizer=lambda model, config: SGD(model.parameters(), lr=0.1)))
    assert not run.notes


OTHER = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda model, config: None, "returned None: it must return a torch.optim.Optimizer; is a `return` missing?"),
        (lambda model, config: ([SGD(model.parameters())], []), "; the scheduler goes into schedule=..."),
        (
            lambda model, config: {"a": SGD(model.parameters())},
            "returned a dict of optimizers: only a task with its own `step`",
        ),
        (
            lambda model, config: SGD(OTHER.parameters()),
            "with 2 parameters that the model does not have (the first has shape (2, 2))",
        ),
        (lambda model, config: LBFGS(model.parameters()), "LBFGS, whose step() computes the loss several times by a closure"),
        (lambda model, config: SGD([{"params": model.parameters(), "lr": -1.0}]), "Invalid learning rate"),
        (lambda model, config: _without_lr(model), "and its group 0 has no 'lr'"),
        (lambda model, config: _with_lr(model, None), "group 0 has lr None: it must be a number of 0 or more"),
        (lambda model, config: _with_lr(model, float("nan")), "group 0 has lr nan"),
    ],
)
def test_what_is_no_usable_optimizer_is_refused(make, said):
    if "Invalid" in said:
        with pytest.raises(ValueError, match=said):
            made(own(optimizer=lambda model, config: SGD(model.parameters(), lr=-1.0)))
        return
    assert said in refused(lambda: own(optimizer=make))


def _without_lr(model: nn.Module) -> Optimizer:
    optimizer = SGD(model.parameters())
    del optimizer.param_groups[0]["lr"]
    return optimizer


def _with_lr(model: nn.Module, lr: Any) -> Optimizer:
    optimizer = SGD(model.parameters())
    optimizer.param_groups[0]["lr"] = lr
    return optimizer


def test_an_optimizer_of_frozen_parameters_only_is_refused():
    task = own(model=frozen_first, optimizer=lambda model, config: SGD(model[0].parameters(), lr=0.1))
    assert "that holds none of the model's 2 trained parameters: nothing would train" in refused(lambda: task)


def test_an_optimizer_that_swaps_weights_is_refused():
    class Swaps(Descent):
        def train(self) -> None: ...
        def eval(self) -> None: ...

    assert "which swaps weights for validation" in refused(
        lambda: own(optimizer=lambda model, config: Swaps(model.parameters()))
    )


def test_local_steps_need_a_state_that_starts_at_zero():
    task = own(optimizer=lambda model, config: NAdam(model.parameters()))
    assert "which is not known of NAdam: use a built-in one, or torch's SGD" in refused(
        lambda: task, virtual_workers=2, local_steps=2
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"optimizer": "adam"}, "optimizer is text, 'adam': a built-in one is an option"),
        (
            {"optimizer": SGD([torch.zeros(1, requires_grad=True)])},
            "optimizer is already made (SGD), but the model is not",
        ),
        ({"optimizer": RMSprop}, "optimizer is the class RMSprop: write optimizer=lambda model, config: RMSprop("),
        ({"optimizer": lambda model: None}, "cannot be called with (model, config)"),
        ({"optimizer": 3}, "it must be a function"),
        (
            {"schedule": "cosine"},
            "schedule is text, 'cosine': a built-in one is an option, as in defaults={'schedule': 'cosine'}",
        ),
        ({"schedule": StepLR}, "schedule needs 'step_size', which is not known"),
        ({"schedule": StepLR(SGD([torch.zeros(1, requires_grad=True)]), 1)}, "schedule is already made (StepLR)"),
        ({"schedule": lambda optimizer, length: 1}, "schedule needs 'length', which is not known"),
        ({"schedule": lambda: 1}, "cannot be called with (step)"),
        ({"schedule": 0.5}, "schedule is a float: it must be a function"),
        ({"scheduler": lambda step: 1}, "did you mean 'schedule'?"),
        ({"optim": lambda model: 1}, "did you mean 'optimizer'?"),
    ],
)
def test_wrong_fields_are_refused_at_the_users_own_line(fields, said):
    with pytest.raises(UsageError) as error:
        own(**fields)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (lambda step: None, "its schedule function returned None: it must return a factor for a step"),
        (lambda optimizer: None, "its schedule function returned None"),
        (lambda step: -0.5, "its schedule returned -0.5 for step 0: a factor must be a number of 0 or more"),
        (lambda step: 1.0 if step < 17 else float("nan"), "its schedule returned nan for step 17"),
        (lambda step: 1 / step, "its schedule function raised ZeroDivisionError: division by zero"),
        (lambda optimizer: StepLR(optimizer, size=1), "its schedule function raised TypeError"),
        (lambda optimizer: StepLR(SGD([torch.zeros(1)]), 1), "returned StepLR for another optimizer"),
        (lambda optimizer: ReduceLROnPlateau(optimizer, mode="max"), "has mode='max', but a smaller loss is better"),
    ],
)
def test_what_is_no_usable_schedule_is_refused(schedule, said):
    assert said in refused(lambda: own(schedule=schedule))


def test_a_plateau_needs_validation_and_epochs():
    task = own(schedule=ReduceLROnPlateau)
    assert "looks at a validation metric, but the task has no validation data" in refused(
        lambda: replace(task, validation=None)
    )
    assert "--schedule-by step: task blobs has ReduceLROnPlateau" in refused(lambda: task, schedule_by="step")
    with pytest.raises(UsageError, match="unknown validation metric for --monitor 'acuracy': did you mean 'accuracy'"):
        train_in(ALONE, task, {"monitor": "acuracy", "mode": "min"})


def test_a_task_has_its_own_or_a_default_not_both():
    with pytest.raises(UsageError, match="task blobs has its own schedule, and 'cosine' among its defaults"):
        replace(blobs(), schedule=lambda step: 1.0, defaults={"schedule": "cosine"})
    for option in ("optimizer", "schedule"):
        with pytest.raises(UsageError, match=f"--{option} own: task blobs has no {option} of its own"):
            configure(blobs(), {option: "own"})
    with pytest.raises(UsageError, match="--schedule own: task fashion-mnist-mini has no schedule of its own"):
        resolve("fashion-mnist-mini", {"schedule": "own"})


def test_a_schedule_that_ends_too_early_says_so():
    task = own(schedule=lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=5, cycle_momentum=False))
    with pytest.raises(UsageError, match="the task's schedule, OneCycleLR, failed in its step 6: Tried to step 6 times"):
        train_in(ALONE, task, {})


def test_state_that_no_checkpoint_can_hold_is_refused():
    class Remembers(StepLR):
        def __init__(self, optimizer: Optimizer) -> None:
            self.total = torch.zeros(1)
            super().__init__(optimizer, 1)

    assert "Remembers, keeps 'total' as Tensor: what changes must be numbers" in refused(lambda: own(schedule=Remembers))


def test_several_optimizers_by_name_for_a_step_of_the_tasks_own():
    stepped = replace(own(), step=lambda step, model, optimizers: {})  # never called here
    both = {
        "first": lambda model: Adam(model[0].parameters(), lr=0.01),
        "last": lambda model: SGD(model[3].parameters(), lr=0.1),
    }
    make = lambda model, config: {name: one(model) for name, one in both.items()}  # noqa: E731
    run = made(replace(stepped, optimizer=make, schedule=SCHEDULES["StepLR"]))
    optimizer = run.update.optimizer
    assert isinstance(optimizer, Combined)
    run.update.begin(STEPS)
    assert optimizer["first"].param_groups[0]["lr"] == pytest.approx(0.007)
    assert optimizer["last"].param_groups[0]["lr"] == pytest.approx(0.07)
    assert run.contract.optimizer == "Adam for first and SGD for last (the task's own) in 2 groups at lr 0.01, 0.1"
    shared = lambda model, config: {"a": SGD(model.parameters()), "b": SGD(model.parameters())}  # noqa: E731
    for wrong, said in (
        (shared, "returned optimizers that share parameters"),
        (lambda model, config: {}, "returned an empty dict"),
        (lambda model, config: {1: SGD(model.parameters())}, "returned a dict with the key 1"),
        (lambda model, config: {"a": None}, "under 'a', returned None"),
    ):
        assert said in refused(lambda wrong=wrong: made(replace(stepped, optimizer=wrong)))


def test_torchs_optimizers_are_made_fit_for_a_graph_on_a_gpu_only():
    config = make_config(own_defaults(own(optimizer=lambda model, config: Adam(model.parameters()))))
    optimizer, _ = make_task_optimizer(own(optimizer=lambda model, config: Adam(model.parameters())), nn.Linear(2, 2), config)
    assert not optimizer.param_groups[0]["capturable"]


PAGE = (Path(__file__).parents[3] / "docs" / "optimizers.md").read_text()


def test_the_pages_task_trains():
    (code,) = re.findall(r"```python\n(import torch.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    trained, again = (train_in(ALONE, names["task"](), {"epochs": 3}) for _ in range(2))
    assert trained.result.model_sha256 == again.result.model_sha256, "workers and resumed runs make the same data"
    assert rates(trained)[:: len(rates(trained)) // 3] == pytest.approx([1.0, 0.7, 0.49])
    assert "Adadelta (the task's own) at lr 1, StepLR (the task's own) once per epoch" in PAGE
    run = made(names["task"]())
    assert f"{run.contract.optimizer}, {run.contract.schedule}" in PAGE


@pytest.mark.parametrize("line", re.findall(r"^    (schedule=.*)$", PAGE, flags=re.MULTILINE))
def test_the_pages_schedules_work(line):
    made(own(schedule=eval(f"dict({line.partition('  #')[0]})")["schedule"]))
