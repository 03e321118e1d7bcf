"""`paceline advise`: its arguments. The run is in `probe.py` (a record that measures noise) and `advise.py` (the advice)."""

import argparse
from typing import Any

from paceline.flags import add_flags, add_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the record or task, the cluster and, for training the task, one flag per option."""
    parser.add_argument(
        "target", metavar="RECORD|TASK", help="a record with a noise scale, or a task, which is then trained for a few epochs"
    )
    add_recipe(parser)
    parser.add_argument("--cluster", default="", metavar="NAME", help="also predict speed there: a preset, a file or `here`")
    parser.add_argument(
        "--speed", default=1.0, type=float, metavar="X", help="a worker there is X times as fast as the one measured [1]"
    )
    add_flags(parser)


def run(options: dict[str, Any]) -> int:
    """Find or train the record, and print the advice."""
    from paceline.advise.advise import advise_verb
    from paceline.advise.probe import find_or_train

    target, cluster, speed, recipe = (options.pop(name) for name in ("target", "cluster", "speed", "recipe"))
    return advise_verb(str(find_or_train(target, options, recipe)), cluster, speed, options.get("runs_dir", "runs"))
