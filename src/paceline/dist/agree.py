"""Check that all workers hold the same weights (law 6).

Each tensor gets a 64-bit fingerprint of its bits, computed on its own device. Workers exchange only these: 8 bytes per tensor.
"""

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.dist.world import World
from paceline.errors import WorkersDisagree

_CHUNK = 1 << 22  # elements at a time on a GPU: the int64 copy of a chunk takes 32 MiB, however large the tensor
_CPU_CHUNK = (
    1 << 16
)  # ... on a CPU: 512 KiB stay in its cache. Larger chunks, with a page fault every 4 KiB, take 4 times as long
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprints(tensors: Iterable[Tensor]) -> Tensor:
    """One int64 per tensor: the sum over elements of (bits x an odd number for this position), modulo 2^64. No host sync."""
    return torch.stack([_fingerprint(tensor) for tensor in tensors])


_WHY = "something changes weights outside the optimizer, or a device is faulty"


def check_agreement(tensors: Mapping[str, Tensor], world: World, when: str, why: str = _WHY) -> None:
    """Raise WorkersDisagree on every worker if any tensor differs between workers. Collective: call on every rank."""
    if world.size == 1 or not tensors:
        return
    table = torch.zeros(world.size, len(tensors), dtype=torch.int64, device=world.device)
    table[world.rank] = fingerprints(tensors.values())
    dist.all_reduce(table)  # each row comes from one worker, so the sum is a gather
    wrong = table.cpu() != table[0].cpu()
    if wrong.any():
        names = [name for name, differs in zip(tensors, wrong.any(0).tolist(), strict=True) if differs]
        ranks = [str(rank) for rank, differs in enumerate(wrong.any(1).tolist()) if differs]
        raise WorkersDisagree(
            f"workers disagree {when}: {len(names)} of {len(tensors)} tensors differ (first: {names[0]}) between worker 0 and"
            f" worker{'s' * (len(ranks) > 1)} {', '.join(ranks)}; {why}"
        )


def any_reason(world: World, reason: str) -> str:
    """This worker's `reason` against something, or "another worker cannot" if only another has one; "" if none has.

    All workers then decide alike. Collective: call on every rank.
    """
    if world.size == 1:
        return reason
    refused = torch.tensor(int(bool(reason)), device=world.device)
    dist.all_reduce(refused, dist.ReduceOp.MAX)
    return reason or ("another worker cannot" if int(refused) else "")


def _fingerprint(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().flatten()
    bits = flat.view(_BITS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    size = _CPU_CHUNK if tensor.device.type == "cpu" else _CHUNK
    for start in range(0, bits.numel(), size):
        chunk = bits[start : start + size].to(torch.int64)
        odd = torch.arange(start, start + chunk.numel(), device=tensor.device) * 0x1E3779B97F4A7C15 * 2 + 1
        total = total + ((chunk + 0x9E3779B9) * odd).sum()
    return total
