"""`paceline report`: its arguments. The run is in `page.py`."""

import argparse
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the records and where the page goes."""
    parser.add_argument("records", nargs="*", metavar="RECORD", help="records, studies or result files [the newest record]")
    parser.add_argument("--out", default="", metavar="FILE", help="the page to write [report.html in the record]")
    parser.add_argument(
        "--library",
        default="",
        metavar="WHERE",
        help="smaller pages: load plotly's script from cdn (plotly's server), a URL, or a .js file that pages share and that is"
        " written if missing [inside the page, 4.8 MB]",
    )
    parser.add_argument("--runs-dir", default="runs", metavar="DIR", help="folder to search for records by name [runs]")


def run(options: dict[str, Any]) -> int:
    """Write the page."""
    from paceline.report.page import report_verb

    return report_verb(**options)
