"""The cores that runs really get, and whether the thread settings fit them.

The number of cores says little: a container may have a quota, and other programs may use the cores. So all usable cores are
kept busy for a moment, and the CPU time that this gets is compared with the time that passed.
"""

import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.dist.place import core_count
from paceline.doctor.finding import Finding

_BUSY_S = 0.3
_MOST_THREADS = 256
_SHARED = 0.8
"""If a run gets less than this share of its cores, other programs slow it down."""

_STOLEN = 0.05
"""The share of the time that a hypervisor may give to other machines without a note."""


@dataclass(frozen=True, kw_only=True)
class Cores:
    """What this machine gives a run."""

    total: int
    """Cores of the machine."""
    allowed: int
    """Cores that this process may use (affinity)."""
    quota: float | None = None
    """The CPU time per second that its cgroup allows; None: unlimited."""
    got: float
    """The CPU time per second that busy threads got, one on each allowed core."""
    steal: float | None = None
    """The share of the machine's time that its hypervisor gave to others meanwhile; None: unknown."""
    load: float | None = None
    """The load average of the last minute."""
    busiest: tuple[str, ...] = ()
    """Other processes that used the most CPU time meanwhile."""

    @property
    def usable(self) -> int:
        """The whole cores that a run can count on if no other program runs."""
        return max(1, self.allowed if self.quota is None else min(self.allowed, round(self.quota)))

    @property
    def share(self) -> float:
        """What a run gets of what it is allowed."""
        return self.got / min(self.allowed, self.quota or math.inf)


def measure_cores() -> Cores:
    """Keep all allowed cores busy for a moment, and read the limits."""
    allowed = core_count()
    before, stolen = _cpu_times(), read_steal()
    got = keep_busy(min(allowed, _MOST_THREADS)) * max(1.0, allowed / _MOST_THREADS)
    after, stolen_after = _cpu_times(), read_steal()
    steal = None
    if stolen and stolen_after and stolen_after[1] > stolen[1]:
        steal = (stolen_after[0] - stolen[0]) / (stolen_after[1] - stolen[1])
    load = None
    with suppress(OSError, AttributeError):
        load = os.getloadavg()[0]
    return Cores(
        total=os.cpu_count() or allowed,
        allowed=allowed,
        quota=read_quota(),
        got=got,
        steal=steal,
        load=load,
        busiest=_busiest(before, after),
    )


def keep_busy(threads: int, seconds: float = _BUSY_S) -> float:
    """The CPU time per second that this number of busy threads get in total. Hashing does not hold Python's lock."""
    chunk, spent, start = bytes(1 << 22), [0.0] * threads, threading.Barrier(threads + 1)

    def work(number: int) -> None:
        start.wait()
        end, begin = time.perf_counter() + seconds, time.thread_time()
        while time.perf_counter() < end:
            hashlib.sha256(chunk)
        spent[number] = time.thread_time() - begin

    workers = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(threads)]
    for worker in workers:
        worker.start()
    start.wait()
    begin = time.perf_counter()
    for worker in workers:
        worker.join()
    return sum(spent) / (time.perf_counter() - begin)


def read_quota(root: Path = Path("/")) -> float | None:
    """The cores that this process's cgroup and those above it allow, v1 or v2; None: unlimited, or not Linux."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    found: list[float] = []
    mounts = root / "sys/fs/cgroup"
    for each in lines:
        _, controllers, path = [*each.split(":", 2), "", ""][:3]
        if not controllers:
            found += _walk([mounts, mounts / "unified"], path, _quota_v2)
        elif "cpu" in controllers.split(","):
            found += _walk([mounts / controllers, mounts / "cpu"], path, _quota_v1)
    return min(found, default=None)


def read_steal(root: Path = Path("/")) -> tuple[float, float] | None:
    """(stolen, total) time of all cores since the machine started, in ticks; None if unknown."""
    try:
        times = [float(each) for each in (root / "proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    return (times[7], sum(times)) if len(times) == 8 else None


def judge_cores(cores: Cores) -> Iterator[Finding]:
    """How many cores runs have, and how much of them."""
    limit = "" if cores.quota is None else f", limited to {cores.quota:.3g} by the container"
    have = f"{cores.usable} of {cores.total} usable{limit}"
    got = f"{min(1.0, cores.share):.0%} of their time is available now"
    if cores.share >= _SHARED:
        yield Finding("ok", "cores", f"{have}; {got}")
    else:
        others = f" ({', '.join(cores.busiest)})" if cores.busiest else ""
        yield Finding("slow", "cores", f"{have}; only {got}", f"wait for or end the programs that use them{others}")
    if cores.steal is not None:
        text = f"the hypervisor gave {cores.steal:.0%} of this machine's time to other machines"
        if cores.steal > _STOLEN:
            yield Finding("note", "cores", text, "use a virtual machine with cores of its own")
        else:
            yield Finding("ok", "cores", text, detail=True)
    if cores.load is not None:
        yield Finding("ok", "cores", f"load average {cores.load:.1f}", detail=True)


def judge_threads(cores: Cores, threads: int | None, gpus: int, env: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the variables that set threads fit the cores. `threads` are those that torch uses, if known."""
    known = "" if threads is None else f"torch uses {threads} for {cores.usable} core{'s' * (cores.usable > 1)}"
    fine = Finding("ok", "threads", known or "unknown: torch did not start")
    found = list(_judge_variables(cores, env))
    if all(each.level == "ok" for each in found) and threads is not None:
        if threads > cores.usable:
            fix = f"export OMP_NUM_THREADS={cores.usable}"
            found = [Finding("slow", "threads", f"torch uses {threads}, but only {cores.usable} can run at once", fix)]
        elif threads == 1 and cores.usable > 1 and not gpus:
            fix = f"unset OMP_NUM_THREADS, or use --workers {cores.usable}"
            found.append(Finding("note", "threads", f"one worker uses 1 of {cores.usable} cores", fix))
    yield from found or [fine]
    yield from judge_waiting(cores, env)


def judge_waiting(cores: Cores, env: Mapping[str, str]) -> Iterator[Finding]:
    """Whether OMP_WAIT_POLICY matters: threads that spin while they wait make a run several times slower on shared cores."""
    policy = env.get("OMP_WAIT_POLICY", "").lower()
    if policy == "passive":
        yield Finding("ok", "threads", "waiting threads sleep (OMP_WAIT_POLICY=passive)", detail=True)
    elif cores.share < _SHARED and policy:
        text = f"waiting threads keep the cores busy (OMP_WAIT_POLICY={policy}), but other programs use them too"
        yield Finding("slow", "threads", text, "export OMP_WAIT_POLICY=passive")
    elif cores.share < _SHARED:
        text = "other programs use the cores: Paceline's commands let idle threads sleep, but your own scripts may not"
        yield Finding("note", "threads", text, "export OMP_WAIT_POLICY=passive")
    else:
        text = f"OMP_WAIT_POLICY is {policy or 'not set'}: fine on cores that no other program uses"
        yield Finding("ok", "threads", text, detail=True)


def _judge_variables(cores: Cores, env: Mapping[str, str]) -> Iterator[Finding]:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = env.get(name)
        if value is None:
            continue
        first = value.split(",")[0].strip()
        if not first.isdigit() or int(first) < 1:
            yield Finding("note", "threads", f"{name} is {value!r}, which is not a number of threads", f"unset {name}")
        elif int(first) > cores.usable:
            text = f"{name} is {value}, but only {cores.usable} can run at once"
            yield Finding("slow", "threads", text, f"unset {name}")
        else:
            yield Finding("ok", "threads", f"{name}={value} for {cores.usable} core{'s' * (cores.usable > 1)}")


def _walk(mounts: Sequence[Path], path: str, read: Callable[[Path], list[float]]) -> list[float]:
    """The limits of a cgroup and all above it. In a container, its path may not exist below the mount."""
    found = []
    for mount in mounts:
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for length in range(len(parts) + 1):
            with suppress(OSError, ValueError, IndexError, ZeroDivisionError):
                found += read(mount.joinpath(*parts[:length]))
    return found


def _quota_v2(folder: Path) -> list[float]:
    quota, period = (folder / "cpu.max").read_text().split()[:2]
    return [] if quota == "max" else [float(quota) / float(period)]


def _quota_v1(folder: Path) -> list[float]:
    quota, period = (float((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    return [] if quota <= 0 else [quota / period]


def _cpu_times() -> dict[tuple[int, str], float]:
    """The CPU time of every process that we can see, by number and name."""
    found: dict[tuple[int, str], float] = {}
    with suppress(Exception):  # an error in psutil is not fatal: the list only makes the advice more helpful
        import psutil

        for process in psutil.process_iter(["pid", "name", "cpu_times"]):
            times = process.info["cpu_times"]
            if times is not None and process.info["pid"] != os.getpid():
                found[process.info["pid"], str(process.info["name"])] = times.user + times.system
    return found


def _busiest(before: Mapping[tuple[int, str], float], after: Mapping[tuple[int, str], float]) -> tuple[str, ...]:
    used = {each: after[each] - before[each] for each in after if each in before and after[each] - before[each] >= _BUSY_S / 10}
    most = sorted((each for each in used if each[0] > 1), key=lambda each: -used[each])[:3]
    return tuple(f"{name} {pid}" for pid, name in most)
