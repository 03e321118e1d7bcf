"""Build a run: data, model, optimizer, loaders and contract. All that each worker needs before the first step."""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import Dataset

from paceline import models
from paceline.config import Config
from paceline.contract import Contract
from paceline.core.deal import count_micros
from paceline.core.determinism import deterministic
from paceline.core.keys import key, seed_all
from paceline.core.norms import PartNorm, can_group, group_batch_norms
from paceline.core.parts import Parts, Step
from paceline.core.sampler import Sampler
from paceline.core.sync_norm import replace_sync_batch_norms
from paceline.data.augment import Images
from paceline.data.conversion import name_type
from paceline.data.loaders import Arrays, Loader, Resident, make_loader
from paceline.dist.agree import any_reason, check_agreement
from paceline.dist.world import World
from paceline.errors import UsageError
from paceline.optim import make_optimizer
from paceline.optim.muon import describe_split
from paceline.output import plural, stages
from paceline.training.dataset import count_samples, load_data
from paceline.training.forward import Forward
from paceline.training.gradients import Sam
from paceline.training.grouping import Grouping, choose_grouping, measures_noise
from paceline.training.local import first_local_step
from paceline.training.precision import choose_precision
from paceline.training.task import Task
from paceline.training.task_fields import Data, check_made_model
from paceline.training.terms import describe_batch, make_contract, make_steps
from paceline.training.trial import Trial
from paceline.training.update import Update
from paceline.values import flag

_INIT = 0x1217  # keeps the numbers that make models apart from those of step 0
_SAME_MODEL = "the task must make the same model in every worker; torch, numpy and random are seeded before it is called"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One worker's side of a run, before the first step."""

    config: Config
    world: World
    parts: Parts
    forward: Forward
    update: Update
    train: Loader
    validation: Loader | None
    """None: the task has no validation data."""
    validation_samples: int
    data_sha256: str
    """Of both data sets. A resumed run must find the same."""
    contract: Contract
    notes: tuple[str, ...] = ()
    """What to tell the user before the first step."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for loader in self._loaders():
                stack.callback(loader.close)
                loader.start()
            stack.pop_all()  # from here on, __exit__ closes them
        return self

    def __exit__(self, *_: object) -> None:
        for loader in self._loaders():
            loader.close()

    def _loaders(self) -> list[Loader]:
        return [loader for loader in (self.train, self.validation) if loader is not None]

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

    def steps(self, epoch: int, which: range) -> list[Step]:
        """These steps of an epoch. Parts that train by themselves have passes of their own."""
        local_from = which.stop if self.local_from is None else self.local_from - epoch * self.sampler.steps
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


def build(task: Task, config: Config, world: World) -> Run:
    """Load the data, make the model, work out the contract. Collective: call on every rank."""
    precision, notes = choose_precision(config, world)
    with deterministic(config.reduce == "exact"):
        run = _build(task, replace(config, precision=precision), world)
    return replace(run, notes=(*notes, *run.notes))


def _build(task: Task, config: Config, world: World) -> Run:
    stages.enter("reading the data")
    train, validation, data_sha256 = load_data(task, config, world)
    sampler, schedule = make_steps(config, world, count_samples(train))
    stages.enter("building the model")
    trial = Trial(task=task, data=train, config=config, sampler=sampler, world=world)
    model, grouping, notes = _make_model(trial)
    notes = (*describe_batch(sampler, schedule), *notes)

    def load(data: Data) -> Loader:
        return make_loader(
            data, config.loader, task.prepare, world.device, config.loader_workers, config.seed, world.node_cores
        )

    loader, validation_samples = load(train), 0 if validation is None else count_samples(validation)
    if suits_channels_last(model, config, sampler.global_batch // sampler.parts):
        notes += _lay_out_channels_last(model, trial)
    optimizer = make_optimizer(model, config)
    parts = Parts(
        model,
        samples=sampler.samples,
        global_batch=sampler.global_batch,
        virtual_workers=sampler.parts,
        reduce=config.reduce,
        seed=config.seed,
        accumulate=config.accumulate,
        at_once=grouping.at_once,
        measure_noise=measures_noise(config),
        world=world,
    )
    if config.local_steps and parts.statistics.over_workers:
        raise UsageError("--local-steps: a norm layer takes its statistics over all workers; use norm=part or batch")
    notes += _describe_limits(model, config, sampler)
    about = {
        "task": task.name,
        "unit": task.unit,
        "model": config.model or type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "data": getattr(train, "about", "") or f"{type(train).__name__} of {plural(count_samples(train), 'sample')}",
        "train_samples": count_samples(train),
        "validation_samples": validation_samples,
        "loader": "on the device" if isinstance(loader, Resident) else "streamed",
        "parts": grouping.why,
        "augmentation": _describe_augmentation(task, config, train),
        "record": "none",
    }
    return Run(
        config=config,
        world=world,
        parts=parts,
        forward=Forward(model, task.objective, loader, config.precision),
        update=Update(model, optimizer, schedule, config, parts.engine.noise),
        train=loader,
        validation=None if validation is None else load(validation),
        validation_samples=validation_samples,
        data_sha256=data_sha256,
        contract=make_contract(config, world, sampler, schedule, about),
        notes=notes,
    )


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
    return tuple(notes)


def _describe_augmentation(task: Task, config: Config, train: Arrays | Dataset[Any]) -> str:
    if task.prepare is None:
        return "none" if isinstance(train, Arrays) else "none by Paceline; the task's data set may have its own"
    if not isinstance(task.prepare, Images):
        return "the task's own prepare"
    smoothed = f"; label smoothing {config.label_smoothing:g}" if config.label_smoothing else ""
    return task.prepare.describe() + smoothed


def _make_model(trial: Trial) -> tuple[nn.Module, Grouping, tuple[str, ...]]:
    """The model, how it runs its parts, and what to tell the user. Collective: call on every rank."""
    task, config, world, parts = trial.task, trial.config, trial.world, trial.sampler.parts
    seed_all(key(config.seed, _INIT))
    made = check_made_model(task.name, task.model()) if task.model else _model(config, task, trial.data)
    model, notes = strip_compiled(made)
    model = own_buffers(model.to(world.device))
    notes += _check_norm_part(model, config.norm_part)
    grouping = choose_grouping(model, config, parts, world.size)
    why, note = trial.try_prepare() if parts > 1 else ("", "")
    notes += (note,) if note else ()
    if grouping.at_once > 1 and not grouping.one_pass:
        why = any_reason(world, why or trial.try_model(model))
        if why and config.parts_at_once:
            notes += (f"--parts-at-once {config.parts_at_once}: {why}, so the model depends on the number of workers",)
        elif why:
            grouping = Grouping(1, f"in turn: {why}")
    if world.device.type == "cpu":
        replace_sync_batch_norms(model)
    if config.reduce == "exact":  # DDP would give everyone rank 0's
        check_agreement(dict(model.state_dict()), world, "about the untrained model", _SAME_MODEL)
    if grouping.at_once > 1 or config.norm_part:
        model = group_batch_norms(model, config.norm_part or None)
    return model, grouping, notes


def strip_compiled(model: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """The model without torch.compile's wrappers, which put `_orig_mod.` into names of weights; and a note if it had any."""
    bare = model
    while hasattr(bare, "_orig_mod"):
        bare = cast(nn.Module, bare._orig_mod)
    inner = [(parent, *item) for parent in bare.modules() for item in parent._modules.items() if hasattr(item[1], "_orig_mod")]
    for parent, name, child in inner:
        parent._modules[name] = cast(Any, child)._orig_mod
    if bare is model and not inner:
        return model, ()
    return bare, ("torch.compile's wrapper was removed from the task's model: --fast decides what to compile",)


def own_buffers(model: nn.Module) -> nn.Module:
    """Give each buffer memory of its own if it shares some, with itself (after `expand`) or with another tensor.

    Nothing can be loaded into the first kind, and safetensors saves neither.
    """
    owners: dict[int, Tensor] = {parameter.untyped_storage().data_ptr(): parameter for parameter in model.parameters()}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.numel():
                continue
            folded = any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))
            if folded or owners.setdefault(buffer.untyped_storage().data_ptr(), buffer) is not buffer:
                module._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)
    return model


def _check_norm_part(model: nn.Module, norm_part: int) -> tuple[str, ...]:
    """Notes about `--norm-part`. Raises UsageError if the model's batch cannot be cut."""
    why = can_group(model) if norm_part else ""
    if why:
        raise UsageError(f"--norm-part {norm_part} cannot cut its batch: {why}; leave --norm-part out")
    plain = any(isinstance(module, _BatchNorm) and not isinstance(module, PartNorm) for module in model.modules())
    return () if plain or not norm_part else (f"--norm-part {norm_part} changes nothing: the model has no plain batch norm",)


def suits_channels_last(model: nn.Module, config: Config, part_batch: int) -> bool:
    """Whether to lay out convolutions channels-last: 1.6 times as fast on a CPU, 2 to 3 times on a GPU.

    Skip it if batch norm handles several groups per pass: it would have to copy (unless compiled). Skip small batches: the last
    step of an epoch can have a single sample, and then torch 2.13's batch norm on the CPU returns wrong gradients.
    """
    if config.fast == "off" or part_batch < 8 * config.accumulate:
        return False
    grouped = any(isinstance(module, PartNorm) for module in model.modules())
    compiles = config.fast == "on" and config.reduce == "fast" and next(model.parameters()).device.type == "cuda"
    return any(isinstance(module, nn.Conv2d) for module in model.modules()) and (compiles or not grouped)


def _lay_out_channels_last(model: nn.Module, trial: Trial) -> tuple[str, ...]:
    """Change the layout in place; change it back, with a note, if a user's own net fails. Collective: call on every rank."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    why = any_reason(trial.world, "" if trial.task.model is None else trial.why_not_channels_last(model))
    if not why:
        return ()
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return (f"convolutions keep torch's default layout instead of channels-last: {why}",)


def _model(config: Config, task: Task, train: Arrays | Dataset[Any]) -> nn.Module:
    """The model `--model` names, for the shape of this data's images."""
    sample = train[0]
    first = sample[0] if isinstance(sample, tuple | list) and sample else sample
    if not isinstance(first, Tensor | np.ndarray):
        raise UsageError(
            f"--model builds nets for images as tensors; task {task.name} has samples that begin with {name_type(first)}:"
            " return (image, label), or give the task its own model"
        )
    shape = tuple(first.shape)
    if len(shape) != 3 or shape[1] != shape[2]:
        raise UsageError(f"--model builds nets for square images, C x H x H; task {task.name} has inputs of shape {shape}")
    return models.build(config.model or "cnn", in_channels=shape[0], image_size=shape[2], classes=task.classes)
