"""Sequences of different lengths: a task whose loss is a mean over tokens, in three equal forms."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.data.loaders import Arrays
from paceline.training.task import Task

SAMPLES, LENGTH = 53, 6
RANDOM = torch.Generator().manual_seed(5)
X = torch.randn(SAMPLES, LENGTH, 4, generator=RANDOM)
Y = torch.randn(SAMPLES, LENGTH, generator=RANDOM)
MASK = torch.arange(LENGTH) < torch.randint(0, LENGTH + 1, (SAMPLES, 1), generator=RANDOM)
"""Which of a sequence's tokens count; some sequences have none."""


def squares(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Per sequence: the sum of its tokens' losses, and their number."""
    x, y, mask = batch
    return ((model(x).squeeze(-1) - y).square() * mask).sum(1), mask.sum(1)


def per_sample(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    total, count = squares(model, batch)
    return {"loss": total / count.clamp(min=1), "weight": count, "count": count}


def per_batch(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """As Hugging Face: the mean over the tokens of the batch, which is nan if there are none."""
    x, y, mask = batch
    loss = F.mse_loss(model(x).squeeze(-1)[mask], y[mask])
    return {"loss": loss, "weight": mask.sum(), "count": mask.sum() / len(mask)}


def scalar_loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"loss": per_batch(model, batch)["loss"], "weight": batch[2].sum(1), "count": batch[2].sum(1)}


def tokens(objective: Any, mask: Tensor = MASK, **fields: Any) -> Task:
    options = {"global_batch": 8, "reference_batch": 8, "base_lr": 0.05, "epochs": 2, "eval_batch": 7, "weight_decay": 0.0}
    return Task(
        name="tokens",
        model=lambda: nn.Linear(4, 1),
        train=Arrays((X, Y, mask)),
        objective=objective,
        defaults=options,
        **{"validation": Arrays((X, Y, mask)), **fields},
    )
