"""Hooks on a GPU: metrics arrive late without a wait, and a hook that changes weights has the same effect as on the CPU."""

import pytest
import torch

from harness.training import blobs, train_in
from paceline import Hooks, Moment
from paceline.dist.world import world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
OPTIONS = {"reduce": "exact", "virtual_workers": 2, "epochs": 2}


def test_a_step_is_told_in_order_and_once() -> None:
    seen: list[int] = []
    with world() as here:
        trained = train_in(here, blobs(hooks=Hooks(on_step=lambda moment: seen.append(moment.step))), OPTIONS)
    assert seen == list(range(1, trained.result.steps + 1))


def test_a_change_takes_effect_before_the_next_step() -> None:
    """The meter waits for each step: otherwise a checkpoint, which flushes it, would change when the hook is called."""

    def shrink(moment: Moment) -> None:
        for parameter in moment.model.parameters():
            parameter.mul_(0.99)

    hooks = Hooks(on_step=shrink, changes_model=True, every_rank=True)
    with world() as here:
        calm = train_in(here, blobs(hooks=hooks), {**OPTIONS, "checkpoint_every": "0"})
        plain = train_in(here, blobs(), {**OPTIONS, "checkpoint_every": "0"})
    assert calm.result.model_sha256 != plain.result.model_sha256


def test_checkpoints_do_not_change_when_a_hook_acts(tmp_path) -> None:
    def shrink(moment: Moment) -> None:
        for parameter in moment.model.parameters():
            parameter.mul_(0.99)

    hooks = Hooks(on_step=shrink, changes_model=True, every_rank=True)
    with world() as here:
        calm = train_in(here, blobs(hooks=hooks), {**OPTIONS, "checkpoint_every": "0"})
        saved = train_in(here, blobs(hooks=hooks), {**OPTIONS, "checkpoint_every": "3"}, tmp_path)
    assert saved.result.model_sha256 == calm.result.model_sha256


def test_a_hook_that_looks_keeps_the_bits() -> None:
    def look(moment: Moment) -> None:
        torch.rand(3, device="cuda")
        moment.model.eval()(torch.zeros(2, 5, device="cuda"))

    with world() as here:
        plain = train_in(here, blobs(dropout=0.2), OPTIONS)
        looked = train_in(here, blobs(dropout=0.2, hooks=Hooks(on_step=look, on_epoch=look)), OPTIONS)
    assert looked.result.model_sha256 == plain.result.model_sha256
