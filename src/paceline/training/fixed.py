"""A record's model, and a fixed set of samples on the device to evaluate it on again and again: `landscape` and `sharpness`.

The samples follow from a seed, never from the number of workers. They are prepared once, as in validation (no augmentation),
and stay on the device, so that evaluating another set of weights reads no data.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.core.exact_mean import check_names, lay_out
from paceline.core.hashes import key, keys_numpy
from paceline.core.keys import seed_all
from paceline.core.stream import Stream
from paceline.core.trees import map_tensors
from paceline.data.loaders import Batch
from paceline.dist.world import World
from paceline.output import stages
from paceline.training.after import Opened, Request, opened
from paceline.training.forward import check_values

_SAMPLES, _CHUNK = 0xF13D, 0xF13E  # keep these random numbers apart from those of training and validation


@dataclass(frozen=True, kw_only=True)
class FixedSet:
    """Some samples of one data set, as batches on the device."""

    name: str
    batches: tuple[Batch, ...]
    counts: tuple[int, ...]
    """Samples in each batch."""

    @property
    def samples(self) -> int:
        """Samples in all batches."""
        return sum(self.counts)


class Fixed:
    """A record's model in evaluation mode, and its fixed sets by name."""

    def __init__(self, opened: Opened, sets: Mapping[str, FixedSet]) -> None:
        self.opened, self.run, self.sets = opened, opened.run, sets
        self.model: nn.Module = opened.run.model
        self.names: dict[str, tuple[str, ...]] = {}
        """The objective's metrics in validation, loss first: per set, known after its first evaluation."""
        self.objective = opened.task.validation_objective or opened.task.objective

    def values(self, batch: Batch) -> dict[str, Tensor]:
        """The objective's values for a batch, with a graph for gradients if they are enabled."""
        with self.run.forward.autocast():
            return self.objective(self.model, batch)

    def loss(self, batch: Batch, count: int) -> tuple[Tensor, Tensor]:
        """The sum of a batch's losses, each times its weight, and the sum of the weights. Differentiable; no host sync.

        The mean loss of a set is the sum of the first over the sum of the second.
        """
        values = self.values(batch)
        check_values(values, count, self.run.world.device)
        loss = values["loss"].float()
        weight = values.get("weight")
        if weight is None:
            return (loss.sum() if loss.dim() else loss * count), torch.full((), float(count), device=loss.device)
        total = weight.float().sum()
        return (torch.where(weight == 0, 0.0, loss) * weight).sum() if loss.dim() else loss * total, total

    @torch.no_grad()
    def means(self, name: str) -> Tensor:
        """The mean of each metric over a set, in float64 on the device, in the order of `names`. No host sync.

        The order of all sums is fixed, so the same weights have the same means on any worker.
        """
        one, sums = self.sets[name], None
        for batch, count in zip(one.batches, one.counts, strict=True):
            values = self.values(batch)
            names = check_values(values, count, self.run.world.device)
            check_names(names, self.names.setdefault(name, names))
            rows = lay_out(values, (*names, "weight") if "weight" in values else names, count).double()
            if "weight" in values:
                found = torch.cat(((torch.where(rows[-1] == 0, 0.0, rows[:-1]) * rows[-1]).sum(1), rows[-1].sum().view(1)))
            else:
                found = torch.cat((rows.sum(1), torch.full((1,), float(count), dtype=torch.float64, device=rows.device)))
            sums = found if sums is None else sums + found
        assert sums is not None
        return sums[:-1] / sums[-1]

    def seed(self) -> None:
        """Seed what the model may draw in evaluation: the same numbers for each set of weights."""
        seed_all(key(self.run.config.seed, _CHUNK), self.run.world.device)

    @contextmanager
    def batch_statistics(self, on: bool = True) -> Iterator[None]:
        """In this block batch norm uses the statistics of each batch: the recorded ones fit no other weights."""
        layers = [layer for layer in self.model.modules() if isinstance(layer, _NormBase) and on]
        kept = [(layer, layer.training, layer.momentum) for layer in layers]
        buffers = [(buffer, buffer.clone()) for layer in layers for buffer in layer.buffers(recurse=False)]
        for layer in layers:
            layer.training, layer.momentum = True, 0.0
        try:
            yield
        finally:
            for layer, training, momentum in kept:
                layer.training, layer.momentum = training, momentum
            for buffer, value in buffers:  # a momentum of 0 turns inf and nan into nan
                buffer.copy_(value)


@contextmanager
def fixed(request: Request, here: World, *, samples: int, seed: int, shared: bool = False) -> Iterator[Fixed]:
    """Open a record with up to `samples` samples of each of `request.sets` (0: all). Collective: call on every rank.

    With `shared`, workers will share the batches of a set, so there is at least one for each of them.
    """
    with opened(request, here, validates=True) as model:
        sets = {}
        for name in model.run.validation_sets:
            stages.enter(f"reading samples of the {'training' if name == 'train' else name} data")
            sets[name] = _read(model, name, samples, seed, here.size if shared else 1)
        yield Fixed(model, sets)


@torch.no_grad()
def _read(model: Opened, name: str, samples: int, seed: int, at_least: int) -> FixedSet:
    run = model.run
    data, device = run.validation_sets[name], run.world.device
    count = min(samples or data.samples, data.samples)
    chosen = np.arange(count)
    if count < data.samples and not _is_stream(model, name):  # a stream can only be read from its start
        order = np.argsort(keys_numpy(key(seed, _SAMPLES), np.arange(data.samples)), kind="stable")
        chosen = np.sort(order[:count])
    size = run.config.eval_batch or (1000 if device.type == "cuda" else 250)
    chunks = np.array_split(chosen, max(-(-count // size), min(at_least, count)))

    def before(i: int) -> None:
        seed_all(key(run.config.seed, _CHUNK, i), device)

    keep: Callable[[Tensor], Tensor] = Tensor.clone
    batches = [map_tensors(keep, batch) for batch in data.loader.batches(chunks, None, before)]
    return FixedSet(name=name, batches=tuple(batches), counts=tuple(len(chunk) for chunk in chunks))


def _is_stream(model: Opened, name: str) -> bool:
    sources: Any = model.run.task.validation  # functions that make their data once
    return isinstance(sources[name](), Stream)
