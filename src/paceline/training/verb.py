"""`paceline train`: its arguments, and its run. Imports torch only when it runs."""

import argparse
from typing import Any

from paceline.config import check_options, merge_options
from paceline.flags import add_flags, add_task
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
    from paceline.training.run import train

    train(task, **options)
    return 0
