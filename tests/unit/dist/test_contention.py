"""Threads that spin, and threads that wait for a core."""

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.dist import contention
from paceline.dist.contention import core_times

VERBS = ("train", "study")


@pytest.fixture
def no_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.setenv(name, "")  # so that monkeypatch also removes what the test sets
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_policy")
@pytest.mark.parametrize(("busy", "policy"), [(0.0, None), (1.2, "passive")])
def test_idle_threads_sleep_only_if_others_use_the_cores(
    busy: float, policy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contention, "_busy_cores", lambda: busy)
    monkeypatch.setattr(contention, "_trains_here", lambda verbs: False)
    note = contention.stop_spinning_if_shared(VERBS)
    assert os.environ.get("OMP_WAIT_POLICY") == policy
    assert ("other programs use 1.2 of these" in note) is bool(busy)


@pytest.mark.usefixtures("no_policy")
@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_a_policy_that_the_user_has_set_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contention, "_busy_cores", lambda: 2.0)
    monkeypatch.setenv(name, "17")
    assert contention.stop_spinning_if_shared(VERBS) == ""
    assert os.environ.get("OMP_WAIT_POLICY", "17") == "17"


@pytest.mark.usefixtures("no_policy")
@pytest.mark.parametrize(
    ("command", "cores", "seen"),
    [
        ("python -m paceline train my_task.py", {1}, True),
        ("/venv/bin/python /venv/bin/paceline study s.toml", {0, 1, 2}, True),
        ("/venv/bin/python /venv/bin/paceline study s.toml --slot 7", {0, 1}, False),
        ("/venv/bin/python /venv/bin/paceline board", {0, 1}, False),
        ("python -m paceline train my_task.py", {2, 3}, False),
        ("vim paceline.py train", {0, 1}, False),
        ("tmux new paceline train", {0, 1}, False),
        ("paceline train my_task.py", {0, 1}, True),
    ],
)
def test_another_run_counts_from_its_start(
    command: str, cores: set[int], seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid, words in {os.getpid(): "python -m paceline train x.py", 99_999_999: command}.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "cmdline").write_bytes("\0".join(words.split()).encode() + b"\0")
    monkeypatch.setattr(contention, "Path", lambda name: tmp_path)
    monkeypatch.setattr(contention, "_ancestors", lambda: {os.getpid()})
    monkeypatch.setattr(contention.os, "sched_getaffinity", lambda pid: cores if pid == 99_999_999 else {0, 1})
    monkeypatch.setattr(contention, "_busy_cores", lambda: 0.0)
    note = contention.stop_spinning_if_shared(VERBS)
    assert note == ("another run uses these 2 cores, so idle threads sleep (OMP_WAIT_POLICY=passive)" if seen else "")


def test_wrappers_of_a_run_are_not_other_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    parents = {os.getppid(): 1234, 1234: 1, 1: 0}
    stat = "{0} (a) b) S {1} 7 7"
    monkeypatch.setattr(
        contention, "Path", lambda name: SimpleNamespace(read_text=lambda: stat.format(0, parents[int(name.split("/")[2])]))
    )
    assert contention._ancestors() == {os.getpid(), *parents}


class Machine:
    """/proc/loadavg and /proc/stat of a machine with cores 0 and 1, of which others use `busy` cores; 100 ticks per second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, busy: float, loadavg: str, own: float = 0.0) -> None:
        self.now_s, self.own = 0.0, own
        monkeypatch.setattr(contention.os, "sched_getaffinity", lambda pid: {0, 1})
        monkeypatch.setattr(contention.os, "sysconf", lambda name: 100)
        monkeypatch.setattr(contention, "time", self)
        files = {
            "/proc/loadavg": lambda: loadavg,
            # The other cores of the machine are busy, too, and must not count.
            "/proc/stat": lambda: "\n".join(
                f"cpu{core} {int(100 * self.now_s * use)} 0 0 500 9 0 0 0 0 0" for core, use in enumerate([busy, own, 1, 1])
            ),
        }
        monkeypatch.setattr(contention, "Path", lambda name: SimpleNamespace(read_text=files[str(name)]))

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def perf_counter(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return self.now_s * self.own


@pytest.mark.parametrize(
    ("busy", "loadavg", "expected"),
    [
        (0.9, "1.00 0.5 0.1 1/300 77", 0.9),
        (0.9, "0.10 0.5 0.1 2/300 77", 0.9),  # it has just begun
        (0.9, "0.10 0.5 0.1 1/300 77", 0.0),  # nothing else runs now, nor did in the last minute
        (0.3, "1.00 0.5 0.1 3/300 77", 0.0),  # too little to matter
    ],
)
def test_cores_that_others_keep_busy(busy: float, loadavg: str, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, busy, loadavg)
    assert contention._busy_cores() == pytest.approx(expected, abs=0.1)


def test_our_own_work_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, busy=0.0, loadavg="1.00 0.5 0.1 1/300 77", own=1.0)
    assert contention._busy_cores() == 0.0


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel does not report how long threads wait: use Linux"
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
