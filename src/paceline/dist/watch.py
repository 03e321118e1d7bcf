"""What a worker knows about time: that it was asked to stop, and that it makes no progress (law 7).

A wish to stop (SIGTERM, Ctrl-C, or a file of the launcher's) is only noted: the loop reads `stop`, finishes the step, writes a
checkpoint and ends by itself. One thread sees to it that this happens within the grace, and that a worker which stands still
says where before it ends. Signals reach the thread through a pipe, because Python runs handlers in the main thread alone, which
may be stuck in a collective. Nothing here imports torch.
"""

import os
import select
import signal
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any, Self

from paceline.dist import reports
from paceline.dist.launch import INTERRUPTED, STOPPED, STOPPING
from paceline.dist.place import read_place

PHASES = ("data", "forward", "backward", "reduce", "validation", "checkpoint")
"""What a worker can be doing, in the order of a step."""

_MAY_WAIT = ("backward", "reduce")  # DDP averages within backward: the worker may merely wait for another one
_WAIT_LONGER_S = 2.0  # ... and then lets the one that hangs speak first
_LOOK_EVERY_S = 0.25
_UNWIND_S = 5.0  # after a second Ctrl-C, for a KeyboardInterrupt to close the record in


class Watch:
    """Notices that this worker was asked to stop, and that it makes no progress. The clock starts at the first `mark`."""

    def __init__(self, rank: int, timeout_s: float, grace_s: float) -> None:
        self._rank, self._timeout_s, self._grace_s = rank, timeout_s, grace_s
        self._folder = reports.folder()
        self._place = read_place()
        self._last: tuple[float, int, str] | None = None
        self._stop = ""
        self._exit_code = STOPPED
        self._deadline = float("inf")
        self._signals = 0  # as the thread counts them
        self._handled = 0  # as the main thread does: two that come while it is stuck are one to Python
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._watched = threading.get_ident()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)  # Python's rule for a pipe that signals are written to
        # A worker of our own launcher dies at once on SIGTERM, which is how the launcher ends the others when one failed.
        if self._folder is None and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # a background job's Ctrl-C is not for it
                    self._handlers[number] = signal.signal(number, self._handle)
            self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            _handling.append(self)
        self._thread = threading.Thread(target=self._run, name="paceline-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self in _handling:
            _handling.remove(self)
            signal.set_wakeup_fd(self._wakeup)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
        os.write(self._writer, b"\0")
        self._thread.join()
        os.close(self._writer)
        os.close(self._reader)

    def mark(self, step: int, phase: str) -> None:
        """Say that there is progress: what begins now. A long wait that is as it should be marks again now and then."""
        self._last = (time.monotonic(), step, phase)

    @property
    def stop(self) -> str:
        """Why this worker should stop ("SIGTERM", "Ctrl-C"), or ""."""
        if not self._stop and self._folder is not None:
            self._stop = reports.read_stop(self._folder)
        return self._stop

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """In the main thread. The thread has heard it, too; only here can it become a KeyboardInterrupt."""
        self._handled += 1
        if self._handled > 1 and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._note(number)

    def _note(self, number: int) -> None:
        if self._stop:
            return
        self._exit_code = INTERRUPTED if number == signal.SIGINT else STOPPED
        self._deadline = time.monotonic() + self._grace_s
        self._stop = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._reader], [], [], _LOOK_EVERY_S)
            for number in os.read(self._reader, 64) if ready else b"":
                if number == 0:  # the end of the watch
                    return
                if number in self._handlers:
                    self._hear(number)
            if time.monotonic() > self._deadline:
                late = f"paceline: worker {self._rank} did not end within {self._grace_s:g} s of {self._stop}: it ends now"
                print(late, file=sys.stderr, flush=True)
                os._exit(self._exit_code)
            self._check_progress()

    def _hear(self, number: int) -> None:
        self._signals += 1
        self._note(number)
        if number == signal.SIGINT and self._signals == 1 and self._place.launcher == "alone" and sys.stderr.isatty():
            print(STOPPING, file=sys.stderr, flush=True)
        if number == signal.SIGINT and self._signals > 1:
            self._deadline = min(self._deadline, time.monotonic() + _UNWIND_S)

    def _check_progress(self) -> None:
        if self._last is None:
            return
        when, step, phase = self._last
        may_wait = phase in _MAY_WAIT and self._place.size > 1
        if time.monotonic() - when < self._timeout_s + _WAIT_LONGER_S * may_wait:
            return
        if may_wait:
            text = f"worker {self._rank} waited {self._timeout_s:g} s for another worker at step {step}, in {phase}"
        else:
            text = f"worker {self._rank} hung: no progress for {self._timeout_s:g} s at step {step}, in {phase}"
        text = f"{text}\n{self._stack()}".rstrip()
        if not reports.leave(reports.Report(self._rank, time.time(), 1, text, lost_contact=may_wait, waited=may_wait)):
            print(f"paceline: {text}", file=sys.stderr, flush=True)
        if may_wait:
            time.sleep(_WAIT_LONGER_S)  # for the others that wait to say so: who is then still silent is the one that hangs
        os._exit(1)

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._watched)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    def _leave_child(self) -> None:
        """In a forked child, such as a DataLoader's worker: its signals are not the worker's, and SIGTERM ends it as before.

        Ctrl-C at a terminal reaches it, too. It stays with the handler, which takes no notice of the first: the step that is
        to be finished needs its samples.
        """
        signal.set_wakeup_fd(-1)
        if signal.SIGTERM in self._handlers:
            signal.signal(signal.SIGTERM, self._handlers[signal.SIGTERM])


_handling: list[Watch] = []
"""The watch that has the signal handlers, if any: what a fork must know."""


def _after_fork() -> None:
    for watch in _handling:
        watch._leave_child()


os.register_at_fork(after_in_child=_after_fork)
