from pathlib import Path
from typing import Any

import pytest

from paceline.doctor import disk as module
from paceline.doctor.clock import Clock, judge_clock, measure_clock, read_clocks
from paceline.doctor.disk import Disk, judge_disk
from paceline.doctor.finding import Finding, merge


def disk(**change: Any) -> Finding:
    good = {"folder": Path("/data/runs"), "free_bytes": 50 << 30, "system": "ext4", "bytes_per_s": 5e8}
    return merge("disk", judge_disk(Disk(**{**good, **change})))


def clock(**change: Any) -> Finding:
    good = {"read_s": 5e-8, "step_s": 4e-8, "jump_s": 0.001, "synchronized": True, "behind_s": -1e6}
    return merge("clock", judge_clock(Clock(**{**good, **change})))


def test_a_fast_disk() -> None:
    found = disk()
    assert (found.level, found.fix) == ("ok", "")
    assert found.text == "500 MB/s: a checkpoint of 100 MB takes 0.2 s; 50.0 GiB free in /data/runs"


def test_a_slow_disk_a_full_one_and_one_on_the_network() -> None:
    assert disk(bytes_per_s=1e7).level == "slow"
    assert "100 MB takes 10 s" in disk(bytes_per_s=1e7).text
    assert (disk(free_bytes=1 << 30).level, disk(free_bytes=1 << 30).fix) == ("wrong", "free some space")
    assert (disk(system="nfs4").level, disk(system="nfs4").fix) == ("note", "use a --runs-dir on a local disk")


def test_a_folder_that_cannot_be_written_to() -> None:
    found = disk(bytes_per_s=None, failure="Permission denied")
    assert (found.level, found.fix) == ("wrong", "use a --runs-dir that you can write to")
    assert found.text.startswith("cannot write to /data/runs (ext4): Permission denied")


def test_a_full_temporary_folder_is_shown_though_it_is_a_detail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FREE_BYTES", 1 << 80)
    assert len([each for each in judge_disk(Disk(folder=Path("/"), free_bytes=1)) if each.fix == "free some space"]) == 2


def test_a_good_clock() -> None:
    assert clock() == Finding("ok", "clock", "precise to 50 ns, synchronized")
    assert clock(synchronized=None).text == "precise to 50 ns"
    assert clock(synchronized=False).level == "ok"
    assert "matters only for several nodes" in clock(synchronized=False).text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"behind_s": 3 * 86_400}, "the date is wrong: paceline's own files are 3 days newer"),
        ({"jump_s": -3.2}, "the wall clock jumped by -3.2 s during this check"),
        ({"step_s": 0.015}, "its resolution is 15 ms, too coarse to time steps"),
        ({"read_s": 2e-6}, "reading it takes 2.0 us, which slows timed steps"),
    ],
)
def test_a_clock_that_makes_timings_wrong(change: dict[str, float], said: str) -> None:
    found = clock(**change)
    assert found.level == "note"
    assert found.text.startswith(said)


def test_the_real_clock_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, monotonic = read_clocks()
    found = measure_clock((wall - 5, monotonic))
    assert found.jump_s == pytest.approx(5, abs=0.5)
    assert 0 < found.step_s < 1e-3
    monkeypatch.setattr("paceline.doctor.clock.sys.platform", "darwin")
    assert measure_clock((wall, monotonic)).synchronized is None
