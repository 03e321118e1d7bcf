"""Send named tensors from rank 0 to every worker."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.dist.world import World


def broadcast_tensors(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Rank 0's tensors, by name, on the CPU of every worker: only rank 0 needs access to their file.

    Collective: call on every rank. What other ranks pass is ignored.
    """
    if world.size == 1:
        return dict(tensors)
    given = tensors if world.is_main else {}
    described = world.broadcast([[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in given.items()])
    received = {}
    for name, dtype, shape in described:
        kind = getattr(torch, dtype)
        # A contiguous copy: what others receive is in the order of the elements, whatever the layout here.
        tensor = (
            given[name].to(world.device).contiguous() if name in given else torch.empty(shape, dtype=kind, device=world.device)
        )
        dist.broadcast(tensor, 0)
        received[name] = tensor.cpu()  # as in a checkpoint: an optimizer's own step count must stay on the CPU
    return received
