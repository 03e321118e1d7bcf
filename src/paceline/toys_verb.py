"""`paceline toys`: compute the toys of `toys.py`, write them to toys.json for `paceline report`, and print the results.

The same flags give the same numbers, so a record of toys is replaced. numpy is imported only when the verb runs.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import RecordError, UsageError, reason
from paceline.files import finite, write_file
from paceline.output import is_terminal, make_table, stages
from paceline.records import environment
from paceline.values import check_name

FILE = "toys.json"
_RATES, _NOISE = "0.02,0.05,0.1,0.2,0.3", "1,2,4"
_REPORT = "report.html"
_MOST = {"seeds": 100_000, "steps": 1_000_000, "seed": 2**63 - 1}
_MOST_VALUES = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add which toys, and what to vary."""
    parser.add_argument("--toy", choices=("line", "minima", "all"), default="all", help="which problem [all]")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of data, orders and noise [0]")
    parser.add_argument("--seeds", type=int, default=1_000, metavar="N", help="walks per setting [1000]")
    parser.add_argument("--steps", type=int, default=2_000, metavar="N", help="steps of each walk on the two minima [2000]")
    parser.add_argument("--lr", type=float, default=0.1, metavar="X", help="learning rate for the line [0.1]")
    parser.add_argument("--rates", default=_RATES, metavar="X,...", help=f"learning rates for the two minima [{_RATES}]")
    parser.add_argument("--noise", default=_NOISE, metavar="X,...", help=f"standard deviations of the noise there [{_NOISE}]")
    parser.add_argument("--momentum", type=float, default=0.9, metavar="X", help="momentum there [0.9]")
    parser.add_argument("--name", default="toys", help="name of the record [toys]")
    parser.add_argument("--runs-dir", default="runs", metavar="DIR", help="folder of the record [runs]")


def run(options: dict[str, Any]) -> int:
    """Compute the toys, write the record and print the results."""
    rates, noises = _check(options)
    folder = _make_folder(Path(options["runs_dir"]), options["name"])
    from paceline.toys import line_toy, minima_toy, threshold_toy

    which, momentum = options["toy"], options["momentum"]
    runs = {name: options[name] for name in ("steps", "seeds", "seed")}
    stages.start(is_terminal(sys.stdout))
    toys = [line_toy(options["lr"], options["seed"], options["seeds"])] if which != "minima" else []
    toys += [minima_toy(rates, noises, momentum, **runs), threshold_toy()] if which != "line" else []
    stages.stop()
    record = {"kind": "toys", **runs, "lr": options["lr"], "momentum": momentum, "toys": toys, "environment": environment()}
    with _explained(folder):
        write_file(folder / FILE, json.dumps(finite(record), allow_nan=False) + "\n")
    print("\n\n".join(map(describe, toys)))
    print(f"\nnumbers in {folder / FILE}; to see them move: paceline report {folder}")
    return 0


def describe(toy: Mapping[str, Any]) -> str:
    """A toy as text: its stationary points and its table."""
    facts = [f"{toy['title']} ({toy['about']})"]
    if toy["toy"] != "threshold":
        heads = ["point", *toy["axes"], "loss", "lambda max", "lambda min", "2 / lambda max"]
        facts.append(make_table(heads, [_point(point) for point in toy["points"]]))
    return "\n\n".join([*facts, {"line": _line, "minima": _minima, "threshold": _threshold}[toy["toy"]](toy["rows"])])


def _point(point: Mapping[str, Any]) -> list[str]:
    high, low = point["eigenvalues"]
    numbers = [f"{value:.4g}" for value in (point["x"], point["y"], point["value"], high, low)]
    return [point["name"], *numbers, f"{2 / high:.4g}" if low > 0 else "-"]


def _line(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = ("batch", "steps", "distance from the minimum", "sd", "loss above the minimum")
    names = ("steps", "distance", "sd", "excess")
    return make_table(heads, [[f"{row['batch']}", *(f"{row[name]:.4g}" for name in names)] for row in rows])


def _threshold(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [[f"{r['factor']:g}", f"{r['lr']:.4g}", r["end"], f"{r['x_low']:.4f} to {r['x_high']:.4f}"] for r in rows]
    return make_table(("lr / limit", "lr", "descent without noise", "x in the last 64 steps"), cells)


def _minima(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per noise and learning rate, with the fractions of the three ways next to each other."""
    names = list(dict.fromkeys(row["optimizer"] for row in rows))
    lines: dict[tuple[float, float], list[Mapping[str, Any]]] = {}
    for row in rows:
        lines.setdefault((row["noise"], row["row_lr"]), []).append(row)
    cells = [[f"{noise:g}", f"{lr:g}", *map(_fraction, found)] for (noise, lr), found in lines.items()]
    said = f"walks of {rows[0]['seeds']:,} that end in the flat minimum, 95% interval (mu = {rows[-1]['momentum']:g})"
    shares = [row["long_run"] for row in rows]
    long_run = f"in the limit of small steps and a very long time: {min(shares):.3f} to {max(shares):.3f}"
    lost = sum(row["diverged"] for row in rows)
    ended = [f"{lost:,} walks diverged, and count as not in the flat minimum"] if lost else []
    return "\n".join([said, make_table(("noise", "lr", *names), cells), long_run, *ended])


def _fraction(row: Mapping[str, Any]) -> str:
    return f"{row['flat']:.3f} ({row['low']:.3f} to {row['high']:.3f})"


def _check(options: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Refuse values that make no sense. Returns the learning rates and the noises."""
    for name, most in _MOST.items():
        least = 0 if name == "seed" else 1
        if not least <= options[name] <= most:
            raise UsageError(f"--{name} is {options[name]}: it must be between {least} and {most:,}")
    if not (0 < options["lr"] <= 100):
        raise UsageError(f"--lr is {options['lr']:g}: it must be above 0, and at most 100")
    if not (0 <= options["momentum"] < 1):
        raise UsageError(f"--momentum is {options['momentum']:g}: it must be at least 0 and below 1")
    return _numbers("--rates", options["rates"], _RATES), _numbers("--noise", options["noise"], _NOISE)


def _numbers(what: str, text: str, usual: str) -> list[float]:
    try:
        found = sorted({float(each) for each in text.split(",")})
    except ValueError:
        found = []
    if not found or not all(math.isfinite(value) and 0 < value <= 100 for value in found) or len(found) > _MOST_VALUES:
        raise UsageError(
            f"{what} is {text[:60]!r}: it must be up to {_MOST_VALUES} numbers above 0, and at most 100, such as {usual}"
        )
    return found


def _make_folder(runs_dir: Path, name: str) -> Path:
    """The folder to write: a new or empty one, or one that holds toys already. Checked before the work."""
    check_name("--name", name, "; --runs-dir sets the folder")
    folder = runs_dir / name
    with _explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        held = {path.name for path in folder.iterdir()}
    if held - {FILE, _REPORT}:
        raise UsageError(f"{folder} holds something other than toys: choose another --name")
    return folder


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecordError(f"cannot write {folder}: {reason(error)}; choose another --name or --runs-dir") from error
