from pathlib import Path
from typing import Any

import pytest

from paceline.doctor.cores import Cores, judge_cores, judge_threads, keep_busy, read_quota, read_steal
from paceline.doctor.finding import Finding, merge


def cores(**change: Any) -> Cores:
    return Cores(**{"total": 4, "allowed": 4, "got": 4.0, **change})


def threads(found: Cores, count: int | None = 4, gpus: int = 0, **env: str) -> Finding:
    return merge("threads", judge_threads(found, count, gpus, env))


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, None),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
            },
            2.0,  # the tightest of all that are above
        ),
        ({"proc/self/cgroup": "0::/../../x\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1.0),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/7\n1:cpuset:/\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n0::/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "nonsense\n", "sys/fs/cgroup/cpu.max": "word\n"}, None),
    ],
)
def test_the_quota_of_a_container(files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    assert read_quota(write(tmp_path, files)) == quota


def test_stolen_time(tmp_path: Path) -> None:
    assert read_steal(tmp_path) is None
    assert read_steal(write(tmp_path, {"proc/stat": "cpu  10 0 20 60 0 0 0 10 0 0\ncpu0 1 2\n"})) == (10, 100)
    assert read_steal(write(tmp_path, {"proc/stat": "cpu  10 0 20\n"})) is None


def test_busy_threads_get_cpu_time() -> None:
    assert 0 < keep_busy(2, 0.05) <= 2.1


def test_cores_of_our_own() -> None:
    found = merge("cores", judge_cores(cores(load=0.1, steal=0.0, busiest=("x 1",))))
    assert (found.level, found.text, found.fix) == ("ok", "4 of 4 usable; 100% of their time is available now", "")


def test_cores_that_other_programs_use() -> None:
    found = merge("cores", judge_cores(cores(got=1.0, busiest=("python 7", "gcc 8"))))
    assert (found.level, found.text) == ("slow", "4 of 4 usable; only 25% of their time is available now")
    assert found.fix == "wait for or end the programs that use them (python 7, gcc 8)"


def test_a_quota_does_not_count_as_use_by_other_programs() -> None:
    limited = cores(total=64, allowed=64, quota=2.0, got=2.0)
    assert limited.usable == 2
    found = merge("cores", judge_cores(limited))
    assert (found.level, found.text) == (
        "ok",
        "2 of 64 usable, limited to 2 by the container; 100% of their time is available now",
    )
    said = threads(limited, 64)
    assert (said.level, said.fix) == ("slow", "export OMP_NUM_THREADS=2")
    assert cores(quota=0.25).usable == 1


def test_a_hypervisor_that_takes_time() -> None:
    found = merge("cores", judge_cores(cores(steal=0.2)))
    assert found.level == "note"
    assert found.text.startswith("the hypervisor gave 20% of this machine's time to other machines")


def test_threads_that_fit() -> None:
    assert threads(cores()) == Finding("ok", "threads", "torch uses 4 for 4 cores")
    assert threads(cores(), OMP_NUM_THREADS="4").text == "OMP_NUM_THREADS=4 for 4 cores"
    assert threads(cores(), 2, OMP_NUM_THREADS="2,1").level == "ok"
    assert threads(cores(), None).text == "unknown: torch did not start"


@pytest.mark.parametrize(
    ("env", "level", "text", "fix"),
    [
        ({"OMP_NUM_THREADS": "8"}, "slow", "OMP_NUM_THREADS is 8, but only 4 can run at once", "unset OMP_NUM_THREADS"),
        ({"MKL_NUM_THREADS": "9"}, "slow", "MKL_NUM_THREADS is 9, but only 4 can run at once", "unset MKL_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "all"}, "note", "OMP_NUM_THREADS is 'all', which is not a number of threads", "unset OMP_NUM"),
        ({"OMP_NUM_THREADS": "0"}, "note", "OMP_NUM_THREADS is '0', which is not", "unset OMP_NUM_THREADS"),
    ],
)
def test_variables_that_harm(env: dict[str, str], level: str, text: str, fix: str) -> None:
    found = threads(cores(), **env)
    assert (found.level, found.text[: len(text)], found.fix[: len(fix)]) == (level, text, fix)


def test_one_thread_on_many_cores() -> None:
    assert threads(cores(), 1).fix == "unset OMP_NUM_THREADS, or use --workers 4"
    assert threads(cores(), 1, OMP_NUM_THREADS="1").text == "one worker uses 1 of 4 cores; OMP_NUM_THREADS=1 for 4 cores"
    assert threads(cores(), 1, gpus=1).level == "ok"


def test_waiting_threads_matter_only_if_cores_are_shared() -> None:
    shared = cores(got=1.0)
    assert (threads(shared).level, threads(shared).fix) == ("note", "export OMP_WAIT_POLICY=passive")
    assert threads(shared, OMP_WAIT_POLICY="ACTIVE").level == "slow"
    assert threads(shared, OMP_WAIT_POLICY="PASSIVE").level == "ok"
    assert threads(cores(), OMP_WAIT_POLICY="active").level == "ok"
