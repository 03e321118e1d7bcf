"""Threads that spin, and threads that wait for a core."""

import os
import threading
import time
from pathlib import Path

import pytest

from paceline.dist.process import core_times, limit_spinning


@pytest.fixture
def no_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.setenv(name, "")  # so that monkeypatch also removes what the test sets
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_policy")
def test_idle_threads_spin_briefly() -> None:
    limit_spinning()
    assert 0 < int(os.environ["GOMP_SPINCOUNT"]) <= 10_000


@pytest.mark.usefixtures("no_policy")
def test_a_policy_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    limit_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel does not tell how long threads wait: use Linux"
)
def test_time_on_a_core_is_counted_over_all_threads() -> None:
    worked, counted = threading.Barrier(3), threading.Event()

    def work() -> None:
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        worked.wait()
        counted.wait()

    before = core_times()
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    worked.wait()
    after = core_times()
    counted.set()
    for thread in threads:
        thread.join()
    assert after[0] - before[0] > 0.09
    assert after[1] >= before[1]
