"""The arguments of `paceline landscape RECORD`. Nothing here imports torch."""

import argparse
import json
import math
from pathlib import Path
from typing import Any

from paceline.errors import Stopped, UsageError, unknown
from paceline.evaluate import add_weights_and_workers, is_main, start_stages, to_flags
from paceline.files import finite
from paceline.output import say, stages
from paceline.records import find_record

SHAPES = ("plane", "line", "path")
SETS = ("train", "validation")
PRECISIONS = ("fp32", "bf16", "fp16")
_LINE, _PLANE = 51, 25  # points per side
_MOST_POINTS, _MOST_LINE = 250_000, 4001
_MOST_REACH = 1e6
_MOST_WORKERS = 8  # started by themselves: a surface takes seconds, and each worker needs some to start


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the record, what to draw, and how."""
    add = parser.add_argument
    add("record", metavar="RECORD", help="a record of paceline train, by its folder or name")
    add(
        "--shape",
        choices=SHAPES,
        help="plane: two random directions; line: one; path: the plane in which the run moved most, with its path (train with"
        " --snapshots N) [plane]",
    )
    add("--to", default="", metavar="RECORD", help="the line from this model to that of another record")
    add("--also", default="", metavar="RECORD,...", help="with --shape path: more runs, with their paths on the same plane")
    add("--points", type=int, metavar="N", help=f"points per side [{_PLANE}; {_LINE} for a line]")
    add(
        "--reach",
        type=float,
        metavar="X",
        help="how far random directions go: at 1, each filter moves by its own norm; with --to, how far beyond the two models"
        " [1; with --to 0.5]",
    )
    add("--samples", type=int, default=1000, metavar="N", help="samples of each data set, chosen by the seed; 0: all [1000]")
    add("--sets", default="", metavar="SET,...", help="train, validation or both [both for lines, else train]")
    add("--seed", type=int, default=0, metavar="N", help="chooses directions and samples [0]")
    add(
        "--statistics",
        choices=("recorded", "batch"),
        help="batch-norm statistics: those of the record, or those of each batch of samples [recorded; for a path batch]",
    )
    add("--precision", default="", choices=PRECISIONS, help="precision of the forward pass [that of the run]")
    add("--picture", default="", metavar="FILE", help="also draw it: .png or .svg (pip install 'paceline[pictures]')")
    add("--view", default="contour", choices=("contour", "3d"), help="how --picture shows a plane [contour]")
    add("--json", action="store_true", help="print the result as JSON")
    add_weights_and_workers(parser, "workers to start on this node [one per GPU, or per core without GPUs, at most 8]")


def run(options: dict[str, Any]) -> int:
    """Evaluate, save, and say what came out."""
    flags = to_flags({**options, "workers": None})  # as given: each worker fills in the same defaults
    asked = _check(options)
    as_json, picture, view = options.pop("json"), options.pop("picture"), options.pop("view")
    find_record(options["record"], options["runs_dir"])  # report a mistake before torch is loaded
    if picture and Path(picture).suffix not in (".png", ".svg"):
        raise UsageError(f"--picture {picture}: use a name that ends in .png or .svg")
    if not as_json:
        start_stages()
    try:
        from paceline.landscape.landscape import Asked, describe, landscape
        from paceline.training.after import Request, in_world

        options["workers"] = options["workers"] or _count_workers(options["backend"])
        sets = tuple(options["sets"].split(","))
        request = Request(**{**{name: options[name] for name in _REQUEST}, "sets": sets})
        wish = Asked(**asked)
        found = in_world(request, ["landscape", *flags], lambda here: landscape(request, wish, here))
        if found is not None and is_main():
            said = json.dumps(finite(found), indent=2) if as_json else describe(found)
            if picture:
                from paceline.landscape.picture import draw

                draw(found, Path(picture), view=view)
                said += "" if as_json else f"\npicture in {picture}"
            say(said if as_json else f"{said}\npaceline report {options['record']} draws it")
    except (KeyboardInterrupt, Stopped) as stop:
        why = "Ctrl-C" if isinstance(stop, KeyboardInterrupt) or stop.exit_code == 130 else "a signal"
        raise Stopped(f"stopped by {why}; points that are done are kept: the same command continues", why) from None
    finally:
        stages.stop()
    return 0


_REQUEST = ("record", "weights", "task", "workers", "backend", "runs_dir", "precision")


def _check(options: dict[str, Any]) -> dict[str, Any]:
    """Fill in the defaults that depend on the shape; returns the fields of `Asked`."""
    if options["to"] and options["shape"]:
        raise UsageError(f"--to and --shape {options['shape']} are both given: --to draws the line between two models")
    shape = "between" if options["to"] else options["shape"] or "plane"
    flat = shape in ("line", "between")
    if options["also"] and shape != "path":
        raise UsageError("--also adds runs to --shape path: give both, or leave --also out")
    if options["reach"] is not None and shape == "path":
        raise UsageError("--reach does not apply to --shape path, which covers the whole path: leave it out")
    for name, usual in (("points", _LINE if flat else _PLANE), ("reach", 0.5 if options["to"] else 1.0)):
        options[name] = usual if options[name] is None else options[name]
    _check_numbers(options, flat)
    options["statistics"] = options["statistics"] or ("batch" if shape == "path" else "recorded")
    options["sets"] = ",".join(dict.fromkeys((options["sets"] or ("train,validation" if flat else "train")).split(",")))
    return {
        **{name: options[name] for name in ("to", "points", "samples", "seed", "statistics", "reach")},
        "shape": shape,
        "also": tuple(name for name in options["also"].split(",") if name),
    }


def _check_numbers(options: dict[str, Any], flat: bool) -> None:
    points, reach = options["points"], options["reach"]
    most = _MOST_LINE if flat else math.isqrt(_MOST_POINTS)
    if not 3 <= points <= most:
        raise UsageError(f"--points is {points:,}: use 3 to {most:,} points{'' if flat else ' per side'}")
    if not (math.isfinite(reach) and (reach > 0 or (reach == 0 and options["to"])) and reach <= _MOST_REACH):
        raise UsageError(f"--reach is {reach:g}: it must be a number above 0, up to {_MOST_REACH:g}")
    for name in ("samples", "seed"):
        if options[name] < 0:
            raise UsageError(f"--{name} is {options[name]}: it must be at least 0")
    for name in options["sets"].split(",") if options["sets"] else ():
        if name not in SETS:
            raise unknown("value for --sets", name, SETS)
    if options["workers"] is not None and options["workers"] < 1:
        raise UsageError(f"--workers is {options['workers']}: it must be at least 1")
    if options["view"] != "contour" and (flat or not options["picture"]):
        raise UsageError("--view 3d says how --picture shows a plane or a path: give --picture, and no line")


def _count_workers(backend: str) -> int | None:
    """How many workers to start here by default; None if they exist."""
    from paceline.dist.place import core_count, read_place
    from paceline.dist.world import count_gpus

    if read_place().launcher != "alone":
        return None
    return min(_MOST_WORKERS, count_gpus(backend) or core_count())
