"""Print without failing: a reader that went away, a full disk or a closed stream must not end a run."""

import os
import sys
from contextlib import suppress
from typing import TextIO


def say(text: str, end: str = "\n") -> bool:
    """Print to stdout at once. False if it could not be printed."""
    return try_say(text, end) is None


def try_say(text: str, end: str = "\n") -> Exception | None:
    """Print to stdout at once; return the error if it could not be printed."""
    return _print(sys.stdout, text + end)


def warn(text: str) -> bool:
    """Print a line to stderr at once. False if it could not be printed."""
    return _print(sys.stderr, text + "\n") is None


def is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody looks at this stream. It is None if it was closed before Python started."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed since
        return False


def open_output() -> None:
    """Point streams that were closed before Python started (`>&-`) to nowhere, so that no file takes their number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number; workers have it too
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))


def close_output() -> None:
    """Flush stdout and stderr before the process exits; drop what they cannot take, or Python would fail on it again."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _print(stream: TextIO | None, text: str) -> Exception | None:
    if stream is None:
        return ValueError("closed")
    try:
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (OSError, ValueError, RuntimeError) as error:  # closed since; or printed by a signal handler during another print
        return error
    return None
