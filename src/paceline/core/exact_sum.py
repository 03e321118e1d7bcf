"""Sums of gradients that do not depend on the order of their terms (`reduce="exact"`).

A float sum depends on its order, so a model trained on 2 workers drifts from the same model on 4. Integer sums do not. Here
every value is written as digits in base 2^W at fixed positions: digit k of x is trunc(|x| / 2^(k W)) mod 2^W, with the sign of
x. The digits of a value depend on that value alone, on every worker. Of each tensor, the three highest positions that any part
of any worker needs are kept; lower ones are cut off. Digits are summed over parts as int32, and over workers as one int64 made
of all three.

Every worker sums a share of the values: all others send it theirs, and it sends the sums back as float32. That is 8 + 4 bytes
per value; an all-reduce of float32 takes 4 + 4. With one part per worker, values are sent as they are and split into digits
only where they are summed: 4 + 4.

The part cut off each value is less than 2^-2W of the largest value of its tensor. With W = 18, for up to 256 parts, 37 bits of
the largest value are kept; a float32 has 24 (a float64 has 53, and loses some). Float32 tensors whose largest value is below
2^-57 may keep fewer bits; values below 2^-112 may count as zero. The sum is rounded to float32 (to float64 for a float64
tensor) and from there to its tensor's dtype.

Overflow is impossible: W is chosen so that `parts` times the largest three-digit number stays below 2^62. A sum beyond the
dtype's range is an infinity. A tensor in which any part has a NaN or an infinity comes out as NaN everywhere.

(Demmel & Nguyen 2015, "Parallel Reproducible Summation", doi:10.1109/TC.2014.2345391, use bins at fixed positions too.)
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.errors import UsageError
from paceline.output import plural

_DIGITS = 3
_CHUNK = 1 << 20  # values summed and sent at a time: 4 or 8 MiB, so that one chunk is sent while the next is summed
_GPU_CHUNK = 1 << 23  # ... on a GPU, where every chunk costs kernel launches
_CACHED = 1 << 16  # values a CPU works on at a time: a few arrays of up to 512 KiB stay in its cache
MOST_PARTS = 1 << 16


class ExactReducer:
    """Sums the gradients of all parts of all workers, with the same bits for any order and any number of workers.

        reducer = ExactReducer(model.parameters(), parts=V)
        for part in my_parts:                    # every worker has at least one
            loss(part).backward()
            reducer.add([p.grad for p in model.parameters()])
            model.zero_grad()
        for p, grad in zip(model.parameters(), reducer.finish()):  # collective: call on every rank
            p.grad = grad

    Bits also depend on how a part's own gradient is computed: use the same kind of device and the same number of threads.
    """

    def __init__(self, tensors: Iterable[Tensor], parts: int, workers: "Workers | None" = None) -> None:
        tensors, self._workers = list(tensors), workers or Workers()
        if not 1 <= parts <= MOST_PARTS:
            raise UsageError(f"{parts} parts: the exact sum takes 1 to {MOST_PARTS:,}")
        if parts < self._workers.size:
            raise UsageError(
                f"{plural(parts, 'part')} for {self._workers.size} workers: an exact sum needs one or more per worker"
            )
        other = next((tensor.dtype for tensor in tensors if not tensor.is_floating_point()), None)
        if other is not None:
            raise UsageError(f"an exact sum cannot take gradients of {other}: use float parameters, or reduce fast")
        self._most = parts - self._workers.size + 1  # parts this worker can have: each of the others has at least one
        self._shapes = [tensor.shape for tensor in tensors]
        self._dtypes = [tensor.dtype for tensor in tensors]
        self._device = tensors[0].device
        self._on_cpu = self._device.type == "cpu"
        dtype = torch.float64 if torch.float64 in self._dtypes else torch.float32
        self._width = (62 - (parts - 1).bit_length()) // _DIGITS
        # The top of a tensor of zeros, and of tensors whose scale, or its inverse, would not be a normal number.
        lowest = _DIGITS - (1022 if dtype == torch.float64 else 126) // self._width
        self._zero = torch.zeros(1, dtype=dtype, device=self._device)
        self._lay_out([tensor.numel() for tensor in tensors])
        # Where every step starts. Never written to, so that a step captured as a CUDA graph starts there too.
        self._lowest_tops = torch.full((len(tensors),), lowest, dtype=torch.int32, device=self._device)
        self._none_bad = torch.zeros(len(tensors), dtype=torch.bool, device=self._device)
        self._tops, self._bad, self._added = self._lowest_tops, self._none_bad, 0
        self._scales: Tensor | None = None
        self._scale = self._flat

    def _lay_out(self, sizes: Sequence[int]) -> None:
        """Lay out all tensors end to end. Memory is reused: on a CPU, new memory costs more than all the arithmetic here."""
        size = self._workers.size
        self._count = sum(sizes)
        length = _round_up(self._count, size)  # equal shares for all workers, padded with zeros
        self._chunks = _cut(slice(0, length), _round_up(_CHUNK if self._on_cpu else _GPU_CHUNK, size))
        self._repeats = torch.tensor([*sizes[:-1], sizes[-1] + length - self._count], device=self._device)
        self._flat = self._zero.new_zeros(length)
        """The values of the last part that was added. They are split into digits when a second part comes."""
        self._digits: Tensor | None = None
        self._sent = self._flat if self._most == 1 else torch.empty(length, dtype=torch.int64, device=self._device)
        self._received = self._sent if size == 1 else torch.empty_like(self._sent)
        self._sums = torch.empty_like(self._flat)
        self._share = self._sums if size == 1 else self._zero.new_empty(length // size)
        self._results = torch.split(self._sums[: self._count], list(sizes))

    @property
    def nbytes(self) -> int:
        """Bytes that a worker scatters and gathers per step. (An all-reduce of float32 has twice 4 per value.)"""
        return self._sent.nbytes + self._sums.nbytes + 16 * len(self._shapes)

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """Add one part's gradients (None counts as zeros). They are read, not kept."""
        if self._added == self._most:
            raise UsageError(f"the exact sum got more than the {self._most} parts that this worker can have")
        if any(grad is not None and grad.layout != torch.strided for grad in grads):
            raise UsageError("an exact sum cannot take sparse gradients: use sparse=False in the model, or reduce fast")
        values = [
            torch.zeros(shape, dtype=dtype, device=self._device) if grad is None else grad.detach()
            for grad, shape, dtype in zip(grads, self._shapes, self._dtypes, strict=True)
        ]
        filled = [value if value.numel() else self._zero for value in values]  # an empty tensor has no largest value
        largest = _largest(filled, self._flat.dtype)
        finite = largest.isfinite()
        exponents = torch.where(finite & (largest > 0), torch.frexp(largest).exponent, -(1 << 20))
        tops = torch.div(exponents + self._width - 1, self._width, rounding_mode="floor").to(torch.int32)
        self._bad = self._bad | ~finite
        self._raise(torch.maximum(tops, self._tops))
        if self._added == 1:
            self._add_held(first=True)
        torch.cat([value.to(self._flat.dtype).flatten() for value in values], out=self._flat[: self._count])
        self._added += 1
        if self._added > 1:
            self._add_held(first=False)

    def finish(self) -> list[Tensor]:
        """The sums, in the tensors' shapes and dtypes, valid until the next call. Collective: call on every rank."""
        agreed = torch.stack([self._tops, self._bad.to(torch.int32)])
        self._workers.max(agreed)
        self._raise(agreed[0])
        scale, scattered, gathered = self._spread_scales(), [], []
        for chunk in self._chunks:  # one chunk is sent while the next is packed ...
            self._pack(chunk, scale)
            scattered.append(self._workers.scatter(self._sent[chunk], self._received[chunk]))
        scale = self._spread_scales(agreed[1] > 0)
        for chunk, work in zip(self._chunks, scattered, strict=True):  # ... or summed
            work.wait()
            gathered.append(self._workers.gather(self._sum_share(chunk, scale), self._sums[chunk]))
        for work in gathered:
            work.wait()
        self.forget()
        found = zip(self._results, self._shapes, self._dtypes, strict=True)
        return [total.view(shape).to(dtype) for total, shape, dtype in found]

    def _raise(self, tops: Tensor) -> None:
        """Move every tensor's digits up to these top positions; digits that fall off the low end are dropped."""
        rises = tops - self._tops
        self._tops = tops
        if self._added < 2 or (self._on_cpu and not rises.any()):  # on a GPU, the check would wait for it
            return
        assert self._digits is not None
        spread = self._spread(rises.to(torch.int64))
        for chunk in self._chunks:
            digits = self._digits[:, chunk]
            padded = torch.cat([torch.zeros_like(digits[:1]), digits])
            places = torch.arange(1, _DIGITS + 1, device=self._device)[:, None] - spread[chunk]
            digits.copy_(torch.gather(padded, 0, places.clamp_(min=0)))

    def _add_held(self, first: bool) -> None:
        """Add the digits of the held values to the sums; `first` starts the sums."""
        if self._digits is None:
            self._digits = torch.empty(_DIGITS, len(self._flat), dtype=torch.int32, device=self._device)
        scale = self._spread_scales()
        for here in self._pieces(slice(0, len(self._flat))):
            rest = (self._flat[here] * scale[here]).mul_(4.0**-self._width)  # powers of two: exact, as is everything below
            for digits in self._digits:
                whole = rest.trunc()
                digits[here] = whole if first else digits[here] + whole.to(torch.int32)
                rest.sub_(whole).mul_(2.0**self._width)

    def _pack(self, chunk: slice, scale: Tensor) -> None:
        """Prepare a chunk to be sent: all digits of a value as one int64, or the plain values."""
        if self._added == 0:
            self._sent[chunk] = 0
        elif self._sent is self._flat:
            return
        elif self._added == 1:
            for here in self._pieces(chunk):
                self._sent[here] = _whole(self._flat[here], scale[here])
        else:
            assert self._digits is not None
            high, middle, low = self._digits
            for here in self._pieces(chunk):
                shifted = self._sent[here].copy_(high[here]).bitwise_left_shift_(self._width).add_(middle[here])
                shifted.bitwise_left_shift_(self._width).add_(low[here])

    def _sum_share(self, chunk: slice, scale: Tensor) -> Tensor:
        """The sums of this worker's share of a chunk."""
        size, rank = self._workers.size, self._workers.rank
        received = self._received[chunk].view(size, -1)
        sums, scale = self._share[chunk.start // size : chunk.stop // size], scale[chunk].view(size, -1)[rank]
        for here in self._pieces(slice(0, len(sums)), rows=size):
            sent = received[:, here]
            whole = _whole(sent, scale[here]) if sent.is_floating_point() else sent
            sums[here] = whole.sum(0)
            sums[here].div_(scale[here])
        return sums

    def _pieces(self, of: slice, rows: int = 1) -> list[slice]:
        """The slices to work on at a time."""
        return _cut(of, max(1, _CACHED // rows)) if self._on_cpu else [of]

    def _spread_scales(self, bad: Tensor | None = None) -> Tensor:
        """The factor that turns each value's digits into a whole number; NaN in bad tensors."""
        scales = _power_of_two((_DIGITS - self._tops) * self._width, self._flat.dtype)
        if bad is not None:
            scales.masked_fill_(bad, math.nan)
        if self._scales is None or not (self._on_cpu and torch.equal(scales, self._scales)):  # mostly they are equal
            self._scales, self._scale = scales, self._spread(scales)
        return self._scale

    def _spread(self, per_tensor: Tensor) -> Tensor:
        """Expand one value per tensor to one per element."""
        return per_tensor.repeat_interleave(self._repeats, output_size=len(self._flat))

    def forget(self) -> None:
        """Drop what was added."""
        self._tops, self._bad, self._added = self._lowest_tops, self._none_bad, 0


def _whole(values: Tensor, scale: Tensor) -> Tensor:
    """All digits of a value as one int64."""
    return (values * scale).to(torch.int64)  # truncates


def _largest(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The largest magnitude in each tensor; NaN if it holds one."""
    if tensors[0].device.type == "cpu":  # 0.2 ns per value; the norm below takes 2.4
        bounds = [torch.aminmax(tensor) for tensor in tensors]
        highs = torch.stack([high.to(dtype) for _, high in bounds])
        return torch.maximum(highs, -torch.stack([low.to(dtype) for low, _ in bounds]))
    return torch.stack([norm.to(dtype) for norm in torch._foreach_norm(list(tensors), math.inf)])


def _power_of_two(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponents as normal floats, from their bits: `torch.ldexp` uses `pow`, whose range and rounding vary."""
    if dtype == torch.float64:
        return (exponents.to(torch.int64) + 1023 << 52).view(dtype)
    return (exponents + 127 << 23).view(dtype)


def _cut(of: slice, most: int) -> list[slice]:
    """Consecutive slices of at most `most` elements."""
    return [slice(start, min(start + most, of.stop)) for start in range(of.start, of.stop, most)]


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Workers:
    """The workers whose parts are summed: torch's default group, or this process alone."""

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.size, self.rank = (dist.get_world_size(), dist.get_rank()) if together else (1, 0)

    def max(self, tensor: Tensor) -> None:
        """Element-wise maximum over all workers, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)

    def scatter(self, sent: Tensor, received: Tensor) -> Any:
        """Start sending one piece to each worker and receiving one from each."""
        return dist.all_to_all_single(received, sent, async_op=True) if self.size > 1 else Done()

    def gather(self, share: Tensor, everything: Tensor) -> Any:
        """Start sending this worker's piece to all and receiving everyone's."""
        return _all_gather(everything, share, async_op=True) if self.size > 1 else Done()


class Done:
    """Finished work."""

    def wait(self) -> None:
        pass


_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renamed it
