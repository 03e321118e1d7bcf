"""A stand-in for a model on its own device: it sleeps instead of computing, and has 4 MB of real gradients.

    paceline scale bench/tasks/sleeper.py --workers 1,2,3,4

It learns nothing. A machine with two cores cannot show what four workers with a device each would do, because their compute
would compete for the cores. Here the forward pass sleeps for 20 ms and the backward pass for 40 ms: a quarter of that before
each of four parameters of 1 MB gets its gradient. So DDP's buckets, their overlap, the link and waiting are real, while the
cores stay nearly idle.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

from paceline import Arrays, Task

BLOCKS, VALUES = 4, 1 << 18  # four parameters of 1 MB in float32
FORWARD_S, BACKWARD_S = 0.020, 0.040


def task() -> Task:
    """The function that `paceline scale` calls."""
    return Task(
        name="sleeper",
        model=Sleeper,
        train=lambda: Arrays((torch.zeros(65_536, 1),)),
        validation=lambda: Arrays((torch.zeros(16, 1),)),
        objective=objective,
        unit="samples",
        defaults={"reference_batch": 16, "base_lr": 0.001, "epochs": 1, "schedule": "constant", "fast": "off"},
    )


class Sleeper(nn.Module):
    """Blocks that add a parameter's mean and sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(VALUES)) for _ in range(BLOCKS))

    def forward(self, inputs: Tensor) -> Any:
        """Sleep in each block; the backward pass sleeps in each block before it computes the parameter's gradient."""
        for weight in self.weights:
            inputs = Sleep.apply(inputs + weight.mean())
        return inputs


class Sleep(torch.autograd.Function):
    """The identity function, but it takes time in both directions."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        time.sleep(FORWARD_S / BLOCKS)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(BACKWARD_S / BLOCKS)
        return gradient


def objective(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """One loss per sample."""
    (inputs,) = batch
    return {"loss": model(inputs).squeeze(1)}
