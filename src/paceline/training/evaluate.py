"""Exact validation: every sample counts once, whatever the number of workers (law 4).

Samples are cut into fixed chunks; worker r evaluates chunks r, r + P, ... and writes each sample's metrics into its place in
a table of zeros. Summing the tables over the workers adds zeros to every value, which is exact; the mean is then taken in one
order.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.data.loaders import Inputs, Loader
from paceline.training.graph import Graph, compiler, watch
from paceline.training.step import Step, autocast, check_values


class Validation:
    """The validation of one run; called, it gives the mean of each metric over all samples."""

    def __init__(self, step: Step, loader: Loader, samples: int) -> None:
        self._step, self._loader, self._samples = step, loader, samples
        size = step.config.eval_batch or (1000 if step.world.device.type == "cuda" else 250)
        chunks = [np.arange(start, min(start + size, samples)) for start in range(0, samples, size)]
        self._mine = chunks[step.world.rank :: step.world.size]
        self._graph = self._record() if self._mine and step.captured is not None else None

    @torch.no_grad()
    def __call__(self) -> dict[str, float]:
        """Every worker reaches this and gets the same numbers."""
        step, model, world = self._step, self._step.model, self._step.world
        table = torch.zeros(len(step.metrics), self._samples, device=world.device)
        was_training = model.training
        model.eval()
        for chunk, inputs in zip(self._mine, self._loader.inputs(self._mine, None), strict=True):
            step.mark(step.now, "validation")
            given, columns = [inputs], slice(int(chunk[0]), int(chunk[-1]) + 1)
            replays = self._graph is not None and self._graph.fits(given)
            table[:, columns] = self._graph(given) if self._graph and replays else self._rows(given, len(chunk))
        model.train(was_training)
        step.mark(step.now, "reduce")
        if world.size > 1:
            dist.all_reduce(table)
        return dict(zip(step.metrics, table.double().mean(1).tolist(), strict=True))

    def _rows(self, given: list[Inputs], count: int) -> Tensor:
        """One row a metric, one column a sample."""
        step = self._step
        with autocast(step.config, step.world):
            values = step.objective(step.model, self._loader.make(given[0]))
        check_values(values, count)
        return torch.stack([values[name].float() for name in step.metrics])

    @torch.no_grad()
    def _record(self) -> Graph | None:
        """A full chunk as a CUDA graph, where steps are; compiled, where they are. None where it cannot be."""
        model, chunk = self._step.model.eval(), self._mine[0]

        def rows(given: list[Inputs]) -> Tensor:
            return self._rows(given, len(chunk))

        given = list(self._loader.inputs([chunk], None))
        _, why = watch(rows, given, model, self._step.objective)
        try:
            if self._step.compiled and not why:
                with compiler() as compiled:
                    rows = compiled(rows)
                    rows(given)
            return None if why else Graph(rows, given)
        except Exception:  # whatever a compiler or a graph trips over: it is done as it always was
            return None
        finally:
            model.train()
