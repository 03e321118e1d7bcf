"""`paceline evaluate RECORD`: the metrics of a trained model, the same numbers on any number of workers.

Nothing at the top of this file imports torch.
"""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from paceline.config import Config
from paceline.errors import UsageError
from paceline.files import finite
from paceline.output import is_terminal, make_table, say, stages
from paceline.records import find_record

if TYPE_CHECKING:
    from paceline.training.after import Request

WEIGHTS = ("last", "best")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the record, its weights, the data and the workers."""
    add_request(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_request(parser: argparse.ArgumentParser) -> None:
    """Add what `evaluate` and `predict` share."""
    parser.add_argument("record", metavar="RECORD", help="a record of paceline train, by its folder or name")
    parser.add_argument(
        "--data",
        default="",
        metavar="DATA",
        help="train, the name of a validation set, or a function that returns data: FILE.py:FUNCTION or MODULE:FUNCTION [the"
        " validation data]",
    )
    add_weights_and_workers(parser)


def add_weights_and_workers(parser: argparse.ArgumentParser, workers: str = "workers to start on this node [1]") -> None:
    """Add what all verbs share that look at a trained model."""
    parser.add_argument("--weights", default="last", choices=WEIGHTS, help="weights of the last or of the best epoch [last]")
    parser.add_argument("--task", default="", metavar="TASK", help="the task, if it is no longer where the record says")
    parser.add_argument("--workers", type=int, metavar="N", help=workers)
    backends = ("auto", "nccl", "gloo", "mpi")
    parser.add_argument("--backend", default="auto", choices=backends, help="how workers communicate [auto]")
    parser.add_argument("--runs-dir", default=Config.runs_dir, metavar="DIR", help="folder of the records [runs]")


def run(options: dict[str, Any]) -> int:
    """Evaluate, and print the metrics."""
    as_json, flags = options.pop("json"), to_flags(options)
    find_record(options["record"], options["runs_dir"])  # report a mistake before torch is loaded
    if not as_json:  # its output is JSON and nothing else
        start_stages()
    try:
        from paceline.training.after import evaluate, in_world

        request = make_request(options)
        found = in_world(request, ["evaluate", *flags, *(["--json"] if as_json else [])], lambda here: evaluate(request, here))
    finally:
        stages.stop()
    if found is not None and is_main():
        say(json.dumps(finite(found), indent=2) if as_json else describe(found))
    return 0


def describe(found: dict[str, Any]) -> str:
    """The table, and a line about what was evaluated."""
    own = found["in_the_record"]
    heads = ["metric", "value", *(["in the record"] if own else [])]
    rows = [[name, f"{value:.6g}", *([_number(own.get(name))] if own else [])] for name, value in found["metrics"].items()]
    about = f"{found['weights']} on {found['data']}, {found['samples']:,} samples"
    return f"{make_table(heads, rows)}\n{about}"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else ""


def make_request(options: dict[str, Any]) -> "Request":
    """What to look at, from the arguments that `add_request` adds."""
    from paceline.training.after import Request

    if options["workers"] is not None and options["workers"] < 1:
        raise UsageError(f"--workers is {options['workers']}: it must be at least 1")
    return Request(**options)


def to_flags(options: dict[str, Any]) -> list[str]:
    """The arguments for a worker's command line."""
    left_out = [name for name, value in options.items() if name == "record" or value is None or value is False or value == ""]
    given = {name: value for name, value in options.items() if name not in left_out}
    flags = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in given.items()]
    return [options["record"], *flags]


def start_stages() -> None:
    """Show what the program does until it has results."""
    from paceline.dist.place import read_place

    place = read_place()
    if place.rank == 0:
        # srun and mpirun may give each worker a terminal even if their own output goes to a file.
        stages.start(is_terminal(sys.stdout) and place.launcher not in ("srun", "mpirun"))


def is_main() -> bool:
    """Whether this process is the one that prints."""
    from paceline.dist.place import read_place

    return read_place().rank == 0
