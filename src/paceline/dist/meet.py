"""How the workers of one world find each other without a fixed port.

torchrun and Paceline's launcher host a store. torchrun keeps it when it restarts its workers, so `meet_in_launcher_store` uses
a new prefix in it. With srun and mpirun a worker knows only the address of rank 0 and a key of the run. Rank 0 opens its store
on any free port. It announces that port, with the key, on the first free port of a list derived from the key; the others try
the ports of that list until one answers with their key. So workers recognize other runs and programs on these ports and move
on. Workers connect only to a store that was announced: torch's client waits forever for a listener that does not answer. Rank 0
stops announcing once all workers are there, so a later run in the same Slurm step cannot find an old store.
"""

import errno
import hashlib
import socket
import time
import uuid
from contextlib import suppress
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline.dist.place import Place, meeting_point
from paceline.dist.store import host_store, listen, os_error_text
from paceline.errors import PacelineError

_HERE = "paceline/here"  # how many workers have found the store
_ATTEMPT = "paceline/attempt"  # in torchrun's store: the name that rank 0 gave the newest attempt
_TRIES = 16  # ports in the list; all below 32768, where Linux's ports for outgoing connections start
_PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)  # taken, or reserved for root
_ANSWER_S = 2  # how long to wait for an answer; rank 0 answers within 0.05 s
_FIRST_PORT, _PORTS = 20000, 12000


def meet(place: Place, timeout: timedelta) -> Store:
    """The store that all workers of this world share. Collective: call on every rank."""
    if place.launcher == "alone":
        return HashStore()
    host, port = meeting_point(place)
    if port is not None:
        if place.rank != 0:
            return TCPStore(host, port, place.size, is_master=False, timeout=timeout)
        try:
            return host_store(host, port, place.size, timeout)
        except OSError as error:
            advice = "choose another MASTER_PORT, or unset it" if error.errno in _PORT_ERRORS else "set MASTER_ADDR to its host"
            raise PacelineError(f"rank 0 cannot listen at {host}:{port}: {os_error_text(error)}; {advice}") from error
    ports = [_FIRST_PORT + _hash(place.run_key, i) % _PORTS for i in range(_TRIES)]
    return _host(host, ports, place, timeout) if place.rank == 0 else _find(host, ports, place, timeout)


def meet_in_launcher_store(store: Store, place: Place, timeout: timedelta) -> Store:
    """A prefix of torchrun's store that no earlier attempt has used. Collective: call on every rank.

    The store still holds the addresses of workers that died: gloo would try to connect to them. torchrun's restart count cannot
    serve as the prefix, because nodes may count differently. So rank 0 names the attempt and answers each of the other workers
    individually. A worker that read an old name gets no answer and reads the name again.
    """
    me, end = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if place.rank == 0:
        store.set(_ATTEMPT, me)
        for rank in range(1, place.size):
            store.wait([f"{me}/{rank}"], timeout)
            store.set(f"{me}/{rank}/{store.get(f'{me}/{rank}').decode()}", "welcome")
        return PrefixStore(me, store)
    while time.monotonic() < end:
        attempt = store.get(_ATTEMPT).decode()
        store.set(f"{attempt}/{place.rank}", me)
        if store.check([f"{attempt}/{place.rank}/{me}"]):
            return PrefixStore(attempt, store)
        time.sleep(0.05)
    raise PacelineError(f"worker {place.rank} got no answer from rank 0 within {timeout.total_seconds():.0f} s")


def _host(host: str, ports: list[int], place: Place, timeout: timedelta) -> Store:
    end = time.monotonic() + timeout.total_seconds()
    with _first_free(ports, host) as server:
        store = host_store(host, 0, place.size, timeout, wait=False)
        server.settimeout(0.05)
        while (here := store.add(_HERE, 0) + 1) < place.size:
            if time.monotonic() > end:
                raise PacelineError(
                    f"rank 0 waited {timeout.total_seconds():.0f} s on {host}: only {here} of {place.size} workers connected"
                )
            with suppress(OSError), server.accept()[0] as caller:  # no connection yet, or the caller closed it
                caller.sendall(_greeting(place) + str(store.port).encode())
    return store


def _first_free(ports: list[int], host: str) -> socket.socket:
    for port in ports:
        try:
            return listen(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise PacelineError(
                    f"rank 0 cannot listen at {host}: {os_error_text(error)}; set MASTER_ADDR to its host"
                ) from error
    raise PacelineError(f"all ports in {ports} on {host} are taken: set MASTER_PORT to a free one")


def _find(host: str, ports: list[int], place: Place, timeout: timedelta) -> Store:
    end = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < end:
        for port in ports:
            try:
                with socket.create_connection((host, port), timeout=_ANSWER_S) as caller:
                    answer = caller.recv(1024)  # one short line: it arrives in one piece
            except OSError:  # rank 0 is not there yet, or another program that does not answer
                continue
            if answer.startswith(_greeting(place)):
                store_port = int(answer.removeprefix(_greeting(place)))
                store = TCPStore(host, store_port, place.size, is_master=False, timeout=timeout, wait_for_workers=False)
                store.add(_HERE, 1)
                return store
        time.sleep(0.05)
    raise PacelineError(
        f"worker {place.rank} did not find rank 0 on {host} within {timeout.total_seconds():.0f} s: is it up, and are the ports"
        f" {min(ports)} to {max(ports)} open? (MASTER_ADDR and MASTER_PORT override them)"
    )


def _greeting(place: Place) -> bytes:
    return f"paceline {place.run_key} ".encode()


def _hash(key: str, i: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{key}/{i}".encode()).digest()[:4], "big")
