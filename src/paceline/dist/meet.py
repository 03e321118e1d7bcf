"""How workers of one world find each other without a fixed port.

torchrun brings a store of its own. Under srun and mpirun every worker knows only where rank 0 is and a key of the run, so rank 0
opens the first free port of a row that follows from the key, and signs it; the others try the row until they find the
signature. Two runs on one machine that meet on the same port tell each other apart and move on.
"""

import hashlib
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from paceline.dist.place import Place, meeting_point
from paceline.errors import PacelineError

_SIGNATURE = "paceline/run"
_ROW = 16  # ports tried; all below 32768, where Linux starts handing out ports for outgoing connections
_FIRST_PORT, _PORTS = 20000, 12000


def meet(place: Place, timeout: timedelta) -> dist.Store:
    """The store all workers of this world share. Every worker reaches this."""
    if place.launcher == "alone":
        return dist.HashStore()
    host, port = meeting_point(place)
    if port is not None:
        return dist.TCPStore(host, port, place.size, is_master=place.rank == 0, timeout=timeout)
    row = [_FIRST_PORT + _hash(place.run_key, i) % _PORTS for i in range(_ROW)]
    return _host(host, row, place, timeout) if place.rank == 0 else _find(host, row, place, timeout)


def _host(host: str, row: list[int], place: Place, timeout: timedelta) -> dist.Store:
    for port in row:
        try:
            store = dist.TCPStore(host, port, place.size, is_master=True, timeout=timeout, wait_for_workers=False)
        except RuntimeError:  # taken by another program
            continue
        store.set(_SIGNATURE, place.run_key)
        return store
    raise PacelineError(f"all of the ports {row} on {host} are taken: set MASTER_PORT to a free one")


def _find(host: str, row: list[int], place: Place, timeout: timedelta) -> dist.Store:
    end = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < end:
        for port in row:
            try:
                socket.create_connection((host, port), timeout=5).close()
                store = dist.TCPStore(host, port, place.size, is_master=False, timeout=timedelta(seconds=5), wait_for_workers=False)
                if store.get(_SIGNATURE) == place.run_key.encode():
                    store.set_timeout(timeout)
                    return store
            except (OSError, RuntimeError):  # nobody there yet, or a stranger
                continue
        time.sleep(0.05)
    raise PacelineError(
        f"worker {place.rank} found no rank 0 on {host} within {timeout.total_seconds():.0f} s: is it up, and are the ports"
        f" {min(row)} to {max(row)} open? (MASTER_ADDR and MASTER_PORT override them)"
    )


def _hash(key: str, i: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{key}/{i}".encode()).digest()[:4], "big")
