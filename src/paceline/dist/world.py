"""The world: this worker's rank, device and backend, and how many others there are. Join it with `world()`."""

import itertools
import json
import os
import socket
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from paceline.dist.meet import meet, meet_in_launcher_store
from paceline.dist.messages import claim_first
from paceline.dist.place import Place, core_count, cores_for_worker, meeting_point, read_place, threads_per_worker
from paceline.errors import UsageError
from paceline.output import plural

_NOTE = "note"
_worlds = itertools.count()  # numbers the worlds that this process has joined


@dataclass(frozen=True, kw_only=True)
class World:
    """What a worker knows about itself and the others."""

    rank: int
    local_rank: int
    node: int
    size: int
    local_size: int
    nodes: int
    device: torch.device
    backend: str
    launcher: str
    restart_store: Store | None = None
    """A prefix of the launcher's store, for notes to the workers of the next attempt: torchrun's store outlives its workers."""
    failures: Any = None
    """A store where the worker that fails first leaves its error, if another launcher started the workers."""
    node_cores: frozenset[int] | None = None
    """The cores that all workers of this node may use, if each was bound to its share; None: those of this process."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only worker that prints and writes the record."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for all workers. Collective: call on every rank."""
        if self.size == 1:
            return  # NCCL takes seconds to set up in the first collective: one worker does not need it
        dist.barrier(device_ids=[self.device.index] if self.backend == "nccl" else None)

    def read_restart_note(self) -> str:
        """The note that this run's workers wrote before torchrun restarted them; "" without one."""
        store = self.restart_store
        return store.get(_NOTE).decode() if store is not None and store.check([_NOTE]) else ""

    def write_restart_note(self, text: str) -> None:
        """Write a note for the workers that torchrun may start to replace these."""
        if self.restart_store is not None:
            self.restart_store.set(_NOTE, text)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value (anything that JSON can hold) on every worker. Collective: call on every rank."""
        if self.size == 1:
            return value
        text = json.dumps(value).encode() if self.rank == 0 else b""
        length = torch.tensor(len(text), device=self.device)
        dist.broadcast(length, 0)
        data = torch.empty(int(length), dtype=torch.uint8, device=self.device)
        if self.rank == 0:
            data.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        dist.broadcast(data, 0)
        return json.loads(bytes(data.cpu().numpy()))

    def gather(self, value: Any) -> list[Any]:
        """On rank 0, every worker's value (anything that JSON can hold) in order of rank; [] on the others. Collective: call on
        every rank.
        """
        if self.size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        lengths[self.rank] = len(text)
        dist.all_reduce(lengths)
        table = torch.zeros(self.size, int(lengths.max()), dtype=torch.uint8, device=self.device)
        table[self.rank, : len(text)] = text.to(self.device)
        dist.reduce(table, 0)  # each row comes from one worker, so the sum is a gather
        if self.rank != 0:
            return []
        rows = zip(table.cpu().numpy(), lengths.tolist(), strict=True)
        return [json.loads(bytes(row[:length])) for row, length in rows]


@contextmanager
def world(backend: str = "auto", timeout_s: float = 600.0) -> Iterator[World]:
    """Join the world this process was started in (a world of one without a launcher). Collective: call on every rank."""
    place = read_place()
    device, backend = choose_device(place, backend)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif place.size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_per_worker(place.local_size))
    _choose_interface(place)
    timeout = timedelta(seconds=timeout_s)
    store, restart_store, hook = None, None, sys.excepthook
    if backend == "mpi":
        dist.init_process_group("mpi")
    else:
        if place.launcher in ("paceline", "torchrun"):  # these host a store, at MASTER_ADDR and MASTER_PORT
            theirs, _, _ = next(rendezvous("env://", place.rank, place.size, timeout=timeout))
            store = meet_in_launcher_store(theirs, place, timeout)
            # A program may train several times: the n-th world of an attempt reads the notes of the n-th of the last attempt.
            restart_store = PrefixStore(f"paceline/world-{next(_worlds)}", theirs)
        else:
            store = meet(place, timeout)
        dist.init_process_group(backend, timeout=timeout, rank=place.rank, world_size=place.size, store=store)
    if place.size == 1:
        sys.excepthook = hook  # torch's would put [rank0]: before each line of a traceback, once for each world so far
    shared = place.size > 1 and store is not None and place.launcher != "paceline"
    try:
        with _own_stream(device), _bound_to_cores(place, device) as usable:
            yield World(
                rank=place.rank,
                local_rank=place.local_rank,
                node=place.node,
                size=place.size,
                local_size=place.local_size,
                nodes=place.nodes,
                device=device,
                backend=backend,
                launcher=place.launcher,
                restart_store=restart_store,
                failures=store if shared else None,
                node_cores=usable,
            )
    except BaseException as error:
        if shared:
            claim_first(store, error)
        # After a failure the other workers may be stuck in a collective, and destroying the process group would wait for them.
        # They notice the closed connection when this process ends.
        if place.size == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()
    sys.excepthook = hook


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Run all of a GPU worker's kernels in one stream of its own: CUDA graphs cannot be captured in the default stream."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.current_stream(device)
    own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    own.wait_stream(before)
    with torch.cuda.stream(own):
        yield
    before.wait_stream(own)


@contextmanager
def _bound_to_cores(place: Place, device: torch.device) -> Iterator[frozenset[int] | None]:
    """Bind a CPU worker to its share of the node's cores while the block runs. Yields the cores it had before; None: not bound.

    A bound worker keeps what is in its core's cache, and gloo's threads wake up on their own worker's core.
    """
    share = cores_for_worker(place) if device.type == "cpu" else None
    if share is None:
        yield None
        return
    before = os.sched_getaffinity(0)
    _bind_threads(share)
    try:
        yield frozenset(before)
    finally:
        _bind_threads(before)


def _bind_threads(cores: Iterable[int]) -> None:
    """Bind all threads of this process: those that compute and gloo's already exist, and outlive a world.

    Not with psutil: its `cpu_affinity` binds one thread, and every CPU worker would import it for a list of thread ids.
    """
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)


def choose_device(place: Place, backend: str) -> tuple[torch.device, str]:
    """This worker's device and backend; a UsageError says what to choose instead if `backend` does not work here."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "auto":
        backend = "nccl" if gpus and dist.is_nccl_available() else "gloo"
    if backend not in backends():
        raise UsageError(
            f"--backend {backend}: this torch ({torch.__version__}) was built without it;"
            f" use --backend {' or '.join(backends())}"
        )
    if backend == "nccl":
        if not gpus:
            raise UsageError("--backend nccl needs GPUs, and no GPU is visible here; use --backend gloo")
        bound_elsewhere = gpus == 1 and place.launcher in ("srun", "mpirun")  # each task may see its own GPU as device 0
        if place.local_size > gpus and not bound_elsewhere:
            raise UsageError(
                f"{place.local_size} workers on a node with {plural(gpus, 'GPU')}: use --workers {gpus}, or --backend gloo"
                " to share them"
            )
    return torch.device("cuda", place.local_rank % gpus) if gpus else torch.device("cpu"), backend


def count_gpus(backend: str) -> int:
    """GPUs of this node, of which each worker needs its own; 0 if there are none, or if workers may share them (gloo)."""
    return torch.cuda.device_count() if backend in ("auto", "nccl") and torch.cuda.is_available() else 0


def backends() -> list[str]:
    """The backends this torch was built with."""
    there = {"nccl": dist.is_nccl_available(), "gloo": dist.is_gloo_available(), "mpi": dist.is_mpi_available()}
    return [name for name, here in there.items() if here]


def describe_devices(world: World) -> str:
    """The devices, for the contract: `2 CPU workers, 1 thread each` or `4 x NVIDIA H200`."""
    if world.device.type == "cuda":
        name = torch.cuda.get_device_name(world.device)
        shared = world.local_size > torch.cuda.device_count()
        return f"{world.size} x {name}" if not shared else f"{world.size} workers sharing {torch.cuda.device_count()} x {name}"
    each = " each" if world.size > 1 else ""
    workers = f"{plural(world.size, 'CPU worker')}, {plural(torch.get_num_threads(), 'thread')}{each}"
    return f"{workers} ({plural(len(world.node_cores) if world.node_cores else core_count(), 'core')}, no GPU)"


def interfaces() -> dict[str, str]:
    """Network interfaces that have an IPv4 address, with their first one."""
    import psutil  # here: only `paceline doctor` and runs on several nodes need it, and importing it takes 20 ms

    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family == socket.AF_INET:
                found.setdefault(name, each.address)
    return found


def _choose_interface(place: Place) -> None:
    """Choose gloo's network interface, and on one node NCCL's too, unless the user did.

    On one node no other machine needs to connect, so both use the loopback. On several nodes gloo would look up the host's own
    name, which on many systems is 127.0.1.1 (two nodes then never connect) or does not resolve (gloo then fails even for one
    worker).
    """
    if not sys.platform.startswith("linux"):
        return
    if place.nodes == 1:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "=lo")  # "=": exactly this name, not every name that starts with it
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    host, _ = meeting_point(place)
    mine = _address_toward(host)
    if mine.startswith("127.") and not host.startswith(("127.", "localhost")):
        # This machine's own name: Debian's /etc/hosts maps it to 127.0.1.1: other nodes cannot reach that. Use the interface
        # of the default route, or the first one that is not the loopback.
        outside = [address for address in interfaces().values() if not address.startswith("127.")]
        mine = _address_toward("198.51.100.1") or next(iter(outside), mine)
    for name, address in interfaces().items():
        if address == mine:
            os.environ["GLOO_SOCKET_IFNAME"] = name


def _address_toward(host: str) -> str:
    """This machine's address on the route to a host; "" without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing: it only picks the route
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def default_world(device: torch.device) -> World:
    """The default process group of torch.distributed, or a single worker."""
    joined = dist.is_available() and dist.is_initialized()
    rank, size = (dist.get_rank(), dist.get_world_size()) if joined else (0, 1)
    return World(
        rank=rank,
        local_rank=rank,
        node=0,
        size=size,
        local_size=size,
        nodes=1,
        device=device,
        backend=str(dist.get_backend()) if joined else "none",
        launcher="torch.distributed",
    )
