"""Notice requests to stop, and workers that hang (law 7).

A request to stop (SIGTERM, SIGHUP, Ctrl-C, or the launcher's file) is only recorded: the loop reads `stop`, finishes the step,
writes a checkpoint and ends. One thread ensures that this happens within the grace period, and that a worker that hangs prints
its stack before it ends. Signals reach the thread through a pipe, because Python runs handlers only in the main thread, which
may be stuck in a collective. A process that is not ours (a notebook, the caller's own program) is never ended from here: its
main thread gets an exception instead. Does not import torch.
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

from paceline.dist import messages
from paceline.dist.launch import INTERRUPTED, STOPPED, STOPPING
from paceline.dist.place import read_place
from paceline.dist.process import drop_closed_terminal, exit_now
from paceline.errors import PacelineError, Stopped
from paceline.explanation import deepest_user_frame
from paceline.output import is_terminal, warn

WATCHED = ("loading", "data", "forward", "backward", "reduce", "validation", "checkpoint", "hook")
"""What a worker can be doing: before the first step, then in the order of a step."""

_MAY_WAIT = ("backward", "reduce")  # DDP averages within backward, so the worker may just be waiting for another one
_WAIT_LONGER_S = 2.0  # ... and then gives the one that hangs time to say so first
_STUCK_S = 5.0  # asked to stop, but this long in such a stage: the worker it waits for is probably gone
_LOOK_EVERY_S = 0.25
_UNWIND_S = 5.0  # time to close the record after an exception, such as that of a second Ctrl-C

_ours = False


def mark_own_process() -> None:
    """Say that this process is Paceline's own command line: it may be ended if it is stuck. A caller's program may not."""
    global _ours
    _ours = True


class Watch:
    """Notices that this worker was asked to stop, or that it hangs. The clock starts at the first `mark`."""

    def __init__(self, rank: int, timeout_s: float, grace_s: float) -> None:
        self._rank, self._timeout_s, self._grace_s = rank, timeout_s, grace_s
        self.stop = ""
        """Why this worker should stop ("SIGTERM", "SIGHUP", "Ctrl-C"), or ""."""
        self._folder = messages.launcher_folder()
        self._place = read_place()
        self._last: tuple[float, int, str] | None = None
        self._seen: tuple[float, int, str] | None = None  # `_last` when the thread last checked
        self._age_s = self._longest_wait_s = 0.0  # how long it has been in this stage, if it may be waiting
        self._exit_code = STOPPED
        self._asked = self._deadline = float("inf")
        self._error: BaseException | None = None  # for the main thread to raise
        self._interrupted = False
        self._own_signals = 0  # sent by the thread itself and not yet received
        self._signals = 0  # how many the thread has received
        self._handled = 0  # how many the main thread has handled: Python merges two that arrive while it is stuck
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._watched = threading.get_ident()
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)  # required by signal.set_wakeup_fd
        # Workers of our own launcher die at once on SIGTERM: that is how the launcher ends the others when one fails.
        if self._folder is None and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # ignored: nohup, and Ctrl-C in a background job
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

    def mark(self, step: int, stage: str) -> None:
        """Report progress: the stage that starts now. Call it again now and then during a long wait that is expected."""
        self._last = (time.monotonic(), step, stage)

    def why_stop(self) -> str:
        """Why the run stops: `stop`, or the launcher's reason if another worker saw it first."""
        return self.stop or (messages.read_stop(self._folder) if self._folder is not None else "")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Signal handler, in the main thread. The thread gets the signal too, but only this one can raise an exception."""
        error, self._error = self._error, None
        if error is None:
            self._handled += 1
            self._request_stop(number)
            if self._loads():  # no step to finish, nothing to save
                error = self._why_interrupted("before the first step")
            elif self._handled > 1 and number == signal.SIGINT:
                error = KeyboardInterrupt()
        if error is not None:
            self._interrupted = True
            raise error

    def _request_stop(self, number: int) -> None:
        if number == signal.SIGHUP:
            drop_closed_terminal()
        if self.stop:
            return
        self._exit_code = INTERRUPTED if number == signal.SIGINT else STOPPED
        self._grace_s = min(self._grace_s, _UNWIND_S) if self._loads() else self._grace_s
        self._asked = time.monotonic()
        self._deadline = self._asked + self._grace_s
        self.stop = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name

    def _loads(self) -> bool:
        return self._last is not None and self._last[2] == "loading"

    def _why_interrupted(self, when: str) -> BaseException:
        return KeyboardInterrupt() if self.stop == "Ctrl-C" else Stopped(f"stopped by {self.stop} {when}", self.stop)

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._reader], [], [], _LOOK_EVERY_S)
            for number in os.read(self._reader, 64) if ready else b"":
                if number == 0:  # written by __exit__
                    return
                if number in self._handlers:
                    self._receive(number)
            if not self.stop and self._folder is not None:
                self.stop = messages.read_stop(self._folder)  # here, not in the loop: a `stat` takes 5 us
                if self.stop == "SIGHUP":
                    drop_closed_terminal()
            if time.monotonic() > self._deadline:
                self._end_late()
            self._check_progress()

    def _receive(self, number: int) -> None:
        if self._own_signals:
            self._own_signals -= 1
            return
        self._signals += 1
        self._request_stop(number)
        alone = self._place.launcher == "alone"
        if number == signal.SIGINT and self._signals == 1 and alone and not self._loads() and is_terminal(sys.stderr):
            warn(STOPPING)
        if number == signal.SIGINT and self._signals > 1:
            self._deadline = min(self._deadline, time.monotonic() + _UNWIND_S)

    def _end_late(self) -> None:
        """The grace period is over. A lone worker gets an exception first, to close its record; a caller's program goes on."""
        late = f"paceline: worker {self._rank} did not end within {self._grace_s:g} s of {self.stop}"
        alone = self._place.launcher == "alone"
        if alone and self._interrupt(self._why_interrupted("in the middle of a step")):
            warn(f"{late}: interrupting it")
            self._deadline = time.monotonic() + _UNWIND_S
        elif alone and not _ours:
            self._deadline = float("inf")
        else:
            warn(f"{late}: ending it now")
            exit_now(self._exit_code)

    def _interrupt(self, error: BaseException) -> bool:
        """Have the main thread raise this, once. False if it already unwinds, or if the handlers are not ours."""
        numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) == self._handle]
        if self._interrupted or not numbers:
            return False
        self._interrupted, self._error = True, error
        self._own_signals += 1
        signal.pthread_kill(self._watched, numbers[0])  # a real signal: it also interrupts a system call that waits
        return True

    def _check_progress(self) -> None:
        last = self._last
        if last is None or last[2] == "loading":  # loading data has no time limit
            return
        when, step, stage = last
        may_wait = stage in _MAY_WAIT and self._place.size > 1
        if last is not self._seen:
            self._longest_wait_s = max(self._longest_wait_s, self._age_s)
        self._seen, self._age_s = last, (time.monotonic() - when) * may_wait
        if may_wait:
            self._check_stuck(when, step, stage)
        if time.monotonic() - when < self._timeout_s + _WAIT_LONGER_S * may_wait:
            return
        if may_wait:
            text = f"worker {self._rank} waited {self._timeout_s:g} s for another worker at step {step}, in {stage}"
        else:
            text = f"worker {self._rank} hung: no progress for {self._timeout_s:g} s at step {step}, in {stage}"
        stack = traceback.extract_stack(sys._current_frames().get(self._watched))
        failure = messages.Failure(
            *(self._rank, time.time(), 1, text, may_wait, may_wait),
            where=deepest_user_frame(stack),
            traceback="".join(stack.format()).rstrip(),
            unexplained=not deepest_user_frame(stack),
        )
        if not messages.write_failure(failure):
            warn(f"paceline: {failure.explain().describe(whole=True)}")
        if self._place.launcher == "alone" and not _ours:  # no other worker waits for it
            self._last = None  # say it once
            self._interrupt(PacelineError(text))
            return
        if may_wait:
            time.sleep(_WAIT_LONGER_S)  # let other waiting workers say so: the one that stays silent is the one that hangs
        exit_now(1)

    def _check_stuck(self, when: float, step: int, stage: str) -> None:
        """End a worker that was asked to stop while it waits for others. torchrun stops all workers when one fails, and a
        collective with that one never ends.

        Steps may be slow, so it gets at least twice the longest wait so far, up to the grace period.
        """
        limit = max(_STUCK_S, 2 * self._longest_wait_s)
        if time.monotonic() - max(when, self._asked) > limit:
            late = f"paceline: worker {self._rank} was asked to stop and is stuck at step {step}, in {stage}: ending it now"
            warn(late)
            exit_now(self._exit_code)

    def _leave_child(self) -> None:
        """In a forked child, such as one that the user's Dataset started: restore the handlers of SIGTERM and SIGHUP.

        Ctrl-C at a terminal reaches the child too. It keeps that handler, which only records the first Ctrl-C: the current step
        may need this child to finish. (Loader processes are forked before the watch starts and set their own handlers.)
        """
        self._last = None
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGHUP):
            if number in self._handlers:
                signal.signal(number, self._handlers[number])


_handling: list[Watch] = []
"""The watch that has the signal handlers, if any, for `_after_fork`."""


def _after_fork() -> None:
    for watch in _handling:
        watch._leave_child()


os.register_at_fork(after_in_child=_after_fork)
