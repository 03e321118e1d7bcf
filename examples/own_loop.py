"""plain_ddp.py on Paceline's core: the same weights, bit for bit, on 1 to 8 workers, with batch norm and dropout.

torchrun --nproc-per-node 2 examples/own_loop.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import paceline


def make_data(samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in three clusters."""
    labels = torch.arange(samples) % 3
    centers = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    return centers[labels] + torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed)), labels


def train(epochs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    x, y = make_data(1000, seed=2)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    team = paceline.Parts(model, samples=len(x), global_batch=256, virtual_workers=8, reduce="exact", seed=0)
    for epoch in range(epochs):
        for step in team.epoch(epoch):
            for part in step:
                part.backward(F.cross_entropy(model(x[part.samples]), y[part.samples]))
            step.reduce()
            optimizer.step()
            optimizer.zero_grad()
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
