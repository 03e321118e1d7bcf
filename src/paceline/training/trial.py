"""Try a task on a few samples before the first step: may parts share a pass, and does channels-last work?

Batches come through a loader process if the run uses them. A Dataset that opens its file when it is first read must not do so
in this process: loader processes are forks of it and would share its position in the file.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.config import Config
from paceline.core.keys import key, random_state, seed_all
from paceline.core.sampler import Sampler
from paceline.core.trees import tensors_in
from paceline.data.augment import Images
from paceline.data.loaders import Arrays, Batch, Feed, make_loader
from paceline.dist.world import World
from paceline.errors import first_line
from paceline.training.task import Task, is_classify
from paceline.training.task_checks import every

_KEY = 0x7217  # keeps the random numbers of trials apart from those of training


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A task, and what is needed to try it."""

    task: Task
    data: Any
    config: Config
    sampler: Sampler
    world: World
    feed: Feed

    def try_prepare(self) -> tuple[str, str]:
        """Why the task's `prepare` needs parts in turn, and a note if it is not reproducible; "" for neither."""
        if self.task.prepare is None or isinstance(self.task.prepare, Images):
            return "", ""
        part = self.sampler.global_batch // self.sampler.parts
        samples = self.sampler.order(0)[: 2 * part]
        samples, seeded = samples[: len(samples) // 2 * 2], b""

        def seed(i: int) -> None:
            nonlocal seeded
            self._seed()
            seeded = random_state(self.world.device)

        try:
            with self._batches([samples, samples[::2], samples[::2]], seed) as (together, alone, again):
                if not _same(alone, again):
                    return "the task's prepare draws random numbers", _NOT_SEEDED
                if random_state(self.world.device) != seeded:
                    return "the task's prepare draws random numbers", ""
                same = _same(every(together, 2, len(samples)), alone)
                return "" if same else "the task's prepare looks across the samples of a batch", ""
        except Exception as error:  # running in turn is always correct; a mistake in the task shows in the first step
            return f"the task's prepare failed in a trial ({first_line(error)})", ""

    @torch.no_grad()
    def try_model(self, model: nn.Module) -> str:
        """Why the task needs parts in turn: the user's own model draws random numbers, or the loss is one number per batch.
        "" if neither.
        """
        if self.task.model is None and is_classify(self.task.objective):
            return ""
        kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        try:
            with self._batches([self.sampler.order(0)[: self.sampler.global_batch // self.sampler.parts]]) as (batch,):
                self._seed()
                before = random_state(self.world.device)
                values = self.task.objective(model, batch)
                if random_state(self.world.device) != before:
                    return "the model draws random numbers"
                mixes = isinstance(values, dict) and not values["loss"].dim()  # other mistakes show in the first step
                return "the loss is one number per batch" if mixes else ""
        except Exception as error:
            return f"the model failed in a trial ({first_line(error)})"
        finally:
            for name, buffer in model.named_buffers():
                if name in kept:
                    buffer.copy_(kept[name])

    @torch.no_grad()
    def why_not_channels_last(self, model: nn.Module) -> str:
        """Why a user's own net fails on two samples in this layout; often because of `x.view(...)` after a convolution."""
        model.eval()
        try:
            with self._batches([np.arange(2)], epoch=None) as (batch,):
                self.task.objective(model, batch)
        except RuntimeError as error:  # other mistakes show in the first step
            return first_line(error)
        except Exception:
            return ""
        finally:
            model.train()
        return ""

    def _seed(self) -> None:
        seed_all(key(self.config.seed, _KEY), self.world.device)

    @contextmanager
    def _batches(
        self, samples: list[np.ndarray], before: Callable[[int], None] = lambda i: None, epoch: int | None = 0
    ) -> Iterator[list[Batch]]:
        processes = 0 if isinstance(self.data, Arrays) else min(1, self.config.loader_workers)
        loader = make_loader(
            self.data, "streaming", self.task.prepare, self.world.device, processes, self.config.seed, self.feed
        )
        try:
            yield list(loader.batches(samples, epoch, before))
        finally:
            loader.close()


_NOT_SEEDED = (
    "preparing the same samples twice gives different results: a random number generator that Paceline does not seed makes"
    " the model depend on the number of workers; draw from torch, numpy.random or random"
)


def _same(one: Any, other: Any) -> bool:
    """Whether two batches hold equal tensors."""
    ours, theirs = list(tensors_in(one)), list(tensors_in(other))
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=1e-4, equal_nan=True)
        for a, b in zip(ours, theirs, strict=True)
    )
