"""The data and the model of the migration examples: points in three clusters; batch norm and dropout."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


def make_data(samples: int, seed: int) -> TensorDataset:
    labels = torch.arange(samples) % 3
    centers = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(centers[labels] + torch.randn(samples, 8, generator=torch.Generator().manual_seed(seed)), labels)


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
