"""Virtual workers in any training loop: `Parts` cuts every step into V parts and makes them one gradient.

    with paceline.world() as world:
        team = paceline.Parts(model, samples=len(x), global_batch=256, virtual_workers=8, reduce="exact", seed=0)
        for epoch in range(10):
            for step in team.epoch(epoch):
                for part in step:                      # this worker's parts: seeded, batch-norm statistics selected
                    part.backward(loss(model(x[part.samples]), y[part.samples]))
                step.reduce()
                optimizer.step()
                optimizer.zero_grad()

The trained model depends on V, never on the number of workers P. `paceline train` runs on this same class.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline.core.batches import Dealt, data_of, plan_batches, with_batches
from paceline.core.deal import Pass, check_parts, count_parts, cut_epoch, deal_all
from paceline.core.determinism import set_deterministic
from paceline.core.engine import Engine
from paceline.core.exact_mean import Chunks, check_names, lay_out, mean_over_workers
from paceline.core.keyed import KeyedDataset, PassSampler
from paceline.core.keys import key, seed_all
from paceline.core.noise import noise_scale
from paceline.core.norms import can_group, group_batch_norms
from paceline.core.sampler import Sampler
from paceline.core.shapes import check_shapes
from paceline.core.statistics import Statistics, spans_workers
from paceline.core.step import Part as Part
from paceline.core.step import Step as Step
from paceline.core.stream import Stream, StreamReader
from paceline.core.trees import move
from paceline.dist.world import World, default_world
from paceline.errors import UsageError
from paceline.output import plural
from paceline.phases import Phase, as_phases, naming_arguments

_EVALUATION = 0xE7A1  # keeps the random numbers of evaluation apart from those of training


class Parts:
    """Trains one model as V virtual workers, on however many workers there are.

    Every step's global batch is cut into V equal parts. A part is what one GPU would have had: its own batch-norm statistics,
    random numbers and gradient. The step uses the mean over all samples.

    The world is the one that `paceline.world()` joined, or the default process group of torch.distributed; without one, a
    single worker. All workers start from rank 0's weights. Move the model to its device first.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: DataLoader[Any] | None = None,
        *,
        samples: int | None = None,
        global_batch: int | None = None,
        virtual_workers: int | None = None,
        reduce: Literal["fast", "exact"] = "fast",
        seed: int = 0,
        accumulate: int = 1,
        at_once: int = 1,
        measure_noise: bool = False,
        weights: Any = None,
        stream: bool = False,
        batch_schedule: str | Mapping[Any, Any] | Sequence[Phase] = "",
        smallest_part: int = 32,
        world: World | None = None,
    ) -> None:
        """Collective: call on every rank, with the same arguments.

        loader: the DataLoader of a script for one worker. Its batch size is the global batch, whatever the number of workers;
        its dataset, collate_fn and processes stay; the order of samples follows from the seed, and nothing is dropped. Without
        one, give `samples`, training samples in an epoch, and `global_batch`, samples per step over all workers.
        virtual_workers: V (default: the number of workers). reduce: "fast" averages with DDP; "exact" sums integers, so that
        the weights have the same bits on any number of workers (it also makes this process use deterministic kernels and one
        CPU thread). accumulate: cut each part into this many micro-batches. at_once: parts per forward pass; more than one
        needs a model whose samples do not mix outside batch norm, and no dropout. measure_noise: keep `noise_scale` up to date.
        weights: one per sample of the data; an epoch then draws `samples` samples with replacement. stream: samples come from a
        `Stream`, through `loader`. batch_schedule: "0:256 1:512" or {0: 256, 1: 512} changes the global batch at these epochs;
        `global_batch` is the largest one then, and batches whose parts would have fewer than `smallest_part` samples have
        fewer parts (`team.phase` is the current one; the learning rate is yours to change). world:
        from `paceline.world()`; by default, torch's process group.
        """
        self.model, self.world = model, world or default_world(next(model.parameters()).device)
        parts = virtual_workers or self.world.size
        check_parts(parts, self.world.size)
        with naming_arguments():
            if global_batch is None and loader is None and batch_schedule:
                global_batch = max((phase.global_batch for phase in as_phases(batch_schedule, None, 1, 1)), default=None)
            samples, global_batch = plan_batches(loader, samples, global_batch)
            _check_arguments(reduce, min(at_once, accumulate, global_batch, smallest_part))
            phases = as_phases(batch_schedule, global_batch, parts, smallest_part)
            self.sampler = Sampler(samples, global_batch, parts, seed, weights, stream, phases)
        self.exact, self._accumulate = reduce == "exact", accumulate
        if self.exact:
            set_deterministic()
        self.at_once, self._measures_noise = self._group(at_once), measure_noise  # `at_once`: the most parts in a pass
        self._dealt: dict[int, list[list[range]]] = {}
        """Every worker's groups, by the number of parts."""
        if not all(self._deal(parts)):
            raise UsageError(f"at_once is {at_once}: the {plural(parts, 'part')} then make too few groups for all workers")
        self.engine = Engine(model, parts, self.world, exact=self.exact, measures_noise=measure_noise)
        self._statistics: dict[int, Statistics] = {}
        """By the number of parts: captured graphs refer to their memory."""
        self.phase: Phase = self.sampler.phases[0]
        """The phase of the current step."""
        self.statistics = self._statistics[self.phase.parts] = Statistics(model, self.groups, self.phase.parts)
        self._begin_phase()
        self._loader = None if loader is None else with_batches(loader, self._keyed(loader.dataset), PassSampler())

    def _group(self, at_once: int) -> int:
        """Let several parts share a pass, if they are to; returns how many."""
        if any(spans_workers(module) for module in self.model.modules()):
            _check_spanning(self.exact)
            _check_all_work(self.sampler, self.world.size)
            at_once = -(-self.sampler.parts // self.world.size)  # every worker must take part in every pass of such a layer
        elif at_once == 1:
            return 1
        elif why := can_group(self.model):
            raise UsageError(f"at_once is {at_once}: {why}, so parts cannot be kept apart in a pass; use at_once=1")
        group_batch_norms(self.model)
        return at_once

    @property
    def virtual_workers(self) -> int:
        """V, in the phase with the largest batch."""
        return self.sampler.parts

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch; with a batch schedule, in one after its last change."""
        return self.sampler.cut(self.sampler.settled).steps

    @property
    def groups(self) -> list[range]:
        """This worker's parts in the current phase, in groups that run in one pass; none if it is idle."""
        return self._own_groups(self.phase.parts)

    def counts(self, phase: Phase) -> list[int]:
        """How many parts each worker has in a step of this phase."""
        return count_parts(self._deal(phase.parts))

    def has_idle(self, phase: Phase) -> bool:
        """Whether some workers have no part in this phase."""
        return not all(self._deal(phase.parts))

    def _deal(self, parts: int) -> list[list[range]]:
        """Every worker's groups."""
        if parts not in self._dealt:
            self._dealt[parts] = deal_all(parts, self.world.size, self.at_once, self.exact, self._measures_noise)
        return self._dealt[parts]

    def switch(self, phase: Phase) -> None:
        """Let the next steps belong to this phase. Statistics stay: `enter` takes them along."""
        if phase == self.phase:
            return
        self.phase = phase
        self.statistics.rest()
        if phase.parts not in self._statistics:
            self._statistics[phase.parts] = Statistics(self.model, self.groups, phase.parts)
        self.statistics = self._statistics[phase.parts]
        self._begin_phase()

    def _begin_phase(self) -> None:
        units = [len(group) for groups in self._deal(self.phase.parts) for group in groups]
        self.engine.enter(self.phase, units)
        self.engine.around_backward = self.statistics.recomputing

    def statistics_tensors(self) -> list[Tensor]:
        """All tensors that passes of any phase so far change."""
        return [tensor for statistics in self._statistics.values() for tensor in statistics.tensors()]

    def enter(self, phase: Phase) -> None:
        """Begin a phase, if it is not the current one. Collective: call on every rank.

        If the number of parts changes, every part starts with the mean of the old parts' batch-norm statistics.
        """
        if phase.parts != self.phase.parts:
            values, counts = self.statistics.gather(self.world)
            self.switch(phase)
            self.statistics.scatter(values.mean(0, keepdim=True).expand(phase.parts, -1), counts[:1].expand(phase.parts, -1))
        self.switch(phase)

    @property
    def noise_scale(self) -> float:
        """The gradient noise scale so far (`measure_noise=True`): beyond this global batch, more workers stop paying off.

        Waits for the device.
        """
        if self.engine.noise is None:
            raise UsageError("noise_scale needs Parts(..., measure_noise=True)")
        return noise_scale(*self.engine.noise.state.tolist())

    # --- training ---

    def epoch(self, epoch: int, loader: DataLoader[Any] | None = None, start: int = 0) -> Iterator["Step"]:
        """This worker's steps of an epoch. Collective: go through it on every rank.

        `start`: steps of this epoch that are done already. With a loader, which Parts or `loader()` was given, parts have their
        `batch`. After the last step the model gets the mean of the parts' batch-norm statistics.
        """
        count = self.sampler.cut(epoch).steps
        if not 0 <= start <= count:
            raise UsageError(f"start is {start}: it must be how many of this epoch's {count} steps are done")
        self._check_trained()
        steps = self.steps(epoch, range(start, count))
        batches: Iterator[Any] | None = None
        loader = self._loader if loader is None else loader
        if loader is not None:
            batches = _batches(loader, [item.samples for step in steps for item in step.passes], epoch)
        for step in steps:
            step.batches = None if batches is None else islice(batches, len(step.passes))
            step.make = partial(move, device=self.world.device)
            self.enter(step.phase)
            yield step
            for _ in step.batches or ():  # of a step that was skipped
                pass
        self.average_statistics()

    def _check_trained(self) -> None:
        """Raise a UsageError if a layer was unfrozen since the start: its gradients would not be combined."""
        trained = {id(parameter) for parameter in self.engine.carrier.trained}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and id(parameter) not in trained:
                raise UsageError(f"{name} was frozen when Parts was made and is not now: make Parts again after unfreezing")

    def steps(self, epoch: int, which: range, alone: bool = False) -> list["Step"]:
        """These steps of an epoch. `alone`: every part in a pass of its own."""
        cut, phases = self.sampler.cut(epoch), self.sampler.phases
        if alone:
            singles = [(number, range(part, part + 1)) for number, group in enumerate(self.groups) for part in group]
            passes = cut_epoch(self.sampler, epoch, which, lambda parts: [single for _, single in singles], self._accumulate)
            passes = [[replace(item, group=singles[item.group][0]) for item in row] for row in passes]
        else:
            one_pass = self.statistics.over_workers
            passes = cut_epoch(self.sampler, epoch, which, self._own_groups, self._accumulate, one_pass)
        sizes, first = np.diff(cut.bounds), self.sampler.first_step(epoch)
        return [Step(self, first + i, phases[cut.phases[i]], int(sizes[i]), row) for i, row in zip(which, passes, strict=True)]

    def _own_groups(self, parts: int) -> list[range]:
        return self._deal(parts)[self.world.rank]

    def loader(self, dataset: Dataset[Any] | Stream, num_workers: int = 0, **options: Any) -> DataLoader[Any]:
        """A DataLoader whose batches are this worker's parts, for `epoch(epoch, loader)`. Options are those of DataLoader.

        The random numbers that `dataset` draws follow from (seed, epoch, sample), in any number of loader processes.
        """
        if isinstance(dataset, Stream) and num_workers > 1:
            raise UsageError(f"num_workers is {num_workers}: a Stream is read in order, by one process; use num_workers=1")
        return DataLoader(self._keyed(dataset), batch_sampler=PassSampler(), num_workers=num_workers, **options)

    def _keyed(self, dataset: Any) -> KeyedDataset | StreamReader:
        """The dataset as a DataLoader of parts reads it. Raises a UsageError if it is not the data that Parts was made for."""
        sampler, name = self.sampler, type(dataset).__name__
        if isinstance(dataset, Stream) and not sampler.dealt:
            raise UsageError("the loader got a Stream, but Parts was made without stream=True")
        if sampler.dealt and not isinstance(dataset, Stream):
            raise UsageError(f"the loader got {name}, but Parts was made with stream=True")
        if isinstance(dataset, Stream):
            keyed: KeyedDataset | StreamReader = StreamReader(dataset, sampler.parts, sampler.seed)
        else:
            keyed = KeyedDataset(dataset, sampler.seed, sampler.weights is not None)
        if len(keyed) != sampler.rows_in_data:
            raise UsageError(f"the dataset has {len(keyed):,} samples, and Parts was made for {sampler.rows_in_data:,}")
        return keyed

    def seed(self, step: int, item: Pass, round: int = 0) -> None:
        """Seed what a pass may draw: by the step, the round and the part, never by the rank (law 3)."""
        seed_all(key(self.sampler.seed, step, item.parts[0], item.micro, *([round] if round else [])), self.world.device)

    # --- evaluation and checkpoints ---

    @torch.no_grad()
    def evaluate(
        self,
        data: int | Dataset[Any] | DataLoader[Any],
        function: Callable[[Any], Mapping[str, Tensor]],
        *,
        batch: int | None = None,
        epoch: int = 0,
    ) -> dict[str, float]:
        """The exact mean of each metric over all samples of `data`: every sample counts once, on any number of workers.

        `data` is a DataLoader, a Dataset or a number of samples. `function` gets a batch on the model's device, or sample
        numbers, and returns metrics: one value per sample, or one number for all of them. If it also returns "weight", means
        are weighted by it. The model is in evaluation mode, with the mean of the parts' batch-norm statistics. Random numbers
        follow from (seed, epoch, chunk). `batch`: samples per call (default: the loader's, or 250). Collective: call on every
        rank.
        """
        dataset, samples, size = data_of(data)
        chunks, rows = Chunks(samples, batch or size, self.world), []
        given: Iterable[Any] = map(torch.from_numpy, chunks.mine)
        if dataset is not None:
            loader = data if isinstance(data, DataLoader) else DataLoader(dataset)
            given = self._batches_of(loader, chunks)
        modes = [(module, module.training) for module in self.model.modules()]
        self.average_statistics()
        self.model.eval()
        names: tuple[str, ...] = ()
        for number, chunk, inputs in zip(chunks.numbers, chunks.mine, given, strict=True):
            seed_all(key(self.sampler.seed, _EVALUATION, epoch, number), self.world.device)
            values = function(inputs)
            names = names or tuple(values)
            check_names(tuple(values), names)
            check_shapes(values, len(chunk), "the function given to evaluate returned")
            rows.append(lay_out(values, names, len(chunk)))
        for module, training in modes:
            module.training = training
        return mean_over_workers(chunks, names, rows)

    def deal(self, loader: DataLoader[Any]) -> Dealt:
        """This worker's batches of a DataLoader, for an evaluation loop of your own. `paceline.total` adds up the sums.

        Every sample is in one batch of one worker, and the batches are the same on any number of workers. They are on the
        model's device. The model gets the mean of the parts' batch-norm statistics. Collective: call on every rank.
        """
        self.average_statistics()
        _, samples, size = data_of(loader)
        return self._batches_of(loader, Chunks(samples, size, self.world))

    def _batches_of(self, loader: DataLoader[Any], chunks: Chunks) -> Dealt:
        sampler = PassSampler()
        sampler.set_epoch(chunks.mine, None)
        keyed = KeyedDataset(loader.dataset, self.sampler.seed)
        return Dealt(with_batches(loader, keyed, sampler), loader.dataset, self.world.device)

    def average_statistics(self) -> None:
        """Put the mean of all parts' batch-norm statistics into the model. Collective: call on every rank."""
        self.statistics.average(self.world)

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint needs besides the model's and the optimizer's state. Collective: call on every rank.

        Also calls `average_statistics`, so that the model can be saved next. Every rank gets the same tensors, and they load on
        any number of workers.
        """
        values, counts = self.statistics.gather(self.world)
        self.average_statistics()
        noise = {} if self.engine.noise is None else {"noise": self.engine.noise.state.clone()}
        return {"statistics": values, "counts": counts, **noise}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict`. Load the model's own state first."""
        known = {phase.parts: phase for phase in self.sampler.phases}
        if len(state["statistics"]) not in known or ("noise" in state) != (self.engine.noise is not None):
            raise UsageError(
                "this state comes from Parts with other virtual_workers, batch_schedule or measure_noise: use the same"
            )
        self.switch(known[len(state["statistics"])])
        self.statistics.scatter(state["statistics"], state["counts"])
        if self.engine.noise is not None:
            self.engine.noise.state.copy_(state["noise"])


def _check_arguments(reduce: str, least: int) -> None:
    if least < 1:
        raise UsageError("at_once, accumulate, global_batch and smallest_part must be at least 1")
    if reduce not in ("fast", "exact"):
        raise UsageError(f'reduce is {reduce!r}: it must be "fast" or "exact"')


def _check_spanning(exact: bool) -> None:
    if exact:
        raise UsageError(
            'reduce="exact": a norm layer takes its statistics over all workers, by float sums that depend on their number;'
            ' use plain batch norm, or reduce="fast"'
        )


def _check_all_work(sampler: Sampler, workers: int) -> None:
    fewest = min(phase.parts for phase in sampler.phases)
    if fewest < workers:
        raise UsageError(
            f"a norm layer takes its statistics over all workers, but a phase of the batch schedule has"
            f" {plural(fewest, 'part')} for {workers} workers: use a smaller smallest_part, or plain batch norm"
        )


def _batches(loader: DataLoader[Any], passes: list[np.ndarray], epoch: int) -> Iterator[Any]:
    """The loader's batches for these passes."""
    if not isinstance(loader.batch_sampler, PassSampler):
        raise UsageError("this DataLoader does not know about parts: make it with Parts.loader(dataset)")
    loader.batch_sampler.set_epoch(passes, epoch)
    return iter(loader)
