"""`paceline study`: its arguments. The run is in `study.py`."""

import argparse
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the study's file and what changes it for one call."""
    parser.add_argument("file", metavar="FILE", help="the study: TOML with a task, seeds, options and arms")
    parser.add_argument("--runs-dir", default="runs", metavar="DIR", help="folder for the study's own folder [runs]")
    parser.add_argument(
        "--out", default="", metavar="FILE", help="where to copy the results; with --table, the results to show"
    )
    parser.add_argument("--seeds", default="", metavar="N", help="N seeds (3) or these (0,5,7), instead of those in the file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="an option for all arms (epochs=3), or a parameter of task() (set.width=64); repeatable",
    )
    parser.add_argument("--only", action="append", default=[], metavar="ARM", help="run only this arm; repeatable")
    parser.add_argument("--per-device", default=1, type=int, metavar="N", help="runs at once on each GPU, or on the CPU [1]")
    parser.add_argument(
        "--mini", action="store_true", help="try every arm's options: one seed, small data, a small net, small batches"
    )
    parser.add_argument("--table", action="store_true", dest="show", help="run nothing; show the table of the results so far")
    parser.add_argument("--slot", default="", help=argparse.SUPPRESS)


def run(options: dict[str, Any]) -> int:
    """Run or show the study."""
    from paceline.study.study import study_verb

    return study_verb(**options)
