"""Ctrl-C during a cleanup."""

import signal

import pytest

from paceline.dist.process import delay_interrupts


def test_a_cleanup_finishes_before_an_interrupt_is_raised() -> None:
    handler, done = signal.getsignal(signal.SIGINT), []

    def clean(raise_later: bool, error: Exception | None = None) -> None:
        with delay_interrupts(raise_later=raise_later):
            signal.raise_signal(signal.SIGINT)
            done.append(raise_later)
            if error is not None:
                raise error

    with pytest.raises(KeyboardInterrupt):
        clean(raise_later=True)
    with pytest.raises(ValueError, match="of the cleanup"):
        clean(raise_later=True, error=ValueError("of the cleanup"))
    clean(raise_later=False)
    assert done == [True, True, False]
    assert signal.getsignal(signal.SIGINT) is handler


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with delay_interrupts(raise_later=True):
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
