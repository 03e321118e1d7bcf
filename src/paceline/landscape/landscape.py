"""`paceline landscape RECORD`: the loss around a trained model, over a line or a plane in weight space.

Four shapes. `line` and `plane`: along random, filter-normalized directions. `path`: the plane of the two main directions of one
or more runs' snapshots. `between`: the line from one model to another. Rank 0 makes the directions, and all workers evaluate
points. A point's values do not depend on the worker that computed them, so the surface is the same for any number of workers.
"""

import hashlib
import itertools
import json
import math
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.dist.world import World
from paceline.errors import UsageError
from paceline.files import finite, read_json, write_json
from paceline.landscape.directions import Direction, difference, fit_plane, random_direction
from paceline.landscape.points import METRICS, Points
from paceline.landscape.store import Store
from paceline.output import is_terminal, plural, say, stages
from paceline.records import environment, find_record
from paceline.training.after import Request
from paceline.training.fixed import Fixed, fixed
from paceline.training.progress import left_words
from paceline.training.snapshots import list_snapshots, read_snapshot
from paceline.training.trained import WEIGHTS
from paceline.training.weight_files import find_weights, read_on_main, read_weights
from paceline.training.weights import model_sha256

FOLDER = "landscape"
_BLOCK_S = 1.0  # workers share results about this often
_TELL_S = 10.0  # between two lines of progress where there is no terminal
_MARGIN = 0.2  # of a path's extent, on each side


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What to draw."""

    shape: str = "plane"
    """line, plane, path or between."""
    to: str = ""
    """For between: the other record."""
    also: tuple[str, ...] = ()
    """For path: more records whose paths are on the same plane."""
    points: int
    """Per side."""
    reach: float
    """How far a line or a plane goes on each side, in norms of the model's filters; beyond each model for between."""
    samples: int
    """Of each data set; 0: all."""
    seed: int = 0
    statistics: str = "recorded"
    """Of batch norm: those of the record, or those of each batch."""

    @property
    def name(self) -> str:
        """The name of the file."""
        other = re.sub(r"[^A-Za-z0-9._-]", "_", Path(self.to).resolve().name)[:80]
        return {"path": "path", "between": f"between-{other}"}.get(self.shape, f"{self.shape}-{self.seed}")


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """Where to evaluate."""

    directions: list[Direction]
    x: list[float]
    y: list[float]
    """Empty for a line."""
    facts: dict[str, Any]
    """More about it, for the result: the paths, the names of both models."""

    def place(self, number: int) -> tuple[float, ...]:
        """The coordinates of a point."""
        row, column = divmod(number, len(self.x))
        return (self.x[column], self.y[row]) if self.y else (self.x[column],)

    @property
    def count(self) -> int:
        """How many points there are."""
        return len(self.x) * (len(self.y) or 1)


def landscape(request: Request, asked: Asked, here: World) -> dict[str, Any]:
    """Evaluate the surface and write it to the record; what was written, with its file. Collective: call on every rank."""
    begin, record = time.perf_counter(), find_record(request.record, request.runs_dir) if here.is_main else Path()
    folder = record / FOLDER
    with (
        fixed(request, here, samples=asked.samples, seed=asked.seed) as model,
        torch.no_grad(),
        model.batch_statistics(asked.statistics == "batch"),
    ):
        _check_model(model, asked)
        stages.enter("choosing directions")
        sketch = _make_sketch(model, asked, request)
        about = _describe(model, asked, sketch)
        request_id = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
        file, before = here.broadcast(_find_file(folder, asked.name, request_id) if here.is_main else None)
        if before is not None:
            return {**before, "new_points": 0, "file": file}
        points, part = Points(model, sketch.directions), folder / f"{asked.name}-{request_id}.part"
        store = Store(part, about, (len(model.sets), len(METRICS))) if here.is_main else None
        try:
            kept = len(store.values) if store is not None else 0
            _evaluate_all(points, sketch, store, here)
            _evaluate_paths(model, points, sketch, asked, request)
            found = {
                **_assemble(model, asked, sketch, store),
                "new_points": sketch.count - kept,
                "workers": here.size,
                "time_s": round(time.perf_counter() - begin, 3),
                "request": request_id,
                "environment": environment(),
            }
            if store is not None:
                write_json(Path(file), finite(found, as_text=True))
                store.close(done=True)
        finally:
            if store is not None:
                store.close(done=False)
    stages.stop()
    return {**found, "file": file}


def _find_file(folder: Path, name: str, request_id: str) -> tuple[str, dict[str, Any] | None]:
    """The file for a result, and its contents if it holds this very one; with a number if another has the name."""
    for number in itertools.count(1):
        file = folder / (f"{name}.json" if number == 1 else f"{name}-{number}.json")
        if not file.exists():
            return str(file), None
        with suppress(OSError, ValueError):
            found = read_json(file)
            if found.get("request") == request_id:
                return str(file), found
    raise AssertionError


def _check_model(model: Fixed, asked: Asked) -> None:
    """Refuse a model without a finite loss, and norms that need all workers at once."""
    if asked.statistics == "batch" and model.run.parts.statistics.over_workers:
        raise UsageError(
            "a norm layer takes its statistics over all workers, but each point has one: use --statistics recorded"
        )
    record = model.opened.trained.record
    for name in model.sets:
        loss = float(model.means(name)[0])
        if not math.isfinite(loss):
            raise UsageError(
                f"the loss of {record} is {loss} on its {name} data: its run diverged, so there is nothing to draw"
            )


def _make_sketch(model: Fixed, asked: Asked, request: Request) -> Sketch:
    """Where to evaluate, made by rank 0. Collective: call on every rank."""

    def make() -> tuple[dict[str, Tensor], str]:
        sketch = _SKETCHES[asked.shape](model, asked, request)
        named = {f"{i}/{name}": tensor for i, each in enumerate(sketch.directions) for name, tensor in each.items()}
        return named, json.dumps({"count": len(sketch.directions), "x": sketch.x, "y": sketch.y, "facts": sketch.facts})

    named, text = read_on_main(make, model.run.world)
    found = json.loads(text)
    directions: list[Direction] = [{} for _ in range(found.pop("count"))]
    for name, tensor in named.items():
        number, _, own = name.partition("/")
        directions[int(number)][own] = tensor
    return Sketch(directions=directions, **found)


def _sketch_random(model: Fixed, asked: Asked, request: Request) -> Sketch:
    side = _spread(-asked.reach, asked.reach, asked.points)
    flat = asked.shape == "line"
    directions = [random_direction(model.model, asked.seed, number) for number in range(1 if flat else 2)]
    what = "a random direction" if flat else "two random directions"
    return Sketch(
        directions=directions,
        x=side,
        y=[] if flat else side,
        facts={"about": f"along {what}, filter-normalized: at 1, every filter has moved by its own norm (seed {asked.seed})"},
    )


def _sketch_between(model: Fixed, asked: Asked, request: Request) -> Sketch:
    path = find_weights(asked.to, request.runs_dir, WEIGHTS[request.weights])
    other, own = read_weights(path), model.model.state_dict()
    odd = next((name for name in own if name not in other or other[name].shape != own[name].shape), None)
    record = model.opened.trained.record
    if odd is not None or len(other) != len(own):
        odd = odd or next(name for name in other if name not in own)
        raise UsageError(f"{record} and {path.parent} are different models ({odd} does not match): no line joins them")
    if not all(bool(value.isfinite().all()) for value in other.values() if value.is_floating_point()):
        raise UsageError(f"{path} has weights that are not finite: its run diverged")
    direction = difference(model.model, other)
    distance = math.sqrt(sum(float(each.double().square().sum()) for each in direction.values()))
    if not distance:
        raise UsageError(f"{record} and {path.parent} have the same weights: no line joins them")
    ends = [Path(record).resolve().name, path.parent.resolve().name]
    return Sketch(
        directions=[direction],
        x=_spread(-asked.reach, 1 + asked.reach, asked.points),
        y=[],
        facts={
            "about": f"on the straight line from {ends[0]} (at 0) to {ends[1]} (at 1), {distance:.3g} apart",
            "ends": ends,
            "distance": distance,
        },
    )


def _sketch_path(model: Fixed, asked: Asked, request: Request) -> Sketch:
    records = [Path(model.opened.trained.record), *(find_record(each, request.runs_dir) for each in asked.also)]
    twice = next((each for i, each in enumerate(records) if each.resolve() in {other.resolve() for other in records[:i]}), None)
    if twice is not None:
        raise UsageError(f"{twice} is given twice: --also adds other runs to the plane")
    paths, steps = [], []
    shapes = {name: weight.shape for name, weight in model.model.named_parameters()}
    for record in records:
        snapshots = list_snapshots(record)
        if len(snapshots) < 2:
            raise UsageError(f"{record} has no snapshots of its training: train with --snapshots 20, then draw its path")
        points = [read_snapshot(path) for _, path in snapshots]
        odd = next(
            (name for point in points for name in shapes if name not in point or point[name].shape != shapes[name]), None
        )
        if odd is not None:
            raise UsageError(f"the snapshots in {record} are of a different model ({odd} does not match)")
        paths.append(points)
        steps.append([step for step, _ in snapshots])
    plane = fit_plane(model.model, paths)
    x, y = (_cover([place[axis] for places in plane.places for place in places], asked.points) for axis in (0, 1))
    named = [
        {
            "name": record.resolve().name,
            "step": at,
            **{axis: [place[i] for place in places] for i, axis in enumerate(("x", "y", "off"))},
        }
        for record, at, places in zip(records, steps, plane.places, strict=True)
    ]
    shares = f"{plane.explained[0]:.0%} and {plane.explained[1]:.0%}"
    return Sketch(
        directions=list(plane.directions),
        x=x,
        y=y,
        facts={
            "about": f"on the plane of the snapshots' two main directions, which explain {shares} of their variance",
            "explained": list(plane.explained),
            "paths": named,
        },
    )


_SKETCHES = {"line": _sketch_random, "plane": _sketch_random, "path": _sketch_path, "between": _sketch_between}


def _spread(low: float, high: float, count: int) -> list[float]:
    """Evenly spaced numbers. With an odd count, the middle is exact: there the model itself is evaluated."""
    step = (high - low) / (count - 1)
    return [round(low + step * i, 12) for i in range(count)]


def _cover(values: Sequence[float], count: int) -> list[float]:
    low, high = min([0.0, *values]), max([0.0, *values])
    margin = _MARGIN * (high - low) or 1.0
    return _spread(low - margin, high + margin, count)


def _describe(model: Fixed, asked: Asked, sketch: Sketch) -> dict[str, Any]:
    """What a point's values depend on: only points with the same description continue a surface."""
    run, digest = model.run, hashlib.sha256()
    for direction in sketch.directions:
        for tensor in direction.values():
            digest.update(tensor.contiguous().numpy().tobytes())
    return {
        "model": model_sha256(model.model),
        "directions": digest.hexdigest(),
        "x": sketch.x,
        "y": sketch.y,
        "sets": {name: each.samples for name, each in model.sets.items()},
        "data": run.data_sha256,
        "seed": asked.seed,
        "precision": run.config.precision,
        "statistics": asked.statistics,
        "device": run.world.device.type,
        "torch": torch.__version__,
    }


def _evaluate_all(points: Points, sketch: Sketch, store: Store | None, here: World) -> None:
    """Evaluate the points that are not stored yet, in blocks dealt to the workers. Collective: call on every rank."""
    done = here.broadcast(sorted(store.values) if store is not None else [])
    left = sorted(set(range(sketch.count)) - set(done))
    progress = _Progress(sketch.count, len(done))
    size = 1  # points per worker in a block
    while left:
        block, left = left[: size * here.size], left[size * here.size :]
        begin, mine = time.monotonic(), block[here.rank :: here.size]
        values = points.evaluate([sketch.place(number) for number in mine]).tolist() if mine else []
        rows = here.gather([mine, values])
        if store is not None:
            for numbers, found in rows:
                store.add(numbers, found)
            progress.show(len(block))
            size = max(1, min(4 * size, round(size * _BLOCK_S / max(time.monotonic() - begin, 1e-3))))
        size = here.broadcast(size)


class _Progress:
    """How far the points are: after each block on a terminal; on a pipe only from time to time."""

    def __init__(self, total: int, done: int) -> None:
        self._total, self._done, self._new = total, done, 0
        self._begin = self._told = time.monotonic()
        stages.enter(f"{done:,} of {total:,} points" if is_terminal(sys.stdout) else "")

    def show(self, points: int) -> None:
        """Count points that are done, and show the progress."""
        self._new += points
        done, now = self._done + self._new, time.monotonic()
        left_s = (self._total - done) * (now - self._begin) / self._new
        text = f"{done:,} of {self._total:,} points, about {left_words(left_s)} left"
        if is_terminal(sys.stdout):
            stages.enter(text)
        elif stages.on and now - self._told > _TELL_S and done < self._total:
            say(text)
            self._told = now


def _evaluate_paths(model: Fixed, points: Points, sketch: Sketch, asked: Asked, request: Request) -> None:
    """Add the loss of every snapshot itself, which is off the plane, on the first data set."""
    if asked.shape != "path" or not model.run.world.is_main:
        return
    records = [Path(model.opened.trained.record), *(find_record(each, request.runs_dir) for each in asked.also)]
    for path, record in zip(sketch.facts["paths"], records, strict=True):
        stages.enter(f"evaluating the snapshots of {path['name']}")
        losses = [float(points.evaluate_weights(read_snapshot(file))[0, 0]) for _, file in list_snapshots(record)]
        path["loss"] = [float(f"{loss:.6g}") for loss in losses]


def _assemble(model: Fixed, asked: Asked, sketch: Sketch, store: Store | None) -> dict[str, Any]:
    """The result, from all points."""
    values = store.values if store is not None else {}
    width, sets = len(sketch.x), {}
    for number, name in enumerate(model.sets):
        measured = [metric for metric in METRICS if metric in model.names[name]]
        rows: dict[str, Any] = {}
        for metric in measured if values else ():
            flat = [float(f"{values[i][number][METRICS.index(metric)]:.6g}") for i in range(sketch.count)]
            rows[metric] = [flat[i : i + width] for i in range(0, len(flat), width)] if sketch.y else flat
        sets[name] = rows
    return {
        "kind": asked.shape,
        **sketch.facts,
        "x": sketch.x,
        **({"y": sketch.y} if sketch.y else {}),
        "sets": sets,
        "samples": {name: each.samples for name, each in model.sets.items()},
        "seed": asked.seed,
        "precision": model.run.config.precision,
        "statistics": asked.statistics,
        "weights": model.opened.weights,
    }


def describe(found: Mapping[str, Any]) -> str:
    """The result in a few lines."""
    lines = [found["about"]]
    for name, rows in found["sets"].items():
        flat = [value for row in rows["loss"] for value in (row if isinstance(row, list) else [row])]
        finite_ones = sorted(value for value in flat if math.isfinite(value))
        middle = finite_ones[len(finite_ones) // 2] if finite_ones else math.nan
        ends = f"{finite_ones[0]:.4g} to {finite_ones[-1]:.4g}" if finite_ones else "not finite anywhere"
        odd = f", {len(flat) - len(finite_ones):,} not finite" if len(flat) > len(finite_ones) else ""
        lines.append(f"{name} loss ({plural(found['samples'][name], 'sample')}): {ends}, median {middle:.4g}{odd}")
    lines += [_describe_path(path) for path in found.get("paths", ())]
    count = len(found["x"]) * len(found.get("y", [0]))
    again = f" ({count - found['new_points']:,} were done before)" if found["new_points"] < count else ""
    lines.append(f"{count:,} points in {found['time_s']:.1f} s{again}: {found['file']}")
    return "\n".join(lines)


def _describe_path(path: Mapping[str, Any]) -> str:
    steps = path["step"]
    return f"path of {path['name']}: steps {steps[0]:,} to {steps[-1]:,}, loss {path['loss'][0]:.4g} to {path['loss'][-1]:.4g}"
