"""Bring what the workers computed for each chunk to rank 0, in the order of the chunks.

Worker r has chunks r, r + P, ... (`exact_mean.Chunks`). Round by round every worker sends the tensors of one chunk to rank 0,
which hands them on in order. So rank 0 needs memory for one round, not for all chunks. Descriptions travel as JSON, tensors as
their bytes: nothing is unpickled.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.core.exact_mean import Chunks
from paceline.dist.agree import any_reason
from paceline.dist.world import World
from paceline.errors import UsageError


def gather_in_order(chunks: Chunks, trees: Iterable[Any]) -> Iterator[Any]:
    """On rank 0, yield the tree of every chunk, on the CPU, in the order of the chunks; on the other ranks, yield nothing.

    `trees` yields one tree for each chunk of this worker (`chunks.numbers`): a tensor, or tuples, lists and dicts of tensors
    and plain values. Shapes and dtypes may differ between chunks. If one worker's iterator raises an error, that worker raises
    it, and the others raise one that says they lost contact. Collective: iterate to the end on every rank.
    """
    world, mine = chunks.world, iter(trees)
    total = -(-chunks.samples // chunks.size)
    for first in range(0, total, world.size):
        about, leaves = _next(mine, first + world.rank < total, world)
        described = world.gather(about)
        if world.rank == 0:
            present = [(rank, one) for rank, one in enumerate(described) if one is not None]  # the last round may be short
            received = [leaves if rank == 0 else _receive(one["leaves"], rank, world) for rank, one in present]
            for (_, one), tensors in zip(present, received, strict=True):
                yield _unflatten(one["tree"], tensors)
        elif leaves:
            dist.send(_pack(leaves, world), 0)


def _next(mine: Iterator[Any], has_chunk: bool, world: World) -> tuple[dict[str, Any] | None, list[Tensor]]:
    """Describe this worker's next tree, and list its tensors. Raises an error on all workers if one of them has an error."""
    about: dict[str, Any] | None = None
    leaves: list[Tensor] = []
    failed: BaseException | None = None
    try:
        if has_chunk:
            about = {"tree": _flatten(next(mine), leaves), "leaves": []}
            leaves = [leaf.detach().contiguous() for leaf in leaves]
            about["leaves"] = [[str(leaf.dtype).removeprefix("torch."), list(leaf.shape)] for leaf in leaves]
    except StopIteration:
        failed = ValueError("fewer trees than chunks")
    except Exception as error:
        failed = error
    other = any_reason(world, "failed" if failed is not None else "")
    if failed is not None:
        raise failed
    if other:
        raise RuntimeError("lost contact: a remote peer failed")  # `is_lost_contact` knows it: its own error is the one to show
    return about, leaves


def _flatten(tree: Any, leaves: list[Tensor]) -> Any:
    """Describe a tree in JSON, and append its tensors to `leaves`."""
    if isinstance(tree, Tensor):
        leaves.append(tree)
        return {"tensor": len(leaves) - 1}
    if isinstance(tree, Mapping):
        wrong = next((key for key in tree if not isinstance(key, str)), None)
        if wrong is not None:
            raise UsageError(f"outputs have a dict with the key {wrong!r}: use text for the keys")
        return {"dict": {key: _flatten(value, leaves) for key, value in tree.items()}}
    if isinstance(tree, tuple | list):
        kind = "tuple" if isinstance(tree, tuple) else "list"
        return {kind: [_flatten(value, leaves) for value in tree]}
    if tree is None or isinstance(tree, bool | int | float | str):
        return {"value": tree}
    raise UsageError(f"outputs hold a {type(tree).__name__}: use tensors, or tuples, lists and dicts of tensors")


def _unflatten(about: Any, leaves: list[Tensor]) -> Any:
    ((kind, value),) = about.items()
    match kind:
        case "tensor":
            return leaves[value].cpu()
        case "dict":
            return {key: _unflatten(each, leaves) for key, each in value.items()}
        case "value":
            return value
    made = [_unflatten(each, leaves) for each in value]
    return tuple(made) if kind == "tuple" else made


def _carrier(world: World) -> torch.device:
    """Where messages between two workers must be: gloo sends tensors of a CPU only."""
    return world.device if world.backend == "nccl" else torch.device("cpu")


def _pack(leaves: list[Tensor], world: World) -> Tensor:
    """The bytes of all tensors as one message."""
    return torch.cat([leaf.to(_carrier(world)).reshape(-1).view(torch.uint8) for leaf in leaves])


def _receive(described: list[Any], rank: int, world: World) -> list[Tensor]:
    """The tensors that a worker packed."""
    if not described:
        return []
    kinds = [getattr(torch, dtype) for dtype, _ in described]
    sizes = [kind.itemsize * math.prod(shape) for kind, (_, shape) in zip(kinds, described, strict=True)]
    message = torch.empty(sum(sizes), dtype=torch.uint8, device=_carrier(world))
    dist.recv(message, rank)
    # A copy of each: a view needs an offset that is a multiple of the element's size.
    pieces = [piece.clone() for piece in torch.split(message.cpu(), sizes)]
    return [piece.view(kind).view(shape) for piece, kind, (_, shape) in zip(pieces, kinds, described, strict=True)]
