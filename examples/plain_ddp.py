"""A plain DDP training script: the starting point of own_loop.py.

torchrun --nproc-per-node 2 examples/plain_ddp.py
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler


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
    ddp = DistributedDataParallel(model)
    sampler = DistributedSampler(range(len(x)), seed=0)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for samples in torch.tensor(list(sampler)).split(256 // dist.get_world_size()):
            F.cross_entropy(ddp(x[samples]), y[samples]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()
