"""`paceline doctor`: whether this machine will train well, in ten lines, and what to do if not.

    finding.py     one fact, its level and its fix; merged into one line per subject
    cores.py       shared cores, quotas, thread settings        disk.py    speed of checkpoints
    probe.py       torch, all-reduce, loaders and GPUs, tried in child processes
    network.py     what the probe and the sockets say           clock.py   whether timings can be trusted

A check measures instead of trusting what the machine says about itself. What may crash or hang runs in a child process with a
time limit. Cores and disk come first, while nothing of ours runs.
"""

import functools
import os
import platform
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.data import fashion_mnist
from paceline.dist.place import read_place
from paceline.doctor.clock import judge_clock, measure_clock, read_clocks
from paceline.doctor.cores import Cores, judge_cores, judge_threads, measure_cores
from paceline.doctor.disk import Disk, judge_disk, measure_disk
from paceline.doctor.finding import Finding, line, merge, verdict
from paceline.doctor.network import judge_loader, judge_network, look_at_network
from paceline.doctor.probe import Probe, run_probe
from paceline.errors import PacelineError
from paceline.output import is_terminal

_OLDEST_TORCH = (2, 11)
_SILENT_S = 2.0
Check = Callable[[], Iterator[Finding]]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was measured before the first line is printed."""

    cores: Cores
    disk: Disk
    probe: Probe
    env: Mapping[str, str]

    @property
    def threads(self) -> int | None:
        """The threads that torch uses; None: unknown."""
        return self.probe.stages.get("torch", {}).get("threads")

    @property
    def gpus(self) -> list[Mapping[str, Any]]:
        """The GPUs that torch can use."""
        return list(self.probe.stages.get("gpus", {}).get("gpus", ()))


def doctor(*, verbose: bool = False, runs_dir: str = "runs") -> int:
    """Print one line per subject and the verdict. Returns 1 if something keeps runs from working."""
    return report(make_checks(Path(runs_dir)), verbose=verbose)


def report(checks: Mapping[str, Check], *, verbose: bool = False) -> int:
    """Run the checks in their order. A check that fails is a finding too, not a traceback."""
    merged = []
    for what, check in checks.items():
        found: list[Finding] = []
        with _progress(f"checking {what} ..."):
            try:
                for each in check():
                    found.append(each)  # noqa: PERF402  # what was found before an error stays
            except PacelineError as error:
                found.append(Finding("wrong", what, str(error)))
            except Exception as error:
                found.append(Finding("wrong", what, f"the check itself failed: {type(error).__name__}: {error}"))
        merged.append(merge(what, found))
        for shown in found if verbose else merged[-1:]:
            print(line(shown), flush=True)
    print(verdict(merged), flush=True)
    return 1 if any(each.level == "wrong" for each in merged) else 0


def make_checks(runs_dir: Path) -> dict[str, Check]:
    """The ten subjects. The first one measures everything, in the order in which measurements disturb each other least."""
    start = read_clocks()

    @functools.cache
    def facts() -> Facts:
        return Facts(cores=measure_cores(), disk=measure_disk(runs_dir), probe=run_probe(), env=os.environ)

    return {
        "software": lambda: judge_software(facts()),
        "device": lambda: judge_device(facts()),
        "precision": lambda: judge_precision(facts()),
        "cores": lambda: judge_cores(facts().cores),
        "threads": lambda: judge_threads(facts().cores, facts().threads, len(facts().gpus), facts().env),
        "loader": lambda: judge_loader(facts().probe),
        "network": lambda: _judge_network(facts()),
        "disk": lambda: judge_disk(facts().disk),
        "data": judge_data,
        "clock": lambda: judge_clock(measure_clock(start)),
    }


def judge_software(facts: Facts) -> Iterator[Finding]:
    """Python, torch, its backends, and what can start workers."""
    yield Finding("ok", "software", f"python {platform.python_version()} on {platform.system()}")
    yield Finding("ok", "software", f"{platform.platform()}, {sys.executable}", detail=True)
    torch = facts.probe.stages.get("torch")
    if torch is None:
        yield Finding("wrong", "software", f"torch does not work: {facts.probe.why('torch')}", "pip install 'torch>=2.11'")
        return
    old = tuple(int(number) for number in torch["version"].split(".")[:2]) < _OLDEST_TORCH
    fix = "pip install 'torch>=2.11'" if old else ""
    yield Finding("wrong" if old else "ok", "software", f"torch {torch['version']}{' is too old' if old else ''}", fix)
    gloo = "gloo" in torch["backends"]
    fix = "" if gloo else "install a torch built with gloo"
    yield Finding("ok" if gloo else "wrong", "software", f"backends {', '.join(torch['backends']) or 'none'}", fix)
    place, beside = read_place(facts.env), Path(sys.executable).parent
    tools = [name for name in ("torchrun", "srun", "mpirun") if shutil.which(name) or (beside / name).exists()]
    yield Finding("ok", "software", f"launchers {', '.join(['paceline --workers', *tools])}", detail=True)
    if place.launcher != "alone":
        yield Finding("note", "software", f"this is worker {place.rank} of {place.size} started by {place.launcher}")


def judge_device(facts: Facts) -> Iterator[Finding]:
    """The GPUs, or why there are none."""
    built = facts.probe.stages.get("torch", {}).get("cuda")
    if "gpus" not in facts.probe.stages:
        tried = facts.probe.was_tried("gpus")
        yield Finding("wrong" if tried else "note", "device", f"GPUs {'do not work: ' * tried}{facts.probe.why('gpus')}")
        return
    if not facts.gpus:
        if built and _has_driver():
            fix = "check nvidia-smi and CUDA_VISIBLE_DEVICES"
            yield Finding("wrong", "device", f"torch has CUDA {built} but sees no GPU", fix)
        else:
            why = "no GPU was found" if built else "torch is a CPU build"
            yield Finding("note", "device", f"{why}: runs use CPU workers over gloo")
        if not built and _has_driver():
            text = "there is an NVIDIA driver, but torch cannot use it"
            yield Finding("slow", "device", text, "install a torch build with CUDA")
        return
    names = [gpu["name"] for gpu in facts.gpus]
    counts = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    least = min(facts.gpus, key=lambda gpu: gpu["free"] / gpu["total"])
    free = f"{least['free'] / 2**30:.0f} of {least['total'] / 2**30:.0f} GiB free"
    yield Finding("ok", "device", f"{counts}, {free}{' on the fullest' if len(names) > 1 else ''}, CUDA {built}")
    if least["free"] < 0.8 * least["total"]:
        text = f"another program uses the memory of GPU {facts.gpus.index(least)}"
        yield Finding("note", "device", text, "nvidia-smi shows which; end it, or set CUDA_VISIBLE_DEVICES")
    for index, gpu in enumerate(facts.gpus):
        text = f"GPU {index}: {gpu['name']}, {gpu['free'] / 2**30:.1f} of {gpu['total'] / 2**30:.1f} GiB free"
        yield Finding("ok", "device", text, detail=True)


def judge_precision(facts: Facts) -> Iterator[Finding]:
    """What `--precision auto` would choose, from a new trial: the machine may have changed since the cached one."""
    if facts.gpus:
        old = [index for index, gpu in enumerate(facts.gpus) if tuple(gpu["capability"]) < (8, 0)]
        times = max(gpu["fp32_s"] / gpu["bf16_s"] for gpu in facts.gpus)
        if old:
            which = f"GPUs {', '.join(map(str, old))} have" if len(old) > 1 else f"GPU {old[0]} has"
            instead = "fp16" if all(tuple(gpu["capability"]) >= (7, 0) for gpu in facts.gpus) else "fp32"
            text = f"{which} no bf16 units: --precision auto uses {instead}"
            yield Finding("note", "precision", text)
        else:
            text = f"bf16, {times:.1f} times as fast as fp32 in matrix products: --precision auto uses it"
            yield Finding("ok", "precision", text)
        return
    if "torch" not in facts.probe.stages:
        yield Finding("note", "precision", "not tried, because the check of torch failed")
        return
    from paceline.training.precision import TRIAL_THREADS, lists_amx, try_bf16

    found, tried = try_bf16(TRIAL_THREADS, again=True), lists_amx()
    if found.crash:
        fix = "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 to use bf16 without AMX" if tried else ""
        yield Finding("note", "precision", f"fp32: {found.describe()}", fix)
    elif found.ratio is None:
        yield Finding("note", "precision", f"fp32, because {found.describe()}")
    elif tried and found.pays:
        yield Finding("ok", "precision", f"bf16: {found.describe()}")
    elif found.pays:  # without AMX, `auto` does not try: most such CPUs emulate bf16
        yield Finding("note", "precision", f"fp32, but {found.describe()}", "try --precision bf16")
    else:
        yield Finding("ok", "precision", f"fp32: {found.describe()}")


def judge_data() -> Iterator[Finding]:
    """The built-in data sets."""
    for name in fashion_mnist.SOURCES:
        folder = fashion_mnist.find(name)
        if folder is None:
            yield Finding("note", "data", f"{name} was not found", f"paceline data fetch {name}")
            continue
        try:
            fashion_mnist.load(name)
        except PacelineError as error:
            yield Finding("wrong", "data", f"{name}: {error}", f"paceline data fetch {name}")
        else:
            yield Finding("ok", "data", name)
            yield Finding("ok", "data", f"{name} in {folder}", detail=True)


def _judge_network(facts: Facts) -> Iterator[Finding]:
    if "torch" not in facts.probe.stages:
        return iter([Finding("note", "network", facts.probe.why("all-reduce"))])
    from paceline.dist.world import interfaces  # imports torch

    return judge_network(look_at_network(interfaces(), facts.env), facts.probe, facts.env)


def _has_driver(root: Path = Path("/")) -> bool:
    return (root / "proc/driver/nvidia/gpus").is_dir() or shutil.which("nvidia-smi") is not None


@contextmanager
def _progress(text: str) -> Iterator[None]:
    """On a terminal, show what is being checked if it takes longer than two seconds, and remove that line afterwards."""
    if not is_terminal(sys.stderr):
        yield
        return
    said = threading.Event()

    def say() -> None:
        said.set()
        print(text, end="", file=sys.stderr, flush=True)

    timer = threading.Timer(_SILENT_S, say)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        if said.is_set():
            print("\r\033[K", end="", file=sys.stderr, flush=True)
