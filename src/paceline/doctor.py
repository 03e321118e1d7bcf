"""`paceline doctor`: check that this machine is ready to train. One line per check, with a fix if something is wrong."""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.data import fashion_mnist
from paceline.dist.place import core_count, read_place
from paceline.dist.process import python_command
from paceline.dist.world import backends, interfaces
from paceline.errors import PacelineError
from paceline.training.precision import TRIAL_THREADS, lists_amx, try_bf16

_FREE_BYTES = 2 * 1024**3
_ALL_REDUCE_S = 60


@dataclass(frozen=True)
class Finding:
    """One check's outcome: `ok`, `note` (works, but worth knowing) or `wrong`."""

    level: str
    what: str
    text: str
    fix: str = ""


def doctor() -> int:
    """Print the findings; return 1 if something is wrong that keeps runs from working."""
    wrong = 0
    for check in _CHECKS:
        try:
            for finding in check():
                fix = f"; fix: {finding.fix}" if finding.fix else ""
                print(f"{finding.level:<5} {finding.what:<12} {finding.text}{fix}", flush=True)
                wrong += finding.level == "wrong"
        except Exception as error:  # a check that fails is a finding too, not a traceback
            name = check.__name__.lstrip("_")
            print(f"wrong {name:<12} the check itself failed: {type(error).__name__}: {error}", flush=True)
            wrong += 1
    print("ready to train" if not wrong else f"{wrong} problem{'s' * (wrong > 1)} to fix")
    return 1 if wrong else 0


def _python() -> Iterator[Finding]:
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")


def _torch() -> Iterator[Finding]:
    major, minor = (int(number) for number in torch.__version__.split(".")[:2])
    old = (major, minor) < (2, 11)
    yield Finding("wrong" if old else "ok", "torch", torch.__version__, "pip install 'torch>=2.11'" if old else "")


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        if built and shutil.which("nvidia-smi"):
            yield Finding(
                "wrong", "gpu", f"torch has CUDA {built} but sees no GPU", "check nvidia-smi and CUDA_VISIBLE_DEVICES"
            )
        else:
            why = "torch is a CPU build" if not built else "no GPU found"
            yield Finding("note", "gpu", f"{why}: runs use CPU workers on gloo")
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
        yield Finding(
            "ok", "gpu", f"{index}: {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, CUDA {torch.version.cuda}"
        )


def _bf16() -> Iterator[Finding]:
    """What `--precision auto` would choose. Runs a new trial, not the cached one, in case the machine has changed."""
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            about = f"GPU {index}: compute capability {major}.{minor}"
            if major >= 8:
                yield Finding("ok", "bf16", f"works on {about}: --precision auto uses it")
            else:
                yield Finding("note", "bf16", f"{about} has no bf16 units: --precision auto uses fp32")
        return
    found, amx = try_bf16(TRIAL_THREADS, again=True), lists_amx()
    if found.crash:
        fix = "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 to use bf16 without AMX" if amx else ""
        yield Finding("note", "bf16", f"crashes: {found.describe()}; --precision auto uses fp32", fix)
    elif found.ratio is None:
        yield Finding("note", "bf16", f"unknown: {found.describe()}; --precision auto uses fp32")
    else:
        speed = "slower" if found.ratio > 1 else "works"
        why = "uses it" if found.pays and amx else "uses fp32" if amx else "uses fp32 on CPUs without AMX"
        yield Finding("ok", "bf16", f"{speed}: {found.describe()}; --precision auto {why}")


def _backends() -> Iterator[Finding]:
    here = backends()
    missing = [name for name in ("nccl", "gloo", "mpi") if name not in here]
    level = "ok" if "gloo" in here else "wrong"
    about = f" (not in this torch: {', '.join(missing)})" if missing else ""
    yield Finding(level, "backends", ", ".join(here) + about, "" if level == "ok" else "install a torch built with gloo")


def _cores() -> Iterator[Finding]:
    threads = os.environ.get("OMP_NUM_THREADS")
    said = f", OMP_NUM_THREADS={threads}" if threads else ""
    yield Finding("ok", "cores", f"{core_count()} usable of {os.cpu_count()}{said}")


def _launcher() -> Iterator[Finding]:
    place = read_place()
    tools = [
        name for name in ("torchrun", "srun", "mpirun") if shutil.which(name) or (Path(sys.executable).parent / name).exists()
    ]
    inside = "" if place.launcher == "alone" else f"; this is worker {place.rank} of {place.size} started by {place.launcher}"
    yield Finding("ok", "launchers", f"{', '.join(['paceline --workers', *tools])}{inside}")


def _network() -> Iterator[Finding]:
    found = interfaces()
    listed = ", ".join(f"{name} {address}" for name, address in found.items())
    chosen = os.environ.get("GLOO_SOCKET_IFNAME")
    if chosen and chosen not in found:
        yield Finding(
            "wrong", "network", f"{listed}; GLOO_SOCKET_IFNAME={chosen} is not one of them", "unset GLOO_SOCKET_IFNAME"
        )
    elif not any(address.startswith("127.") for address in found.values()):
        yield Finding("wrong", "network", f"no loopback interface ({listed})", "ip link set lo up")
    else:
        yield Finding("ok", "network", listed)


def _data() -> Iterator[Finding]:
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
            yield Finding("ok", "data", f"{name} in {folder}")


def _disk() -> Iterator[Finding]:
    for what, folder in (("disk", Path.cwd()), ("temp disk", Path(tempfile.gettempdir()))):
        free = shutil.disk_usage(folder).free
        low = free < _FREE_BYTES
        fix = "free some space, or use --runs-dir" if low else ""
        yield Finding("wrong" if low else "ok", what, f"{free / 2**30:.1f} GiB free in {folder}", fix)


def _all_reduce() -> Iterator[Finding]:
    """Add a tensor over gloo, in two real processes like those of a run."""
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        begin = time.perf_counter()
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"} if sys.platform.startswith("linux") else dict(os.environ)
        command = [
            *python_command(),
            "-c",
            "import sys; from paceline.doctor import add; add(*sys.argv[1:])",
            f"{folder}/store",
        ]
        pair = [
            subprocess.Popen([*command, str(rank)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        try:
            outputs = [process.communicate(timeout=_ALL_REDUCE_S) for process in pair]
        except subprocess.TimeoutExpired:
            text = f"2 workers did not connect within {_ALL_REDUCE_S} s"
            yield Finding("wrong", "all-reduce", text, "check that lo is up and that no firewall blocks it")
            return
        finally:
            for process in pair:
                process.kill()
                process.wait()
        if [out.strip() for out, _ in outputs] != ["3.0", "3.0"]:
            last = (outputs[0][1] or outputs[1][1]).strip().splitlines()
            yield Finding("wrong", "all-reduce", f"2 workers failed: {last[-1] if last else outputs}", "see the checks above")
            return
        yield Finding("ok", "all-reduce", f"2 workers over gloo, {time.perf_counter() - begin:.1f} s including start-up")


def add(store: str, rank: str) -> None:
    """Runs in each of the two workers: all-reduce 1 + 2."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    value = torch.full((1000,), float(rank) + 1)
    dist.all_reduce(value)
    print(value.mean().item(), flush=True)
    dist.destroy_process_group()


_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python,
    _torch,
    _gpus,
    _bf16,
    _backends,
    _cores,
    _launcher,
    _network,
    _data,
    _disk,
    _all_reduce,
)
