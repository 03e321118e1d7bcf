"""A Dataset is recognized by samples read in a child process."""

import os
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.data import Dataset

from harness.training import blobs
from paceline.config import make_config
from paceline.dist.world import world
from paceline.training.build import build
from paceline.training.task import classify


class Own(Dataset[tuple[Tensor, int]]):
    """A user's own data set, and one that is not quite the same."""

    def __init__(self, last: float = 0.0, random: bool = False) -> None:
        self.last, self.random = last, random

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = torch.rand(5) if not self.random else torch.tensor(list(os.urandom(5))).float()
        return noise + (self.last if index == 23 else 0.0), index % 3


def test_a_users_own_data_set_is_known_again() -> None:
    """By some of its samples, seeded; samples that are never the same twice say nothing."""

    def known(data: Own) -> str:
        task = replace(blobs(), train=lambda: data, validation=Own, objective=classify())
        with world() as here:
            return build(task, make_config(task.defaults), here).data_sha256

    assert known(Own()) == known(Own())
    assert known(Own(last=1.0)) != known(Own())
    assert known(Own(random=True)) == known(Own(random=True))
