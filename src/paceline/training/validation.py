"""Exact validation (law 4) on one or more sets, and validation of averaged weights.

The first set is the main one. Metrics of the others have their set's name in front: "shifted/loss".

Random numbers that a model draws in validation are keyed by (seed, epoch, chunk).

With `--ema` the averaged weights are validated, and saved at the end. Batch-norm statistics from training do not fit them,
because the training weights moved. So new ones are taken (Izmailov et al. 2018, arXiv:1803.05407, section 3.2), in the same
exact way: over fixed chunks of training samples, with one table row per chunk.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from paceline.core.exact_mean import Chunks, check_names, lay_out, mean_over_workers
from paceline.core.in_order import gather_in_order
from paceline.core.keys import key, seed_all
from paceline.core.trees import map_tensors
from paceline.data.loaders import Inputs
from paceline.errors import UsageError, unknown
from paceline.output import plural
from paceline.training.build import Run, ValidationSet
from paceline.training.capture.graph import Graph, compiler, find_obstacle
from paceline.training.capture.replay import CapturedStep
from paceline.training.forward import check_values
from paceline.training.metrics import WholeSet
from paceline.training.step import Executor, TrainStep

_SAMPLES, _CHUNKS = 8192, 256  # at most, of the training data: for the batch-norm statistics of averaged weights
_STATISTICS, _CHUNK = 0x57A7, 0xE7A1  # keep the random numbers of these passes apart from those of training


class Validation:
    """The validation of one run. Call it for the mean of each metric over all samples, and the task's metrics of whole sets."""

    def __init__(self, run: Run, step: TrainStep, executor: Executor) -> None:
        """Captured as a CUDA graph if the run's steps are, and compiled if they are."""
        self._run = run
        self._sets = {name: _Set(run, step, data, executor) for name, data in run.validation_sets.items()}

    @torch.no_grad()
    def __call__(self, epoch: int, tell: Callable[[int, int], None] = lambda done, total: None) -> dict[str, float]:
        """Validate after an epoch; the same numbers on every worker. Collective: call on every rank.

        `tell` is called with the number of chunks that this worker has started, and their total. On a GPU they may be queued.
        """
        run, found = self._run, dict[str, float]()
        total, done = sum(one.count for one in self._sets.values()), 0
        was_training = run.model.training
        run.model.eval()
        for number, (name, one) in enumerate(self._sets.items()):
            metrics = one.evaluate(epoch, lambda chunk, before=done: tell(before + chunk, total))  # type: ignore[misc]
            found |= {f"{name}/{key}": value for key, value in metrics.items()} if number else metrics
            done += one.count
        run.model.train(was_training)
        return found

    def check(self) -> str:
        """Raise a UsageError if `--target-accuracy`, `--monitor` or the task's metrics cannot be measured: before the first
        step, not after the first epoch. Returns a note for the user, or "". Collective: call on every rank.
        """
        config, metrics = self._run.config, self._run.task.metrics
        if not config.target_accuracy and not config.monitor and not metrics:
            return ""
        found, note = next(iter(self._sets.values())).try_first()
        names = (*found, *metrics)
        if config.target_accuracy and "accuracy" not in names:
            raise UsageError(
                f"--target-accuracy: in validation this task's objective reports {', '.join(names)}, but no 'accuracy';"
                " add it to the dict that the objective returns, or leave --target-accuracy out"
            )
        known = [*names, *(f"{one}/{name}" for one in list(self._sets)[1:] for name in names)]
        of_dict = any(config.monitor.rpartition("/")[2].startswith(f"{name}_") for name in metrics)  # NAME_key
        if config.monitor and config.monitor not in known and not of_dict:
            raise unknown("validation metric for --monitor", config.monitor, known)
        return note


class _Set:
    """One validation set."""

    def __init__(self, run: Run, step: TrainStep, data: ValidationSet, executor: Executor) -> None:
        self._run, self._step, self._loader = run, step, data.loader
        self._objective = run.task.validation_objective or run.task.objective
        size = run.config.eval_batch or (1000 if run.world.device.type == "cuda" else 250)
        self._chunks = Chunks(data.samples, size, run.world)
        self._whole = WholeSet(run.task.metrics) if run.task.metrics else None
        self._names: tuple[str, ...] = ()
        """The objective's metrics in validation, loss first, and "weight" if there is one; training may report others."""
        self._graph: Graph | None = None
        if isinstance(executor, CapturedStep) and self._chunks.mine:
            self._graph = self._record(executor.compiled)

    @property
    def count(self) -> int:
        """This worker's chunks."""
        return len(self._chunks.mine)

    def evaluate(self, epoch: int, tell: Callable[[int], None]) -> dict[str, float]:
        """The metrics of this set. Collective: call on every rank."""
        step, whole, rows = self._step, self._whole, list[Tensor]()
        evaluated = self._evaluate(epoch, tell, rows)
        step.mark("validation")  # before the first chunk is loaded: a loader may hang
        if whole is None:
            for _ in evaluated:
                pass
        else:
            whole.begin()
            for outputs in gather_in_order(self._chunks, evaluated):
                step.mark("validation")
                whole.feed(outputs)
        step.mark("reduce")
        means = mean_over_workers(self._chunks, self._names, rows)
        return means if whole is None else {**means, **whole.finish(self._run.world, means)}

    def _evaluate(self, epoch: int, tell: Callable[[int], None], rows: list[Tensor]) -> Iterator[Any]:
        """Evaluate this worker's chunks; adds their rows, and yields their outputs."""
        step, chunks, seed = self._step, self._chunks, self._run.config.seed

        def seed_chunk(i: int) -> None:
            seed_all(key(seed, _CHUNK, epoch, chunks.numbers[i]), self._run.world.device)

        inputs = self._loader.inputs(chunks.mine, None, seed_chunk)
        for number, (chunk, given) in enumerate(zip(chunks.mine, inputs, strict=True), start=1):
            step.mark("validation")
            tell(number)
            row, outputs = self._replay([given]) or self._values([given], len(chunk))
            rows.append(row)
            if self._whole is not None:
                step.mark("reduce")  # workers wait for each other to gather the outputs
            yield outputs

    def try_first(self) -> tuple[tuple[str, ...], str]:
        """The names of the objective's metrics, by a trial of the first chunk: on every worker, so that all have the same
        error. Also a note if the task's metrics fail on it. That is not an error yet: they may need more samples.
        """
        chunk, note = np.arange(min(self._chunks.size, self._chunks.samples)), ""
        model = self._run.model.eval()
        with torch.no_grad():
            (given,) = self._loader.inputs([chunk], None)
            _, outputs = self._values([given], len(chunk))
        model.train()
        if self._whole is not None:
            self._whole.begin()
            self._whole.feed(map_tensors(Tensor.cpu, outputs))
            try:
                self._whole.finish(self._run.world, {})
            except UsageError as error:
                note = f"in a trial on the first {plural(len(chunk), 'validation sample')}, {error}"
        return tuple(name for name in self._names if name != "weight"), note

    def _replay(self, given: list[Inputs]) -> tuple[Tensor, Any] | None:
        """The same as `_values`, from the graph; None if it does not fit."""
        if self._graph is None or not self._graph.fits(given):
            return None
        return cast(tuple[Tensor, Any], map_tensors(Tensor.clone, self._graph(given)))

    def _values(self, given: list[Inputs], count: int) -> tuple[Tensor, Any]:
        """The metrics, with one row per name and one column per sample; and the outputs, if they are needed."""
        forward = self._run.forward
        with forward.autocast():
            values = self._objective(forward.model, self._loader.make(given[0]))
        names = check_values(values, count, self._run.world.device)
        names = (*names, "weight") if "weight" in values else names
        if not self._names:
            self._names = names
        check_names(names, self._names)
        if self._whole is not None and "outputs" not in values:
            raise UsageError(
                f"task {self._run.task.name} has metrics, but its objective returned no 'outputs' in validation: return"
                " {'loss': ..., 'outputs': (predictions, targets)}"
            )
        outputs: Any = values["outputs"] if self._whole is not None else None
        return lay_out(values, names, count), outputs

    @torch.no_grad()
    def _record(self, compiled: bool) -> Graph | None:
        """A full chunk as a CUDA graph; None if that fails."""
        model, chunk = self._run.model.eval(), self._chunks.mine[0]

        def values(given: list[Inputs]) -> Any:
            return self._values(given, len(chunk))

        given = list(self._loader.inputs([chunk], None))
        _, why = find_obstacle(values, given, model, self._objective)
        try:
            if compiled and not why:
                with compiler() as compile:
                    values = compile(values)
                    values(given)
            return None if why else Graph(values, given)
        except Exception:  # any failure of the compiler or the graph: the plain form works
            return None
        finally:
            model.train()


class Averaged:
    """The model with averaged weights (`--ema`) and batch-norm statistics to go with them.

    Each chunk is as large as a part and is normalized as a part would be (a `PartNorm` cuts it further); statistics are the
    mean over the chunks. A layer that the model calls twice in a pass keeps those of the second call.
    """

    def __init__(self, run: Run, step: TrainStep) -> None:
        self._run, self._step = run, step
        self._kept: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def put_in(self, epoch: int) -> None:
        """Replace the training weights and statistics by the averaged ones. Collective: call on every rank, after
        `Statistics.average`, with the model as training left it.
        """
        assert self._run.update.ema is not None
        self._run.update.ema.put_in()
        layers = [module for module in self._run.model.modules() if isinstance(module, _NormBase) and _moves(module)]
        buffers = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
        self._kept = [(buffer, buffer.clone()) for buffer in buffers]
        if layers:
            self._take_statistics(layers, epoch)
        for buffer, kept in self._kept:
            if not buffer.is_floating_point():  # the count of training's passes
                buffer.copy_(kept)

    @torch.no_grad()
    def take_out(self) -> None:
        """Restore the training weights and statistics."""
        assert self._run.update.ema is not None
        self._run.update.ema.take_out()
        for buffer, kept in self._kept:
            buffer.copy_(kept)
        self._kept = []

    @contextmanager
    def aside(self) -> Iterator[None]:
        """For this block the model has its training weights and statistics; then the same averaged ones again, bit for bit."""
        assert self._run.update.ema is not None
        averaged = [buffer.clone() for buffer, _ in self._kept]
        self._run.update.ema.take_out()
        for buffer, kept in self._kept:
            buffer.copy_(kept)
        yield
        self._run.update.ema.put_in()
        for (buffer, _), value in zip(self._kept, averaged, strict=True):
            buffer.copy_(value)

    def _take_statistics(self, layers: list[_NormBase], epoch: int) -> None:
        step, run, model, world = self._step, self._run, self._run.model, self._run.world
        running = [tensor for layer in layers for tensor in (layer.running_mean, layer.running_var) if tensor is not None]
        rows, mine = self._deal()
        table = torch.zeros(rows, sum(each.numel() for each in running), dtype=torch.float64, device=world.device)
        modes, momenta = [(module, module.training) for module in model.modules()], [layer.momentum for layer in layers]
        model.eval()  # no dropout, and nothing else that a model does only in training
        for layer in layers:
            layer.training, layer.momentum = True, 1.0  # running statistics become those of the chunk
        numbers = list(mine)

        def seed(i: int) -> None:
            seed_all(key(run.config.seed, _STATISTICS, epoch, numbers[i]), world.device)

        step.mark("validation")
        for row, inputs in zip(mine, run.train.inputs(list(mine.values()), epoch, seed), strict=True):
            step.mark("validation")
            with run.forward.autocast():
                run.forward.objective(model, run.train.make(inputs))
            table[row] = torch.cat([each.flatten() for each in running])
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        for module, training in modes:
            module.training = training
        step.mark("reduce")
        if world.size > 1:
            dist.all_reduce(table)  # every row comes from one worker: adding zeros is exact
        means = torch.split(table.mean(0) + 0.0, [each.numel() for each in running])  # no -0.0: only some workers would have it
        for each, mean in zip(running, means, strict=True):
            each.copy_(mean.view_as(each))

    def _deal(self) -> tuple[int, dict[int, np.ndarray]]:
        """The number of chunks, and this worker's chunks by number. The chunks do not depend on the number of workers.

        A norm over all workers needs every worker in every pass: then all have the same number of chunks.
        """
        sampler = self._run.sampler
        size = max(2, sampler.global_batch // sampler.parts)  # of the largest batch
        rank, workers = self._run.world.rank, self._run.world.size
        order = sampler.order(0)[: min(_SAMPLES, _CHUNKS * size)]
        chunks = np.split(order[: len(order) // size * size], max(1, len(order) // size)) if len(order) >= size else [order]
        if not self._run.parts.statistics.over_workers:
            return len(chunks), {i: chunks[i] for i in range(rank, len(chunks), workers)}
        rows = max(1, len(chunks) // workers) * workers
        return rows, {i: chunks[i % len(chunks)] for i in range(rank, rows, workers)}


def _moves(layer: _NormBase) -> bool:
    """Whether training moves this layer's running statistics; a model may keep a layer in evaluation mode."""
    return layer.running_mean is not None and layer.training
