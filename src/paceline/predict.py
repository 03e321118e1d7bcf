"""`paceline predict RECORD --to FILE`: a trained model's predictions, in sample order, the same bytes on any number of workers.

Nothing at the top of this file imports torch.
"""

import argparse
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.evaluate import add_request, is_main, make_request, start_stages, to_flags
from paceline.output import plural, say, stages
from paceline.records import find_record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the record, the file, the data and the workers."""
    parser.add_argument(
        "--to", required=True, metavar="FILE", help="where to write: .npz, .npy, .safetensors, .csv or .jsonl (by its suffix)"
    )
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    add_request(parser)


def run(options: dict[str, Any]) -> int:
    """Predict, and say what was written."""
    flags, to, force = to_flags(options), options.pop("to"), options.pop("force")
    if not to:
        raise UsageError("--to is empty: give the name of a file")
    find_record(options["record"], options["runs_dir"])  # report a mistake before torch is loaded
    start_stages()
    try:
        from paceline.training.after import in_world
        from paceline.training.outputs import check_target
        from paceline.training.predictions import predict

        request = make_request(options)
        if is_main():
            check_target(Path(to), force)  # before any worker starts
        found = in_world(request, ["predict", *flags], lambda here: predict(request, Path(to), force, here))
    finally:
        stages.stop()
    if found is not None and is_main():
        say(
            f"{found['file']}: {', '.join(found['names'])} of {plural(found['samples'], 'sample')}, in sample order"
            f"\n{found['weights']} on {found['data']}, by {found['how']}"
        )
    return 0
