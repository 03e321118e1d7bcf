"""Fit a line: the smallest task. The data are 100 points of y = 10 x + 2 with noise of standard deviation 1.

    paceline train examples/line_fit.py
    paceline train examples/line_fit.py --workers 2 --global-batch 32

The validation loss ends near 1, the variance of the noise. No line can do better.
"""

import torch
from torch import Tensor, nn

from paceline import Arrays, Task


def task() -> Task:
    """The function that `paceline train` calls."""
    return Task(
        name="line-fit",
        model=lambda: nn.Linear(1, 1),
        train=lambda: points(100, seed=0),
        validation=lambda: points(100, seed=1),
        objective=squared_error,
        unit="points",
        defaults={
            "reference_batch": 16,
            "base_lr": 0.001,
            "momentum": 0.0,
            "weight_decay": 0.0,
            "schedule": "constant",
            "epochs": 100,
        },
    )


def points(count: int, seed: int) -> Arrays:
    """Points on the line, with noise."""
    random = torch.Generator().manual_seed(seed)
    x = 10 * torch.rand(count, 1, generator=random)
    return Arrays((x, 10 * x + 2 + torch.randn(count, 1, generator=random)), about=f"{count} points of y = 10 x + 2, noise 1")


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """One loss per point."""
    x, y = batch
    return {"loss": (model(x) - y).square().squeeze(1)}
