"""The command line: parse, then one line a verb."""

import argparse
import difflib
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from paceline import __version__
from paceline.config import add_flags, check_options
from paceline.dist.launch import INTERRUPTED, start_as_worker
from paceline.dist.messages import headline, is_lost_contact, send_failure, send_finished
from paceline.dist.place import read_place
from paceline.dist.process import exit_now
from paceline.dist.watch import mark_own_process
from paceline.errors import PacelineError, Stopped, UsageError, printable, refuse_exit, unknown
from paceline.loading import pause_collector
from paceline.output import close_output, is_terminal, open_output, reader_is_gone, warn
from paceline.toml import read_recipe

_EXAMPLES = """examples:
  paceline train fashion-mnist-mini --workers 2
  paceline train my_task.py --epochs 10 --global-batch 1024
  torchrun --nproc-per-node 4 -m paceline train fashion-mnist
  paceline study my_study.toml
  paceline rehearse fashion-mnist --workers 64
  paceline scale fashion-mnist --workers 1,2,4
  paceline report runs/demo
  paceline plan runs/my-scale --cluster list
  paceline data fetch fashion-mnist
  paceline doctor
"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    0 done, 1 failed, 2 the user's mistake, 3 diverged, 130 stopped by Ctrl-C, 143 stopped by SIGTERM or SIGHUP.
    """
    argv = sys.argv[1:] if argv is None else argv
    open_output(protected=list(argv[:1]) == ["train"])
    mark_own_process()
    start_as_worker()
    pause_collector()
    code = run(argv)
    close_output()
    if code == 0:
        send_finished()
    if "torch" in sys.modules:
        exit_now(code)
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """The exit code of a command line. Errors become one line, or a traceback where they are nobody's mistake but ours."""
    verb = ""
    try:
        args = _parse(argv)
        verb = args.verb
        with refuse_exit():  # argparse's own exits, such as --help, are above
            return _verb(args)
    except KeyboardInterrupt:
        # On a terminal, over what is left of a progress line.
        warn(("\r\x1b[K" if is_terminal(sys.stderr) else "") + "paceline: interrupted")
        return INTERRUPTED
    except BrokenPipeError as error:
        # `train` never sees its own stdout break: there the error is the task's.
        return 1 if verb != "train" and reader_is_gone() else _explain(error)
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
        from paceline.study.study import study_verb

        return study_verb(**options)
    if verb == "rehearse":
        from paceline.rehearse import rehearse

        return rehearse(options)
    if verb == "scale":
        from paceline.scale.scale import scale_verb

        return scale_verb(options)
    if verb in ("report", "board"):
        return _show(verb, options)
    if verb == "plan":
        from paceline.plan.plan import plan_verb

        return plan_verb(**options)
    if verb == "advise":
        from paceline.advise.advise import advise_verb
        from paceline.advise.probe import find_or_train

        target, cluster, speed, recipe = (options.pop(name) for name in ("target", "cluster", "speed", "recipe"))
        return advise_verb(str(find_or_train(target, options, recipe)), cluster, speed, options.get("runs_dir", "runs"))
    if verb == "data":
        from paceline.data import verb as data

        folder = Path(args.data_dir) if args.data_dir else None
        if args.action == "list":
            return data.list_data(folder)
        return (data.fetch if args.action == "fetch" else data.verify)(args.name, folder)
    from paceline.doctor import doctor

    return doctor()


def _show(verb: str, options: dict[str, Any]) -> int:
    if verb == "report":
        from paceline.report.page import report_verb

        return report_verb(options.pop("records"), **options)
    from paceline.board.board import board_verb

    return board_verb(**options)


def _explain(error: Exception) -> int:
    """Say what went wrong, once, and give the exit code."""
    known = isinstance(error, PacelineError)
    place = None
    with suppress(UsageError):  # the error may be about the place itself
        place = read_place()
    rank = place.rank if place else 0
    if place and place.launcher == "paceline" and send_failure(rank, error):
        return error.exit_code if isinstance(error, PacelineError) else 1
    prefix = f"paceline: worker {rank}: " if place and place.size > 1 else "paceline: "
    if isinstance(error, UsageError | Stopped) and rank != 0:
        if isinstance(error, UsageError):
            time.sleep(2)  # it is the same for all workers, and rank 0 says so unless a launcher ends it because we ended
        return error.exit_code
    if known:
        warn(f"{prefix}{error}")
    elif is_lost_contact(error):
        warn(f"{prefix}lost contact with another worker: its own error is the cause")
    else:
        warn(printable(f"{prefix}failed: {headline(error)}\n{traceback.format_exc()}".rstrip("\n")))
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
        "report": "One self-contained HTML page about records, studies and scalings.",
        "board": "The same page live: runs listed, compared, and drawn while they train.",
        "plan": "Predict images/s, time and cost on 1 to 4096 workers of a cluster, from a record.",
        "advise": "How many workers are worth it, from the gradients' noise.",
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
    if wanted == "advise":
        _add_advise(parsers["advise"])
    _add_pages(parsers["report"], parsers["board"])
    _add_plan(parsers["plan"])
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
    from paceline.scale.scale import NOT_FOR_SCALE

    hidden = dict.fromkeys(NOT_FOR_SCALE, argparse.SUPPRESS)
    add_flags(parser, {**hidden, "workers": "how many workers to measure, such as 1,2,4 [1,2]; torchrun and the like say it"})


def _add_pages(report: argparse.ArgumentParser, board: argparse.ArgumentParser) -> None:
    report.add_argument("records", nargs="*", metavar="RECORD", help="records, studies or result files [the newest record]")
    report.add_argument("--out", default="", metavar="FILE", help="the page to write [report.html in the record]")
    report.add_argument(
        "--runs-dir", default="runs", metavar="DIR", help="folder that names of records are looked for in [runs]"
    )
    board.add_argument("folder", nargs="?", default="runs", metavar="DIR", help="folder of records [runs]")
    board.add_argument("--host", default="127.0.0.1", help="address to listen at; any but this machine's asks for a token")
    board.add_argument("--port", default=8420, type=int, help="port to listen at, 0 for a free one [8420]")
    board.add_argument("--open", action="store_true", dest="open_browser", help="open it in a browser")


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("record", nargs="?", default="", metavar="RECORD", help="of paceline scale, or of a training run")
    parser.add_argument(
        "--cluster", required=True, metavar="NAME", help="a preset, a TOML file, `here`, or `list` to see what there is"
    )
    parser.add_argument("--mode", default="weak", help="weak: fixed samples a worker; strong: fixed global batch [weak]")
    parser.add_argument(
        "--workers", default="", metavar="1,2,8", help="numbers of workers [1, 2, 4 ... 4096, or the cluster's]"
    )
    parser.add_argument("--samples", type=int, metavar="N", help="samples a worker and step in weak scaling [as measured]")
    parser.add_argument("--target-steps", type=int, metavar="N", help="steps to the target at the record's global batch")
    parser.add_argument("--noise", default="", metavar="N", help="noise scale in samples, or a record that measured it")
    parser.add_argument("--price", type=float, metavar="N", help="of a worker for an hour")
    parser.add_argument("--speed", default=1.0, type=float, help="how many times as fast as here a worker is there [1]")
    parser.add_argument(
        "--cores",
        default="",
        metavar="N",
        help="cores that CPU workers share, whatever their nodes (none: each has a device of its own) [as measured]",
    )
    parser.add_argument("--json", default="", metavar="FILE", help="also write everything as JSON")
    parser.add_argument(
        "--runs-dir", default="runs", metavar="DIR", help="folder that names of records are looked for in [runs]"
    )


def _add_advise(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="RECORD|TASK", help="a record with a noise scale; or a task, to train it a little")
    parser.add_argument("--recipe", metavar="FILE", help="options from a TOML file or a packaged recipe; flags override them")
    parser.add_argument("--cluster", default="", metavar="NAME", help="also predict speed there: a preset, a file or `here`")
    parser.add_argument("--speed", default=1.0, type=float, help="how many times as fast as here a worker is there [1]")
    add_flags(parser)


def _wanted(argv: Sequence[str], verbs: Iterable[str]) -> str | None:
    """The verb asked for; a UsageError with the nearest one where it does not exist."""
    first = next((arg for arg in argv if not arg.startswith("-")), None)
    if first is not None and first not in verbs:
        raise unknown("verb", first, verbs)
    return first
