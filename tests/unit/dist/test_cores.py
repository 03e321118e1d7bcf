"""Which cores a CPU worker is bound to: with invented places, variables and cores, and with real threads of this process."""

import os
import threading

import pytest
import torch

from paceline.dist import place as place_module
from paceline.dist.place import Place, cores_for_worker
from paceline.dist.world import _bound_to_cores

CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch):
    """A machine with 8 cores, all usable by parent and worker unless the test changes that."""
    found = {"mine": set(range(8)), "parent": set(range(8)), "machine": 8}
    parent = os.getppid()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(found["parent" if pid == parent else "mine"]))
    monkeypatch.setattr(os, "cpu_count", lambda: found["machine"])
    monkeypatch.setattr(place_module, "_position", lambda core: (0, core, core))
    return found


def shares(size, launcher="paceline", env=None):
    return [
        cores_for_worker(Place(local_rank=i, local_size=size, size=size, launcher=launcher), env or {}) for i in range(size)
    ]


@pytest.mark.parametrize("launcher", ["paceline", "torchrun", "srun", "mpirun"])
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_cores_are_divided_evenly_among_workers(machine, launcher, size):
    found = shares(size, launcher)
    assert sorted(core for share in found for core in share) == list(range(8))
    assert {len(share) for share in found} <= {8 // size, 8 // size + 1}


def test_a_single_worker_on_its_node_is_not_bound(machine):
    assert shares(1) == [None]


def test_more_workers_than_cores_are_not_bound(machine):
    assert shares(9) == [None] * 9


def test_cores_that_the_whole_run_was_given_are_shared(machine):
    machine["mine"] = machine["parent"] = {2, 3, 6, 7}
    assert shares(2) == [{2, 3}, {6, 7}]


def test_a_worker_bound_by_a_wrapper_is_not_bound_again(machine):
    machine["mine"] = {2, 3, 6, 7}
    assert shares(2) == [None, None]


@pytest.mark.parametrize("launcher", ["srun", "mpirun"])
def test_a_worker_bound_by_its_launcher_is_not_bound_again(machine, launcher):
    machine["mine"] = machine["parent"] = {2, 3, 6, 7}
    assert shares(2, launcher) == [None, None]


@pytest.mark.parametrize("name", ["OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"])
def test_openmp_binding_variables_are_respected(machine, name):
    assert shares(2, env={name: "x"}) == [None, None]


@pytest.mark.parametrize(("threads", "bound"), [("1", True), ("4", True), ("5", False), ("4,2", True)])
def test_a_worker_with_more_threads_than_cores_is_not_bound(machine, threads, bound):
    assert [share is not None for share in shares(2, env={"OMP_NUM_THREADS": threads})] == [bound, bound]


def test_threads_of_one_physical_core_stay_together(machine, monkeypatch):
    monkeypatch.setattr(place_module, "_position", lambda core: (0, core % 4, core))  # core 0's other thread is core 4
    assert shares(2) == [{0, 4, 1, 5}, {2, 6, 3, 7}]


def test_sockets_stay_together(machine, monkeypatch):
    monkeypatch.setattr(place_module, "_position", lambda core: (core % 2, core, core))
    assert shares(2) == [{0, 2, 4, 6}, {1, 3, 5, 7}]


def test_a_core_without_a_known_position_is_sorted_by_its_number():
    assert place_module._position(10**6) == (0, 10**6, 10**6)


def test_a_worker_whose_parent_has_ended_is_not_bound(monkeypatch):
    def gone(pid):
        if pid:
            raise ProcessLookupError
        return {0, 1}

    monkeypatch.setattr(os, "sched_getaffinity", gone)
    assert shares(2) == [None, None]


def cores_of_threads():
    return [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]


@pytest.fixture
def other_thread():
    """A thread that already exists, like those of torch and gloo."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    yield
    end.set()
    thread.join()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.usefixtures("other_thread")
@pytest.mark.parametrize("fails", [False, True])
def test_all_threads_are_bound_while_the_world_lasts(monkeypatch, fails):
    before, bound = os.sched_getaffinity(0), {max(os.sched_getaffinity(0))}
    monkeypatch.setattr("paceline.dist.world.cores_for_worker", lambda place: frozenset(bound))
    end, later = threading.Event(), None
    try:
        with _bound_to_cores(Place(local_size=2), CPU) as usable:
            assert usable == before
            later = threading.Thread(target=end.wait)  # started meanwhile, and outlives the world
            later.start()
            assert all(cores == bound for cores in cores_of_threads())
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    found = cores_of_threads()
    end.set()
    later.join()
    assert all(cores == before for cores in found)


def test_a_gpu_worker_is_not_bound(monkeypatch):
    monkeypatch.setattr("paceline.dist.world.cores_for_worker", lambda place: pytest.fail("asked for its cores"))
    with _bound_to_cores(Place(local_size=2), torch.device("cuda")) as usable:
        assert usable is None
