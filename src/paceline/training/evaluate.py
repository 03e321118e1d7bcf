"""Exact validation: every sample counts once, whatever the number of workers (law 4).

Samples are cut into fixed chunks; worker r evaluates chunks r, r + P, ... and writes each sample's metrics into its place in
a table of zeros. Summing the tables over the workers adds zeros to every value, which is exact; the mean is then taken in one
order.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.data.loaders import Loader
from paceline.dist.world import World
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
        with autocast(config, world):
            values = step.objective(model, batch)
        check_values(values, len(chunk))
        for row, name in enumerate(metrics):
            table[row, int(chunk[0]) : int(chunk[-1]) + 1] = values[name]
    model.train(was_training)
    if world.size > 1:
        dist.all_reduce(table)
    return dict(zip(metrics, table.double().mean(1).tolist(), strict=True))


@torch.no_grad()
def average_statistics(model: nn.Module, world: World) -> None:
    """Give all workers the mean of their batch norms' running statistics. Every worker reaches this.

    Each worker's statistics are an exponential average over its own parts; that is linear, so averaging now equals having
    averaged after every step.
    """
    buffers: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, _NormBase) and module.running_mean is not None and module.running_var is not None:
            buffers += [module.running_mean, module.running_var]
    if world.size == 1 or not buffers:
        return
    flat = torch.cat([buffer.flatten() for buffer in buffers])
    dist.all_reduce(flat)
    for buffer, mean in zip(buffers, torch.split(flat / world.size, [b.numel() for b in buffers]), strict=True):
        buffer.copy_(mean.view_as(buffer))
