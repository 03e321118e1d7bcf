"""Build a run: data, model, optimizer, loaders and contract. All that each worker needs before the first step."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Self, cast

from torch import Tensor, nn

from paceline.config import Config
from paceline.contract import Contract
from paceline.core.deal import count_micros
from paceline.core.determinism import deterministic
from paceline.core.parts import Parts, Step
from paceline.core.sampler import Sampler
from paceline.core.schedules import Schedule, count_steps
from paceline.core.stream import Stream
from paceline.data.augment import Images
from paceline.data.loaders import Arrays, Feed, Loader, Resident, make_loader
from paceline.dist.process import delay_interrupts
from paceline.dist.world import World
from paceline.errors import UsageError
from paceline.optim.muon import describe_split
from paceline.output import plural, stages
from paceline.phases import Phase, is_auto
from paceline.training.dataset import count_samples, load_data
from paceline.training.forward import Forward
from paceline.training.gradients import Sam
from paceline.training.grouping import measures_noise
from paceline.training.hooks import Hooks
from paceline.training.local import first_local_step
from paceline.training.model import lay_out_channels_last, make_model, suits_channels_last
from paceline.training.own import OWN, describe_own, make_rates, make_task_optimizer
from paceline.training.precision import choose_precision
from paceline.training.sampling import check_collated, describe_data, make_weights
from paceline.training.task import Task
from paceline.training.task_fields import Data
from paceline.training.task_step import check_options as check_step_options
from paceline.training.terms import describe_batch, describe_idle, describe_update, make_contract, make_steps
from paceline.training.trial import Trial
from paceline.training.update import Update
from paceline.training.weight_files import Initial, start_from
from paceline.values import flag


@dataclass(frozen=True)
class ValidationSet:
    """Data to validate on."""

    loader: Loader
    samples: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """One worker's side of a run, before the first step."""

    task: Task
    config: Config
    world: World
    parts: Parts
    forward: Forward
    update: Update
    train: Loader
    validation_sets: Mapping[str, ValidationSet]
    """The main one first; empty if the task has no validation data."""
    data_sha256: str
    """Of all data sets. A resumed run must find the same."""
    contract: Contract
    initial: Initial
    """The weights that the model started from."""
    notes: tuple[str, ...] = ()
    """What to tell the user before the first step."""
    hooks: tuple[Hooks, ...] = ()
    """The task's own, and the tracker's on rank 0."""
    varies: bool = False
    """Batches may differ in shape: the task collates them itself."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for loader in self._loaders():
                stack.callback(loader.close)
                loader.start()
            stack.pop_all()  # from here on, __exit__ closes them
        return self

    def __exit__(self, error: object, *_: object) -> None:
        with delay_interrupts(raise_later=error is None):  # a second Ctrl-C must not leave half of the processes behind
            for loader in self._loaders():
                loader.close()

    def _loaders(self) -> list[Loader]:
        return [self.train, *(each.loader for each in self.validation_sets.values())]

    @property
    def model(self) -> nn.Module:
        return self.parts.model

    @property
    def sampler(self) -> Sampler:
        return self.parts.sampler

    @property
    def local_from(self) -> int | None:
        """The step from which parts train by themselves; None without `--local-steps`."""
        return first_local_step(self.config.local_steps, self.config.local_after, self.update.schedule)

    @property
    def plain_until(self) -> int:
        """Steps before parts train by themselves: those that can be captured."""
        return self.update.schedule.total_steps if self.local_from is None else self.local_from

    def set_phases(self, phases: tuple[Phase, ...]) -> None:
        """Continue with these phases: `--batch-schedule auto` adds one at a time."""
        self.parts.sampler = replace(self.parts.sampler, phases=phases)
        self.update.rates.follow(self.sampler, count_steps(self.sampler, self.config.epochs, self.config.max_steps))

    def steps(self, epoch: int, which: range) -> list[Step]:
        """These steps of an epoch. Parts that train by themselves have passes of their own."""
        local_from = which.stop if self.local_from is None else self.local_from - self.sampler.first_step(epoch)
        begin = min(max(which.start, local_from), which.stop)
        together = self.parts.steps(epoch, range(which.start, begin))
        return together + (self.parts.steps(epoch, range(begin, which.stop), alone=True) if begin < which.stop else [])

    def sam(self) -> Sam | None:
        """Sharpness-aware steps, if the run takes them."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return Sam(trained, self.config.sam_rho) if self.config.sam_rho else None

    def kept(self) -> dict[str, Tensor]:
        """What a step changes besides the model, its statistics and the optimizer's state, by name in a checkpoint."""
        noise = self.parts.engine.noise
        scaler = self.update.scaler.tensors() if self.update.scaler is not None else {}
        return {**({} if noise is None else {"noise": noise.state}), **self.update.averages(), **scaler}


def build(task: Task, config: Config, world: World, initial: Initial | None = None) -> Run:
    """Load the data, make the model, work out the contract. Collective: call on every rank.

    `initial` is what the run once started from (`--init-from`), if it now continues from a checkpoint.
    """
    precision, notes = choose_precision(config, world)
    if task.step is not None:
        precision = "fp32" if (config.precision, precision) == ("auto", "fp16") else precision
        check_step_options(replace(config, precision=precision))
    with deterministic(config.reduce == "exact"):
        run = _build(task, replace(config, precision=precision), world, initial)
    return replace(run, notes=(*notes, *run.notes), hooks=cast(tuple[Hooks, ...], task.hooks))


def _build(task: Task, config: Config, world: World, initial: Initial | None) -> Run:
    stages.enter("reading the data")
    train, validation, data_sha256 = load_data(task, config, world)
    check_collated(task, train, validation)
    weighted = make_weights(task, train, world)
    data_sha256 = weighted.add_to(data_sha256)
    samples = weighted.draws or count_samples(train)
    sampler, schedule = make_steps(config, world, samples, weighted.weights, isinstance(train, Stream))
    stages.enter("building the model")
    feed = _make_feed(task, config, world, sampler)
    trial = Trial(task=task, data=train, config=config, sampler=sampler, world=world, feed=feed)
    model, grouping, notes = make_model(trial)
    if grouping.at_once > 1:  # smaller last steps run in turn, and their parts' shards must be in the same process
        feed = replace(feed, own_shards=1)
    notes = (*_describe_steps(config, world, sampler, schedule, grouping.at_once), *notes)
    initial = start_from(model, config, world, initial)

    def load(data: Data, feed: Feed) -> Loader:
        return make_loader(data, config.loader, task.prepare, world.device, config.loader_workers, config.seed, feed)

    loader = load(train, feed)
    if suits_channels_last(model, config, sampler.global_batch // sampler.parts):
        notes += lay_out_channels_last(model, trial)
    optimizer, more = make_task_optimizer(task, model, config)
    own = describe_own(optimizer) if config.optimizer == OWN else {}
    rates, other = make_rates(task, optimizer, config, schedule, sampler.global_batch / config.reference_batch)
    notes += more + other
    parts = _make_parts(model, config, world, sampler, grouping.at_once)
    if config.local_steps and parts.statistics.over_workers:
        raise UsageError("--local-steps: a norm layer takes its statistics over all workers; use norm=part or batch")
    notes += _describe_limits(model, config, sampler)
    about = {
        **_describe(task, config, model, train, loader),
        "data": describe_data(train, sampler.parts),
        "sampling": weighted.describe(),
        "validation_samples": sum(count_samples(data) for data in validation.values()),
        "parts": grouping.why,
        "initialized": initial.about,
        "initial_sha256": initial.sha256,
        **({"base_lr": own["base_lr"], "optimizer": describe_update(config, own["words"])} if own else {}),
        **({"schedule": rates.words} if config.schedule == OWN else {}),
    }
    return Run(
        task=task,
        config=config,
        world=world,
        parts=parts,
        forward=Forward(model, task.objective, loader, config.precision),
        update=Update(model, optimizer, rates, config, parts.engine.noise),
        train=loader,
        validation_sets={
            name: ValidationSet(load(data, replace(feed, shards=1, own_shards=1, repeats=False)), count_samples(data))
            for name, data in validation.items()
        },
        data_sha256=data_sha256,
        contract=make_contract(config, world, sampler, rates.schedule, about, parts.at_once),
        initial=initial,
        notes=notes,
        varies=task.collate is not None,
    )


def _make_feed(task: Task, config: Config, world: World, sampler: Sampler) -> Feed:
    """How loaders bring training samples."""
    return Feed(
        collate=task.collate,
        prefetch=config.prefetch,
        pin_memory=config.pin_memory,
        cores=world.node_cores,
        shards=sampler.parts,
        own_shards=-(-sampler.parts // world.size),
        repeats=sampler.weights is not None,
    )


def _make_parts(model: nn.Module, config: Config, world: World, sampler: Sampler, at_once: int) -> Parts:
    """The model as virtual workers. Collective: call on every rank."""
    return Parts(
        model,
        samples=sampler.samples,
        global_batch=sampler.global_batch,
        virtual_workers=sampler.parts,
        reduce=config.reduce,
        seed=config.seed,
        accumulate=config.accumulate,
        at_once=at_once,
        measure_noise=measures_noise(config),
        weights=sampler.weights,
        stream=sampler.dealt,
        batch_schedule=sampler.phases,
        world=world,
    )


def _describe(task: Task, config: Config, model: nn.Module, train: Data, loader: Loader) -> dict[str, Any]:
    """What the contract says about the task, its model and its data."""
    return {
        "task": task.name,
        "unit": task.unit,
        "model": config.model or type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "frozen": sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad),
        "train_samples": count_samples(train),
        "loader": "on the device" if isinstance(loader, Resident) else "streamed",
        "augmentation": _describe_augmentation(task, config, train),
        "record": "none",
    }


def _describe_steps(config: Config, world: World, sampler: Sampler, schedule: Schedule, at_once: int) -> tuple[str, ...]:
    """Notes about batches and, unless their number or the phases are not known yet, about idle workers."""
    notes = describe_batch(config, sampler, schedule)
    if config.workers_schedule or is_auto(config.batch_schedule):
        return notes
    return (*notes, *describe_idle(config, sampler, schedule, world.size, at_once))


def _describe_limits(model: nn.Module, config: Config, sampler: Sampler) -> tuple[str, ...]:
    """Notes about options that do not apply to all samples or parameters."""
    part_batch, notes = sampler.global_batch // sampler.parts, []
    if count_micros(config.accumulate, part_batch) < config.accumulate:
        notes.append(
            f"--accumulate is {config.accumulate}, but a part has {plural(part_batch, 'sample')} and a micro-batch needs two:"
            f" --accumulate {count_micros(config.accumulate, part_batch)} is used"
        )
    for name, used in (("step_at", "step"), ("step_factor", "step"), ("peak_at", "one-cycle")):
        if getattr(config, name) != getattr(Config, name) and config.schedule != used:
            notes.append(f"{flag(name)} does nothing with --schedule {config.schedule}: it belongs to --schedule {used}")
    if config.optimizer == "muon":
        notes.append(describe_split(model, config.rest))
    if config.pin_memory == "on" and next(model.parameters()).device.type == "cpu":
        notes.append("--pin-memory on does nothing: workers train on the CPU")
    return tuple(notes)


def _describe_augmentation(task: Task, config: Config, train: Data) -> str:
    if task.prepare is None:
        return "none" if isinstance(train, Arrays) else "none by Paceline; the task's data set may have its own"
    if not isinstance(task.prepare, Images):
        return "the task's own prepare"
    smoothed = f"; label smoothing {config.label_smoothing:g}" if config.label_smoothing else ""
    return task.prepare.describe() + smoothed
