"""A stand-in for a model on a device of its own: it sleeps where a device would compute, and has 4 MB of real gradients.

    paceline scale bench/tasks/sleeper.py --workers 1,2,3,4

It learns nothing. A machine with two cores cannot show what four workers with a device each would do: their computing would
get in each other's way. Here the forward pass sleeps for 20 ms and the backward pass for 40 ms, a quarter before each of four
parameters of 1 MB has its gradient, so that DDP's buckets, their overlap, the link and waiting for each other are real while
the cores stay nearly idle.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

from paceline import Arrays, Task

BLOCKS, VALUES = 4, 1 << 18  # four times 1 MB of float32
FORWARD_S, BACKWARD_S = 0.020, 0.040


def task() -> Task:
    """What `paceline scale` asks this file for."""
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
        """Sleep, block after block; the backward pass sleeps in each block before its parameter's gradient is made."""
        for weight in self.weights:
            inputs = Sleep.apply(inputs + weight.mean())
        return inputs


class Sleep(torch.autograd.Function):
    """The identity, which takes time in both directions."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        time.sleep(FORWARD_S / BLOCKS)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(BACKWARD_S / BLOCKS)
        return gradient


def objective(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """A loss a sample."""
    (inputs,) = batch
    return {"loss": model(inputs).squeeze(1)}
