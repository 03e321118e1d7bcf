"""The command line: parse the arguments, run the verb, turn errors into one line and an exit code.

Each verb is a module with `add_arguments(parser)` and `run(options) -> exit code`. It is imported only when it is called, and
imports torch only when it runs.
"""

import argparse
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

from paceline import __version__
from paceline.dist.contention import stop_spinning_if_shared
from paceline.dist.launch import INTERRUPTED, start_as_worker
from paceline.dist.messages import failed_first, is_lost_contact, send_failure, send_finished
from paceline.dist.place import read_place
from paceline.dist.process import exit_now
from paceline.dist.watch import mark_own_process
from paceline.errors import PacelineError, SampleError, Stopped, UsageError, refuse_exit
from paceline.explanation import explain, is_device_assert
from paceline.hints import unknown_flag, unknown_verb
from paceline.loading import pause_collector
from paceline.output import close_output, is_terminal, open_output, reader_is_gone, warn

VERBS = {
    "train": ("paceline.training.verb", "Train a task on any number of workers."),
    "scale": ("paceline.scale.verb", "Measure images/s on 1, 2, 4 ... workers, how far that is from linear, and why."),
    "evaluate": ("paceline.evaluate", "Evaluate a trained model on its validation data, or on other data."),
    "predict": ("paceline.predict", "Write a trained model's predictions to a file, in sample order."),
    "landscape": ("paceline.landscape.verb", "Draw the loss around a model, along its training, or between two models."),
    "sharpness": ("paceline.sharpness.verb", "Measure how sharp a trained model's minimum is: Keskar, SAM, the Hessian."),
    "lr-find": ("paceline.lr_find.verb", "Recommend a learning rate from a short run in which it grows."),
    "runs": ("paceline.runs", "List records: status, accuracy, images/s."),
    "report": ("paceline.report.verb", "Write one self-contained HTML page about records, studies and scalings."),
    "board": ("paceline.board.verb", "Show records live in a browser: list, compare and follow runs."),
    "plan": ("paceline.plan.verb", "Predict images/s, time and cost on 1 to 4096 workers of a cluster, from a record."),
    "advise": ("paceline.advise.verb", "Say how many workers are worth it, from the noise in the gradients."),
    "rehearse": ("paceline.rehearse", "Measure what N workers would do to accuracy, on the one worker you have."),
    "learning-curve": ("paceline.learning_curve.verb", "Measure error against data size; predict what more data would give."),
    "study": ("paceline.study.verb", "Train arms x seeds from a TOML file; print a table with spreads and verdicts."),
    "toys": ("paceline.toys_verb", "Run SGD on two tiny problems with exact answers, to watch it move in a report."),
    "data": ("paceline.data.verb", "List, fetch or verify the built-in data sets."),
    "completion": ("paceline.completion", "Print a script that completes commands in bash, zsh or fish."),
    "doctor": ("paceline.doctor.verb", "Say in ten lines whether this machine will train well, and what to fix."),
}
"""The module and the one-line summary of each verb."""

_TRAINING = (
    *("train", "evaluate", "predict", "landscape", "sharpness", "lr-find", "scale", "advise", "rehearse", "learning-curve"),
    "study",
)

_EXAMPLES = """examples:
  paceline train fashion-mnist-mini --workers 2
  paceline train my_task.py --epochs 10 --global-batch 1024
  torchrun --nproc-per-node 4 -m paceline train fashion-mnist
  paceline evaluate runs/demo
  paceline predict runs/demo --to predictions.npz
  paceline landscape runs/demo
  paceline sharpness runs/demo
  paceline lr-find my_task.py
  paceline study my_study.toml
  paceline rehearse fashion-mnist --workers 64
  paceline learning-curve fashion-mnist --target-error 0.05
  paceline scale fashion-mnist --workers 1,2,4
  paceline runs
  paceline report runs/demo
  paceline plan runs/my-scale --cluster aws-p5
  paceline data fetch fashion-mnist
  paceline doctor
"""


_TRACEBACK = "--traceback"
_LINGER_S = 2.0


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Exit codes: 0 done, 1 failed, 2 the user's mistake, 3 diverged, 130 stopped by Ctrl-C, 143 stopped by SIGTERM or SIGHUP.
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
    """Run a command line and return its exit code.

    An error is printed as one line with the user's own frame. The traceback follows with --traceback, or if no line of it is
    the user's.
    """
    verb, whole = "", _TRACEBACK in argv
    try:
        verb, options = _parse(argv)
        if verb in _TRAINING:
            _prepare_threads()
        with refuse_exit():  # not around _parse: argparse exits by itself after --help
            return int(import_module(VERBS[verb][0]).run(options))
    except KeyboardInterrupt:
        # On a terminal, overwrite what is left of a progress line.
        warn(("\r\x1b[K" if is_terminal(sys.stderr) else "") + "paceline: interrupted")
        return INTERRUPTED
    except BrokenPipeError as error:
        # `train` survives a broken stdout, so there the error comes from the task.
        return 1 if verb != "train" and reader_is_gone() else _explain(error, whole)
    except Exception as error:
        return _explain(error, whole)


def _explain(error: Exception, whole: bool) -> int:
    """Print what went wrong, once for all workers, and return the exit code."""
    code = error.exit_code if isinstance(error, PacelineError) else 1
    if is_device_assert(error):
        _unfreed.append(error)
    place = None
    with suppress(UsageError):  # the error may be about the place itself
        place = read_place()
    rank = place.rank if place else 0
    if place and place.launcher == "paceline" and send_failure(rank, error):
        return code
    prefix = f"paceline: worker {rank}: " if place and place.size > 1 else "paceline: "
    known = failed_first(error)
    shared = isinstance(error, UsageError | Stopped) and not isinstance(error, SampleError)  # all workers raise these
    first = known if known is not None else rank == 0 or not shared
    if first:
        lost = bool(place and place.size > 1 and is_lost_contact(error) and not whole)
        said = "lost contact with another worker, whose own error is the cause"
        warn(prefix + (said if lost else explain(error).describe(whole=whole)))
    hosts_store = bool(known and place and rank == 0 and place.launcher != "torchrun")
    if hosts_store or not (first or isinstance(error, Stopped)):
        # The launcher may end all workers when one ends: give the first one time to print its error. Rank 0 also hosts the
        # store in which the others look up whether they were first.
        time.sleep(_LINGER_S)
    return code


_unfreed: list[Exception] = []
"""Errors whose frames hold tensors of a GPU that is no longer usable: freeing such a tensor would abort the process."""


def _prepare_threads() -> None:
    """Check before torch loads whether others use the cores. Not in workers: they would count each other as other programs."""
    with suppress(UsageError):
        note = stop_spinning_if_shared(_TRAINING) if read_place().launcher == "alone" else ""
        if note:
            warn(f"note: {note}")


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line that suggest the nearest flag."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def refuse(self, argument: str) -> NoReturn:
        """Raise the error for an argument that does not exist."""
        flags, name = self._option_string_actions, argument.partition("=")[0]
        see = f"{self.prog} {'--help-all' if '--help-all' in flags else '--help'}"
        if name.startswith("-"):
            raise unknown_flag(name, flags, see)
        pair = re.fullmatch(r"[0-9.]+:[0-9]+,?", name)
        raise UsageError(f"unknown argument {name}: " + ('put a schedule in quotes: "0:64 1:128"' if pair else f"see {see}"))


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help as wide as the terminal, up to 110 characters."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=min(shutil.get_terminal_size().columns - 2, 110))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)  # `--step-at` is one word


def make_parser(called: Collection[str]) -> tuple[Parser, dict[str, Parser]]:
    """The parser of the command line, and those of the verbs. Only the modules of verbs in `called` are imported."""
    parser = Parser(
        prog="paceline",
        description="Train the same PyTorch model on any number of workers, without losing accuracy.",
        epilog=_EXAMPLES,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    made: dict[str, Parser] = {}
    for verb, (module, summary) in VERBS.items():
        made[verb] = verbs.add_parser(verb, help=summary, description=summary, allow_abbrev=False, formatter_class=_Help)
        if verb in called:
            made[verb].add_argument(_TRACEBACK, action="store_true", help="print the whole traceback of an error")
            import_module(module).add_arguments(made[verb])
    return parser, made


def _parse(argv: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The verb and its options."""
    argv = _plain(argv)
    called = next((arg for arg in argv if not arg.startswith("-")), None)
    if called is not None and called not in VERBS:
        raise unknown_verb(called, VERBS)
    parser, verbs = make_parser([called] if called else [])
    if called and "--help-all" in argv and "--help-all" not in verbs[called]._option_string_actions:
        argv = [called, "--help"]  # it has no others
    if not argv:
        parser.print_help(sys.stderr)
        parser.exit(UsageError.exit_code)
    args, rest = parser.parse_known_args(argv)
    if rest:
        (verbs[called] if called else parser).refuse(next((arg for arg in rest if arg.startswith("-")), rest[0]))
    options = vars(args)
    del options["traceback"]
    return options.pop("verb"), options


def _plain(argv: Sequence[str]) -> list[str]:
    """The arguments, with `help VERB`, `--help VERB` and `version` in the form that argparse expects."""
    match [arg for arg in argv if arg != _TRACEBACK]:  # `run` has read it: an error may come before the options are known
        case ["help" | "--help" | "-h", str(verb), *more] if not verb.startswith("-"):
            return [verb, "--help-all" if "--help-all" in more else "--help"]
        case ["help", *_]:
            return ["--help"]
        case ["version" | "-V"]:
            return ["--version"]
        case plain:
            return plain
