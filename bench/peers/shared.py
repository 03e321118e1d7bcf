"""What the scripts of all peers share, and no peer's lines count: settings, the data set, the model, and the clock.

`bench/peers.py` passes the settings in one variable; by hand: `PEERS='{"epochs": 1}' torchrun bench/peers/plain_ddp.py`.
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
    """One run, the same for all peers."""

    device: str = "cpu"
    data: str = "fashion-mnist-mini"
    model: str = "cnn"
    workers: int = 1
    part_batch: int = 128
    precision: str = "fp32"
    epochs: int = 3
    peak_lr: float = 0.05
    loaders: int = 0
    """DataLoader processes a worker."""
    compile: bool = False

    def make_model(self) -> nn.Module:
        torch.manual_seed(0)
        model = models.build(self.model, in_channels=1, image_size=28, classes=10)
        if self.compile:
            model.compile()
        return model


def settings() -> Settings:
    """This run's, from the variable that the parent sets."""
    return Settings(**json.loads(os.environ.get("PEERS", "{}")))


class FashionMNIST(Dataset[tuple[Tensor, int]]):
    """Fashion-MNIST with the augmentation that torchvision's RandomCrop(28, padding=2) and RandomHorizontalFlip would do.

    By hand because torchvision has no CPU build here; faster, too: padded once for all, and without PIL.
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
    """Tells the parent when the first step ended, how fast each epoch's training was, and what came of it."""

    def __init__(self) -> None:
        self.epoch, self.images, self.steps, self.start = 0, 0, 0, 0.0

    def begin(self) -> None:
        """Of an epoch's training."""
        _synchronize()
        self.images, self.start = 0, time.perf_counter()

    def step(self, images: int = 0) -> None:
        """After each; `images` are this worker's, for those who do not train on each sample exactly once."""
        self.images += images
        self.steps += 1
        if self.steps == 1:
            _synchronize()
            emit("first step", time=time.time())

    def end(self) -> None:
        """Of an epoch's training, before validation."""
        _synchronize()
        time_s = time.perf_counter() - self.start
        self.epoch += 1
        emit("epoch", number=self.epoch, time_s=time_s, images=self.images * _workers(), gpu_mb=gpu_mb())

    def accuracy(self, value: Tensor | float) -> None:
        """In validation."""
        emit("accuracy", value=float(value))


def hooks(base: type, begin: str, step: str, end: str) -> Any:
    """A callback for those who call back: a clock under the peer's own names for these moments."""
    clock = Clock()
    called = {begin: clock.begin, step: clock.step, end: clock.end}
    return type("Hooks", (base,), {name: _method(function) for name, function in called.items()})()


def watch(args: Settings) -> None:
    """Tell the parent about a Paceline run, whose speed and accuracy are in its record, from outside of what may be compiled.

    A step that is replayed from a CUDA graph calls no hook, so on a GPU the last word is at exit (by `os._exit`: no atexit).
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

    def last_word(code: int) -> NoReturn:
        emit("epoch", number=args.epochs, gpu_mb=gpu_mb())
        leave(code)

    if args.device == "cuda":
        os._exit = last_word


def emit(event: str, **values: Any) -> None:
    """One line, in one write, so that workers do not write into each other's."""
    sys.stdout.write(PREFIX + json.dumps({"event": event, "rank": _rank(), **values}) + "\n")
    sys.stdout.flush()


def gpu_mb() -> float | None:
    """The most that tensors took on this worker's GPU so far."""
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
