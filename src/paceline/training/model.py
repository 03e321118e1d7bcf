"""Make a run's model: the task's own or `--model`'s, with its first weights, and how its parts run."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline import models
from paceline.config import Config
from paceline.core.keys import key, seed_all
from paceline.core.norms import PartNorm, can_group, group_batch_norms
from paceline.core.stream import Stream, StreamReader
from paceline.core.sync_norm import replace_sync_batch_norms
from paceline.data.conversion import name_type
from paceline.dist.agree import any_reason, check_agreement
from paceline.errors import UsageError
from paceline.training.grouping import Grouping, choose_grouping
from paceline.training.task import Task
from paceline.training.task_fields import Data, check_made_model
from paceline.training.trial import Trial

_INIT = 0x1217  # keeps the numbers that make models apart from those of step 0
_ALONE = "the task's collate may treat a sample differently if another part is in the same list"
_SAME_MODEL = "the task must make the same model in every worker; torch, numpy and random are seeded before it is called"


def make_model(trial: Trial) -> tuple[nn.Module, Grouping, tuple[str, ...]]:
    """The model, how it runs its parts, and what to tell the user. Collective: call on every rank."""
    config, world, parts = trial.config, trial.world, trial.sampler.parts
    model, notes = make_bare_model(trial.task, config, lambda: trial.data)
    model = own_buffers(model.to(world.device))
    notes += _check_norm_part(model, config.norm_part)
    grouping = choose_grouping(model, config, parts, world.size)
    if trial.task.step is not None and not grouping.one_pass:
        grouping = Grouping(1, "in turn: the task has its own step function")
    why, note = trial.try_prepare() if parts > 1 else ("", "")
    notes += (note,) if note else ()
    if grouping.at_once > 1 and not grouping.one_pass:
        why = any_reason(world, _ALONE if trial.task.collate is not None else why or trial.try_model(model))
        if why and config.parts_at_once:
            depends = f"--parts-at-once {config.parts_at_once}: {why}, so the model depends on the number of workers"
            notes += () if config.reduce == "exact" else (depends,)  # exact mode has the same groups on any number
        elif why:
            grouping = Grouping(1, f"in turn: {why}")
    if world.device.type == "cpu":
        replace_sync_batch_norms(model)
    if config.reduce == "exact":  # DDP would give everyone rank 0's
        check_agreement(dict(model.state_dict()), world, "about the untrained model", _SAME_MODEL)
    if grouping.at_once > 1 or config.norm_part:
        model = group_batch_norms(model, config.norm_part or None)
    return model, grouping, notes


def make_bare_model(task: Task, config: Config, data: Callable[[], Data]) -> tuple[nn.Module, tuple[str, ...]]:
    """The task's model on the CPU, with its first weights, and what to tell the user. `data` is only needed for `--model`."""
    seed_all(key(config.seed, _INIT))
    return strip_compiled(check_made_model(task.name, task.model()) if task.model else _model(config, task, data()))


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


def lay_out_channels_last(model: nn.Module, trial: Trial) -> tuple[str, ...]:
    """Change the layout in place; change it back, with a note, if a user's own net fails. Collective: call on every rank."""
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    why = any_reason(trial.world, "" if trial.task.model is None else trial.why_not_channels_last(model))
    if not why:
        return ()
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return (f"convolutions keep torch's default layout instead of channels-last: {why}",)


def _model(config: Config, task: Task, train: Data) -> nn.Module:
    """The model `--model` names, for the shape of this data's images."""
    sample = StreamReader(train, 1, config.seed)[0] if isinstance(train, Stream) else train[0]
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
