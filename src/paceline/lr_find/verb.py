"""`paceline lr-find`: its arguments. The run is in `find.py`."""

import argparse
from typing import Any

from paceline.flags import add_flags, add_task
from paceline.lr_find.find import FIRST, LAST, REFUSED, STEPS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the task, the range, and one flag per option that is of use here."""
    add_task(parser)
    parser.add_argument(
        "--from", dest="first", default=FIRST, type=float, metavar="X", help=f"learning rate of the first step [{FIRST:g}]"
    )
    parser.add_argument(
        "--to", dest="last", default=LAST, type=float, metavar="X", help=f"learning rate of the last step [{LAST:g}]"
    )
    parser.add_argument(
        "--steps", default=STEPS, type=int, metavar="N", help=f"steps, unless the loss explodes first [{STEPS}]"
    )
    add_flags(parser, dict.fromkeys(REFUSED, argparse.SUPPRESS))


def run(options: dict[str, Any]) -> int:
    """Run the test, print the curve and the recommendation."""
    from paceline.lr_find.find import find_verb

    return find_verb(options)
