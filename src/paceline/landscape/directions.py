"""Directions in weight space: random and filter-normalized, from one model to another, and the plane of a training path.

A direction has one tensor per tensor of the model that it moves. All are made on rank 0, on the CPU, in float32: so they do not
depend on devices or workers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.core.hashes import key
from paceline.errors import UsageError
from paceline.output import plural

Direction = dict[str, Tensor]
_RANDOM = 0xD12E  # keeps these random numbers apart from those of training
_COLUMNS = 1 << 20  # weights of all points that are in float64 at a time


def random_direction(model: nn.Module, seed: int, number: int) -> Direction:
    """A normal direction, filter-normalized (Li et al. 2018, arXiv:1712.09913, section 4).

    Each filter of a convolution, or row of a matrix, gets the norm of the model's own. Parameters of one dimension (biases,
    norm layers) do not move.
    """
    direction: Direction = {}
    for index, (name, weight) in enumerate(_trained(model).items()):
        if weight.dim() < 2:
            continue
        random = torch.Generator().manual_seed(key(seed, _RANDOM, number, index) >> 1)
        drawn = torch.randn(weight.shape, generator=random, dtype=torch.float32)
        flat, own = drawn.flatten(1), weight.detach().cpu().float().flatten(1)
        scale = own.norm(dim=1) / (flat.norm(dim=1) + 1e-10)
        direction[name] = (flat * scale[:, None]).view(weight.shape)
    if not direction:
        raise UsageError(
            "random directions move parameters of two or more dimensions, and this model has none: use --shape path, or --to"
            " another record"
        )
    return direction


def difference(model: nn.Module, other: Mapping[str, Tensor]) -> Direction:
    """From the model to other weights, with the buffers of norm layers. The names of `other` are those of the state dict."""
    own = {name: value for name, value in model.state_dict().items() if value.is_floating_point()}
    return {name: other[name].float() - value.cpu().float() for name, value in own.items()}


@dataclass(frozen=True, kw_only=True)
class Plane:
    """The two main directions of one or more paths, and the places of their points."""

    directions: tuple[Direction, Direction]
    """Orthogonal, of length 1."""
    explained: tuple[float, float]
    """The share of the points' variance along each."""
    places: list[list[tuple[float, float, float]]]
    """For each path and point: x, y, and the distance from the plane. The model itself is at (0, 0, 0)."""


def fit_plane(model: nn.Module, paths: Sequence[Sequence[Mapping[str, Tensor]]]) -> Plane:
    """The principal components of the points' differences from the model (Li et al. 2018, section 7).

    They come from the matrix of inner products, which has one row per point: there are far more weights than points.
    """
    own = {name: weight.detach().cpu().float() for name, weight in _trained(model).items()}
    every = [point for path in paths for point in path]
    if len(every) < 3:
        raise UsageError(f"a plane needs at least 3 snapshots, and there are {len(every)}: train with --snapshots 20")
    table = torch.empty(len(every), sum(weight.numel() for weight in own.values()))
    for row, point in zip(table, every, strict=True):
        torch.cat([(point[name].float() - own[name]).flatten() for name in own], out=row)
    gram = torch.zeros(len(every), len(every), dtype=torch.float64)
    for columns in torch.split(table, _COLUMNS, dim=1):
        gram += columns.double() @ columns.double().T
    if not bool(gram.isfinite().all()):
        raise UsageError("a snapshot has weights that are not finite: its run diverged, so no plane fits its path")
    centered = gram - gram.mean(0) - gram.mean(1)[:, None] + gram.mean()
    values, vectors = torch.linalg.eigh(centered)
    spread = float(values.clamp(min=0).sum())
    if not spread > 0 or float(values[-2]) <= 1e-12 * spread:
        raise UsageError(f"the {plural(len(every), 'snapshot')} lie on one point or line: no plane fits them")
    axes, shares, at = [], [], []
    for column in (-1, -2):
        # The axis is a combination of the rows, so places on it follow from their inner products, in float64.
        weights = vectors[:, column] - vectors[:, column].sum() / len(every)
        along = gram @ weights
        length = float((weights @ along).sqrt()) * (1 if along[0] >= 0 else -1)  # the first path starts at a positive place
        axes.append(table.T @ (weights / length).float())
        at.append(along / length)
        shares.append(float(values[column]) / spread)
    off = (gram.diagonal() - at[0].square() - at[1].square()).clamp(min=0).sqrt()
    points = iter([(float(x), float(y), float(z)) for x, y, z in zip(*at, off, strict=True)])
    return Plane(
        directions=(_split(axes[0], own), _split(axes[1], own)),
        explained=(shares[0], shares[1]),
        places=[[next(points) for _ in path] for path in paths],
    )


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad and weight.is_floating_point()}


def _split(flat: Tensor, like: Mapping[str, Tensor]) -> Direction:
    pieces = torch.split(flat, [weight.numel() for weight in like.values()])
    return {name: piece.view(weight.shape) for (name, weight), piece in zip(like.items(), pieces, strict=True)}
