"""Shared by the scripts of all peers, and not counted in their lines: settings, data set, model and clock.

`bench/peers.py` passes the settings in one environment variable. By hand:
`PEERS='{"epochs": 1}' torchrun bench/peers/plain_ddp.py`.
"""

import json
import math
import os
import random
import sys
import time
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset

from paceline import models
from paceline.data import fashion_mnist

PREFIX = "PEERS-EVENT "
MEAN, DEVIATION, PAD = 0.2860, 0.3530, 2


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one run, the same for all peers."""

    device: str = "cpu"
    data: str = "fashion-mnist-mini"
    model: str = "cnn"
    workers: int = 1
    part_batch: int = 128
    precision: str = "fp32"
    epochs: int = 3
    peak_lr: float = 0.05
    loaders: int = 0
    """DataLoader processes per worker."""
    compile: bool = False

    def make_model(self) -> nn.Module:
        torch.manual_seed(0)
        model = models.build(self.model, in_channels=1, image_size=28, classes=10)
        if self.compile:
            model.compile()
        return model


def settings() -> Settings:
    """The settings of this run, from the variable that the parent sets."""
    return Settings(**json.loads(os.environ.get("PEERS", "{}")))


class FashionMNIST(Dataset[tuple[Tensor, int]]):
    """Fashion-MNIST with the augmentation of torchvision's RandomCrop(28, padding=2) and RandomHorizontalFlip.

    Hand-written because torchvision has no CPU build here. It is also faster: padding is done once, and without PIL.
    """

    def __init__(self, name: str, train: bool) -> None:
        data = fashion_mnist.load(name)
        images, labels = (data.train_images, data.train_labels) if train else (data.validation_images, data.validation_labels)
        self.images, self.labels, self.train = torch.from_numpy(images), labels.tolist(), train
        if train:
            self.images = nn.functional.pad(self.images, (PAD, PAD, PAD, PAD))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        if self.train:
            top, left = random.randrange(2 * PAD + 1), random.randrange(2 * PAD + 1)
            image = image[:, top : top + 28, left : left + 28]
            if random.random() < 0.5:
                image = image.flip(2)
        return image.float().mul_(1 / (255 * DEVIATION)).sub_(MEAN / DEVIATION), self.labels[index]


class Clock:
    """Tells the parent when the first step ended, how fast each epoch's training was, and the accuracy."""

    def __init__(self) -> None:
        self.epoch, self.images, self.steps, self.start = 0, 0, 0, 0.0

    def begin(self) -> None:
        """Begin an epoch's training."""
        _synchronize()
        self.images, self.start = 0, time.perf_counter()

    def step(self, images: int = 0) -> None:
        """Count a step. `images` are this worker's: needed if an epoch does not visit each sample exactly once."""
        self.images += images
        self.steps += 1
        if self.steps == 1:
            _synchronize()
            emit("first step", time=time.time())

    def end(self) -> None:
        """End an epoch's training, before validation."""
        _synchronize()
        time_s = time.perf_counter() - self.start
        self.epoch += 1
        emit("epoch", number=self.epoch, time_s=time_s, images=self.images * _workers(), gpu_mb=gpu_mb())

    def accuracy(self, value: Tensor | float) -> None:
        """Report the validation accuracy."""
        emit("accuracy", value=float(value))


def hooks(base: type, begin: str, step: str, end: str) -> Any:
    """A callback for a peer's trainer: a clock under the peer's own hook names."""
    clock = Clock()
    called = {begin: clock.begin, step: clock.step, end: clock.end}
    return type("Hooks", (base,), {name: _method(function) for name, function in called.items()})()


def watch(args: Settings) -> None:
    """Tell the parent about a Paceline run, from outside the code that may be compiled.

    Its speed and accuracy are in its record. A replayed CUDA graph calls no hooks, so on a GPU the last event is sent at exit
    (Paceline uses `os._exit`: no atexit).
    """
    steps = args.epochs * math.ceil(fashion_mnist.SOURCES[args.data].train_size / (args.part_batch * args.workers))
    done = 0

    def after_step(*_: Any) -> None:
        nonlocal done
        done += 1
        if done == 1:
            if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
                _synchronize()
            emit("first step", time=time.time())
        if done == steps:
            emit("epoch", number=args.epochs, gpu_mb=None)
        if done == (1 if args.device == "cuda" else steps):
            hook.remove()

    hook = register_optimizer_step_post_hook(after_step)
    leave = os._exit

    def last_event(code: int) -> NoReturn:
        emit("epoch", number=args.epochs, gpu_mb=gpu_mb())
        leave(code)

    if args.device == "cuda":
        os._exit = last_event


def emit(event: str, **values: Any) -> None:
    """Print one line in one write, so that lines of workers do not mix."""
    sys.stdout.write(PREFIX + json.dumps({"event": event, "rank": _rank(), **values}) + "\n")
    sys.stdout.flush()


def gpu_mb() -> float | None:
    """The most memory that tensors have used on this worker's GPU so far."""
    return torch.cuda.max_memory_allocated() / 1e6 if torch.cuda.is_available() else None


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _workers() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _method(function: Any) -> Any:
    return lambda self, *args, **kwargs: function()
