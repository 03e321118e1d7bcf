"""Whether the clocks can be trusted. Timings use the monotonic clock. Records, and nodes that meet, use the wall clock."""

import ctypes
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.doctor.finding import Finding

_UNSYNCHRONIZED = 5  # TIME_ERROR of adjtimex(2)
_COARSE_S, _COSTLY_S, _JUMP_S = 1e-4, 1e-6, 0.1


@dataclass(frozen=True, kw_only=True)
class Clock:
    """What the clocks of this machine do."""

    read_s: float
    """What it costs to read the clock that timings use."""
    step_s: float
    """The smallest difference between two readings."""
    jump_s: float
    """How far the wall clock moved against the monotonic clock while the doctor ran."""
    synchronized: bool | None
    """Whether the kernel's clock is kept by NTP; None: unknown."""
    behind_s: float
    """How far the wall clock is behind files that exist already; at most 0 if it is right."""


def read_clocks() -> tuple[float, float]:
    """The wall clock and the monotonic clock, to compare later."""
    return time.time(), time.monotonic()


def measure_clock(start: tuple[float, float]) -> Clock:
    """Read the clocks a few times. `start` is what `read_clocks` returned when the doctor began."""
    count = 2000
    readings = [time.perf_counter() for _ in range(count)]
    steps = [after - before for before, after in itertools.pairwise(readings) if after > before]
    wall, monotonic = read_clocks()
    made = Path(__file__).stat().st_mtime
    return Clock(
        read_s=(readings[-1] - readings[0]) / count,
        step_s=min(steps, default=1.0),
        jump_s=(wall - start[0]) - (monotonic - start[1]),
        synchronized=_is_synchronized(),
        behind_s=made - wall,
    )


def judge_clock(clock: Clock) -> Iterator[Finding]:
    """Clocks that make timings or records wrong."""
    if clock.behind_s > 86_400:
        text = f"the date is wrong: paceline's own files are {clock.behind_s / 86_400:,.0f} days newer"
        yield Finding("note", "clock", text, "set the clock: downloads and the order of records depend on it")
    if abs(clock.jump_s) > _JUMP_S:
        text = f"the wall clock jumped by {clock.jump_s:+.1f} s during this check"
        yield Finding("note", "clock", text, "let only one service set the clock")
    if clock.step_s > _COARSE_S:
        yield Finding("note", "clock", f"its resolution is {1e3 * clock.step_s:.2g} ms, too coarse to time steps")
    if clock.read_s > _COSTLY_S:
        text = f"reading it takes {1e6 * clock.read_s:.1f} us, which slows timed steps"
        yield Finding("note", "clock", text, "choose the clock source tsc or kvm-clock")
    precise = f"precise to {1e9 * max(clock.step_s, clock.read_s):,.0f} ns"
    synchronized = {True: ", synchronized", False: "; not synchronized, which matters only for several nodes", None: ""}
    yield Finding("ok", "clock", precise + synchronized[clock.synchronized])


def _is_synchronized() -> bool | None:
    if not sys.platform.startswith("linux"):
        return None
    with suppress(OSError, AttributeError):
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # all zeros: only reads; timex has 208 bytes
        return None if state < 0 else state != _UNSYNCHRONIZED
    return None
