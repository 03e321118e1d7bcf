"""Print without failing: a pipe without a reader, a full disk or a closed stream must not end a run."""

import io
import os
import select
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, TextIO


def say(text: str, end: str = "\n") -> bool:
    """Print to stdout and flush. False if it could not be printed."""
    return try_say(text, end) is None


def try_say(text: str, end: str = "\n") -> Exception | None:
    """Print to stdout and flush; return the error if it could not be printed."""
    return write(sys.stdout, text + end)


def warn(text: str) -> bool:
    """Print a line to stderr and flush. False if it could not be printed."""
    return write(sys.stderr, text + "\n") is None


def plural(count: float, word: str) -> str:
    """`1 worker`, `2,000 workers`, `3 entries`."""
    several = f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"
    return f"{count:,.0f} {word if count == 1 else several}"


def make_table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table as aligned text; the first `left` columns are left-aligned text, the others are numbers, aligned right.

    In a terminal, long text wraps. If the numbers still do not fit, several tables follow each other, each with the first
    column. Piped output is as wide as it needs to be.
    """
    rows = list(rows)
    width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else 10_000
    needed = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    needed = [min(most, _TEXT) if i < left else most for i, most in enumerate(needed)]
    blocks: list[list[int]] = [[0]]
    for column in range(1, len(heads)):
        if len(blocks[-1]) > 1 and sum(needed[i] + _GAP for i in (*blocks[-1], column)) - _GAP > width:
            blocks.append([0])
        blocks[-1].append(column)
    return "\n\n".join(_draw_table([[row[i] for i in block] for row in (heads, *rows)], block, left, width) for block in blocks)


_TEXT, _GAP = 20, 3  # characters: the least width of a column of wrapped text, and the gap between two columns


def _draw_table(rows: Sequence[Sequence[str]], columns: Sequence[int], left: int, width: int) -> str:
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=Box("    \n    \n -- \n" + "    \n" * 5, ascii=True), show_edge=False, pad_edge=False)
    for column, head in zip(columns, rows[0], strict=True):
        table.add_column(
            Text(head), justify="left" if column < left else "right", overflow="fold", no_wrap=bool(column and column >= left)
        )
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


class Stages:
    """What a program does before its real work begins: one line on a terminal that each stage replaces.

    Piped output gets a plain line after a stage that took long. No thread redraws the line, so the seconds in it are those that
    had passed when its stage began.
    """

    def __init__(self) -> None:
        self._on = self._drawn = self._terminal = False
        self._what, self._first_s, self._begin_s = "", 0.0, 0.0

    @property
    def on(self) -> bool:
        """Whether stages are shown: not in a program whose output is JSON and nothing else."""
        return self._on

    def start(self, terminal: bool) -> None:
        """Show the stages from now on. Without this call they are not shown."""
        self._on, self._terminal, self._first_s = True, terminal, time.monotonic()

    def enter(self, what: str) -> None:
        """End the last stage and begin this one, such as `reading the data`; an empty text only ends the last."""
        if not self._on:
            return
        now, last = time.monotonic(), self._what
        took_s, self._what, self._begin_s = now - self._begin_s, what, now
        if not self._terminal:
            if last and took_s > _LONG_S:
                say(f"{last} took {took_s:.1f} s")
            return
        passed_s = now - self._first_s
        text = f"{what} ..." + (f" {passed_s:.0f} s" if passed_s >= 1 else "")
        self._drawn = False
        if what and say(f"\r{text[: max(0, shutil.get_terminal_size().columns - 1)]}\x1b[K", end=""):
            self._drawn = True

    def hand_over(self) -> None:
        """Show no more stages, but leave the line: another process on this terminal replaces it."""
        self._on = False

    def stop(self) -> None:
        """End the last stage, remove the line, and show no more stages."""
        drawn = self._drawn
        self.enter("")
        self._on, self._drawn = False, drawn
        self.clear()

    def clear(self) -> None:
        """Remove the line from the terminal. Everything that is printed calls this first."""
        if self._drawn:
            self._drawn = False
            say("\r\x1b[K", end="")


_LONG_S = 2.0
stages = Stages()
"""The stages of this process."""


def is_terminal(stream: TextIO | None) -> bool:
    """Whether this stream is a terminal. It is None if it was closed before Python started."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed since
        return False


def reader_is_gone() -> bool:
    """Whether stdout is a pipe, socket or terminal and its other end was closed."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)  # POLLHUP and POLLERR are always reported
        return bool(poll.poll(0))
    except (AttributeError, OSError, ValueError):  # closed, or not a file
        return False


def open_output(protected: bool) -> None:
    """Point streams that were closed before Python started (`>&-`) to /dev/null, so that no file gets their descriptor.

    With `protected`, neither our prints nor those of user code can fail afterwards.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number; workers inherit it
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", closefd=False))
        stream = protect(getattr(sys, name)) if protected else None
        if stream is not None:
            setattr(sys, name, stream)


def close_output() -> None:
    """Flush stdout and stderr before the process exits. Drop what cannot be written, or Python's own flush would fail on it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class Protected(io.TextIOWrapper):
    """A text stream that drops everything after the first failed write."""

    sink: "_Sink"

    def write(self, text: str, /) -> int:
        stages.clear()
        return super().write(text)

    @property
    def error(self) -> OSError | None:
        """Why writes are dropped; None while they succeed."""
        return self.sink.error


def protect(stream: TextIO | None) -> Protected | None:
    """A stream to the same file that never raises; None if it has no file. Do not write to the old stream afterwards."""
    if not isinstance(stream, io.TextIOWrapper):
        return None
    try:
        sink = _Sink(stream.fileno(), "w", closefd=False)
    except (OSError, ValueError):
        return None
    with suppress(OSError):
        stream.flush()
    unbuffered = stream.write_through  # PYTHONUNBUFFERED
    new = Protected(
        sink if unbuffered else io.BufferedWriter(sink),
        encoding=stream.encoding,
        errors="backslashreplace" if stream.errors == "strict" else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=unbuffered,
    )
    new.sink = sink
    return new


class _Sink(io.FileIO):
    """A file that accepts every write. It sits below the buffers and so covers `sys.stdout.buffer` and the flush at exit."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        while self.error is None:
            try:
                written = super().write(data)
            except OSError as error:
                self.error = error
                break
            if written is not None:
                return written
            select.select((), (self,), ())  # it is non-blocking and full: wait for room
        return memoryview(data).nbytes


def write(stream: TextIO | None, text: str) -> Exception | None:
    """Print text to a stream and flush; return the error if it could not be printed."""
    if stream is None:
        return ValueError("closed")
    try:
        stages.clear()
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except (OSError, ValueError, RuntimeError) as error:  # closed, or a signal handler prints during another print
        return error
    return stream.error if isinstance(stream, Protected) else None
