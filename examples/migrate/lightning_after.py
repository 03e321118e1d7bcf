"""lightning_before.py as a task: the same weights, bit for bit, on 1 to 4 workers.

paceline train examples/migrate/lightning_after.py --workers 2
"""

import torch
import torch.nn.functional as F
from problem import Net, make_data
from torch.optim.lr_scheduler import StepLR

from paceline import Task


def objective(model, batch):
    x, y = batch
    logits = model(x)
    return {"loss": F.cross_entropy(logits, y, reduction="none"), "accuracy": (logits.argmax(1) == y).float()}


def task() -> Task:
    return Task(
        name="points",
        unit="points",
        model=Net,
        train=make_data(1000, seed=1),
        validation=make_data(203, seed=2),
        objective=objective,
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        schedule=lambda optimizer: StepLR(optimizer, step_size=1, gamma=0.7),
        defaults={
            **{"global_batch": 64, "reference_batch": 64, "virtual_workers": 4, "reduce": "exact"},
            **{"epochs": 3, "log_every": 10},
        },
    )
