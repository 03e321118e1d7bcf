"""Exact validation: every sample counts once, whatever the number of workers (law 4).

Samples are cut into fixed chunks; worker r evaluates chunks r, r + P, ... and writes each sample's metrics into its place in
a table of zeros. Summing the tables over the workers adds zeros to every value, which is exact; the mean is then taken in one
order.
"""

import numpy as np
import torch
import torch.distributed as dist

from paceline.data.loaders import Loader
from paceline.training.step import Step, autocast, check_values


@torch.no_grad()
def evaluate(step: Step, loader: Loader, samples: int) -> dict[str, float]:
    """The mean of each metric over all `samples`. Every worker reaches this and gets the same numbers."""
    model, metrics, world, config = step.model, step.metrics, step.world, step.config
    chunks = [np.arange(start, min(start + config.eval_batch, samples)) for start in range(0, samples, config.eval_batch)]
    mine = chunks[world.rank :: world.size]
    table = torch.zeros(len(metrics), samples, device=world.device)
    was_training = model.training
    model.eval()
    for chunk, batch in zip(mine, loader.batches(mine, None), strict=True):
        step.mark(step.now, "validation")
        with autocast(config, world):
            values = step.objective(model, batch)
        check_values(values, len(chunk))
        for row, name in enumerate(metrics):
            table[row, int(chunk[0]) : int(chunk[-1]) + 1] = values[name]
    model.train(was_training)
    step.mark(step.now, "reduce")
    if world.size > 1:
        dist.all_reduce(table)
    return dict(zip(metrics, table.double().mean(1).tolist(), strict=True))
