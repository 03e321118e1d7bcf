"""`paceline scale`: its arguments. The run is in `scale.py`."""

import argparse
from typing import Any

from paceline.config import names_with
from paceline.flags import add_flags, add_task
from paceline.options import Role


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the task, how to measure it, and one flag per option that is of use here."""
    add_task(parser)
    parser.add_argument(
        "--mode",
        default="weak",
        choices=("weak", "strong"),
        help="weak: every worker has --reference-batch samples per step; strong: the workers share a step's samples [weak]",
    )
    parser.add_argument("--windows", default=7, type=int, metavar="N", help="windows to measure at each number of workers [7]")
    parser.add_argument("--window-s", default=1.0, type=float, metavar="S", help="seconds per window [1]")
    hidden = dict.fromkeys(names_with(Role.WHOLE_RUN), argparse.SUPPRESS)
    workers = "numbers of workers to measure, such as 1,2,4 [1,2]; not needed under torchrun, srun or mpirun"
    add_flags(parser, {**hidden, "workers": workers})


def run(options: dict[str, Any]) -> int:
    """Measure, and show the table."""
    from paceline.scale.scale import scale_verb

    return scale_verb(options)
