"""`paceline doctor`: it has no arguments. The checks are in `checks.py`, which imports torch."""

import argparse
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing."""


def run(options: dict[str, Any]) -> int:
    """Run the checks."""
    from paceline.doctor.checks import doctor

    return doctor()
