"""Batch norm over the samples of all workers, on any device and backend."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.errors import UsageError


class SyncNorm(_BatchNorm):
    """Batch norm with training statistics over the samples of all workers.

    Collective: in training, every worker of the default process group must run every forward and backward pass, in the same
    order and with the same dtype, even with an empty batch. Batches may differ in size. Forward gathers 2 * channels + 1
    numbers per worker, backward sums 2 * channels. With one worker, and in evaluation, it is plain batch norm.

    Statistics are float32 (float64 for float64 input). Gradients of weight and bias are this worker's share, for DDP to
    average; the input's gradient is that of the sum of all workers' losses. It can be differentiated once. It is written in
    plain tensor operations because torch.nn.SyncBatchNorm refuses CPU tensors, and DDP refuses it on the CPU.
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
        output: Tensor = _NormalizeSynced.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, mean, inverse_std, count
        )
        return output

    def _check_input_dim(self, input: Tensor) -> None:
        check_at_least_2d(input)

    def _move_running(self, mean: Tensor, squares: Tensor, count: Tensor) -> None:
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        # A single value over all workers has no variance and moves nothing. Decided on the device: no wait for the GPU.
        share = ((count > 1) * momentum).to(self.running_mean.dtype)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_((squares / (count - 1).clamp(min=1)).to(self.running_var.dtype), share)


def replace_sync_batch_norms(model: nn.Module) -> nn.Module:
    """Make every `nn.SyncBatchNorm` of `model` a `SyncNorm`, which also runs on CPUs; returns `model`.

    The modules change their class and stay the same objects. Raises UsageError for one that `SyncNorm` cannot replace.
    """
    for name, module in model.named_modules():
        if type(module) is nn.SyncBatchNorm:
            if not module.affine or not module.track_running_stats:
                raise UsageError(
                    f"layer {name or 'the model'} is a SyncBatchNorm with affine=False or track_running_stats=False, which"
                    " runs on GPUs only: leave both on, or use nn.BatchNorm"
                )
            module.__class__ = SyncNorm  # type: ignore[assignment]
    return model


class _NormalizeSynced(torch.autograd.Function):
    """(x - mean) / std * weight + bias, where mean and std depend on the x of every worker.

    With g = dL/dy, xhat = (x - mean) / std and N values per channel over all workers (arXiv:1502.03167, section 3, rearranged):
    dL/dx = weight / std * (g - sum(g) / N - xhat * sum(g * xhat) / N), both sums over all workers.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse_std: Tensor, count: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, mean, inverse_std, count)
        scale = inverse_std * weight
        return torch.addcmul(along(bias - mean * scale, x), x.to(mean.dtype), along(scale, x)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse_std, count = ctx.saved_tensors
        grad = grad.to(mean.dtype)
        xhat = (x.to(mean.dtype) - along(mean, x)) * along(inverse_std, x)
        rest = [dim for dim in range(x.dim()) if dim != 1]
        grad_bias, grad_weight = grad.sum(rest), (grad * xhat).sum(rest)
        grad_x = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([grad_bias, grad_weight])
            dist.all_reduce(sums)
            of_grad, of_product = sums / count.clamp(min=1)
            centered = grad - along(of_grad, x) - xhat * along(of_product, x)
            grad_x = (centered * along(inverse_std * weight, x)).to(x.dtype)
        return grad_x, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None, None, None


def _gather_statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each channel, over all workers: the mean, the sum of squares around it, and the number of values (a scalar).

    Chan, Golub & LeVeque's pairwise update: no difference of large sums, so data far from zero keep their variance.
    """
    dtype, channels = statistics_dtype(x), x.shape[1]
    count = x.numel() // channels
    own = torch.zeros(2 * channels + 1, dtype=dtype, device=x.device)
    if count:
        rest = [dim for dim in range(x.dim()) if dim != 1]
        variance, mean = torch.var_mean(x.to(dtype), rest, correction=0)
        own = torch.cat([mean, variance * count, own.new_full((1,), count)])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)  # not a sum: every worker combines the same rows in the same order, to the same bits
    rows = torch.stack(everyone)
    means, squares, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    total = counts.sum()
    mean = (means * counts).sum(0) / total.clamp(min=1)
    return mean, (squares + counts * (means - mean).square()).sum(0), total


def _has_peers() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def along(per_channel: Tensor, x: Tensor) -> Tensor:
    """(channels,) shaped to broadcast over x's (n, channels, ...)."""
    return per_channel.view(-1, *[1] * (x.dim() - 2))


def check_at_least_2d(input: Tensor) -> None:
    if input.dim() < 2:
        raise ValueError(f"expected at least (n, channels), got {input.dim()}D input")
