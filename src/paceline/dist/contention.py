"""Cores that other programs use as well. Does not import torch.

An idle thread of OpenMP spins for a while before it sleeps. On cores of our own that is fastest: a small model on 8 cores
trained 1.5 and 2.7 times as fast in two trials. When two runs share their cores, spinning threads block threads that have work,
and both runs become several times slower. It is enough if the threads of one run sleep (`bench/shared_cores.py`).
"""

import os
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path


def stop_spinning_if_shared(verbs: Collection[str]) -> str:
    """Set OMP_WAIT_POLICY=passive if others use our cores, and return a note about it; "" if they do not.

    Call before torch is imported: OpenMP reads the policy when it loads. `verbs` are the commands of Paceline that train.
    Another run counts even if it has only just started. A policy that the user has set is kept.
    """
    if has_wait_policy():
        return ""
    if _trains_here(verbs):
        who = "another run uses"
    elif busy := _busy_cores():
        who = f"other programs use {busy:.1f} of"
    else:
        return ""
    os.environ["OMP_WAIT_POLICY"] = "passive"
    cores = len(os.sched_getaffinity(0))
    return f"{who} {'this core' if cores == 1 else f'these {cores} cores'}, so idle threads sleep (OMP_WAIT_POLICY=passive)"


def has_wait_policy() -> bool:
    """Whether the environment says how idle threads of OpenMP wait."""
    return any(name in os.environ for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"))


def _trains_here(verbs: Collection[str]) -> bool:
    """Whether another command of Paceline that trains may use some of our cores."""
    ours = _ancestors()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, AttributeError):  # it has just ended; or not Linux
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            slot = "--slot" in words  # the slots of a study share the cores
            if int(folder.name) in ours or slot or not _is_command(words, verbs):
                continue
            if os.sched_getaffinity(int(folder.name)) & os.sched_getaffinity(0):
                return True
    return False


def _is_command(words: Sequence[str], verbs: Collection[str]) -> bool:
    """`paceline train`, `python /bin/paceline train` or `python -m paceline train`; not these words in another command."""
    for number, (program, verb) in enumerate(pairwise(words)):
        if verb in verbs and os.path.basename(program) == "paceline" and (number < 2 or words[number - 1] == "-m"):
            return True
    return False


def _ancestors() -> set[int]:
    """This process and those that led to it: a wrapper such as `time` has the same words in its command."""
    found, pid = {os.getpid()}, os.getppid()
    while pid > 0 and pid not in found:
        found.add(pid)
        with suppress(OSError, ValueError, IndexError):
            stat = Path(f"/proc/{pid}/stat").read_text()
            pid = int(stat[stat.rindex(")") + 2 :].split()[1])
    return found


def _busy_cores(window_s: float = 0.15) -> float:
    """How many of our cores other programs keep busy; 0 if less than half a core. On an idle machine this takes no time."""
    try:
        load, _, _, running, *_ = Path("/proc/loadavg").read_text().split()
        if float(load) < 0.5 and int(running.partition("/")[0]) < 2:  # one is this process
            return 0.0
        then, began, own = _busy_ticks(), time.perf_counter(), time.process_time()
        time.sleep(window_s)
        elapsed_s, own_s = time.perf_counter() - began, time.process_time() - own
        busy = ((_busy_ticks() - then) / os.sysconf("SC_CLK_TCK") - own_s) / elapsed_s
    except (OSError, ValueError):  # not Linux
        return 0.0
    return busy if busy >= 0.5 else 0.0


def _busy_ticks() -> int:
    """Clock ticks that our cores have spent on any program since they started."""
    cores, ticks = {f"cpu{core}" for core in os.sched_getaffinity(0)}, 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *times = line.split()
        if name in cores:
            user, nice, system, _, _, irq, softirq, steal = map(int, times[:8])
            ticks += user + nice + system + irq + softirq + steal
    return ticks


def core_times() -> tuple[float, float]:
    """Seconds that the threads of this process ran, and seconds that they were ready but waited for a core.

    Linux only (psutil does not have it); zeros elsewhere.
    """
    ran = waited = 0
    with suppress(OSError):
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError, ValueError):  # the thread has just ended
                times = (task / "schedstat").read_text().split()
                ran, waited = ran + int(times[0]), waited + int(times[1])
    return ran / 1e9, waited / 1e9
