"""A test in this folder that starts a process fails: it belongs in tests/system."""

import platform
import sys
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

_EVENTS = {"subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"}
_started: list[str] | None = None
"""The processes that the current test tried to start; None outside a test of this folder."""


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if _started is None or event not in _EVENTS:
        return
    if event == "subprocess.Popen" and args[1][0] == "git":
        raise FileNotFoundError("git")  # a record asks for the revision, and is happy without it
    _started.append(f"{event} {args[1] if event == 'subprocess.Popen' else ''}")
    pytest.fail(f"tests/unit starts no process: move this test to tests/system ({_started[-1]})")


def _start(process: BaseProcess) -> None:
    _refuse("os.spawn", ())  # Python audits only multiprocessing's fork, not its spawn and forkserver
    _multiprocessing_start(process)


platform.processor()  # runs `uname -p` once
sys.addaudithook(_refuse)
_multiprocessing_start, BaseProcess.start = BaseProcess.start, _start  # type: ignore[method-assign]


def pytest_sessionstart() -> None:
    """Try bf16 and fp16 on this CPU once, in child processes. Runs then find the answers in the cache."""
    from paceline.training.precision import TRIAL_THREADS, try_bf16, try_fp16

    try_bf16(TRIAL_THREADS)
    try_fp16(TRIAL_THREADS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Fail a test even if what it tests survived the refusal, or met it in a thread."""
    result = yield
    assert not _started, f"tests/unit starts no process: move this test to tests/system ({_started})"
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _started
    if Path(__file__).parent in item.path.parents:  # pytest calls this hook for tests of other folders, too
        _started = []
    try:
        return (yield)
    finally:
        _started = None
