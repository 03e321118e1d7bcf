"""On a real GPU: a task's own optimizer and schedule in captured steps, and in plain ones with the line that says why."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, Adadelta, Adam, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from harness.training import Trained, blobs, train_in
from paceline.dist.world import World, world
from paceline.training.task import Task

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test ARGS=tests/gpu"),
]

OPTIONS = {"epochs": 4, "precision": "fp32", "log_every": 1}


class Descent(Optimizer):
    """A user's own class that reads its learning rate on the host."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"])


@pytest.fixture(scope="module")
def here() -> Iterator[World]:
    with world() as found:
        yield found


def own(make: Callable[[Any], Optimizer], schedule: Any = None) -> Task:
    return blobs(200, optimizer=lambda model, config: make(model), schedule=schedule)


def losses(trained: Trained) -> np.ndarray:
    return np.array([row["loss"] for row in trained.watcher.steps])


def lrs(trained: Trained) -> list[float]:
    return [row["lr"] for row in trained.watcher.steps]


def said(trained: Trained) -> str:
    return next(note for note in trained.watcher.notes if note.startswith("the step "))


def both(here: World, task: Task, **options: Any) -> tuple[Trained, Trained]:
    """The plain steps and the captured ones, which must agree to rounding."""
    plain, quick = (train_in(here, task, {**OPTIONS, "fast": fast, **options}) for fast in ("off", "auto"))
    np.testing.assert_allclose(losses(plain), losses(quick), rtol=2e-3)
    assert lrs(plain) == lrs(quick)
    return plain, quick


@pytest.mark.parametrize(
    "make",
    [
        lambda model: RMSprop(model.parameters(), lr=0.003),
        lambda model: RMSprop(model.parameters(), lr=0.003, momentum=0.5, capturable=True),
        lambda model: Adadelta(model.parameters(), lr=1.0),
        lambda model: Adadelta(model.parameters(), lr=1.0, capturable=True),
        lambda model: Adam(model.parameters(), lr=0.003, fused=True),
        lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9),
        lambda model: SGD([{"params": model[0].parameters(), "lr": 0.01}, {"params": model[3].parameters()}], lr=0.1),
        lambda model: NAdam(model.parameters(), lr=0.003),  # its state does not start at zero
    ],
    ids=["rmsprop", "rmsprop-m", "adadelta", "adadelta-c", "adam", "sgd", "groups", "nadam"],
)
def test_optimizers_of_torch_are_captured(here: World, make: Callable[[Any], Optimizer]) -> None:
    _, quick = both(here, own(make))
    assert losses(quick)[-5:].mean() < losses(quick)[:5].mean()
    assert said(quick).startswith("the step is captured as a CUDA graph"), quick.watcher.notes


def test_the_rate_of_a_step_schedule_changes_in_a_captured_run(here: World) -> None:
    """Were the rate a number in the graph, later epochs would move the weights as far as the first."""
    make = lambda model: Adadelta(model.parameters(), lr=1.0)  # noqa: E731
    falls = lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.3)  # noqa: E731
    _, quick = both(here, own(make, falls))
    assert said(quick).startswith("the step is captured")
    steps = len(lrs(quick)) // 4
    assert lrs(quick)[::steps] == pytest.approx([1.0, 0.3, 0.09, 0.027])
    constant = train_in(here, own(make), OPTIONS)
    assert not np.allclose(losses(constant)[-5:], losses(quick)[-5:], rtol=1e-3)
    _, by_step = both(here, own(make, falls), schedule_by="step", epochs=2)
    assert lrs(by_step)[:3] == pytest.approx([1.0, 0.3, 0.09])


def test_a_plateau_and_a_function_of_the_step_are_captured(here: World) -> None:
    make = lambda model: RMSprop(model.parameters(), lr=0.003)  # noqa: E731
    plateau = lambda optimizer: ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)  # noqa: E731
    for schedule in (plateau, lambda step: 1 / (1 + 0.1 * step)):
        _, quick = both(here, own(make, schedule))
        assert said(quick).startswith("the step is captured")
        assert len(set(lrs(quick))) > 2


def test_exact_mode_keeps_its_bits_over_a_resume(here: World, tmp_path: Any) -> None:
    task = own(lambda model: RMSprop(model.parameters(), lr=0.003), lambda optimizer: StepLR(optimizer, 1, gamma=0.5))
    options = {**OPTIONS, "reduce": "exact", "virtual_workers": 2}
    whole = train_in(here, task, options)
    assert said(whole).startswith("the step is captured")
    train_in(here, task, {**options, "max_steps": 23}, tmp_path)
    assert train_in(here, task, options, tmp_path, resumes=True).result.model_sha256 == whole.result.model_sha256


@pytest.mark.parametrize(
    ("make", "schedule", "why"),
    [
        (lambda model: Descent(model.parameters(), lr=0.1), None, "Descent, the task's own optimizer, reads its learning rate"),
        (
            lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9),
            lambda optimizer, steps: OneCycleLR(optimizer, max_lr=0.1, total_steps=steps),
            "the task's schedule changes momentum",
        ),
    ],
)
def test_what_a_graph_cannot_repeat_runs_without_one(here: World, make: Any, schedule: Any, why: str) -> None:
    _, quick = both(here, own(make, schedule))
    assert said(quick).startswith(f"the step runs without a CUDA graph: {why}")


def test_an_optimizer_of_timm(here: World) -> None:
    timm = pytest.importorskip("timm.optim", reason="needs timm: pip install timm")
    for name in ("lamb", "nadamw"):
        make = lambda model, name=name: timm.create_optimizer_v2(model, opt=name, lr=0.003)  # noqa: E731
        _, quick = both(here, own(make))
        assert said(quick).startswith("the step "), quick.watcher.notes
