"""A toys.json as the page shows it: surfaces, paths and tables of `paceline toys`, with every number and size checked."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from paceline.output import plural
from paceline.report.series import number, short, text

ROWS: Mapping[str, tuple[str, ...]] = {
    "line": ("batch", "steps", "distance", "sd", "excess"),
    "minima": ("noise", "row_lr", "lr", "momentum", "effective_lr", "seeds", "flat", "low", "high", "diverged", "long_run"),
    "threshold": ("factor", "lr", "x_low", "x_high"),
}
"""The numbers in the rows of each toy's table."""
_MOST_SIDE, _MOST_POINTS, _MOST_PATHS, _MOST_ROWS, _MOST_TOYS = 400, 2_000, 8, 500, 8


def view_toys(found: Mapping[str, Any], problems: list[str]) -> list[dict[str, Any]]:
    """The toys that can be shown. What cannot be read is left out and listed as a problem."""
    listed = _list(found.get("toys"))
    toys = [toy for each in listed[:_MOST_TOYS] if (toy := _toy(each, problems))]
    if not toys:
        problems.append("toys.json has no toys that can be shown: paceline toys writes it again")
    elif len(toys) < len(listed):
        problems.append(f"toys.json: {len(listed) - len(toys)} of {len(listed):,} toys cannot be shown")
    return toys


def _toy(found: Any, problems: list[str]) -> dict[str, Any] | None:
    if not isinstance(found, dict) or not isinstance(found.get("toy"), str) or found["toy"] not in ROWS:
        return None
    surface = _surface(found)
    if surface is None:
        problems.append(f"toys.json: the surface of {found['toy']} has sizes that do not match, or values that are not numbers")
        return None
    listed = _list(found.get("paths"))
    paths = [path for each in listed[:_MOST_PATHS] if (path := _path(each))]
    if len(paths) < len(listed):
        said = f"{len(listed) - len(paths)} of {plural(len(listed), 'path')}"
        problems.append(f"toys.json: {said} of {found['toy']} cannot be shown")
    axes = [text(name, 40) for name in _list(found.get("axes"))[:2]]
    return {
        "toy": found["toy"],
        **{name: text(found.get(name), 300) for name in ("title", "about", "clock")},
        "axes": axes if len(axes) == 2 else ["x", "y"],
        "log": found.get("log") is True,
        "most": number(found.get("most")),
        **surface,
        "points": [point for each in _list(found.get("points"))[:_MOST_PATHS] if (point := _point(each))],
        "paths": paths,
        "rows": _rows(found["toy"], _list(found.get("rows"))[:_MOST_ROWS]),
    }


def _surface(found: Mapping[str, Any]) -> dict[str, Any] | None:
    x, y, rows = (_list(found.get(name)) for name in ("x", "y", "z"))
    if not (2 <= len(x) <= _MOST_SIDE and 2 <= len(y) <= _MOST_SIDE and len(rows) == len(y)):
        return None
    if not all(isinstance(row, list) and len(row) == len(x) for row in rows):
        return None
    across, up = _numbers(x), _numbers(y)
    if across is None or up is None or not (_grows(across) and _grows(up)):
        return None
    return {"x": across, "y": up, "z": [[_short(value) for value in row] for row in rows]}


def _path(found: Any) -> dict[str, Any] | None:
    """A path whose times grow from 0 and whose columns are equally long; None otherwise."""
    if not isinstance(found, dict):
        return None
    columns = {name: _numbers(_list(found.get(name))) for name in ("t", "x", "y", "z")}
    t = columns["t"]
    if not t or any(column is None or len(column) != len(t) for column in columns.values()):
        return None
    if len(t) > _MOST_POINTS or t[0] != 0 or not _grows(t):
        return None
    return {"name": text(found.get("name"), 80), **columns}


def _point(found: Any) -> dict[str, Any] | None:
    if not isinstance(found, dict):
        return None
    numbers = {name: _short(found.get(name)) for name in ("x", "y", "value")}
    curvature = _numbers(_list(found.get("eigenvalues")))
    if None in numbers.values() or curvature is None or len(curvature) != 2:
        return None
    return {"name": text(found.get("name"), 80), **numbers, "eigenvalues": curvature}


def _rows(toy: str, rows: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows with all of their numbers, and the words that two of the tables have."""
    kept = []
    for row in rows:
        numbers = {name: _short(row.get(name)) for name in ROWS[toy]} if isinstance(row, dict) else {"": None}
        if None not in numbers.values():
            kept.append({**numbers, **{name: text(row[name], 80) for name in ("optimizer", "end") if name in row}})
    return kept


def _numbers(values: Sequence[Any]) -> list[float | int] | None:
    """All values as numbers; None if one is not."""
    found = [_short(value) for value in values]
    return None if None in found else [value for value in found if value is not None]


def _grows(values: Sequence[float]) -> bool:
    return all(a < b for a, b in pairwise(values))


def _short(value: Any) -> float | int | None:
    found = number(value)
    return None if found is None else short(found)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
