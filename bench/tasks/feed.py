"""Images on disk as single files, tar files or one mapped array, and a net so small that it needs many of them per second.

Used by bench/data_feed.py. `--set folder=DIR --set kind=files|tar|mapped`.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline import Arrays, Task, tar_stream


class Files(Dataset[Any]):
    """One .npy file per image."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(folder.glob("*.npy"))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, sample: int) -> tuple[np.ndarray, int]:
        return np.load(self._paths[sample]), sample % 10


def objective(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    images, labels = batch
    logits = model(images.unsqueeze(1).float() / 255)
    return {"loss": nn.functional.cross_entropy(logits, labels, reduction="none")}


def net() -> nn.Module:
    """Two small convolutions for images of 512 x 512."""
    layers = nn.Conv2d(1, 8, 8, stride=8), nn.ReLU(), nn.Conv2d(8, 16, 4, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 10))


def task(folder: str, kind: str) -> Task:
    place = Path(folder)
    if kind == "files":
        train: Any = Files(place)
    elif kind == "tar":
        train = tar_stream(sorted(place.glob("*.tar")), lambda fields: (fields["npy"], fields["cls"]))
    else:
        images = np.load(place / "images.npy", mmap_mode="r")
        train = Arrays((images, torch.arange(len(images)) % 10), about="one mapped array")
    return Task(name="feed", model=net, train=train, objective=objective, unit="images")
