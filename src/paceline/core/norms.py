"""The normalization layers of the built-in nets, and the samples over which each takes its statistics.

    batch   the samples of one pass                          Ioffe & Szegedy 2015, arXiv:1502.03167
    part    fixed-size cuts of them ("ghost batch norm")     Hoffer, Hubara & Soudry 2017, arXiv:1705.08741
    sync    the samples of all workers                       as torch.nn.SyncBatchNorm, but on any device and backend
    group   one sample, groups of its channels               Wu & He 2018, arXiv:1803.08494
    none    no normalization

`part` keeps the statistics of a small batch while the global batch grows; `sync` does the opposite. The first three have the
same parameters and buffers under the same names, so a checkpoint of one loads into another. They evaluate alike.

A pass may hold several parts (a part is one virtual worker's share of a step's batch). `group_batch_norms` makes `batch` take
the statistics of each part separately, as `part` always does; `can_group` says whether a whole model allows that.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from paceline.core.sync_norm import SyncNorm, along, check_at_least_2d, statistics_dtype
from paceline.errors import UsageError

NormKind = Literal["batch", "part", "sync", "group", "none"]


def make_norm(kind: NormKind, channels: int, *, dims: Literal[1, 2], part_size: int = 32) -> nn.Module:
    """The layer for inputs of (n, channels), `dims` = 1, or (n, channels, height, width), `dims` = 2."""
    match kind:
        case "batch":
            return nn.BatchNorm1d(channels) if dims == 1 else nn.BatchNorm2d(channels)
        case "part":
            return PartNorm(channels, part_size)
        case "sync":
            return SyncNorm(channels)
        case "group":
            return nn.GroupNorm(_groups(channels, dims), channels)
        case "none":
            return nn.Identity()


def can_group(model: nn.Module) -> str:
    """Why parts cannot share a pass of `model`, naming the first layer that prevents it; "" if they can."""
    for name, module in model.named_modules():
        if reason := _why_not_grouped(module):
            return f"{name or 'the model'} {reason}"
    return ""


def group_batch_norms(model: nn.Module, part_size: int | None = None) -> nn.Module:
    """Make every plain batch norm of `model` a `PartNorm`; returns `model`.

    It takes a part as one group, or cuts it into groups of at most `part_size` samples. The modules change their class and stay
    the same objects, as in torch's parametrizations: parameters, buffers, hooks and every reference to them (a shared layer, an
    optimizer, the root itself) stay valid. A layer that `can_group` would name is left as it is.
    """
    for module in model.modules():
        if type(module) in _PLAIN and not _why_not_grouped(module):
            module.__class__ = PartNorm
            module.part_size = part_size  # type: ignore[assignment]
    return model


class PartNorm(_BatchNorm):
    """Batch norm with training statistics of each part of the batch separately.

    The batch is cut twice, both times like dealing cards. The pass holds `parts` parts of equal size (the caller sets this
    before the pass): **sample i belongs to part i mod parts**. With a `part_size`, each part of m samples is cut again, into
    ceil(m / part_size) *ghosts* whose sizes differ by at most one: sample j of the part belongs to ghost j mod ghosts. With
    None, a part is one group, and the layer is the plain batch norm of each part. Equal groups are a view of the batch with the
    groups folded into the channels, (n / groups, groups * channels, ...), so one native call handles them all without a copy; a
    channels-last batch is copied. Ghosts of unequal size, and parts with momentum None that have seen different numbers of
    passes, take one call each.

    Running statistics are one row of `channels` per part. A caller that sets `parts` = g > 1 replaces `running_mean` and
    `running_var` by contiguous (g, channels) tensors and `num_batches_tracked` by a (g,) tensor. It restores one row before
    evaluation. Row p moves to what part p alone would have made of it; with ghosts, to the mean over its ghosts. If many parts
    share one row, it moves once, to the mean over the parts.

    A ghost with a single value per channel has no variance: it is normalized with the running statistics and does not move
    them. Without a `part_size` or without running statistics torch refuses it, as plain batch norm does.
    """

    # On the class, because `group_batch_norms` runs no constructor.
    part_size: int | None = None
    """At most this many samples per ghost; None: a part is one group."""
    parts: int = 1
    """Parts in the batch of the next training pass."""
    samples: int | None = None
    """Samples in that pass, to check that there is one row per sample; None: not checked."""

    def __init__(
        self,
        channels: int,
        part_size: int | None,
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(channels, eps, momentum, affine, track_running_stats)
        if part_size is not None and part_size < 1:
            raise ValueError(f"part_size is {part_size}, must be 1 or more")
        self.part_size = part_size

    def forward(self, input: Tensor) -> Tensor:
        own = self._running_rows()
        if not self.training and own and len(own[0]) > 1:  # a model may keep this layer in evaluation mode while it trains
            self._check_parts(input)
            return self._normalize_by_running(input, own)
        if not self.training or (self.parts == 1 and self.part_size is None):
            return super().forward(input)
        self._check_input_dim(input)
        self._check_parts(input)
        assert not own or len(own[0]) in (1, self.parts), f"{len(own[0])} rows of running statistics for {self.parts} parts"
        if own and self._all_single(input):
            return self._normalize_by_running(input, own)
        rows = own if own and len(own[0]) == self.parts else [row.repeat(self.parts, 1) for row in own]
        output = self._normalize(input, rows, self._count_pass())
        if rows is not own:
            for row, moved in zip(own, rows, strict=True):
                row.copy_(moved.mean(0))
        return output

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, part_size={self.part_size}"  # type: ignore[no-untyped-call]

    def _check_input_dim(self, input: Tensor) -> None:
        check_at_least_2d(input)

    def _check_parts(self, input: Tensor) -> None:
        n = len(input)
        if self.parts == 1 or (n % self.parts == 0 and self.samples in (None, n)):
            return
        expected = f"{self.parts} equal parts" if self.samples is None else f"{self.samples} samples"
        raise UsageError(
            f"a batch norm of {self.num_features} channels got {n} rows in a pass of {expected}: its rows are not one per"
            f" sample, so the {self.parts} parts cannot be told apart; run one part per pass (--parts-at-once 1)"
        )

    def _running_rows(self) -> list[Tensor]:
        """Views (rows, channels) of the running mean and variance; empty if there are none."""
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return []
        return [self.running_mean.view(-1, self.num_features), self.running_var.view(-1, self.num_features)]

    def _ghosts(self, samples: int) -> int:
        return 1 if self.part_size is None else max(1, math.ceil(samples / self.part_size))

    def _all_single(self, input: Tensor) -> bool:
        """Whether every ghost has at most one value per channel."""
        samples = len(input) // self.parts
        most = math.ceil(samples / self._ghosts(samples))
        return self.part_size is not None and most * math.prod(input.shape[2:]) <= 1

    def _count_pass(self) -> list[float]:
        """Count this pass; returns the momentum of each part in it."""
        if not self.track_running_stats or self.num_batches_tracked is None:
            return [self.momentum or 0.0] * self.parts
        self.num_batches_tracked.add_(1)
        if self.momentum is not None:
            return [self.momentum] * self.parts
        momenta = [1.0 / count for count in self.num_batches_tracked.view(-1).tolist()]
        return momenta if len(momenta) == self.parts else momenta * self.parts

    def _normalize(self, input: Tensor, rows: list[Tensor], momenta: list[float]) -> Tensor:
        """The output for len(momenta) parts dealt out in `input`. Updates `rows`, one per part, in place."""
        parts = len(momenta)
        samples = len(input) // parts
        ghosts = self._ghosts(samples)
        if parts > 1 and (samples % ghosts or len(set(momenta)) > 1):
            outputs = [  # contiguous: torch rounds differently if a batch has gaps
                self._normalize(input[part::parts].contiguous(), [row[part : part + 1] for row in rows], [momentum])
                for part, momentum in enumerate(momenta)
            ]
            return torch.stack(outputs, dim=1).flatten(0, 1)
        if self.part_size is None:
            return self._normalize_equal(input, parts, rows, momenta[0])
        if samples % ghosts:
            output, moved = self._normalize_unequal(input, ghosts, rows, momenta[0])
        else:
            # Copies: autograd keeps its inputs for the backward pass, and copy_ below marks the rows as changed.
            moved = [row.repeat(ghosts, 1) for row in rows]
            output = self._normalize_equal(input, parts * ghosts, moved, momenta[0])
        for row, each in zip(rows, moved, strict=True):
            row.copy_(each.view(-1, *row.shape).mean(0))  # (ghosts, parts, channels)
        return output

    def _normalize_equal(self, input: Tensor, groups: int, rows: list[Tensor], momentum: float) -> Tensor:
        """The output of one native call, which updates `rows`, one per group, in place."""
        if groups > 1 and torch.compiler.is_compiling():
            return self._normalize_apart(input, groups, rows, momentum)
        mean, variance = [row.view(-1) for row in rows] or (None, None)
        output = F.batch_norm(
            _fold(input, groups),
            mean,
            variance,
            _tile(self.weight, groups),
            _tile(self.bias, groups),
            training=True,
            momentum=momentum,
            eps=self.eps,
        )
        return output.view(input.shape) if groups > 1 else output

    def _normalize_apart(self, input: Tensor, groups: int, rows: list[Tensor], momentum: float) -> Tensor:
        """The same in plain operations, on a view with the groups as a dimension, which exists in any layout. A compiler fuses
        them, and does not copy a channels-last batch as the native call's fold does.
        """
        apart = input.view(len(input) // groups, groups, *input.shape[1:]).to(statistics_dtype(input))
        over = [0, *range(3, apart.dim())]
        variance, mean = torch.var_mean(apart, over, correction=0, keepdim=True)
        output = (apart - mean) * torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            output = output * along(self.weight, input) + along(self.bias, input)
        count = apart.numel() // mean.numel()
        for row, found in zip(rows, (mean, variance * (count / max(1, count - 1))), strict=False):
            row.lerp_(found.detach().view(row.shape).to(row.dtype), momentum)
        return output.to(input.dtype).view(input.shape)

    def _normalize_unequal(
        self, input: Tensor, ghosts: int, rows: list[Tensor], momentum: float
    ) -> tuple[Tensor, list[Tensor]]:
        """The output of one part, and the rows that each ghost with more than one value per channel would leave."""
        outputs, moved = [], []
        for ghost in range(ghosts):
            samples = input[ghost::ghosts]
            if rows and samples[:, 0].numel() == 1:
                outputs.append(self._normalize_by_running(samples, rows))
                continue
            left = [row.clone() for row in rows]
            outputs.append(self._normalize_equal(samples, 1, left, momentum))
            moved.append(left)
        dealt = torch.cat([torch.arange(ghost, len(input), ghosts, device=input.device) for ghost in range(ghosts)])
        return torch.cat(outputs)[dealt.argsort()], [torch.cat(each) for each in zip(*moved, strict=True)]

    def _normalize_by_running(self, input: Tensor, rows: list[Tensor]) -> Tensor:
        groups = len(rows[0])
        mean, variance = [row.flatten().clone() for row in rows]
        weight, bias = _tile(self.weight, groups), _tile(self.bias, groups)
        output = F.batch_norm(_fold(input, groups), mean, variance, weight, bias, training=False, eps=self.eps)
        return output.view(input.shape)


_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def _why_not_grouped(module: nn.Module) -> str:
    kind = f"is a {type(module).__name__}"
    match module:
        case nn.SyncBatchNorm() | SyncNorm():
            return f"{kind}, which takes its statistics over all workers"
        case _InstanceNorm():
            return f"{kind} with running statistics" if module.track_running_stats else ""
        case _NormBase() if type(module) not in (*_PLAIN, PartNorm):
            return kind
        case _NormBase() if "forward" in vars(module):  # set on the object: it would hide PartNorm's own
            return f"{kind} with a forward of its own"
    return ""


def _fold(input: Tensor, groups: int) -> Tensor:
    """(n, channels, ...) as (n / groups, groups * channels, ...).

    One group stays as it is: a reshape of one channels-last sample has strides that fit either layout, and then the backward
    pass of torch 2.13 on CPUs returns wrong gradients.
    """
    if groups == 1:
        return input
    n, channels, *sides = input.shape
    return input.contiguous().view(n // groups, groups * channels, *sides)


def _tile(per_channel: Tensor | None, groups: int) -> Tensor | None:
    return per_channel if per_channel is None or groups == 1 else per_channel.repeat(groups)


def _groups(channels: int, dims: Literal[1, 2]) -> int:
    """The largest number of groups, up to 32, that divides the channels.

    Without pixels to take statistics over, a group needs several channels: a single channel minus its mean is always zero.
    """
    most = min(32, channels if dims == 2 else max(1, channels // 8))
    return max(groups for groups in range(1, most + 1) if channels % groups == 0)
