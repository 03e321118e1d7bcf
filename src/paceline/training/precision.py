"""Choose fp32, bf16 or fp16 for a run. On a CPU, a trial in a child process decides.

A GPU's compute capability says what it is made for: bf16 from 8.0 on, fp16 from 7.0 on (V100, T4). On a CPU, fp16 is only for
those who ask for it.

A CPU's flags do not say whether bf16 works: some virtual machines list `amx_bf16`, but oneDNN's kernels die of SIGILL. So a
child process runs a convolution and matrix products, forward and backward, under autocast, and times bf16 against fp32. The
result is kept in the cache folder, per machine, torch version, environment variables and number of threads.
"""

import functools
import hashlib
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from paceline.config import Config
from paceline.dist.process import signal_name
from paceline.dist.world import World
from paceline.errors import UsageError
from paceline.files import read_json, write_json
from paceline.output import stages

_CLEARLY_FASTER = 0.9
TRIAL_THREADS = 1
"""Threads in a trial, however many the run uses: the answer must not depend on the number of workers."""

TRIAL_S = 60.0
"""The longest a trial may take. Most of its time goes into importing torch."""

_FAULTS = ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT", "SIGTRAP", "SIGSYS")
"""Signals that a broken kernel ends with. Others, such as SIGKILL, come from outside and say nothing about bf16."""

_SPEED_VARIABLES = ("ATEN_", "DNNL_", "MKL_", "ONEDNN_")  # prefixes of variables that choose torch's kernels
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMI", "SLURM_", "PACELINE_")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a trial of bf16 on this CPU found."""

    ratio: float | None = None
    """Time of a bf16 step over time of an fp32 step; None if the trial did not finish."""
    crash: str = ""
    """The signal that ended the trial, if bf16 is to blame."""
    failure: str = ""
    """Any other reason why there is no answer."""

    @property
    def pays(self) -> bool:
        """Whether bf16 works and is clearly faster than fp32: a moment of load must not decide."""
        return self.ratio is not None and self.ratio <= _CLEARLY_FASTER

    def describe(self, kind: str = "bf16") -> str:
        """The result in words, such as `a trial of bf16 on this CPU was killed by SIGILL`."""
        if self.ratio is not None:
            found = f"took {self.ratio:.2g} times as long as fp32"
        else:
            found = f"was killed by {self.crash}" if self.crash else self.failure
        return f"a trial of {kind} on this CPU {found}"


Try = Callable[[int, float], Trial]
Precision = Literal["fp32", "bf16", "fp16"]


def choose_precision(config: Config, world: World, try_it: Try | None = None) -> tuple[Precision, tuple[str, ...]]:
    """The precision that `--precision` means here, and a note if a trial advises against it.

    `auto` means bf16 if it is not slower on any worker's device, else fp16 if every worker has a GPU made for it. Raises a
    UsageError for bf16 or fp16 on a CPU where it crashes. Collective: call on every rank; all get the same answer.
    """
    if config.precision == "fp16" and config.local_steps:
        raise UsageError(f"--precision fp16 {_LOCAL}: use --precision fp32, or bf16")
    if config.precision == "fp32":
        return "fp32", ()
    looks = world.gather(_look(config, world, try_it or (try_fp16 if config.precision == "fp16" else try_bf16)))
    found = world.broadcast(_decide(config, looks) if looks else None)
    if found["error"]:
        raise UsageError(found["error"])
    return found["chosen"], tuple(found["notes"])


def try_fp16(threads: int, limit_s: float = TRIAL_S) -> Trial:
    """Try fp16 on this CPU, or return what an earlier trial found."""
    return try_bf16(threads, limit_s, code=_CODE.replace("torch.bfloat16", "torch.float16"))


def try_bf16(threads: int, limit_s: float = TRIAL_S, *, code: str = "", again: bool = False) -> Trial:
    """Try bf16 on this CPU, or return what an earlier trial found; `again` forces a new trial. A child process runs `code`."""
    code = code or _CODE
    identity = _identify(threads, code)
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]
    if not again and (known := _known.get(name) or _read_cache(name)):
        _known[name] = known
        return known
    stages.enter("trying 16-bit numbers")
    found = _known[name] = run_trial(threads, code, limit_s)
    if not found.failure:  # next time a busy machine, or one without free memory, may have an answer
        _write_cache(name, {**asdict(found), "identity": identity})
    return found


def run_trial(threads: int, code: str, limit_s: float) -> Trial:
    """Run `code` in a child process. It prints JSON with `bf16_s` and `fp32_s`; it may crash or hang."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(_RANK_VARIABLES)}
    command = [sys.executable, "-P", "-c", _PRELUDE + code, str(threads), str(math.ceil(limit_s) + 1)]
    try:
        child = subprocess.run(
            command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Trial(failure=f"did not finish in {limit_s:g} s")
    except OSError as error:
        return Trial(failure=f"could not start: {error.strerror}")
    if child.returncode < 0:
        name = signal_name(-child.returncode)
        return Trial(crash=name) if name in _FAULTS else Trial(failure=f"was ended by {name}")
    try:
        said = json.loads(child.stdout.strip().splitlines()[-1])
        ratio = said["bf16_s"] / said["fp32_s"]
        return Trial(ratio=ratio) if math.isfinite(ratio) else Trial(failure="gave no times")
    except (ValueError, LookupError, TypeError, ArithmeticError):
        last = child.stderr.strip().splitlines()
        return Trial(failure=f"failed: {last[-1][:200] if last else f'exit code {child.returncode}'}")


def lists_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU claims to multiply bf16 matrices and oneDNN may use it. Only then is bf16 worth a trial."""
    most = os.environ.get("ONEDNN_MAX_CPU_ISA", "ALL").upper()
    allowed = most in ("ALL", "DEFAULT") or "AMX" in most
    return allowed and "amx_bf16" in _cpu(cpuinfo)["flags"].split()


def _look(config: Config, world: World, try_it: Try) -> dict[str, Any]:
    """What one worker finds: whether bf16 or fp16 pays off on its device, a crash, a note. One CPU worker per node tries."""
    if world.device.type == "cuda":
        capability = torch.cuda.get_device_capability(world.device)
        return {"pays": capability >= (8, 0), "fp16": capability >= (7, 0), "crash": "", "note": ""}
    if world.local_rank != 0:
        return {"pays": True, "fp16": False, "crash": "", "note": ""}
    if config.precision == "auto" and not lists_amx():
        return {"pays": False, "fp16": False, "crash": "", "note": ""}  # emulated bf16 took 27 times as long
    found = try_it(TRIAL_THREADS, min(TRIAL_S, config.timeout_s / 2))  # the other workers wait, at most timeout_s
    where = f" (node {world.node})" if world.nodes > 1 else ""
    note = found.describe("fp16" if config.precision == "fp16" else "bf16") + where if not found.pays else ""
    return {"pays": found.pays, "fp16": False, "crash": found.crash, "note": note}


def _decide(config: Config, looks: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine what all workers found, on rank 0."""
    asked, error = config.precision, ""
    crash = next((look["note"] for look in looks if look["crash"]), "")
    note = crash or next((look["note"] for look in looks if look["note"]), "")
    notes = [f"--precision {asked}: {note}; consider --precision fp32"] if note else []
    if asked == "auto":
        asked, notes = "fp32", [f"bf16 is off: {note}; using fp32"] if note else []
        if all(look["pays"] for look in looks):
            asked = "bf16"
        elif all(look["fp16"] for look in looks):
            asked, notes = ("fp32", [f"fp16 is off: it {_LOCAL}; using fp32"]) if config.local_steps else ("fp16", [])
    elif crash:
        error = f"--precision {asked}: {crash}, and so would the run; use --precision fp32{_avoid_amx()}"
    return {"error": error, "chosen": asked, "notes": notes}


_LOCAL = "cannot train with --local-steps, in which every part would need a loss scale of its own"


def _avoid_amx() -> str:
    return ", or set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 so that torch does not use AMX" if lists_amx() else ""


_known: dict[str, Trial] = {}  # results that this process has found or read


def _identify(threads: int, code: str) -> dict[str, Any]:
    """Everything that the result of a trial depends on."""
    cpu = _cpu()
    return {
        "cpu": cpu["model name"],
        "flags": hashlib.sha256(cpu["flags"].encode()).hexdigest(),
        "host": [platform.node(), _machine_id(), platform.release()],
        "torch": torch.__version__,
        "threads": threads,
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_SPEED_VARIABLES)},
        "trial": hashlib.sha256(code.encode()).hexdigest(),
    }


@functools.cache
def _cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Model and flags of the first core; empty if there is no such file."""
    found = {"model name": "", "flags": ""}
    with suppress(OSError), cpuinfo.open() as lines:  # line by line: a large machine has thousands
        for line in lines:
            name, _, value = (part.strip() for part in line.partition(":"))
            if not name and found["flags"]:
                break
            if name in found:
                found[name] = value
    return found


def _machine_id() -> str:
    try:
        return Path("/etc/machine-id").read_text().strip()
    except OSError:
        return ""


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / "bf16"


def _read_cache(name: str) -> Trial | None:
    """What an earlier process found. None if it left nothing; a damaged or foreign file is not an error."""
    try:
        found = read_json(_cache_folder() / f"{name}.json")
        ratio, crash = found["ratio"], found["crash"]
    except (OSError, ValueError, LookupError, TypeError, RuntimeError):  # RuntimeError: no home folder
        return None
    if crash in _FAULTS and ratio is None:
        return Trial(crash=crash)
    return Trial(ratio=ratio) if isinstance(ratio, float) and math.isfinite(ratio) and ratio > 0 and not crash else None


def _write_cache(name: str, content: dict[str, Any]) -> None:
    """Keep a result for later processes. A folder that cannot be written to is not an error."""
    with suppress(OSError, RuntimeError):
        folder = _cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / f"{name}.json", content)


# Write no core file, not even through a pipe to a crash handler (PR_SET_DUMPABLE), and end even if the parent was killed.
_PRELUDE = """
import ctypes, resource, signal, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
signal.signal(signal.SIGALRM, signal.SIG_DFL)
signal.alarm(int(sys.argv[2]))
"""

_CODE = """
import json, statistics, sys, time
import torch
torch.set_num_threads(int(sys.argv[1]))
torch.manual_seed(0)
net = torch.nn.Sequential(
    torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(),
    torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256),
).to(memory_format=torch.channels_last)
images = torch.randn(32, 16, 28, 28, requires_grad=True)
square = torch.randn(256, 256, requires_grad=True)
def step(bf16):
    begin = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = net(images).float().square().mean() + (square @ square).float().square().mean()
    loss.backward()
    return time.perf_counter() - begin
times = {False: [], True: []}
for bf16 in (True, False, True, False):
    step(bf16)
end = time.perf_counter() + 2
while len(times[True]) < 9 and (not times[True] or time.perf_counter() < end):
    for bf16 in times:
        times[bf16].append(step(bf16))
print(json.dumps({"bf16_s": statistics.median(times[True]), "fp32_s": statistics.median(times[False])}))
"""
