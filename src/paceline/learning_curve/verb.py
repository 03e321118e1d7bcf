"""`paceline learning-curve`: its arguments. The run is in `curve.py`."""

import argparse
from typing import Any

from paceline.config import names_with
from paceline.flags import add_flags, add_task
from paceline.options import Role

SET_HERE = names_with(Role.STUDY, Role.BY_SIZE) - {"runs_dir"}
"""Options that cannot be given: each size has its own value, or they would end runs before their time."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the task, the sizes, how often to train each, and one flag per option."""
    add_task(parser)
    parser.add_argument("--sizes", default="", metavar="N,N,N", help="data sizes [all, 1/2, 1/4 ... down to --smallest]")
    parser.add_argument("--smallest", type=int, metavar="N", help="halve the data while N samples are left [1/32 of the data]")
    parser.add_argument("--seeds", default="3", metavar="N", help="N seeds (3) or these (0,5,7) [3]")
    parser.add_argument(
        "--least-steps",
        default=200,
        type=int,
        metavar="N",
        help="train each size for at least N steps, if that takes no more than 100 epochs [200]",
    )
    parser.add_argument("--target-error", type=float, metavar="X", help="say how many samples this error would need")
    parser.add_argument("--per-device", default=1, type=int, metavar="N", help="runs at once on each GPU, or on the CPU [1]")
    parser.add_argument("--name", default="", metavar="NAME", help="name of the study's folder [learning-curve-TASK]")
    hidden = dict.fromkeys(SET_HERE, argparse.SUPPRESS)
    epochs = "Epochs with all data [5]. Smaller sizes train for more epochs: half as many steps with a quarter of the data."
    add_flags(parser, {**hidden, "epochs": epochs})


def run(options: dict[str, Any]) -> int:
    """Train every size with every seed, fit the curve, print and save it."""
    from paceline.learning_curve.curve import learning_curve

    return learning_curve(**{name: options.pop(name) for name in _OWN if name in options}, options=options)


_OWN = ("task", "recipe", "sizes", "smallest", "seeds", "least_steps", "target_error", "per_device", "name")
