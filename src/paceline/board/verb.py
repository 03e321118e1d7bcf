"""`paceline board`: its arguments. The run is in `board.py`."""

import argparse
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the folder and where to listen."""
    parser.add_argument("folder", nargs="?", default="runs", metavar="DIR", help="folder of records [runs]")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; if other machines can reach it, a token is required [127.0.0.1]",
    )
    parser.add_argument("--port", default=8420, type=int, help="port to listen on, 0 for any free one [8420]")
    parser.add_argument("--open", action="store_true", dest="open_browser", help="open the board in a browser")


def run(options: dict[str, Any]) -> int:
    """Serve the board until Ctrl-C."""
    from paceline.board.board import board_verb

    return board_verb(**options)
