"""Workers of srun and mpirun find each other next to other programs: dist/meet.py with real sockets, one thread per worker."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from harness.engines import wait_for
from paceline.dist import meet
from paceline.dist.place import Place
from paceline.errors import PacelineError

_SOON = timedelta(seconds=30)


def _place(rank: int, key: str) -> Place:
    return Place(rank=rank, local_rank=rank, size=2, local_size=2, launcher="srun", run_key=key)


@pytest.fixture
def port_list(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ports workers try, the same for every run and free at first."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    monkeypatch.setattr(meet, "_TRIES", len(ports))
    monkeypatch.setattr(meet, "_PORTS", 65536)
    monkeypatch.setattr(meet, "_FIRST_PORT", 0)
    monkeypatch.setattr(meet, "_hash", lambda key, i: ports[i])
    return ports


@pytest.fixture
def stranger(port_list: list[int]) -> Iterator[socket.socket]:
    """Another program on the first port: the system accepts connections for it, and it never answers."""
    with socket.create_server(("127.0.0.1", port_list[0])) as server:
        yield server


def test_workers_meet_behind_a_stranger_and_another_run(port_list: list[int], stranger: socket.socket) -> None:
    with ThreadPoolExecutor() as pool:
        other = pool.submit(meet.meet, _place(0, "other"), _SOON)  # on the second port: the first is the stranger's
        wait_for(lambda: _taken(port_list[1]), 10, lambda: "the other run does not come up")
        ours = [pool.submit(meet.meet, _place(rank, "ours"), _SOON) for rank in (1, 0)]
        guest, host = (each.result(timeout=60) for each in ours)
        assert not other.done(), "our worker is not one of the other run"
        other_guest = meet.meet(_place(1, "other"), _SOON)
    host.set("whose", "ours")
    other.result().set("whose", "the other's")
    assert (guest.get("whose"), other_guest.get("whose")) == (b"ours", b"the other's")


def test_a_complete_world_is_not_found_again(port_list: list[int]) -> None:
    """Two runs in turn in one srun step have the same key: the second must not join the first, whose rank 0 is still busy."""
    with ThreadPoolExecutor() as pool:
        first = [pool.submit(meet.meet, _place(rank, "step"), _SOON) for rank in (0, 1)]
        stores = [each.result(timeout=60) for each in first]
        second = [pool.submit(meet.meet, _place(rank, "step"), _SOON) for rank in (1, 0)]
        stores += [each.result(timeout=60) for each in second]
    stores[0].set("run", "first")
    stores[3].set("run", "second")
    assert [store.get("run") for store in stores] == [b"first", b"first", b"second", b"second"]


def test_restarted_workers_do_not_read_the_notes_of_dead_ones() -> None:
    """torchrun keeps its store. The second worker starts before rank 0 and at first finds only the name of the last attempt."""
    store = PrefixStore("torchrun", HashStore())
    with ThreadPoolExecutor() as pool:
        first = [pool.submit(meet.meet_in_launcher_store, store, _place(rank, ""), _SOON) for rank in (0, 1)]
        for each in first:
            each.result(timeout=60).set("address", "dead")
        guest = pool.submit(meet.meet_in_launcher_store, store, _place(1, ""), _SOON)
        with pytest.raises(TimeoutError):
            guest.result(timeout=0.3)
        host = meet.meet_in_launcher_store(store, _place(0, ""), _SOON)
        assert not host.check(["address"])
        host.set("address", "alive")
        assert guest.result(timeout=60).get("address") == b"alive"


def test_ports_that_are_all_taken_are_one_line(port_list: list[int], stranger: socket.socket) -> None:
    servers = [socket.create_server(("127.0.0.1", port)) for port in port_list[1:]]
    try:
        with pytest.raises(PacelineError, match="are taken: set MASTER_PORT"):
            meet.meet(_place(0, "ours"), _SOON)
    finally:
        for server in servers:
            server.close()


def test_a_taken_master_port_is_one_line(stranger: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    port = stranger.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    said = f"rank 0 cannot listen at 127.0.0.1:{port}: Address already in use; choose another MASTER_PORT, or unset it"
    with pytest.raises(PacelineError, match=f"^{said}$"):
        meet.meet(_place(0, "ours"), _SOON)


def test_a_missing_worker_is_one_line(port_list: list[int]) -> None:
    with pytest.raises(PacelineError, match=r"rank 0 waited 1 s on 127\.0\.0\.1: only 1 of 2 workers connected"):
        meet.meet(_place(0, "ours"), timedelta(seconds=1))


def test_a_missing_rank_0_is_one_line(port_list: list[int]) -> None:
    with pytest.raises(PacelineError, match=r"worker 1 did not find rank 0 on 127\.0\.0\.1 within 1 s"):
        meet.meet(_place(1, "ours"), timedelta(seconds=1))


def test_the_ports_differ_between_runs_and_stay_below_outgoing_ports() -> None:
    lists = [
        [meet._FIRST_PORT + meet._hash(key, i) % meet._PORTS for i in range(meet._TRIES)] for key in ("srun-1.0", "srun-1.1")
    ]
    assert lists[0] != lists[1]
    assert all(1024 <= port < 32768 for port_list in lists for port in port_list)


def _taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
