"""The errors that Paceline raises on purpose, and suggestions for misspelled names.

A `PacelineError` is one line for the user: what was found, the rule, what to change. The command line shows `str(error)`
without a traceback and exits with `exit_code`.
"""

import difflib
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


class PacelineError(Exception):
    """A problem that one sentence explains better than a traceback: exit code 1."""

    exit_code = 1

    def __str__(self) -> str:
        return printable(super().__str__())


class ShownAlone(PacelineError):
    """An error that a notebook shows without the traceback: it would consist of the lines that wait for the workers."""

    def _render_traceback_(self) -> list[str]:
        """What IPython prints for this error."""
        return [f"{type(self).__name__}: {self}"]


class UsageError(PacelineError):
    """A mistake in what the user asked for: exit code 2."""

    exit_code = 2

    def __str__(self) -> str:
        return printable(super().__str__()).replace("\n", "\\n")


class SampleError(UsageError):
    """A mistake in some samples. Only the workers that have them may notice, so each reports its own."""


class DataError(PacelineError):
    """Data is missing, damaged or cannot be fetched."""


class RecordError(PacelineError):
    """A record cannot be written or read: a full disk, or a folder that is not a record."""


class WorkersDisagree(PacelineError):
    """Workers that must hold the same weights do not (law 6)."""


class Diverged(PacelineError):
    """The loss stopped being finite, or exploded: exit code 3."""

    exit_code = 3


class Stopped(ShownAlone):
    """The run was asked to stop and did: exit code 130 after Ctrl-C, 143 after SIGTERM or SIGHUP."""

    def __init__(self, text: str, why: str) -> None:
        super().__init__(text)
        self.exit_code = 130 if why == "Ctrl-C" else 143


def printable(text: str) -> str:
    """Escape everything except printable characters, newlines and tabs, so that a user's text cannot control the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def text_of(error: BaseException) -> str:
    """`str(error)`, or "" for an error of the user's that cannot be printed."""
    try:
        return str(error)
    except Exception:
        return ""


def reason(error: Exception) -> str:
    """An error in a few words on one line: the system's own words for an OSError."""
    text = error.strerror if isinstance(error, OSError) else str(error)
    return " ".join((text or str(error) or type(error).__name__).split())


def first_line(error: BaseException) -> str:
    """The first line of an error's text, at most 200 characters."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


@contextmanager
def refuse_exit() -> Iterator[None]:
    """Turn a sys.exit() in user code into an error: otherwise the program would end as if the run were done."""
    try:
        yield
    except SystemExit as error:
        raise PacelineError(describe_exit(error)) from None  # the text says where


def describe_exit(error: SystemExit) -> str:
    """An error message that says where sys.exit() was called."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "_sitebuiltins" not in frame.filename]  # exit()
    at = f" in {frames[-1].name}, line {frames[-1].lineno} of {Path(frames[-1].filename).name}" if frames else ""
    return f"sys.exit({error.code!r}) was called{at}: the run is not done; return from the function, or raise an exception"


def unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that does not exist. It suggests the nearest name, or lists all of them."""
    names, name = sorted(known), name if len(name) <= 100 else f"{name[:100]}..."  # matching a long name is slow
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
    return UsageError(f"unknown {kind} {name!r}: {hint}")
