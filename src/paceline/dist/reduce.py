"""Sums of gradients that do not depend on the order of their terms (`--reduce exact`).

A float sum depends on its order, so a model trained on 2 workers drifts from the same model on 4. Integers have no such
trouble. Here every value is written as digits to the base 2^W at fixed positions: digit k of x is trunc(|x| / 2^(k W)) mod
2^W, with x's sign. Which digits a value has depends on that value alone, whoever looks at it. Of each tensor, the three
highest positions that any part of any worker needs are kept and what lies below is cut off. Digits are summed over parts as
int32 and over workers as one int64 made of all three.

What is cut off each value is less than 2^-2W of the largest of its tensor: with W = 18, for up to 256 parts, 37 bits of the
largest value are kept, where a float32 has 24 (and a float64 53: it loses some). Tensors whose largest value is under 2^-96
keep fewer; what is under 2^-133 may count as zero. The sum is rounded to float64 and from there to the tensor's dtype.

Overflow is impossible: W is chosen so that `parts` times the largest three-digit number stays below 2^62. A sum beyond the
dtype's range is an infinity. A tensor in which any part has a NaN or an infinity comes out as NaN everywhere.

(Demmel & Nguyen 2015, "Parallel Reproducible Summation", doi:10.1109/TC.2014.2345391: floats in bins at fixed positions, too.)
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import UsageError

_DIGITS = 3
_BUCKET = 1 << 19  # values summed and sent at a time: 4 MiB of int64, so that one is on its way while the next is packed
_GPU_BUCKET = 1 << 23  # ... on a GPU, where every bucket costs kernel launches
_CACHED = 1 << 16  # values a CPU works on at a time: a few arrays of 256 KiB stay in its cache, in memory it has already
_LOWEST = -96  # values below 2^-96 share the digits of 2^-96: a float32 scale factor can reach no lower
MOST_PARTS = 1 << 16

AllReduce = Callable[..., Any]


class ExactReducer:
    """Sums the gradients of all parts of all workers, to the same bits for every order and every number of workers.

        reducer = ExactReducer(model.parameters(), parts=V)
        for part in my_parts:                    # every worker has at least one
            loss(part).backward()
            reducer.add([p.grad for p in model.parameters()])
            model.zero_grad()
        for p, grad in zip(model.parameters(), reducer.finish()):  # every worker reaches this
            p.grad = grad

    Bits also depend on how a part's own gradient is computed: the same device kind, the same number of threads.
    """

    def __init__(self, tensors: Iterable[Tensor], parts: int, all_reduce: AllReduce | None = None) -> None:
        tensors = list(tensors)
        if not 1 <= parts <= MOST_PARTS:
            raise UsageError(f"{parts} parts: the exact sum is for 1 to {MOST_PARTS:,}")
        odd = next((tensor.dtype for tensor in tensors if not tensor.is_floating_point()), None)
        if odd is not None:
            raise UsageError(f"--reduce exact does not sum gradients of {odd}: use float parameters, or --reduce fast")
        self._parts = parts
        self._shapes = [tensor.shape for tensor in tensors]
        self._dtypes = [tensor.dtype for tensor in tensors]
        self._device = tensors[0].device
        self._flat_dtype = torch.float64 if torch.float64 in self._dtypes else torch.float32
        self._zero = torch.zeros(1, dtype=self._flat_dtype, device=self._device)
        self._width = (62 - (parts - 1).bit_length()) // _DIGITS
        cuts = _cut([t.numel() for t in tensors], _BUCKET if self._device.type == "cpu" else _GPU_BUCKET)
        self._buckets = [_Bucket(where, self._shapes[where], self._flat_dtype, self._device) for where in cuts]
        self._all_reduce = all_reduce or _all_reduce
        self._tops = self._bad = self._zero
        self._added = 0
        self._clear()

    @property
    def nbytes(self) -> int:
        """Bytes a worker hands to the all-reduce in a step: 8 a value, and 8 a tensor."""
        return 8 * sum(bucket.count for bucket in self._buckets) + 8 * len(self._shapes)

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Add one part's gradients (None counts as zeros). They are read, not kept."""
        if self._added == self._parts:
            raise UsageError(f"the exact sum was made for {self._parts} parts and was given one more")
        if any(grad is not None and grad.layout != torch.strided for grad in grads):
            raise UsageError("--reduce exact does not sum sparse gradients: use sparse=False in the model, or --reduce fast")
        values = [
            torch.zeros(shape, dtype=dtype, device=self._device) if grad is None else grad.detach()
            for grad, shape, dtype in zip(grads, self._shapes, self._dtypes, strict=True)
        ]
        filled = [value if value.numel() else self._zero for value in values]  # nothing has no largest value
        largest = _largest(filled, self._flat_dtype)
        finite = largest.isfinite()
        exponents = torch.where(finite & (largest > 0), torch.frexp(largest).exponent, _LOWEST).clamp_(min=_LOWEST)
        tops = torch.div(exponents + self._width - 1, self._width, rounding_mode="floor").to(torch.int32)
        self._bad |= ~finite
        self._raise(torch.maximum(tops, self._tops))
        self._added += 1
        scales = self._scales()
        for bucket in self._buckets:
            bucket.add(values[bucket.where], scales[bucket.where], self._width)

    def finish(self) -> list[Tensor]:
        """The sums, in the tensors' shapes and dtypes, good until the next call. Every worker reaches this."""
        agreed = torch.stack([self._tops, self._bad.to(torch.int32)])
        self._all_reduce(agreed, dist.ReduceOp.MAX).wait()
        self._raise(agreed[0])
        scales = self._scales()
        under_way = []
        for bucket in self._buckets:  # one is on its way while the next is packed
            total = bucket.pack(scales[bucket.where], self._width)
            under_way.append((bucket, total, self._all_reduce(total, dist.ReduceOp.SUM)))
        scales = scales.masked_fill(agreed[1] > 0, math.nan)
        results: list[Tensor] = []
        for bucket, total, work in under_way:
            work.wait()
            pieces = torch.split(bucket.unpack(total, scales[bucket.where], self._width), bucket.sizes)
            shapes, dtypes = self._shapes[bucket.where], self._dtypes[bucket.where]
            results += [piece.view(shape).to(dtype) for piece, shape, dtype in zip(pieces, shapes, dtypes, strict=True)]
        self._clear()
        return results

    def _scales(self) -> Tensor:
        """What each tensor is multiplied by to have its highest digit before the point."""
        return _power_of_two(-(self._tops - 1) * self._width, self._flat_dtype)

    def _raise(self, tops: Tensor) -> None:
        """Move every tensor's digits to these tops, none lower than before."""
        rises = tops - self._tops
        self._tops = tops
        if not self._added or (self._device.type == "cpu" and not rises.any()):  # asking a GPU would mean waiting for it
            return
        for bucket in self._buckets:
            bucket.shift(rises[bucket.where])

    def _clear(self) -> None:
        lowest = -(-_LOWEST // self._width)  # the top of a tensor of zeros
        self._tops = torch.full((len(self._shapes),), lowest, dtype=torch.int32, device=self._device)
        self._bad = torch.zeros(len(self._shapes), dtype=torch.bool, device=self._device)
        self._added = 0
        for bucket in self._buckets:
            bucket.clear()


class _Bucket:
    """The digits of some tensors, end to end."""

    def __init__(self, where: slice, shapes: Sequence[torch.Size], dtype: torch.dtype, device: torch.device) -> None:
        self.where = where
        """Which of all tensors these are."""
        self.sizes = [shape.numel() for shape in shapes]
        self.count = sum(self.sizes)
        self._dtype, self._on_cpu = dtype, device.type == "cpu"
        at_once = _CACHED if self._on_cpu else max(1, self.count)
        self._slices = [slice(start, start + at_once) for start in range(0, self.count, at_once)]
        self._repeats = torch.tensor(self.sizes, device=device)
        # Kept from step to step: memory that is new costs a CPU more time than all the arithmetic here.
        self._packed = torch.empty(self.count, dtype=torch.int64, device=device)
        self._sums = torch.empty(self.count, dtype=dtype, device=device)
        self._digits: Tensor | None = None
        self._flat = torch.empty(self.count, dtype=dtype, device=device)
        self._parts = 0  # of this step; the first is held as it is until a second comes: with one part a worker, none does
        self._scales: Tensor | None = None
        self._scale = self._flat

    def clear(self) -> None:
        self._parts = 0

    def add(self, values: Sequence[Tensor], scales: Tensor, width: int) -> None:
        """Add the digits of these tensors, scaled so that the highest is before the point."""
        if self._parts == 1:
            self._add_held(scales, width, first=True)
        torch.cat([value.to(self._dtype).flatten() for value in values], out=self._flat)
        self._parts += 1
        if self._parts > 1:
            self._add_held(scales, width, first=False)

    def shift(self, rises: Tensor) -> None:
        """Move digits down by so many positions, a number for each tensor; what falls off the end is gone."""
        if self._digits is None or self._parts < 2:
            return
        padded = torch.cat([torch.zeros_like(self._digits[:1]), self._digits])
        places = torch.arange(1, _DIGITS + 1, device=rises.device)[:, None] - self._spread(rises.to(torch.int64))
        torch.gather(padded, 0, places.clamp_(min=0).expand_as(self._digits), out=self._digits)

    def pack(self, scales: Tensor, width: int) -> Tensor:
        """All digits of a value as one int64."""
        packed = self._packed
        if self._parts == 0:
            return packed.zero_()
        if self._parts == 1:
            scale = self._spread_scales(scales)
            for here in self._slices:
                packed[here] = (self._flat[here] * scale[here]).mul_(2.0 ** (2 * width))  # integers take the whole part
            return packed
        assert self._digits is not None
        high, middle, low = self._digits
        for here in self._slices:
            shifted = packed[here].copy_(high[here]).bitwise_left_shift_(width).add_(middle[here])
            shifted.bitwise_left_shift_(width).add_(low[here])
        return packed

    def unpack(self, packed: Tensor, scales: Tensor, width: int) -> Tensor:
        """The values that these digits stand for."""
        scale = self._spread_scales(scales)
        for here in self._slices:
            self._sums[here] = packed[here].double().mul_(2.0 ** (-2 * width)).div_(scale[here])
        return self._sums

    def _add_held(self, scales: Tensor, width: int, first: bool) -> None:
        """Add the digits of the values held; the first time, the digits are those."""
        if self._digits is None:
            self._digits = torch.empty(_DIGITS, self.count, dtype=torch.int32, device=self._flat.device)
        scale = self._spread_scales(scales)
        for here in self._slices:
            rest = self._flat[here] * scale[here]  # powers of two: exact, as is all below
            for digits in self._digits:
                whole = rest.trunc()
                digits[here] = whole if first else digits[here] + whole.to(torch.int32)
                rest.sub_(whole).mul_(2.0**width)

    def _spread_scales(self, scales: Tensor) -> Tensor:
        """As `_spread`; on a CPU, what the last call returned where the scales are the same, as they mostly are."""
        if self._scales is None or not (self._on_cpu and torch.equal(scales, self._scales)):
            self._scales, self._scale = scales, self._spread(scales)
        return self._scale

    def _spread(self, per_tensor: Tensor) -> Tensor:
        """One value a tensor -> one a value."""
        if len(self.sizes) == 1:
            return per_tensor.expand(self.count)
        return per_tensor.repeat_interleave(self._repeats, output_size=self.count)


def _largest(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The largest magnitude in each tensor; NaN where there is one."""
    if tensors[0].device.type == "cpu":  # 2.4 ns a value by the norm below, 0.2 by this
        bounds = [torch.aminmax(tensor) for tensor in tensors]
        highs = torch.stack([high.to(dtype) for _, high in bounds])
        return torch.maximum(highs, -torch.stack([low.to(dtype) for low, _ in bounds]))
    return torch.stack([norm.to(dtype) for norm in torch._foreach_norm(list(tensors), math.inf)])


def _power_of_two(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponents of a normal float, made of its bits: `torch.ldexp` goes through `pow`, whose range and rounding vary."""
    if dtype == torch.float64:
        return (exponents.to(torch.int64) + 1023 << 52).view(dtype)
    return (exponents + 127 << 23).view(dtype)


def _cut(sizes: Sequence[int], most: int) -> list[slice]:
    """Consecutive tensors in buckets of at most so many values, or of one tensor."""
    bounds, start, total = [], 0, 0
    for i, size in enumerate(sizes):
        if i > start and total + size > most:
            bounds.append(slice(start, i))
            start, total = i, 0
        total += size
    return [*bounds, slice(start, len(sizes))]


class _Done:
    def wait(self) -> None:
        pass


def _all_reduce(tensor: Tensor, op: Any) -> Any:
    alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
    return _Done() if alone else dist.all_reduce(tensor, op, async_op=True)
