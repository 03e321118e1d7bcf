"""What a script with a loop of its own does once for all workers: print, save, add up. It uses torch's process group."""

import builtins
import math
import os
import struct
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.dist.place import read_place
from paceline.errors import UsageError
from paceline.files import replacing


def print(*values: Any, **options: Any) -> None:
    """Print on rank 0 only. `from paceline import print` makes a script for one worker print once on many."""
    if _rank() == 0:
        builtins.print(*values, **options)


def save(state: Any, path: str | os.PathLike[str]) -> None:
    """torch.save on rank 0 only, to a temporary file that is then renamed: the file is complete, or the old one stays.

    Equal states make equal files.
    """
    if _rank() == 0:
        with replacing(Path(path)) as temporary, temporary.open("wb") as file:
            torch.save(state, file)  # given a path, it would write the temporary name into the file


def total(*values: Any) -> Any:
    """The sum of a number or tensor over all workers; of several, a tuple of sums. Collective: call on every rank.

    Numbers are added in float64, or as integers if all are, and rounded once. Tensors must have one shape on all workers.
    """
    if not values:
        raise UsageError("total needs at least one number or tensor")
    size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    sums = tuple(_total(value, size) for value in values)
    return sums if len(sums) > 1 else sums[0]


def _total(value: Any, size: int) -> Any:
    if isinstance(value, Tensor):
        out = value.detach().clone()
        if size > 1:
            dist.all_reduce(out)
        return out
    if not isinstance(value, int | float):
        raise UsageError(f"total got {type(value).__name__}: it adds numbers and tensors")
    if size == 1:
        return value
    found = _gather(value, size)
    return sum(found) if all(isinstance(each, int) for each in found) else math.fsum(found)


def _gather(value: int | float, size: int) -> list[int | float]:
    """Every worker's number, as eight bytes and a flag: one may have an integer and another a float."""
    real = isinstance(value, float)
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    (number,) = struct.unpack("<q", struct.pack("<d" if real else "<q", value))
    mine = torch.tensor([real, number], dtype=torch.int64, device=device)
    rows = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(rows, mine)
    pairs = [row.tolist() for row in rows]
    return [struct.unpack("<d", struct.pack("<q", each))[0] if is_real else each for is_real, each in pairs]


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else read_place().rank
