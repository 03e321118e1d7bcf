"""Small losses as surfaces, without a record: for tests of `paceline sharpness`."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from harness.training import ALONE
from paceline.dist.world import World
from paceline.sharpness.surface import Surface

Loss = Callable[[nn.Module, Any], Tensor]
"""From a model and a batch to one loss per sample."""


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def surface_of(model: nn.Module, batches: list[Any], loss: Loss = cross_entropy, world: World = ALONE) -> Surface:
    """The mean loss of a model over these batches (tuples of tensors)."""

    def sums(batch: Any, count: int) -> tuple[Tensor, Tensor]:
        return loss(model, batch).sum(), torch.tensor(float(count))

    counts = tuple(len(batch[0]) for batch in batches)
    one = SimpleNamespace(batches=tuple(batches), counts=counts, samples=sum(counts))
    fixed: Any = SimpleNamespace(
        run=SimpleNamespace(world=world), sets={"train": one}, model=model, loss=sums, seed=lambda: None
    )
    return Surface(fixed, "train")


def points(
    sizes: tuple[int, ...] = (7, 5, 4), inputs: int = 4, classes: int = 3, kind: torch.dtype = torch.float64
) -> list[Any]:
    """Batches of random inputs and labels."""
    random = torch.Generator().manual_seed(3)
    return [
        (torch.randn(size, inputs, generator=random, dtype=kind), torch.randint(classes, (size,), generator=random))
        for size in sizes
    ]


def net(kind: torch.dtype = torch.float64) -> nn.Module:
    """A net of 64 weights."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(kind)


def exact_hessian(surface: Surface, model: nn.Module, batches: list[Any], loss: Loss = cross_entropy) -> Tensor:
    """The Hessian of the mean loss, from torch."""
    names = [name for name, each in model.named_parameters() if each.requires_grad]
    shapes = [each.shape for each in model.parameters() if each.requires_grad]

    def value(flat: Tensor) -> Tensor:
        pieces = [piece.view(shape) for piece, shape in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]
        named = dict(zip(names, pieces, strict=True))
        wrapped = lambda *inputs: torch.func.functional_call(model, named, inputs)  # noqa: E731
        losses = [loss(wrapped, batch) for batch in batches]  # type: ignore[arg-type]
        return torch.cat(losses).mean()

    found: Tensor = torch.func.hessian(value)(surface.weights)  # type: ignore[no-untyped-call]
    return found
