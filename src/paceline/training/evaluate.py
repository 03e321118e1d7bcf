"""Exact validation: every sample counts once, whatever the number of workers (law 4).

Samples are cut into fixed chunks; worker r evaluates chunks r, r + P, ... and writes each sample's metrics into its place in
a table of zeros. Summing the tables over the workers adds zeros to every value, which is exact; the mean is then taken in one
order. Random numbers that a model draws in validation are keyed by (seed, epoch, chunk).

With `--ema` it is the averaged weights that are validated, and saved at the end. Batch-norm statistics that were taken while
the training weights moved do not fit them, so they are taken anew (Izmailov et al. 2018, arXiv:1803.05407, section 3.2), in
the same manner: fixed chunks of training samples, a row of the table a chunk.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from paceline.core.keys import key, seed_all
from paceline.core.sampler import Sampler
from paceline.data.loaders import Inputs, Loader
from paceline.errors import UsageError
from paceline.training.capture.graph import Graph, compiler, watch
from paceline.training.first import check_values
from paceline.training.step import Step, autocast

_SAMPLES, _CHUNKS = 8192, 256  # at most, of the training data: what batch-norm statistics of averaged weights are taken over
_STATISTICS, _CHUNK = 0x57A7, 0xE7A1  # keep the random numbers of these passes apart from those of training


class Validation:
    """The validation of one run; called, it gives the mean of each metric over all samples."""

    def __init__(self, step: Step, loader: Loader, samples: int) -> None:
        self._step, self._loader, self._samples = step, loader, samples
        size = step.config.eval_batch or (1000 if step.world.device.type == "cuda" else 250)
        chunks = [np.arange(start, min(start + size, samples)) for start in range(0, samples, size)]
        self._numbers = range(step.world.rank, len(chunks), step.world.size)
        self._mine = [chunks[number] for number in self._numbers]
        self._names: tuple[str, ...] = ()
        """What the objective reports in validation, loss first; training may report other metrics."""
        self._graph = self._record() if self._mine and step.captured is not None else None

    @torch.no_grad()
    def __call__(self, epoch: int) -> dict[str, float]:
        """Validate after an epoch; the same numbers on every worker. Collective: call on every rank."""
        step, model, world = self._step, self._step.model, self._step.world
        was_training, rows = model.training, []
        model.eval()

        def seed(i: int) -> None:
            seed_all(key(step.config.seed, _CHUNK, epoch, self._numbers[i]), world.device)

        step.mark(step.now, "validation")  # before the first chunk is loaded: a loader may hang
        for chunk, inputs in zip(self._mine, self._loader.inputs(self._mine, None, seed), strict=True):
            step.mark(step.now, "validation")
            given = [inputs]
            replays = self._graph is not None and self._graph.fits(given)
            rows.append(self._graph(given).clone() if self._graph and replays else self._rows(given, len(chunk)))
        model.train(was_training)
        step.mark(step.now, "reduce")
        names = tuple(world.broadcast(self._names))  # a worker without a chunk has seen none
        _check_names(self._names or names, names)
        table = torch.zeros(len(names), self._samples, device=world.device)
        for chunk, values in zip(self._mine, rows, strict=True):
            table[:, int(chunk[0]) : int(chunk[-1]) + 1] = values
        if world.size > 1:
            dist.all_reduce(table)
        return dict(zip(names, table.double().mean(1).tolist(), strict=True))

    def _rows(self, given: list[Inputs], count: int) -> Tensor:
        """One row per metric, one column per sample."""
        step = self._step
        with autocast(step.config, step.world):
            values = step.objective(step.model, self._loader.make(given[0]))
        names = check_values(values, count)
        if not self._names:
            self._names = names
        _check_names(names, self._names)
        return torch.stack([values[name].float() for name in names])

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


def _check_names(found: tuple[str, ...], expected: tuple[str, ...]) -> None:
    if found != expected:
        raise UsageError(
            f"the objective reported {', '.join(found)} for one batch of validation and {', '.join(expected)} for another:"
            " it must report the same metrics in the same order each time"
        )


class Averaged:
    """The model with averaged weights (`--ema`) and batch-norm statistics to go with them.

    Each chunk is as large as a part and is normalised as a part would be (a `PartNorm` makes its own cuts of it); statistics
    are the mean over the chunks. A layer that the model calls twice in a pass keeps those of the second call.
    """

    def __init__(self, step: Step, loader: Loader, sampler: Sampler) -> None:
        self._step, self._loader, self._sampler = step, loader, sampler
        self._kept: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def put_in(self, epoch: int) -> None:
        """Weights and statistics of the average in the place of those of training. Every worker reaches this, after
        `Statistics.average`; the model is as training left it.
        """
        step = self._step
        assert step.ema is not None
        step.ema.put_in()
        layers = [module for module in step.model.modules() if isinstance(module, _NormBase) and _moves(module)]
        buffers = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
        self._kept = [(buffer, buffer.clone()) for buffer in buffers]
        if layers:
            self._take_statistics(layers, epoch)
        for buffer, kept in self._kept:
            if not buffer.is_floating_point():  # the count of training's passes
                buffer.copy_(kept)

    @torch.no_grad()
    def take_out(self) -> None:
        """Training goes on as if nothing had happened."""
        assert self._step.ema is not None
        self._step.ema.take_out()
        for buffer, kept in self._kept:
            buffer.copy_(kept)
        self._kept = []

    def _take_statistics(self, layers: list[_NormBase], epoch: int) -> None:
        step, model, world = self._step, self._step.model, self._step.world
        running = [tensor for layer in layers for tensor in (layer.running_mean, layer.running_var) if tensor is not None]
        rows, mine = self._deal()
        table = torch.zeros(rows, sum(each.numel() for each in running), dtype=torch.float64, device=world.device)
        modes, momenta = [(module, module.training) for module in model.modules()], [layer.momentum for layer in layers]
        model.eval()  # no dropout, and nothing else that a model does in training alone
        for layer in layers:
            layer.training, layer.momentum = True, 1.0  # running statistics become those of the chunk
        numbers = list(mine)

        def seed(i: int) -> None:
            seed_all(key(step.config.seed, _STATISTICS, epoch, numbers[i]), world.device)

        step.mark(step.now, "validation")
        for row, inputs in zip(mine, self._loader.inputs(list(mine.values()), epoch, seed), strict=True):
            step.mark(step.now, "validation")
            with autocast(step.config, world):
                step.objective(model, self._loader.make(inputs))
            table[row] = torch.cat([each.flatten() for each in running])
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        for module, training in modes:
            module.training = training
        step.mark(step.now, "reduce")
        if world.size > 1:
            dist.all_reduce(table)  # every row comes from one worker: adding zeros is exact
        means = torch.split(table.mean(0) + 0.0, [each.numel() for each in running])  # no -0.0, which not all would have
        for each, mean in zip(running, means, strict=True):
            each.copy_(mean.view_as(each))

    def _deal(self) -> tuple[int, dict[int, np.ndarray]]:
        """How many chunks there are, and this worker's by number: the same ones in all, however many workers there are.

        A norm over all workers needs everybody in every pass: then all have equally many.
        """
        size = max(2, self._sampler.global_batch // self._sampler.parts)
        rank, workers = self._step.world.rank, self._step.world.size
        order = self._sampler.order(0)[: min(_SAMPLES, _CHUNKS * size)]
        chunks = np.split(order[: len(order) // size * size], max(1, len(order) // size)) if len(order) >= size else [order]
        if not self._step.statistics.over_workers:
            return len(chunks), {i: chunks[i] for i in range(rank, len(chunks), workers)}
        rows = max(1, len(chunks) // workers) * workers
        return rows, {i: chunks[i % len(chunks)] for i in range(rank, rows, workers)}


def _moves(layer: _NormBase) -> bool:
    """Whether training moves this layer's running statistics; not where a model keeps it in evaluation."""
    return layer.running_mean is not None and layer.training
