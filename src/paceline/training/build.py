"""Put a run together: data, model, optimizer, step. What each worker needs before the first step."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import Dataset

from paceline import models
from paceline.config import Config
from paceline.data.keys import key, seed_all, seed_sample
from paceline.data.loaders import Arrays, Loader, Resident, make_loader
from paceline.data.sampler import Sampler
from paceline.dist.agree import agreed, check_agreement, fingerprints
from paceline.dist.world import World
from paceline.errors import UsageError
from paceline.models.norms import PartNorm, can_group, group_batch_norms
from paceline.optim import make_optimizer
from paceline.optim.muon import describe_split
from paceline.training.contract import Contract, make_contract, plan_run
from paceline.training.exact import same_bits
from paceline.training.noise import Noise
from paceline.training.parts import Grouping, Pass, choose_grouping, deal_parts, measures_noise, plan_epoch
from paceline.training.step import Step
from paceline.training.task import Task

_INIT, _DATA = 0x1217, 0xDA7A  # keep the numbers that make models and data apart from those of step 0
_SAME_DATA = "the task must make the same data in every worker"
_SAME_MODEL = "the task must make the same model in every worker; torch, numpy and random are seeded before it is called"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One worker's side of a run, ready to go."""

    config: Config
    world: World
    sampler: Sampler
    grouping: Grouping
    step: Step
    train: Loader
    validation: Loader
    validation_samples: int
    data_sha256: str
    """Of both data sets: what a resumed run must find again."""
    contract: Contract
    notes: tuple[str, ...] = ()
    """What the user should know before the first step."""

    def __enter__(self) -> Self:
        for loader in (self.train, self.validation):
            loader.start()
        return self

    def __exit__(self, *_: object) -> None:
        for loader in (self.train, self.validation):
            loader.close()

    def plan(self, epoch: int, steps: range) -> list[list[Pass]]:
        """This worker's passes in these steps of an epoch."""
        sampler, local, groups = self.sampler, self.step.local, self.step.groups
        order, accumulate = sampler.order(epoch), self.config.accumulate
        if local is None:
            return plan_epoch(sampler, order, steps, groups, accumulate, self.grouping.one_pass)
        # Parts that train by themselves run in turn, each as one of its group.
        begin = min(max(steps.start, local.first - epoch * sampler.steps), steps.stop)
        plan = plan_epoch(sampler, order, range(steps.start, begin), groups, accumulate)
        singles = [(number, range(part, part + 1)) for number, group in enumerate(groups) for part in group]
        apart = plan_epoch(sampler, order, range(begin, steps.stop), [single for _, single in singles], accumulate)
        return plan + [[replace(item, group=singles[item.group][0]) for item in passes] for passes in apart]

    def seed(self, step: int, item: Pass) -> None:
        """Seed what a pass may draw: by the step and the part, never by the rank (law 3)."""
        seed_all(key(self.config.seed, step, item.parts[0], item.micro), self.world.device)


def build(task: Task, config: Config, world: World) -> Run:
    """Load the data, make the model, work out the contract. Every worker reaches this."""
    config = replace(config, precision=choose_precision(config.precision, world))
    with same_bits(config):
        return _build(task, config, world)


def _build(task: Task, config: Config, world: World) -> Run:
    train, validation, data_sha256 = _load(task, config, world)
    sampler, schedule = plan_run(config, world, _count(train))
    seed_all(key(config.seed, _INIT))
    model = (task.model() if task.model else _model(config, task, train)).to(world.device)
    notes = _check_norm_part(model, config.norm_part)
    grouping = choose_grouping(model, config, sampler.parts, world.size)
    exact = config.reduce == "exact"
    if exact:  # DDP would give everyone rank 0's
        check_agreement(dict(model.state_dict()), world, "about the untrained model", _SAME_MODEL)
    if grouping.at_once > 1 or config.norm_part:
        model = group_batch_norms(model, config.norm_part or None)
    loaders = [
        make_loader(data, config.loader, task.prepare, world.device, config.loader_workers, config.seed, world.cores)
        for data in (train, validation)
    ]
    if suits_channels_last(model, config, sampler.global_batch // sampler.parts):
        notes += _lay_out_channels_last(model, task, train, config, world)
    dealt = [deal_parts(sampler.parts, world.size, rank, grouping.at_once, whole_groups=exact) for rank in range(world.size)]
    step = Step(
        model=model,
        optimizer=make_optimizer(model, config),
        schedule=schedule,
        objective=task.objective,
        world=world,
        config=config,
        loader=loaders[0],
        parts=sampler.parts,
        groups=dealt[world.rank],
        full=sampler.global_batch,
        noise=_make_noise(model, sampler, dealt, world) if measures_noise(config) else None,
    )
    if config.optimizer == "muon":
        notes += (describe_split(model, config.rest),)
    about = {
        "task": task.name,
        "unit": task.unit,
        "model": config.model or type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "data": getattr(train, "about", "") or f"{type(train).__name__} of {_count(train):,} samples",
        "train_samples": _count(train),
        "validation_samples": _count(validation),
        "loader": "on the device" if isinstance(loaders[0], Resident) else "streamed",
        "parts": grouping.why,
        "record": "none",
    }
    return Run(
        config=config,
        world=world,
        sampler=sampler,
        grouping=grouping,
        step=step,
        train=loaders[0],
        validation=loaders[1],
        validation_samples=_count(validation),
        data_sha256=data_sha256,
        contract=make_contract(config, world, sampler, schedule, about),
        notes=notes,
    )


def _check_norm_part(model: nn.Module, norm_part: int) -> tuple[str, ...]:
    """What the user should know of `--norm-part`; a UsageError where it cannot be."""
    why = can_group(model) if norm_part else ""
    if why:
        raise UsageError(f"--norm-part {norm_part} cannot cut its batch: {why}; leave --norm-part out")
    plain = any(isinstance(module, _BatchNorm) and not isinstance(module, PartNorm) for module in model.modules())
    return () if plain or not norm_part else (f"--norm-part {norm_part} changes nothing: the model has no plain batch norm",)


def _make_noise(model: nn.Module, sampler: Sampler, dealt: list[list[range]], world: World) -> Noise:
    """What compares the gradients of the groups that all workers have."""
    units = [len(group) for groups in dealt for group in groups]
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Noise(trained, units, sampler.global_batch // sampler.parts, sampler.parts, world.device)


def choose_precision(asked: str, world: World) -> Literal["fp32", "bf16"]:
    """What `--precision auto` comes to: bf16 where every worker's matrix units take it, on GPUs (from Ampere on) and CPUs (with
    AMX). Every worker reaches this.
    """
    if asked != "auto":
        return "bf16" if asked == "bf16" else "fp32"
    gpu = world.device.type == "cuda"
    able = torch.cuda.get_device_capability(world.device) >= (8, 0) if gpu else _has_amx()
    return "fp32" if agreed(world, "" if able else "it has no units for bf16") else "bf16"


def suits_channels_last(model: nn.Module, config: Config, part_batch: int) -> bool:
    """Whether convolutions would be faster with the channels of a pixel side by side: 1.6 times on a CPU, 2 to 3 on a GPU.

    Not where batch norm takes several groups a pass, which then must copy (unless compiled); and not for a few samples, of
    which an epoch's tail may leave one: torch 2.13's batch norm on the CPU then returns wrong gradients.
    """
    if config.fast == "off" or part_batch < 8 * config.accumulate:
        return False
    grouped = any(isinstance(module, PartNorm) for module in model.modules())
    compiles = config.fast == "on" and config.reduce == "fast" and next(model.parameters()).device.type == "cuda"
    return any(isinstance(module, nn.Conv2d) for module in model.modules()) and (compiles or not grouped)


def _lay_out_channels_last(model: nn.Module, task: Task, train: Any, config: Config, world: World) -> tuple[str, ...]:
    """In place, and back where a user's own net does not take it; says so. Every worker reaches this."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    why = agreed(world, "" if task.model is None else _why_not_channels_last(model, task, train, config, world))
    if not why:
        return ()
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return (f"convolutions keep torch's usual layout, not channels-last: {why}",)


@torch.no_grad()
def _why_not_channels_last(model: nn.Module, task: Task, train: Any, config: Config, world: World) -> str:
    """Why a user's own net does not run on two samples in this layout: `x.view(...)` after a convolution, most likely."""
    loader = make_loader(train, "auto", task.prepare, world.device, 0, config.seed)
    model.eval()
    try:
        for batch in loader.batches([np.arange(2)], None):
            task.objective(model, batch)
    except RuntimeError as error:  # other mistakes show in the first step, as they always did
        return " ".join(str(error).split())[:150]
    except Exception:
        return ""
    finally:
        model.train()
    return ""


def _has_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU multiplies bf16 matrices, and oneDNN, torch's library for it, is not told to do without."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    allowed = most in ("ALL", "DEFAULT") or "AMX" in most
    return allowed and cpuinfo.exists() and "amx_bf16" in cpuinfo.read_text().split()


def _load(task: Task, config: Config, world: World) -> tuple[Arrays | Dataset[Any], Arrays | Dataset[Any], str]:
    """Both data sets, and a hash of them. A node's first worker goes first: it may have to fetch them for the others."""
    if world.local_rank == 0:
        train, validation = _make(task, config)
    world.barrier()
    if world.local_rank != 0:
        train, validation = _make(task, config)
    digest = hashlib.sha256()
    for data, which in ((train, "training"), (validation, "validation")):
        facts = _facts(data)
        check_agreement(facts, world, f"about the {which} data", _SAME_DATA)
        digest.update(fingerprints(facts.values()).numpy().tobytes() + _some_samples(data, config.seed))
    if config.train_samples:
        if not isinstance(train, Arrays):
            raise UsageError("--train-samples needs data held in Arrays; cut your Dataset with torch.utils.data.Subset instead")
        train = train.first(config.train_samples)
    for data, which in ((train, "training"), (validation, "validation")):
        if not _count(data):
            raise UsageError(f"task {task.name}: its {which} data is empty")
    return train, validation, digest.hexdigest()


def _make(task: Task, config: Config) -> tuple[Arrays | Dataset[Any], Arrays | Dataset[Any]]:
    """Data made at random is the same on every worker: its numbers follow from the seed."""
    seed_sample(key(config.seed, _DATA, 0))
    train = task.train()
    seed_sample(key(config.seed, _DATA, 1))
    return train, task.validation()


def _facts(data: Arrays | Dataset[Any]) -> dict[str, Tensor]:
    """What all workers must have in common: the number of samples and, of arrays, a million values spread over each."""
    facts = {"samples": torch.tensor(_count(data))}
    for i, tensor in enumerate(data.tensors if isinstance(data, Arrays) else ()):
        facts[f"array {i}"] = tensor.flatten()[:: max(1, tensor.numel() // 1_000_000)]
    return facts


def _some_samples(data: Arrays | Dataset[Any], seed: int) -> bytes:
    """What a user's own Dataset gives for three of its samples, where it gives the same twice."""
    if isinstance(data, Arrays) or not _count(data):
        return b""
    found = b""
    for sample in (0, _count(data) // 2, _count(data) - 1):
        readings = []
        for _ in range(2):
            seed_sample(key(seed, _DATA, sample))
            readings.append(_content(data[sample]))
        found += readings[0] if readings[0] == readings[1] else b""
    return found


def _content(item: Any) -> bytes:
    """The numbers and texts in a sample, whatever it is made of."""
    if isinstance(item, Tensor):
        return bytes(item.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    if isinstance(item, np.ndarray | np.generic) and item.dtype != object:
        return item.tobytes()
    if isinstance(item, int | float | str | bytes | bool):
        return repr(item).encode()
    if isinstance(item, Mapping):
        return b"".join(str(name).encode() + _content(value) for name, value in item.items())
    return b"".join(_content(each) for each in item) if isinstance(item, tuple | list) else b""


def _model(config: Config, task: Task, train: Arrays | Dataset[Any]) -> nn.Module:
    """The model `--model` names, for the shape of this data's images."""
    shape = tuple(train[0][0].shape)
    if len(shape) != 3 or shape[1] != shape[2]:
        raise UsageError(f"--model builds nets for square images, C x H x H; task {task.name} has inputs of shape {shape}")
    return models.build(config.model or "cnn", in_channels=shape[0], image_size=shape[2], classes=task.classes)


def _count(data: Arrays | Dataset[Any]) -> int:
    return len(cast(Any, data))
