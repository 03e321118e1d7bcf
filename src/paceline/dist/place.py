"""This process's rank and the size of its world, whoever started it: torchrun, srun, mpirun or Paceline's own launcher.

Only this file reads rank variables. It does not import torch: the command line uses it before anything heavy is loaded.
"""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError
from paceline.output import plural

MESSAGES_VARIABLE = "PACELINE_MESSAGES"
"""Set by Paceline's launcher for its workers: the folder for messages between them (`messages.py`)."""

_BINDING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


@dataclass(frozen=True, kw_only=True)
class Place:
    """One process's place in a world: its rank, and how many workers and nodes there are."""

    rank: int = 0
    local_rank: int = 0
    node: int = 0
    size: int = 1
    local_size: int = 1
    nodes: int = 1
    launcher: str = "alone"
    """alone, paceline, torchrun, srun or mpirun."""
    run_key: str = ""
    """Distinguishes this world from others on the same machine if the launcher gives no port to meet at."""


def read_place(env: Mapping[str, str] | None = None) -> Place:
    """This process's place, from the variables that its launcher set; without any, a world of one worker."""
    env = os.environ if env is None else env
    if "RANK" in env and "WORLD_SIZE" in env:
        local_size = _count(env, "LOCAL_WORLD_SIZE", 1)
        place = Place(
            rank=_number(env, "RANK"),
            local_rank=_number(env, "LOCAL_RANK", 0),
            node=_number(env, "GROUP_RANK", 0),
            size=_number(env, "WORLD_SIZE"),
            local_size=local_size,
            nodes=_number(env, "GROUP_WORLD_SIZE", -(-_number(env, "WORLD_SIZE") // local_size)),
            launcher="paceline" if MESSAGES_VARIABLE in env else "torchrun",
        )
    elif "OMPI_COMM_WORLD_RANK" in env:
        rank, size = _number(env, "OMPI_COMM_WORLD_RANK"), _number(env, "OMPI_COMM_WORLD_SIZE")
        local_size = _count(env, "OMPI_COMM_WORLD_LOCAL_SIZE", size)
        place = Place(
            rank=rank,
            local_rank=_number(env, "OMPI_COMM_WORLD_LOCAL_RANK", rank),
            node=rank // local_size,  # by default, mpirun fills one node after the other
            size=size,
            local_size=local_size,
            nodes=-(-size // local_size),
            launcher="mpirun",
            run_key="mpirun-" + (env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")),
        )
    elif _number(env, "SLURM_STEP_NUM_TASKS", 1) > 1 and "SLURM_PROCID" in env:
        # Only srun sets the STEP variables. A batch script also has SLURM_NTASKS, but it is one process and may start workers.
        node = _number(env, "SLURM_NODEID", 0)
        place = Place(
            rank=_number(env, "SLURM_PROCID"),
            local_rank=_number(env, "SLURM_LOCALID"),
            node=node,
            size=_number(env, "SLURM_STEP_NUM_TASKS"),
            local_size=_tasks_on_node(env.get("SLURM_STEP_TASKS_PER_NODE", "1"), node),
            nodes=_number(env, "SLURM_STEP_NUM_NODES", 1),
            launcher="srun",
            run_key=f"srun-{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}",
        )
    else:
        return Place()
    if not (0 <= place.rank < place.size and 0 <= place.local_rank < place.local_size):
        raise UsageError(
            f"{place.launcher}'s variables contradict each other: rank {place.rank} of {place.size}, local rank"
            f" {place.local_rank} of {place.local_size}"
        )
    return place


def check_workers(place: Place, workers: int | None, schedule: str = "") -> None:
    """Refuse a `--workers` or `--workers-schedule` that differs from the size of a world that another launcher started."""
    if place.launcher in ("alone", "paceline"):
        return
    if schedule:
        raise UsageError(
            f"--workers-schedule: a job keeps its size under {place.launcher}, which started {plural(place.size, 'worker')}:"
            " leave it out, or run `paceline train` by itself on one node, where it starts its own workers"
        )
    if workers not in (None, place.size):
        raise UsageError(
            f"--workers {workers}, but {place.launcher} started {plural(place.size, 'worker')}: omit --workers, or use the"
            " same number"
        )


def meeting_point(place: Place, env: Mapping[str, str] | None = None) -> tuple[str, int | None]:
    """The address of rank 0 and, if the launcher or the user set one, its port (for srun and mpirun)."""
    env = os.environ if env is None else env
    port = check_port(_number(env, "MASTER_PORT"), f"MASTER_PORT is {env['MASTER_PORT']}") if "MASTER_PORT" in env else None
    if place.nodes == 1:  # ignore MASTER_ADDR: no other machine needs to reach this run
        return "127.0.0.1", port
    if "MASTER_ADDR" in env:
        return env["MASTER_ADDR"], port
    if place.launcher == "srun":
        return _slurm_address(env), port
    raise UsageError("mpirun on several nodes needs the address of rank 0: add -x MASTER_ADDR=<its host>")


def check_port(port: int, found: str) -> int:
    """Refuse a port out of range: getaddrinfo would silently wrap it. `found` says where the number comes from."""
    if not 1 <= port <= 65535:
        raise UsageError(f"{found}: a port must be a number from 1 to 65535")
    return port


def core_count() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_worker(local_size: int, env: Mapping[str, str] | None = None) -> int:
    """Threads a CPU worker should use: its share of this node's cores, or what Slurm or mpirun assigned to this task."""
    env = os.environ if env is None else env
    if "SLURM_CPUS_PER_TASK" in env and "SLURM_STEP_ID" in env:
        return max(1, _number(env, "SLURM_CPUS_PER_TASK"))
    if "OMPI_COMM_WORLD_RANK" in env and core_count() < (os.cpu_count() or 1):
        return core_count()  # mpirun bound this worker to its own cores
    return max(1, core_count() // local_size)


def cores_for_worker(place: Place, env: Mapping[str, str] | None = None) -> frozenset[int] | None:
    """The cores to bind a CPU worker to: its share of the cores that its node's workers may use. None: do not bind it.

    A worker is not bound if it already was (by srun, mpirun, taskset or an OpenMP variable), if there are more workers than
    cores, or if it has more threads than its share has cores.
    """
    env = os.environ if env is None else env
    if place.local_size == 1 or not hasattr(os, "sched_setaffinity") or any(name in env for name in _BINDING_VARIABLES):
        return None
    ours = os.sched_getaffinity(0)
    if len(ours) < place.local_size or ours != _inherited(place):
        return None
    begin, end = (len(ours) * i // place.local_size for i in (place.local_rank, place.local_rank + 1))
    share = frozenset(sorted(ours, key=_position)[begin:end])
    threads = env.get("OMP_NUM_THREADS", "")
    return share if not threads.isdigit() or int(threads) <= len(share) else None


def _inherited(place: Place) -> set[int]:
    """The cores of a worker that has not been bound: those of its parent, which also started the other workers.

    The parent of srun's and mpirun's workers is not one of the user's processes: their unbound workers have the whole machine.
    """
    if place.launcher in ("srun", "mpirun"):
        return set(range(os.cpu_count() or 1))
    try:
        return os.sched_getaffinity(os.getppid())
    except OSError:  # it has ended
        return set()


def _position(core: int) -> tuple[int, int, int]:
    """Sort key that puts threads of one physical core, then cores of one socket, next to each other. psutil has no topology."""
    try:
        package, physical = (
            int(Path(f"/sys/devices/system/cpu/cpu{core}/topology/{name}").read_text())
            for name in ("physical_package_id", "core_id")
        )
    except (OSError, ValueError):
        return 0, core, core
    return package, physical, core


def _count(env: Mapping[str, str], name: str, default: int) -> int:
    """A number of workers: at least 1."""
    number = _number(env, name, default)
    if number < 1:
        raise UsageError(f"the variable {name} is {number}: it must be at least 1")
    return number


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        if default is None:
            raise UsageError(f"the variable {name} is missing: the launcher set only some of its variables")
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"the variable {name} is {text!r}: it must be a whole number") from None


def _tasks_on_node(spec: str, node: int) -> int:
    """Slurm's `2(x3),1` means three nodes with 2 tasks and one with 1."""
    counts: list[int] = []
    for item in spec.split(","):
        count, _, times = item.partition("(x")
        try:
            counts += [int(count)] * int(times.rstrip(")") or 1)
        except ValueError:
            raise UsageError(f"the variable SLURM_STEP_TASKS_PER_NODE is {spec!r}: it must look like 2(x3),1") from None
    return counts[node] if node < len(counts) else 1


def _slurm_address(env: Mapping[str, str]) -> str:
    """The address of the step's first node. Prefer Slurm's NodeAddr, because node names may not resolve."""
    nodes = env.get("SLURM_STEP_NODELIST", "")
    try:
        first = _scontrol("hostnames", nodes).split()[0]
        fields = dict(field.partition("=")[::2] for field in _scontrol("node", first).split() if "=" in field)
        return fields.get("NodeAddr", first)
    except (OSError, IndexError, subprocess.SubprocessError) as error:
        raise UsageError(f"scontrol did not say where rank 0 is ({error}): set MASTER_ADDR to its host") from None


def _scontrol(what: str, which: str) -> str:
    return subprocess.run(["scontrol", "show", what, which], check=True, capture_output=True, text=True, timeout=30).stdout
