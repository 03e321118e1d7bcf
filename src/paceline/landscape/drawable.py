"""What a landscape's file holds, as arrays that can be drawn. The file may be damaged: a RecordError says what does not fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.errors import RecordError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Values = NDArray[np.float64]


_MOST = 1e100  # larger losses are as good as infinite, and would overflow in matplotlib


@dataclass(frozen=True)
class Surface:
    """The losses of one set over a plane: `loss[j][i]` at `y[j]`, `x[i]`, nan where it is not finite."""

    x: "Values"
    y: "Values"
    loss: "Values"
    titles: tuple[str, str]
    """Of the two axes."""
    paths: Sequence[tuple[str, "Values", "Values"]]
    """(name, x, y) of each run on the plane."""
    is_path: bool


@dataclass(frozen=True)
class Line:
    """The losses and accuracies of each set along a line."""

    x: "Values"
    sets: Mapping[str, Mapping[str, "Values"]]
    models: Sequence[tuple[float, str]]
    """(x, name) of each model on the line."""
    title: str
    """Of the x axis."""


def read_surface(found: Mapping[str, Any], shown: str = "") -> Surface:
    """The surface of a plane or a path, for one of its sets: the first if `shown` is empty."""
    sets = _sets(found)
    if shown and shown not in sets:
        raise UsageError(f"the landscape has no set {shown!r}: it has {', '.join(sets) or 'none'}")
    x, y = as_values(found.get("x")), as_values(found.get("y"))
    loss = (sets.get(shown) or next(iter(sets.values()), {})).get("loss", np.array([]))
    fits = loss.shape == (y.size, x.size) and min(loss.shape) > 1 and np.isfinite(loss).any()
    if not fits or not all((np.diff(side) > 0).all() for side in (x, y)):
        raise RecordError(
            f"the landscape cannot be drawn: {x.size} x {y.size} increasing places need one loss each, at least 2 x 2 of them"
        )
    is_path = found.get("kind") == "path"
    shares = as_values(found.get("explained")).ravel() if is_path else np.array([])
    words = [f", {share:.0%} of the variance" if np.isfinite(share) else "" for share in shares]
    name = "principal component" if is_path else "direction"
    first, second = (f"{which} {name}{[*words, '', ''][place]}" for place, which in enumerate(("first", "second")))
    listed = found.get("paths") if is_path else None
    runs = [run for run in listed if isinstance(run, Mapping)] if isinstance(listed, list) else []
    paths = [(as_label(run.get("name") or "the run"), as_values(run.get("x")), as_values(run.get("y"))) for run in runs]
    kept = [each for each in paths if each[1].ndim == 1 and each[1].size and each[1].shape == each[2].shape]
    return Surface(x, y, np.where(np.isfinite(loss), loss, np.nan), (first, second), kept, is_path)


def read_line(found: Mapping[str, Any]) -> Line:
    """A line, or the line between two models. Sets without one loss for each place are left out."""
    x = as_values(found.get("x"))
    sets = {
        name: {measure: values for measure, values in each.items() if values.shape == x.shape and np.isfinite(values).any()}
        for name, each in _sets(found).items()
    }
    sets = {name: each for name, each in sets.items() if "loss" in each}
    if not sets or x.ndim != 1 or not np.isfinite(x).all():
        raise RecordError(f"the landscape cannot be drawn: {x.size} places on a line need one loss each")
    ends = found.get("ends")
    names = [as_label(end) for end in ends] if isinstance(ends, list) and len(ends) == 2 else ["first model", "second model"]
    if found.get("kind") == "between":
        return Line(x, sets, [(0.0, names[0]), (1.0, names[1])], "share of the way to the second model")
    return Line(x, sets, [(0.0, "the model")], "distance along the direction")


def as_label(name: Any, most: int = 48) -> str:
    """A name that matplotlib shows as it is: `$` would begin a formula, and legends leave out names that begin with `_`."""
    plain = "".join(each if each.isprintable() else " " for each in str(name))
    plain = plain if len(plain) <= most else f"{plain[: most // 2]}...{plain[-most // 3 :]}"
    return (f" {plain}" if plain.startswith("_") else plain).replace("$", r"\$")


def as_values(value: Any) -> "Values":
    """Numbers as an array; None and text other than "inf" and "nan" become nan. Empty if rows differ in length."""
    if not isinstance(value, list | tuple):
        return np.array([])
    if any(isinstance(each, list | tuple) for each in value):
        rows = [as_values(each) for each in value]
        return np.array(rows) if len({row.shape for row in rows}) == 1 else np.array([])
    return np.array([_number(each) for each in value])


def finer(x: "Values", y: "Values", pieces: int = 12) -> "Values":
    """Points along a path, close enough that it stays on a curved surface."""
    at = np.linspace(0, x.size - 1, (x.size - 1) * pieces + 1)
    return np.stack([np.interp(at, np.arange(x.size), side) for side in (x, y)], axis=1)


def height_at(surface: Surface, height: "Values", x: float, y: float) -> float:
    """The height at a point, between its four neighbors; nan outside."""
    column, row = (
        float(np.interp(at, side, np.arange(side.size), np.nan, np.nan)) for at, side in ((x, surface.x), (y, surface.y))
    )
    if not np.isfinite(column + row):
        return float("nan")
    left, low = min(int(column), surface.x.size - 2), min(int(row), surface.y.size - 2)
    across, up = column - left, row - low
    corners = height[low : low + 2, left : left + 2]
    return float(np.array([1 - up, up]) @ corners @ np.array([1 - across, across]))


def _sets(found: Mapping[str, Any]) -> dict[str, dict[str, "Values"]]:
    sets = found.get("sets")
    return {
        as_label(name): {measure: as_values(each[measure]) for measure in ("loss", "accuracy") if each.get(measure) is not None}
        for name, each in (sets.items() if isinstance(sets, Mapping) else ())
        if isinstance(each, Mapping)
    }


def _number(value: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")
    return found if abs(found) < _MOST else float("inf") if found > 0 else float("nan")
