"""The command line: parse, then one line a verb."""

import argparse
import difflib
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from paceline import __version__
from paceline.config import add_flags, check_options
from paceline.dist.launch import INTERRUPTED, start_as_worker
from paceline.dist.place import read_place
from paceline.dist.reports import headline, is_lost_contact, report_failure
from paceline.dist.watch import claim_process
from paceline.errors import PacelineError, Stopped, UsageError, unknown
from paceline.loading import pause_collector
from paceline.toml import read_recipe

_EXAMPLES = """examples:
  paceline train fashion-mnist-mini --workers 2
  paceline train my_task.py --epochs 10 --global-batch 1024
  torchrun --nproc-per-node 4 -m paceline train fashion-mnist
  paceline study my_study.toml
  paceline rehearse fashion-mnist --workers 64
  paceline scale fashion-mnist --workers 1,2,4
  paceline data fetch fashion-mnist
  paceline doctor
"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit: 0 done, 1 failed, 2 the user's mistake, 3 diverged, 130 interrupted, 143 stopped."""
    claim_process()
    start_as_worker()
    pause_collector()
    code = run(sys.argv[1:] if argv is None else argv)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of torch's backends can abort a process that is shutting down its interpreter; nothing is left to do here.
    if "torch" in sys.modules:
        os._exit(code)
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """The exit code of a command line. Errors become one line, or a traceback where they are nobody's mistake but ours."""
    try:
        return _verb(_parse(argv))
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr)  # what is left of a progress line
        print("paceline: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return _explain(error)


def _verb(args: argparse.Namespace) -> int:
    options = vars(args)
    verb = options.pop("verb")
    if verb == "train":
        task, recipe = options.pop("task"), options.pop("recipe")
        options = {**read_recipe(recipe), **options} if recipe else options
        check_options(options)  # a mistake in the flags shows before torch is loaded
        from paceline.training.run import train

        train(task, **options)
        return 0
    if verb == "study":
        from paceline.measure.study import study_verb

        return study_verb(**options)
    if verb == "rehearse":
        from paceline.measure.rehearse import rehearse

        return rehearse(options)
    if verb == "scale":
        from paceline.measure.scale import scale_verb

        return scale_verb(options)
    if verb == "data":
        from paceline.data import verb as data

        folder = Path(args.data_dir) if args.data_dir else None
        if args.action == "list":
            return data.list_data(folder)
        return (data.fetch if args.action == "fetch" else data.verify)(args.name, folder)
    from paceline.measure.doctor import doctor

    return doctor()


def _explain(error: Exception) -> int:
    """Say what went wrong, once, and give the exit code."""
    known = isinstance(error, PacelineError)
    place = None
    with suppress(UsageError):  # the error may be about the place itself
        place = read_place()
    rank = place.rank if place else 0
    if place and place.launcher == "paceline" and report_failure(rank, error):
        return error.exit_code if isinstance(error, PacelineError) else 1
    prefix = f"paceline: worker {rank}: " if place and place.size > 1 else "paceline: "
    if isinstance(error, UsageError | Stopped) and rank != 0:
        return error.exit_code  # it is the same for all workers; rank 0 says so
    if known:
        print(f"{prefix}{error}", file=sys.stderr)
    elif is_lost_contact(error):
        print(f"{prefix}lost contact with another worker: its own error is the cause", file=sys.stderr)
    else:
        print(f"{prefix}failed: {headline(error)}\n{traceback.format_exc()}", file=sys.stderr, end="")
    return error.exit_code if isinstance(error, PacelineError) else 1


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line that suggest the nearest flag."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def refuse(self, argument: str) -> NoReturn:
        """Say that there is no such argument."""
        name = argument.partition("=")[0]
        near = difflib.get_close_matches(name, list(self._option_string_actions), n=1, cutoff=0.5)
        kind = "flag" if name.startswith("-") else "argument"
        raise UsageError(f"unknown {kind} {name}: " + (f"did you mean {near[0]}?" if near else f"see {self.prog} --help"))


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="paceline",
        description="Train the same PyTorch model on any number of workers, without losing accuracy.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    about = {
        "train": "Train a task on any number of workers.",
        "scale": "Images/s on 1, 2, 4 ... workers, against linear, and where the rest went.",
        "rehearse": "What N workers would do to accuracy, measured on the one that is here.",
        "study": "Train arms x seeds from a TOML file; a table with spreads and verdicts.",
        "data": "List, fetch or verify the built-in data sets.",
        "doctor": "Check this machine: torch, devices, backends, network, data, a real all-reduce.",
    }
    parsers = {name: verbs.add_parser(name, help=text, description=text, allow_abbrev=False) for name, text in about.items()}
    wanted = _wanted(argv, about)
    if wanted == "train":  # 50 flags: made only for those who ask
        parsers["train"].add_argument("task", help="fashion-mnist, fashion-mnist-mini, my_task.py or module:function")
        parsers["train"].add_argument(
            "--recipe", metavar="FILE", help="options from a TOML file or a packaged recipe; flags override them"
        )
        add_flags(parsers["train"])
    if wanted == "rehearse":
        _add_rehearse(parsers["rehearse"])
    if wanted == "scale":
        _add_scale(parsers["scale"])
    _add_study(parsers["study"])
    parsers["data"].add_argument("action", choices=("list", "fetch", "verify"))
    parsers["data"].add_argument("name", nargs="?", default="fashion-mnist")
    parsers["data"].add_argument("--data-dir", default="", metavar="DIR")
    args, rest = parser.parse_known_args(argv)
    if rest:
        (parsers[wanted] if wanted else parser).refuse(rest[0])
    return args


def _add_study(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="the study: TOML with a task, seeds, options and arms")
    parser.add_argument("--runs-dir", default="runs", metavar="DIR", help="folder that the study's folder goes to [runs]")
    parser.add_argument("--out", default="", metavar="FILE", help="a copy of the results; with --table, the results to show")
    parser.add_argument("--seeds", default="", metavar="N", help="so many seeds (3) or these (0,5,7), whatever the file says")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="an option for all arms; may be repeated",
    )
    parser.add_argument("--only", action="append", default=[], metavar="ARM", help="run this arm alone; may be repeated")
    parser.add_argument("--per-device", default=1, type=int, metavar="N", help="runs at once on each GPU, or on the CPU [1]")
    parser.add_argument(
        "--mini", action="store_true", help="try every arm's options out: one seed, small data, net and batches"
    )
    parser.add_argument(
        "--table", action="store_true", dest="show", help="run nothing: show the table of the results there are"
    )
    parser.add_argument("--slot", default="", help=argparse.SUPPRESS)


def _add_rehearse(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", help="fashion-mnist, fashion-mnist-mini, my_task.py or module:function")
    parser.add_argument("--recipe", metavar="FILE", help="options from a TOML file or a packaged recipe; flags override them")
    parser.add_argument("--seeds", default="3", metavar="N", help="so many seeds (3) or these (0,5,7) [3]")
    parser.add_argument("--margin", default=0.005, type=float, help="what counts as equal, of accuracy or loss [0.005]")
    parser.add_argument("--per-device", default=1, type=int, metavar="N", help="runs at once on each GPU, or on the CPU [1]")
    add_flags(parser)


def _add_scale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("task", help="fashion-mnist, fashion-mnist-mini, my_task.py or module:function")
    parser.add_argument("--recipe", metavar="FILE", help="options from a TOML file or a packaged recipe; flags override them")
    parser.add_argument(
        "--mode",
        default="weak",
        choices=("weak", "strong"),
        help="weak: every worker has --reference-batch samples a step; strong: a step's samples are shared out [weak]",
    )
    parser.add_argument("--windows", default=7, type=int, metavar="N", help="windows to measure at each number of workers [7]")
    parser.add_argument("--window-s", default=1.0, type=float, metavar="S", help="seconds a window takes [1]")
    add_flags(parser)


def _wanted(argv: Sequence[str], verbs: Iterable[str]) -> str | None:
    """The verb asked for; a UsageError with the nearest one where it does not exist."""
    first = next((arg for arg in argv if not arg.startswith("-")), None)
    if first is not None and first not in verbs:
        raise unknown("verb", first, verbs)
    return first
