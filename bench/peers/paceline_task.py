"""Paceline, as in README.md: a file with a function task(), for `paceline train bench/peers/paceline_task.py`."""

import numpy as np
import torch
from shared import settings, watch

from paceline import Arrays, Images, Task, classify
from paceline.data.fashion_mnist import load


def task() -> Task:
    args = settings()
    watch(args)  # bench
    data = load(args.data)
    return Task(
        name="peers",
        model=args.make_model,
        train=lambda: arrays(data.train_images, data.train_labels),
        validation=lambda: arrays(data.validation_images, data.validation_labels),
        prepare=Images(mean=0.2860, deviation=0.3530, crop=2, flip=True),
        objective=classify(label_smoothing=0.1),
        defaults={
            "base_lr": args.peak_lr,
            "lr_rule": "none",
            "momentum": 0.9,
            "weight_decay": 5e-4,
            "decay_all": True,
            "schedule": "one-cycle",
        },
    )


def arrays(images: np.ndarray, labels: np.ndarray) -> Arrays:
    return Arrays((torch.from_numpy(images), torch.from_numpy(labels)))
