"""Print the workers' output where this process prints its own, if that is not a file that they inherit, as in a notebook.

The launcher makes one named pipe per stream in the folder of its messages, and workers write to it. The thread that waits for
the workers prints what arrives: in a notebook, output belongs to the cell whose thread prints it. Does not import torch.
"""

import codecs
import os
import select
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from paceline.output import write

_STREAMS = {"stdout": 1, "stderr": 2}
_LOOK_EVERY_S = 0.1
_CHUNK = 65536  # bytes, the size of a pipe's buffer


class Forward:
    """The output of the workers of one attempt. Does nothing for a stream that the workers inherit."""

    def __init__(self, folder: Path) -> None:
        self._streams: dict[int, TextIO] = {}
        for name, number in _STREAMS.items():
            stream = getattr(sys, name)
            if stream is not None and not _is_inherited(stream, number):
                with suppress(OSError):  # a file system without named pipes: workers print to the files that they inherit
                    os.mkfifo(folder / name, 0o600)
                    # Open for both reading and writing, so that it does not end when no worker has it open.
                    self._streams[os.open(folder / name, os.O_RDWR | os.O_NONBLOCK)] = stream
        self._decoders = {pipe: codecs.getincrementaldecoder("utf-8")("replace") for pipe in self._streams}

    def join(self, thread: threading.Thread, timeout_s: float) -> None:
        """Wait for the thread, at most this long, and print what arrives meanwhile."""
        if not self._streams:
            thread.join(timeout_s)
            return
        end = time.monotonic() + timeout_s
        while thread.is_alive() and (left_s := end - time.monotonic()) > 0:
            self._print(min(left_s, _LOOK_EVERY_S))

    def close(self) -> None:
        """Print what is left. Later output is lost."""
        while self._print(0):
            pass
        for pipe in self._streams:
            os.close(pipe)
        self._streams = {}

    def _print(self, timeout_s: float) -> bool:
        """Wait for output and print it. False if nothing arrived."""
        ready, _, _ = select.select(list(self._streams), [], [], timeout_s)
        for pipe in ready:
            text = self._decoders[pipe].decode(os.read(pipe, _CHUNK))
            write(self._streams[pipe], text)
        return bool(ready)


def forward_output(folder: Path) -> None:
    """In a worker: write to the launcher's pipes, if it has made them."""
    for name, number in _STREAMS.items():
        with suppress(OSError):  # there is no such pipe, or the launcher is gone
            pipe = os.open(folder / name, os.O_WRONLY | os.O_NONBLOCK)  # without waiting for a launcher that is gone
            os.set_blocking(pipe, True)
            os.dup2(pipe, number)
            os.close(pipe)
            # A print in user code appears at once, and as a whole: with PYTHONUNBUFFERED set, lines of workers would mix.
            getattr(sys, name).reconfigure(line_buffering=True, write_through=False)


def _is_inherited(stream: TextIO, number: int) -> bool:
    """Whether what a child process prints goes to the same place as what is printed to this stream."""
    try:
        return stream.fileno() == number
    except (AttributeError, OSError, ValueError):  # not a file, or closed
        return False
