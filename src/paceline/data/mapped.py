"""Batches of rows of an array, which may be a file mapped into memory, as numpy.load(..., mmap_mode="r") makes it.

Reading rows in random order is slow once a mapped file does not fit in memory: the kernel fetches 4 KiB at a time. So all pages
of a batch are asked for first, at once.
"""

import ctypes
import math
import mmap
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

_MAPS = Path("/proc/self/maps")  # on Linux; other systems get no advice
_WILLNEED = 3  # of madvise, on Linux


class Rows:
    """The rows of a tensor, read in batches."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._size = tensor, tensor.stride(0) * tensor.itemsize

    def __getitem__(self, rows: list[int]) -> Tensor:
        self._read_ahead(rows)
        return torch.index_select(self._tensor, 0, torch.tensor(rows, dtype=torch.int64), out=self._new_batch(len(rows)))

    @cached_property
    def _madvise(self) -> Callable[[int, int, int], int] | None:
        """Asks for pages, if that is worthwhile. Found out where it is used: a process that is not a fork has a copy."""
        small = self._size < mmap.PAGESIZE  # asking would cost more than it saves
        return None if small or not self._tensor.is_contiguous() or not is_mapped(self._tensor) else _load_madvise()

    def _new_batch(self, rows: int) -> Tensor | None:
        """Where to put a batch: in a loader process, in memory that it shares with its worker. That saves a copy."""
        if get_worker_info() is None:
            return None
        shape = (rows, *self._tensor.shape[1:])
        size = math.prod(shape) * self._tensor.itemsize
        storage = torch.UntypedStorage._new_shared(size)  # type: ignore[no-untyped-call]  # as torch's own collate does
        batch: Tensor = torch.empty(0, dtype=self._tensor.dtype).set_(storage, 0, shape)  # type: ignore[call-overload]
        return batch

    def _read_ahead(self, rows: list[int]) -> None:
        if self._madvise is None:
            return
        for row in rows:
            begin = self._tensor.data_ptr() + row * self._size
            page = begin - begin % mmap.PAGESIZE
            self._madvise(page, begin + self._size - page, _WILLNEED)  # only advice: it may fail


def is_mapped(tensor: Tensor) -> bool:
    """Whether the memory of a tensor is a file."""
    if tensor.device.type != "cpu" or not tensor.nbytes or not _MAPS.exists():
        return False
    for line in _MAPS.read_text(errors="replace").splitlines():
        begin, end = (int(address, 16) for address in line.split(maxsplit=1)[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            file = line.split(maxsplit=5)[5:]
            return bool(file) and file[0].startswith("/") and not file[0].startswith("/dev/")
    return False


def _load_madvise() -> Callable[[int, int, int], int]:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes, madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return madvise
