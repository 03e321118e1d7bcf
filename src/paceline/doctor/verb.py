"""`paceline doctor`: its arguments. The checks are in `checks.py`."""

import argparse
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what to show, and where runs will be kept."""
    parser.add_argument("--verbose", action="store_true", help="show every fact on its own line, instead of ten lines")
    parser.add_argument("--runs-dir", default="runs", metavar="DIR", help="folder of the runs: test its disk [runs]")


def run(options: dict[str, Any]) -> int:
    """Run the checks."""
    from paceline.doctor.checks import doctor

    return doctor(**options)
