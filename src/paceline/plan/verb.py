"""`paceline plan`: its arguments. The run is in `plan.py`."""

import argparse
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the record, the cluster and what to predict."""
    parser.add_argument("record", nargs="?", default="", metavar="RECORD", help="of paceline scale, or of a training run")
    parser.add_argument(
        "--cluster", required=True, metavar="NAME", help="a preset, a TOML file, `here`, or `list` to show the presets"
    )
    parser.add_argument("--mode", default="weak", help="weak: fixed samples per worker; strong: fixed global batch [weak]")
    parser.add_argument(
        "--workers", default="", metavar="1,2,8", help="numbers of workers [1, 2, 4 ... 4096, or as many as the cluster has]"
    )
    parser.add_argument("--samples", type=int, metavar="N", help="samples per worker and step in weak scaling [as measured]")
    parser.add_argument("--target-steps", type=int, metavar="N", help="steps to the target at the record's global batch")
    parser.add_argument("--noise", default="", metavar="N", help="noise scale in samples, or a record that measured it")
    parser.add_argument("--price", type=float, metavar="N", help="price of one worker for one hour")
    parser.add_argument(
        "--speed", default=1.0, type=float, metavar="X", help="a worker there is X times as fast as the one measured [1]"
    )
    parser.add_argument(
        "--cores",
        default="",
        metavar="N",
        help="cores that all CPU workers share, on any number of nodes (none: each worker has its own device) [as measured]",
    )
    parser.add_argument(
        "--batch-schedule",
        default="",
        metavar="EPOCH:BATCH...",
        help='predict a run whose batch changes, such as "0:1024 1:2048"; none: a constant batch [as the record trained]',
    )
    parser.add_argument("--virtual-workers", type=int, metavar="N", help="parts of a schedule's largest batch [as the record]")
    parser.add_argument(
        "--smallest-part", type=int, metavar="N", help="samples that a schedule's parts have at least [as the record]"
    )
    parser.add_argument("--epochs", type=int, metavar="N", help="epochs of a schedule's run [as the record]")
    parser.add_argument(
        "--train-samples", type=int, metavar="N", help="samples in an epoch of a schedule's run [as the record]"
    )
    parser.add_argument(
        "--against", default="", metavar="RECORD", help="compare a schedule's time with this run's training time"
    )
    parser.add_argument(
        "--links",
        default="",
        metavar="RECORD",
        help="with --cluster here: the record of paceline scale to take all-reduces from, if RECORD has none",
    )
    parser.add_argument("--json", default="", metavar="FILE", help="also write everything as JSON")
    parser.add_argument("--runs-dir", default="runs", metavar="DIR", help="folder to search for records by name [runs]")


def run(options: dict[str, Any]) -> int:
    """Predict, and show the table."""
    from paceline.plan.plan import plan_verb

    return plan_verb(**options)
