"""How workers of one world find each other without a fixed port.

torchrun brings a store of its own, which it keeps when it starts its workers again: `meet_afresh` finds a clean corner of it.
Under srun and mpirun every worker knows only where rank 0 is and a key of the run. So rank 0 opens its store on any free port,
and tells that port, with the key, to whoever calls the first free port of a row that follows from the key; the others call the
row until one answers with their key. Two runs on one machine that meet on the same port tell each other apart and move on, and
so they do with strangers. A store is never called on trust: torch's client waits for ever for a listener that says nothing.
Rank 0 stops telling once all are there, so a later run in the same step cannot find an old store.
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
from paceline.dist.store import host_store, listen, why_not
from paceline.errors import PacelineError

_HERE = "paceline/here"  # counts the workers that found the store
_ATTEMPT = "paceline/attempt"  # in torchrun's store: the name rank 0 gave to the newest attempt
_ROW = 16  # ports tried; all below 32768, where Linux starts handing out ports for outgoing connections
_PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)  # taken, or reserved for root
_ANSWER_S = 2  # rank 0 answers within 0.05 s
_FIRST_PORT, _PORTS = 20000, 12000


def meet(place: Place, timeout: timedelta) -> Store:
    """The store all workers of this world share. Every worker reaches this."""
    if place.launcher == "alone":
        return HashStore()
    host, port = meeting_point(place)
    if port is not None:
        if place.rank != 0:
            return TCPStore(host, port, place.size, is_master=False, timeout=timeout)
        try:
            return host_store(host, port, place.size, timeout)
        except OSError as error:
            advice = "use another MASTER_PORT, or unset it" if error.errno in _PORT_ERRORS else "set MASTER_ADDR to its host"
            raise PacelineError(f"rank 0 cannot listen at {host}:{port}: {why_not(error)}; {advice}") from error
    row = [_FIRST_PORT + _hash(place.run_key, i) % _PORTS for i in range(_ROW)]
    return _host(host, row, place, timeout) if place.rank == 0 else _find(host, row, place, timeout)


def meet_afresh(store: Store, place: Place, timeout: timedelta) -> Store:
    """The part of torchrun's store that this attempt's workers share with no earlier one. Every worker reaches this.

    What dead workers wrote there still leads to them: gloo would call their closed ports. torchrun's count of restarts does
    not tell attempts apart, as nodes may count differently. So rank 0 names the attempt, and answers each of the others in
    person: who has read an old name gets no answer, and reads again.
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
    raise PacelineError(f"worker {place.rank} had no answer from rank 0 within {timeout.total_seconds():.0f} s")


def _host(host: str, row: list[int], place: Place, timeout: timedelta) -> Store:
    end = time.monotonic() + timeout.total_seconds()
    with _first_free(row, host) as server:
        store = host_store(host, 0, place.size, timeout, wait=False)
        server.settimeout(0.05)
        while (here := store.add(_HERE, 0) + 1) < place.size:
            if time.monotonic() > end:
                raise PacelineError(
                    f"rank 0 waited {timeout.total_seconds():.0f} s on {host}: {here} of {place.size} workers came"
                )
            with suppress(OSError), server.accept()[0] as caller:  # nobody calls, or the caller hung up
                caller.sendall(_greeting(place) + str(store.port).encode())
    return store


def _first_free(row: list[int], host: str) -> socket.socket:
    for port in row:
        try:
            return listen(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise PacelineError(f"rank 0 cannot listen at {host}: {why_not(error)}; set MASTER_ADDR to its host") from error
    raise PacelineError(f"all of the ports {row} on {host} are taken: set MASTER_PORT to a free one")


def _find(host: str, row: list[int], place: Place, timeout: timedelta) -> Store:
    end = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < end:
        for port in row:
            try:
                with socket.create_connection((host, port), timeout=_ANSWER_S) as caller:
                    answer = caller.recv(1024)  # one short line: it comes in one piece
            except OSError:  # nobody there yet, or a stranger who says nothing
                continue
            if answer.startswith(_greeting(place)):
                store_port = int(answer.removeprefix(_greeting(place)))
                store = TCPStore(host, store_port, place.size, is_master=False, timeout=timeout, wait_for_workers=False)
                store.add(_HERE, 1)
                return store
        time.sleep(0.05)
    raise PacelineError(
        f"worker {place.rank} found no rank 0 on {host} within {timeout.total_seconds():.0f} s: is it up, and are the ports"
        f" {min(row)} to {max(row)} open? (MASTER_ADDR and MASTER_PORT override them)"
    )


def _greeting(place: Place) -> bytes:
    return f"paceline {place.run_key} ".encode()


def _hash(key: str, i: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{key}/{i}".encode()).digest()[:4], "big")
