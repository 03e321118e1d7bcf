"""The normalisation layers a net can be built with, and over whose samples each takes its statistics.

    batch   the samples this worker has                      Ioffe & Szegedy 2015, arXiv:1502.03167
    part    fixed-size parts of them ("ghost batch norm")    Hoffer, Hubara & Soudry 2017, arXiv:1705.08741
    sync    the samples of all workers                       as torch.nn.SyncBatchNorm, but on any device and backend
    group   one sample, groups of its channels               Wu & He 2018, arXiv:1803.08494
    none    nothing is normalised

`part` keeps the statistics of a small batch while the global batch grows; `sync` does the opposite. The first three hold the
same parameters and buffers under the same names, so a checkpoint of one loads into another, and evaluate alike.
"""

import math
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

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


class PartNorm(_BatchNorm):
    """Batch norm whose training statistics are those of parts of the batch, not of all of it.

    A batch of n is cut into ceil(n / part_size) parts whose sizes differ by at most one. **Sample i belongs to part i mod
    parts**: of 96 samples with `part_size` 32, part 0 is samples 0, 3, 6 ... Dealt out like cards, equal parts are a view of
    the batch with the parts folded into the channels, (n / parts, parts * channels, ...), so one native call does them all
    with no copy; a channels-last batch is copied. Parts of unequal size take one call each.

    Running statistics move once a forward pass, to the mean over the parts of what each part alone would have made of them. A
    part with a single value a channel has no variance: it is normalised with the running statistics and does not move them.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, channels: int, part_size: int) -> None:
        super().__init__(channels)
        if part_size < 1:
            raise ValueError(f"part_size is {part_size}, must be 1 or more")
        self.part_size = part_size

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        n = len(input)
        values_per_sample = math.prod(input.shape[2:])
        parts = max(1, math.ceil(n / self.part_size))
        if math.ceil(n / parts) * values_per_sample <= 1:
            return self._normalise_by_running(input)
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        if n % parts == 0:
            output, means, variances = self._normalise_equal(input, parts, momentum)
        else:
            output, means, variances = self._normalise_unequal(input, parts, momentum)
        self.running_mean.copy_(means.mean(0))
        self.running_var.copy_(variances.mean(0))
        return output

    def extra_repr(self) -> str:
        return f"{self.num_features}, part_size={self.part_size}, eps={self.eps}, momentum={self.momentum}"

    def _check_input_dim(self, input: Tensor) -> None:
        _check_at_least_2d(input)

    def _normalise_equal(self, input: Tensor, parts: int, momentum: float) -> tuple[Tensor, Tensor, Tensor]:
        """The output, and the running mean and variance (parts, channels) that each part alone would have left."""
        n, channels, *sides = input.shape
        # Copies: autograd keeps them for the backward pass, by when the layer's own have moved on.
        mean, variance = self.running_mean.repeat(parts), self.running_var.repeat(parts)
        # One part stays as it is: a reshape of one channels-last sample has strides that read as either layout, for which the
        # backward pass of torch 2.13 on CPUs returns wrong gradients.
        output = F.batch_norm(
            input if parts == 1 else input.contiguous().view(n // parts, parts * channels, *sides),
            mean,
            variance,
            self.weight.repeat(parts),
            self.bias.repeat(parts),
            training=True,
            momentum=momentum,
            eps=self.eps,
        )
        if parts > 1:
            output = output.view(input.shape)
        return output, mean.view(parts, channels), variance.view(parts, channels)

    def _normalise_unequal(self, input: Tensor, parts: int, momentum: float) -> tuple[Tensor, Tensor, Tensor]:
        outputs, means, variances = [], [], []
        for part in range(parts):
            samples = input[part::parts]
            if samples[:, 0].numel() == 1:
                outputs.append(self._normalise_by_running(samples))
                continue
            output, mean, variance = self._normalise_equal(samples, 1, momentum)
            outputs.append(output)
            means.append(mean)
            variances.append(variance)
        dealt = torch.cat([torch.arange(part, len(input), parts, device=input.device) for part in range(parts)])
        return torch.cat(outputs)[dealt.argsort()], torch.cat(means), torch.cat(variances)

    def _normalise_by_running(self, input: Tensor) -> Tensor:
        mean, variance = self.running_mean.clone(), self.running_var.clone()
        return F.batch_norm(input, mean, variance, self.weight, self.bias, training=False, eps=self.eps)


class SyncNorm(_BatchNorm):
    """Batch norm whose training statistics are those of all workers' samples together.

    A collective: in training every worker of the default process group must reach every forward and every backward pass, in
    the same order and with the same dtype, even one whose batch is empty. Batches may differ in size. Forward gathers
    2 * channels + 1 numbers a worker, backward sums 2 * channels. Alone (no process group, or a world of one) and in evaluation
    it is plain batch norm.

    Statistics are float32 (float64 for float64 input) whatever the input's dtype. Gradients of weight and bias are this
    worker's share, for DDP to average; the input's gradient is that of the sum of all workers' losses. It can be differentiated
    once. Written in plain tensor operations because torch.nn.SyncBatchNorm refuses CPU tensors, and DDP refuses it on the CPU.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__(channels)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or not _has_peers():
            return super().forward(input)
        mean, squares, count = _gather_statistics(input.detach())
        self._move_running(mean, squares, count)
        inverse_std = torch.rsqrt(squares / count.clamp(min=1) + self.eps)
        output: Tensor = _NormaliseSynced.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, inverse_std, count
        )
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        _check_at_least_2d(input)

    def _move_running(self, mean: Tensor, squares: Tensor, count: Tensor) -> None:
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        # One value in all the world has no variance and moves nothing. Decided on the device: no wait for the GPU.
        share = ((count > 1) * momentum).to(self.running_mean.dtype)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_((squares / (count - 1).clamp(min=1)).to(self.running_var.dtype), share)


class _NormaliseSynced(torch.autograd.Function):
    """(x - mean) / std * weight + bias, where mean and std depend on the x of every worker.

    With g = dL/dy, xhat = (x - mean) / std and N values a channel over all workers (arXiv:1502.03167, section 3, rearranged):
    dL/dx = weight / std * (g - sum(g) / N - xhat * sum(g * xhat) / N), both sums over all workers.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse_std: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, mean, inverse_std, count)
        scale = inverse_std * weight
        return torch.addcmul(_along(bias - mean * scale, x), x.to(mean.dtype), _along(scale, x)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse_std, count = ctx.saved_tensors
        grad = grad.to(mean.dtype)
        xhat = (x.to(mean.dtype) - _along(mean, x)) * _along(inverse_std, x)
        rest = [dim for dim in range(x.dim()) if dim != 1]
        grad_bias, grad_weight = grad.sum(rest), (grad * xhat).sum(rest)
        grad_x = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([grad_bias, grad_weight])
            dist.all_reduce(sums)
            of_grad, of_product = sums / count.clamp(min=1)
            centred = grad - _along(of_grad, x) - xhat * _along(of_product, x)
            grad_x = (centred * _along(inverse_std * weight, x)).to(x.dtype)
        return grad_x, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None, None, None


def _gather_statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Over all workers, for each channel: mean, sum of squares about that mean, and the count of values (a scalar).

    Chan, Golub & LeVeque's pairwise update: no difference of large sums, so data far from zero keep their variance.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    channels = x.shape[1]
    count = x.numel() // channels
    own = torch.zeros(2 * channels + 1, dtype=dtype, device=x.device)
    if count:
        rest = [dim for dim in range(x.dim()) if dim != 1]
        variance, mean = torch.var_mean(x.to(dtype), rest, correction=0)
        own = torch.cat([mean, variance * count, own.new_full((1,), count)])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)  # and not a sum: every worker combines the same rows in the same order, to the same bits
    rows = torch.stack(everyone)
    means, squares, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    total = counts.sum()
    mean = (means * counts).sum(0) / total.clamp(min=1)
    return mean, (squares + counts * (means - mean).square()).sum(0), total


def _has_peers() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _along(per_channel: Tensor, x: Tensor) -> Tensor:
    """(channels,) shaped to broadcast over x's (n, channels, ...)."""
    return per_channel.view(-1, *[1] * (x.dim() - 2))


def _groups(channels: int, dims: Literal[1, 2]) -> int:
    """The most groups, up to 32, that divide the channels.

    Without pixels to take statistics over, a group needs channels enough: alone, a channel less its mean is always zero.
    """
    most = min(32, channels if dims == 2 else max(1, channels // 8))
    return max(groups for groups in range(1, most + 1) if channels % groups == 0)


def _check_at_least_2d(input: Tensor) -> None:
    if input.dim() < 2:
        raise ValueError(f"expected at least (n, channels), got {input.dim()}D input")
