"""A Task object from a program that has already used the GPU, on several workers."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.training import blobs
from paceline.errors import UsageError
from paceline.training.run import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: make test ARGS=tests/gpu"),
]


def test_workers_of_a_program_that_uses_the_gpu(runs: Path) -> None:
    """The workers are new processes: a fork could not use CUDA. The model in this program stays on the CPU."""
    torch.ones(1, device="cuda").sum().item()
    together = train(blobs(), workers=2, backend="gloo", reduce="exact")
    alone = train(blobs(), virtual_workers=2, reduce="exact")
    assert together.model_sha256 == alone.model_sha256
    assert {parameter.device.type for parameter in together.model.parameters()} == {"cpu"}


def test_what_is_on_the_gpu_is_not_sent(runs: Path) -> None:
    teacher, objective = torch.nn.Linear(5, 3).cuda(), blobs().objective
    task = replace(blobs(), objective=lambda model, batch: (teacher(batch[0]), objective(model, batch))[1])
    with pytest.raises(UsageError, match=r"^task blobs: objective cannot be sent to the workers: it holds a tensor on cuda:0;"):
        train(task, workers=2, backend="gloo")
