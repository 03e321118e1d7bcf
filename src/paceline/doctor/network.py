"""Whether workers can connect to each other, and whether loader processes work."""

import errno
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from paceline.doctor.finding import Finding
from paceline.doctor.probe import Probe

_TORCHRUN_PORT = 29500
_SHARED_BYTES = 1 << 30
_OPEN_FILES = 1024


@dataclass(frozen=True, kw_only=True)
class Network:
    """The addresses of this machine."""

    interfaces: Mapping[str, str]
    refused: tuple[str, ...] = ()
    """Addresses on which listening failed."""
    port: int = _TORCHRUN_PORT
    port_taken: bool = False


def look_at_network(interfaces: Mapping[str, str], env: Mapping[str, str]) -> Network:
    """Try to listen on every address, and on the port where nodes meet."""
    said = env.get("MASTER_PORT", "")
    port = int(said) if said.isascii() and said.isdigit() and 0 < int(said) < 65536 else _TORCHRUN_PORT
    refused = tuple(address for address in interfaces.values() if _listen(address, 0))
    return Network(interfaces=interfaces, refused=refused, port=port, port_taken=_listen("127.0.0.1", port) == errno.EADDRINUSE)


def judge_network(network: Network, probe: Probe, env: Mapping[str, str]) -> Iterator[Finding]:
    """Interfaces, ports, and a real all-reduce between two workers."""
    found = network.interfaces
    local = [address for address in found.values() if address.startswith("127.")]
    chosen = env.get("GLOO_SOCKET_IFNAME")
    if chosen and chosen not in found:
        listed = ", ".join(found)
        yield Finding("wrong", "network", f"GLOO_SOCKET_IFNAME is {chosen}, not one of {listed}", "unset GLOO_SOCKET_IFNAME")
    if not local:  # then nothing else works
        yield Finding("wrong", "network", "there is no loopback interface", "ip link set lo up")
        return
    for address in network.refused:
        if address in local:
            yield Finding("wrong", "network", f"cannot listen on {address}", "check firewall and sandbox rules")
        else:
            yield Finding("note", "network", f"cannot listen on {address}: nodes cannot meet at this address")
    done = probe.stages.get("all-reduce")
    if not probe.was_tried("all-reduce"):
        yield Finding("note", "network", probe.why("all-reduce"))
    elif done is None:
        fix = "check that lo is up and that no firewall blocks it"
        yield Finding("wrong", "network", f"2 workers could not all-reduce: {probe.why('all-reduce')}", fix)
    else:
        yield Finding("ok", "network", f"2 workers all-reduced over gloo in {done['s']:.2g} s")
        yield from _judge_listening(done["listening"])
    if network.port_taken:
        named = f"MASTER_PORT {network.port}" if "MASTER_PORT" in env else f"torchrun's port {network.port}"
        fix = "choose another MASTER_PORT" if "MASTER_PORT" in env else "use torchrun --standalone, or paceline --workers"
        yield Finding("note", "network", f"{named} is in use", fix)
    yield Finding("ok", "network", ", ".join(f"{name} {address}" for name, address in found.items()), detail=bool(done))


def judge_loader(probe: Probe) -> Iterator[Finding]:
    """The processes that read data sets which are not kept on the device."""
    about, done = probe.stages.get("torch", {}), probe.stages.get("loader")
    limits = list(judge_limits(_shared_bytes(), _open_files()))
    if not probe.was_tried("loader"):
        yield Finding("note", "loader", probe.why("loader"))
    elif done is None:
        fix = "" if any(each.fix for each in limits) else "use --loader-workers 0, which reads in the worker itself"
        yield Finding("wrong", "loader", f"2 processes could not load batches: {probe.why('loader')}", fix)
    else:
        yield Finding("ok", "loader", f"2 processes ({about.get('start', 'fork')}) start and load batches")
        took = f"4 batches of 3 MB in {1e3 * done['batches_s']:.0f} ms, sharing by {about.get('sharing', '?')}"
        yield Finding("ok", "loader", took, detail=True)
    yield from limits


def judge_limits(shared_bytes: int | None, open_files: int | None) -> Iterator[Finding]:
    """The shared memory through which batches come from loader processes, and the number of open files."""
    if shared_bytes is not None and shared_bytes < _SHARED_BYTES:
        text = f"/dev/shm has only {shared_bytes / 2**20:,.0f} MiB free, too little for large batches"
        yield Finding("note", "loader", text, "docker run --shm-size=8g (or --ipc=host), or use --loader-workers 0")
    elif shared_bytes is not None:
        yield Finding("ok", "loader", f"{shared_bytes / 2**30:.1f} GiB of shared memory")
    if open_files is not None and open_files < _OPEN_FILES:
        text = f"a process may open only {open_files} files"
        yield Finding("note", "loader", text, f"ulimit -n {4 * _OPEN_FILES}")
    elif open_files is not None:
        yield Finding("ok", "loader", f"a process may open {open_files:,} files", detail=True)


def _judge_listening(addresses: list[str]) -> Iterator[Finding]:
    outside = [each for each in addresses if not each.startswith("127.") and each != "::1"]
    if outside:
        text = f"workers listen on {', '.join(outside)}, where other machines can connect"
        yield Finding("note", "network", text, "export GLOO_SOCKET_IFNAME=lo")
    elif addresses:
        yield Finding("ok", "network", "workers listen on the loopback only")


def _listen(address: str, port: int) -> int:
    """0 if it is possible to listen there, else the error number."""
    with socket.socket() as server:
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((address, port))
            server.listen(1)
        except OSError as error:
            return error.errno or errno.EINVAL
    return 0


def _shared_bytes() -> int | None:
    with suppress(OSError, AttributeError):
        about = os.statvfs("/dev/shm")
        return about.f_bavail * about.f_frsize
    return None


def _open_files() -> int | None:
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return None if soft == resource.RLIM_INFINITY else soft
    return None
