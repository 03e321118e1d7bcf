"""`paceline train`: its arguments, and its run. Imports torch only when it runs."""

import argparse
import sys
from typing import Any

from paceline.config import check_options, merge_options
from paceline.dist.place import read_place
from paceline.flags import add_flags, add_task
from paceline.output import is_terminal, stages
from paceline.toml import read_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the task, the recipe and one flag per option."""
    add_task(parser)
    add_flags(parser)


def run(options: dict[str, Any]) -> int:
    """Train a task with these options."""
    task, recipe = options.pop("task"), options.pop("recipe")
    options = merge_options(read_recipe(recipe), options) if recipe else options
    check_options(options)  # report a mistake before torch is loaded
    place = read_place()
    # srun and mpirun may give each worker a terminal even if their own output goes to a file.
    terminal = is_terminal(sys.stdout) and place.launcher not in ("srun", "mpirun")
    if place.rank == 0:
        stages.start(terminal)
    try:
        if terminal:
            stages.enter("loading torch")
        from paceline.training.run import run_task

        run_task(task, options)
    finally:
        stages.stop()
    return 0
