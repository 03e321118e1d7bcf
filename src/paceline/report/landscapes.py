"""A record's loss surfaces (`landscape/NAME.json`) and its `sharpness.json` as the page shows them, with every number checked.

A loss that is not finite becomes None: a gap in the chart. Surfaces with many points are thinned to what a screen can show.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from paceline.output import plural
from paceline.report.confined import AnyPath
from paceline.report.series import number, short, text
from paceline.report.sources import LANDSCAPES, SHARPNESS, read_file

MOST_FILES = 12
MOST_SIDE = 201
"""Points along one side of a surface that are shown."""

_MOST_POINTS = 1_001  # along a line, of a path, or of a density
_MOST_READ = 4_001  # points along one side in a file
_MOST_SETS, _MOST_PATHS, _MOST_ROWS = 8, 24, 24
_LARGEST = 1e100
_SURFACES = ("plane", "path")
_KINDS = ("line", "between", *_SURFACES)
_FACTS = ("precision", "statistics", "weights")
_OF_A_STEP = ("step", "x", "y", "loss", "off")


def view_landscapes(record: AnyPath, problems: list[str]) -> list[dict[str, Any]]:
    """The surfaces in a record's folder, by name. A file that cannot be shown is a problem."""
    folder = record / LANDSCAPES
    if not folder.is_dir():
        return []
    paths = sorted((path for path in folder.glob("*.json") if not path.name.startswith(".")), key=lambda path: path.name)
    if len(paths) > MOST_FILES:
        problems.append(f"{LANDSCAPES} has {len(paths)} files: only the first {MOST_FILES} by name are shown")
    found = []
    for path in (path for path in paths[:MOST_FILES] if path.is_file()):
        said = len(problems)
        raw = read_file(path, problems)
        if raw is not None:
            found.append(view_landscape(text(path.stem, 80), raw, problems))
        problems[said:] = [f"{LANDSCAPES}/{text(problem, 300)}" for problem in problems[said:]]
    return [view for view in found if view]


def view_landscape(name: str, found: Mapping[str, Any], problems: list[str]) -> dict[str, Any] | None:
    """One surface; None, with a problem, if its sizes do not match."""
    kind = found.get("kind")
    if kind not in _KINDS:
        problems.append(f"{name}.json has no kind that a page can show: {text(kind, 40) or 'none'}")
        return None
    x, y = _axis(found.get("x")), _axis(found.get("y")) if kind in _SURFACES else []
    if not x or (kind in _SURFACES and not y):
        problems.append(f"{name}.json: x or y is not a list of 1 to {_MOST_READ} increasing numbers")
        return None
    across, down = _kept(len(x), MOST_SIDE if y else _MOST_POINTS), _kept(len(y), MOST_SIDE)
    sets = [view for each in _items(found.get("sets"), _MOST_SETS) if (view := _set(*each, len(x), len(y)))]
    sets = [thin for each in sets if _has_numbers((thin := _thinned(each, across, down))["loss"])]
    if not sets:
        problems.append(f"{name}.json: no set has one loss for each point, and one that is finite")
        return None
    return {
        "name": name,
        "kind": kind,
        "about": text(found.get("about")),
        "x": [_rounded(x[index]) for index in across],
        "y": [_rounded(y[index]) for index in down],
        "sets": sets,
        "paths": [view for each in _list(found.get("paths"), _MOST_PATHS) if (view := _path(each))] if kind == "path" else [],
        "explained": [share for each in _list(found.get("explained"), 2) if (share := _number(each)) is not None],
        "ends": [text(end, 200) for end in _list(found.get("ends"), 2)] if kind == "between" else [],
        "facts": _facts(found),
        "thinned": len(across) < len(x) or len(down) < len(y),
    }


def view_sharpness(found: Mapping[str, Any], problems: list[str]) -> dict[str, Any] | None:
    """A sharpness.json; None, with a problem, if it has no number to show. Every part of it may be missing."""
    hessian = _object(found.get("hessian"))
    density = _object(hessian.get("density"))
    points = [
        (x, y)
        for each in zip(_list(density.get("x"), _MOST_READ), _list(density.get("y"), _MOST_READ), strict=False)
        if (x := _number(each[0])) is not None and (y := _number(each[1])) is not None and y >= 0
    ]
    points = [points[index] for index in _kept(len(points), _MOST_POINTS)]
    boxes = [_object(row) for row in _list(found.get("keskar"), _MOST_ROWS)]
    view: dict[str, Any] = {
        **_numbers(found, ("samples", "loss")),
        "keskar": [
            {"space": text(row.get("space"), 40), **_numbers(row, ("epsilon", "sharpness"))}
            for row in boxes
            if _number(row.get("sharpness")) is not None
        ],
        "sam": _numbers(found.get("sam"), ("rho", "rise")),
        "adaptive": _numbers(found.get("adaptive"), ("rho", "rise")),
        "top": [_rounded(each) for each in map(_number, _list(hessian.get("top"), _MOST_ROWS)) if each is not None],
        **_numbers(hessian, ("trace", "trace_error", "vectors")),
        "density": {
            "x": [_rounded(x) for x, _ in points],
            "y": [_rounded(y) for _, y in points],
            **_numbers(density, ("vectors",)),
        },
    }
    if not any(value for name, value in view.items() if name not in ("samples", "loss", "density")) and not points:
        problems.append(f"{SHARPNESS} has no measurement that a page can show")
        return None
    return view


def _set(name: Any, found: Any, across: int, down: int) -> dict[str, Any] | None:
    """A set's losses and accuracies; None unless there is one loss for each point."""
    found = _object(found)
    loss, accuracy = (_values(found.get(measure), across, down) for measure in ("loss", "accuracy"))
    return {"name": text(name, 60), "loss": loss, "accuracy": accuracy} if loss else None


def _values(value: Any, across: int, down: int) -> list[Any] | None:
    """A row of values, or rows of them for a surface; None if the sizes do not fit."""
    rows = value if down else [value]
    if not isinstance(rows, list) or len(rows) != (down or 1):
        return None
    if any(not isinstance(row, list) or len(row) != across for row in rows):
        return None
    numbers = [[_number(each) for each in row] for row in rows]
    return numbers if down else numbers[0]


def _has_numbers(values: list[Any]) -> bool:
    return any(each is not None for row in values for each in (row if isinstance(row, list) else [row]))


def _thinned(found: Mapping[str, Any], across: list[int], down: list[int]) -> dict[str, Any]:
    thin: dict[str, Any] = {"name": found["name"]}
    for measure in ("loss", "accuracy"):
        values = found[measure]
        if values is None:
            thin[measure] = None
        elif down:
            thin[measure] = [[_rounded(values[row][index]) for index in across] for row in down]
        else:
            thin[measure] = [_rounded(values[index]) for index in across]
    return thin


def _path(found: Any) -> dict[str, Any] | None:
    """The steps of one run on the plane that have a place; None without any."""
    found = _object(found)
    columns = {name: _list(found.get(name), _MOST_READ) for name in _OF_A_STEP}
    rows = [
        {name: _number(column[index]) if index < len(column) else None for name, column in columns.items()}
        for index in range(min(len(columns["x"]), len(columns["y"])))
    ]
    rows = [row for row in rows if row["x"] is not None and row["y"] is not None]
    kept = [rows[index] for index in _kept(len(rows), _MOST_POINTS)]
    shown = {name: [_rounded(row[name]) for row in kept] for name in _OF_A_STEP}
    steps = [None if row["step"] is None else int(row["step"]) for row in kept]
    return {"name": text(found.get("name"), 200), **shown, "step": steps} if kept else None


def _facts(found: Mapping[str, Any]) -> list[str]:
    """How a surface was measured, in a few words each."""
    counts = {text(name, 60): _number(count) for name, count in _items(found.get("samples"), _MOST_SETS)}
    known = {name: int(count) for name, count in counts.items() if count is not None}
    alike = len(set(known.values())) == 1 and len(known) > 1
    samples = (
        [f"{plural(next(iter(known.values())), 'sample')} of each set"]
        if alike
        else [f"{plural(count, f'{name} sample')}" for name, count in known.items()]
    )
    words = [f"{name}: {said}" for name in _FACTS if (said := text(found.get(name), 60))]
    seed, took, workers = (_number(found.get(name)) for name in ("seed", "time_s", "workers"))
    words += [] if seed is None else [f"seed {seed:.0f}"]
    on = f" on {plural(int(workers), 'worker')}" if workers and workers >= 1 else ""
    return samples + words + ([] if took is None else [f"measured in {took:.3g} s{on}"])


def _number(value: Any) -> float | None:
    """The value if it is a number that a chart can show: axes of larger ones would overflow."""
    found = number(value)
    return found if found is not None and abs(found) < _LARGEST else None


def _axis(value: Any) -> list[float]:
    """The places along one side; empty if they are not increasing numbers, or too many."""
    listed = value if isinstance(value, list) and len(value) <= _MOST_READ else []
    found = [place for each in listed if (place := _number(each)) is not None]
    increasing = all(before < after for before, after in pairwise(found))
    return found if len(found) == len(listed) and increasing else []


def _kept(count: int, most: int) -> list[int]:
    """Evenly spaced indices, at most `most`; both ends and, if there is one, the middle are among them."""
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]


def _numbers(found: Any, names: Iterable[str]) -> dict[str, float | int | None]:
    """The fields that are numbers."""
    values = {name: _number(_object(found).get(name)) for name in names}
    return {name: short(value) for name, value in values.items() if value is not None}


def _rounded(value: float | None) -> float | int | None:
    """A number with the five digits that a chart can show."""
    return None if value is None else short(float(f"{value:.5g}"))


def _items(value: Any, most: int) -> list[tuple[Any, Any]]:
    return list(value.items())[:most] if isinstance(value, dict) else []


def _list(value: Any, most: int) -> list[Any]:
    return value[:most] if isinstance(value, list) else []


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
