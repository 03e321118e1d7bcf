"""Put a run together: data, model, optimizer, step. What each worker needs before the first step."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from paceline import models
from paceline.config import Config
from paceline.data.keys import key, seed_all, seed_sample
from paceline.data.loaders import Arrays, Loader, Resident, make_loader
from paceline.data.sampler import Sampler
from paceline.dist.agree import check_agreement, fingerprints
from paceline.dist.world import World
from paceline.errors import UsageError
from paceline.models.norms import group_batch_norms
from paceline.optim import make_optimizer
from paceline.training.contract import Contract, make_contract, plan_run
from paceline.training.exact import same_bits
from paceline.training.parts import Grouping, choose_grouping, deal_parts
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


def build(task: Task, config: Config, world: World) -> Run:
    """Load the data, make the model, work out the contract. Every worker reaches this."""
    with same_bits(config):
        return _build(task, config, world)


def _build(task: Task, config: Config, world: World) -> Run:
    train, validation, data_sha256 = _load(task, config, world)
    sampler, schedule = plan_run(config, world, _count(train))
    seed_all(key(config.seed, _INIT))
    model = (task.model() if task.model else _model(config, task, train)).to(world.device)
    grouping = choose_grouping(model, config, sampler.parts, world.size)
    exact = config.reduce == "exact"
    if exact:  # DDP would give everyone rank 0's
        check_agreement(dict(model.state_dict()), world, "about the untrained model", _SAME_MODEL)
    if grouping.at_once > 1:
        model = group_batch_norms(model)
    step = Step(
        model=model,
        optimizer=make_optimizer(model, config),
        schedule=schedule,
        objective=task.objective,
        world=world,
        config=config,
        parts=sampler.parts,
        groups=deal_parts(sampler.parts, world.size, world.rank, grouping.at_once, whole_groups=exact),
    )
    loaders = [
        make_loader(data, config.loader, task.prepare, world.device, config.loader_workers, config.seed)
        for data in (train, validation)
    ]
    about = {
        "task": task.name,
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
    )


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
