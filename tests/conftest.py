"""What every test gets: no leaks allowed, and no skip in CI that nobody expected."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.processes import children

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # tests share the cores, with each other and with other programs
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")  # without AMX, --precision auto is fp32 on every CPU

# A background job starts with SIGINT ignored, and so would every process that a test starts and then interrupts. (Paceline
# keeps it ignored: Ctrl-C in the foreground must not end a background job. The tests of that ignore it themselves.)
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the same for nohup

_NEVER_IN_CI = ("gpu",)  # no CI machine has one; `make test ARGS=tests/gpu` runs these where there is
_unexpected: list[str] = []


@pytest.fixture(scope="session")
def kept_processes() -> set[int]:
    """Processes that serve a whole session, such as a browser: they and those below them are no leak."""
    return set()


@pytest.fixture(autouse=True)
def no_leaks(kept_processes: set[int]) -> Iterator[None]:
    """A test leaves no process, thread or environment variable behind."""
    environ, threads = dict(os.environ), set(threading.enumerate())
    yield
    left = children(os.getpid())
    if left and kept_processes:  # a browser's own come and go: what ended while we looked is no leak either
        kept = kept_processes.union(*(children(pid) for pid in kept_processes))
        left = {pid: command for pid, command in children(os.getpid()).items() if pid in left and pid not in kept}
    assert not left, f"processes left behind: {left}"
    new = {thread.name for thread in threading.enumerate() if thread not in threads and not thread.daemon}
    assert not new, f"threads left behind: {new}"
    changed = {name for name in environ.keys() | os.environ.keys() if environ.get(name) != os.environ.get(name)}
    os.environ.clear()
    os.environ.update(environ)
    changed -= {"PYTEST_CURRENT_TEST", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}  # set by pytest, by joining a world ...
    changed -= {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_PTXAS_PATH"}  # ... and by torch's compiler
    assert not changed, f"environment variables changed: {changed}"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty folder; records go to its `runs/`."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail") and not any(need in report.keywords for need in _NEVER_IN_CI):
        _unexpected.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if os.environ.get("CI") and _unexpected and exitstatus == 0:
        print("\nskipped in CI, where everything these need is installed:", *_unexpected, sep="\n  ")
        session.exitstatus = 1
