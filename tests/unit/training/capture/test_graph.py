"""What rules a CUDA graph out, as far as it shows without a GPU; tests/gpu/test_fast.py has the rest."""

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from paceline.core.trees import map_tensors
from paceline.errors import first_line
from paceline.training.capture.graph import _change, _checkpoints, _obstacle
from paceline.training.host_state import host_state


class Counts(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.own, self.python, self.seen, self.total = np.random.default_rng(0), random.Random(0), [0], torch.zeros(1)

    def forward(self) -> None:
        self.calls += 1


def counting(model: nn.Module) -> None:
    model[1]()


@pytest.mark.parametrize(
    ("work", "what"),
    [
        (lambda model: random.random(), "Python's random numbers"),
        (lambda model: np.random.rand(), "numpy's random numbers"),
        (lambda model: torch.rand(1), "torch's random numbers on the CPU"),
        (lambda model: setattr(model[0], "rate", 0.5), "0.rate"),
        (lambda model: counting(model), "1.calls"),
        (lambda model: model.eval(), "training"),
        (lambda model: model[1].own.random(), "1.own"),
        (lambda model: model[1].python.random(), "1.python"),
        (lambda model: model[1].seen.append(1), "1.seen"),
        (lambda model: model[1].total.add_(1), "1.total"),
    ],
)
def test_what_a_step_changes_on_the_host_is_named(work, what) -> None:
    model = nn.Sequential(nn.Linear(2, 2), Counts())
    before = host_state(model, None)
    assert _change(before, host_state(model, None)) == ""
    work(model)
    assert what in _change(before, host_state(model, None))


def test_what_the_objective_holds_is_looked_at() -> None:
    calls, rng = 0, np.random.default_rng(0)

    def counts() -> None:
        nonlocal calls
        calls += 1

    def mixes() -> Any:
        return rng.random()

    model = nn.Linear(1, 1)
    for objective, name in ((counts, "calls"), (mixes, "rng")):
        before = host_state(model, objective)
        objective()
        assert f"the objective.{name}" in _change(before, host_state(model, objective))


class Pair(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor


def test_a_batch_keeps_its_names() -> None:
    batch = Pair(torch.ones(2), torch.zeros(2))
    copied = map_tensors(torch.clone, [batch, {"x": [batch.images]}])
    assert torch.equal(copied[0].images, batch.images)
    assert copied[0].images is not batch.images
    assert isinstance(copied[1]["x"], list)


def test_a_batch_must_be_tensors_on_the_gpu() -> None:
    assert "holds a str" in _obstacle([(torch.zeros(1), {"name": "x"})], None)
    assert "not on the GPU" in _obstacle([(torch.zeros(1), None)], None)


def test_an_error_in_short() -> None:
    assert first_line(RuntimeError("\n  first\nsecond")) == "first"
    assert first_line(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_a_checkpoint_that_keeps_the_random_state_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only by torch.utils.checkpoint itself: others may look at the state."""
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: "state")
    own: dict[str, Any] = {"torch": torch}
    exec(compile("def look(): return torch.cuda.get_rng_state()", torch.utils.checkpoint.__file__, "exec"), own)
    before = torch.cuda.get_rng_state
    with _checkpoints() as found:
        assert torch.cuda.get_rng_state() == "state"
        assert not found
        assert own["look"]() == "state"
        assert len(found) == 1
    assert torch.cuda.get_rng_state is before
