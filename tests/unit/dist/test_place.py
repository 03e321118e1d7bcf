"""A process's place in the world, from the variables of each launcher."""

import pytest

from paceline.dist import place as place_module
from paceline.dist.place import Place, check_workers, core_count, meeting_point, read_place, threads_per_worker
from paceline.errors import UsageError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "4",
    "OMPI_COMM_WORLD_SIZE": "6",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node-17@1",
}
BATCH = {"SLURM_JOB_ID": "42", "SLURM_NTASKS": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SRUN = {
    **BATCH,
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "n[1-4]",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}


def test_no_launcher_is_a_world_of_one():
    alone = Place(rank=0, local_rank=0, node=0, size=1, local_size=1, nodes=1, launcher="alone")
    assert read_place({}) == alone
    assert read_place({"RANK": "3"}) == alone, "a stray variable is no launcher"


def test_torchrun():
    expected = Place(rank=5, local_rank=1, node=1, size=8, local_size=4, nodes=2, launcher="torchrun")
    assert read_place(TORCHRUN) == expected


def test_our_own_launcher_differs_from_torchrun_by_its_messages_variable():
    assert read_place({**TORCHRUN, "PACELINE_MESSAGES": "/tmp/x"}).launcher == "paceline"


def test_rank_and_size_without_local_variables_are_one_worker_per_node():
    expected = Place(rank=1, local_rank=0, node=0, size=2, local_size=1, nodes=2, launcher="torchrun")
    assert read_place({"RANK": "1", "WORLD_SIZE": "2"}) == expected


def test_mpirun():
    place = read_place(MPIRUN)
    expected = (4, 0, 2, 6, 2, 3, "mpirun")
    assert (place.rank, place.local_rank, place.node, place.size, place.local_size, place.nodes, place.launcher) == expected
    assert place.run_key == "mpirun-prterun-node-17@1"


def test_two_runs_of_mpirun_have_different_keys():
    other = {**MPIRUN, "PMIX_NAMESPACE": "prterun-node-18@1"}
    old = {**MPIRUN, "PMIX_NAMESPACE": "", "OMPI_MCA_ess_base_jobid": "99"}
    assert len({read_place(env).run_key for env in (MPIRUN, other, old)}) == 3


def test_mpirun_without_local_variables_is_one_node():
    place = read_place({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "6"})
    assert (place.local_rank, place.local_size, place.nodes) == (3, 6, 1)


def test_srun():
    place = read_place(SRUN)
    assert (place.rank, place.local_rank, place.node, place.size, place.nodes) == (5, 1, 2, 7, 4)
    assert place.launcher == "srun"
    assert place.run_key == "srun-42.3"


@pytest.mark.parametrize(
    ("tasks", "node", "count"),
    [("2(x3),1", 0, 2), ("2(x3),1", 2, 2), ("2(x3),1", 3, 1), ("4", 0, 4), ("1,3(x2)", 1, 3), ("1,3(x2)", 2, 3)],
)
def test_srun_tasks_of_each_node(tasks, node, count):
    env = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": str(node), "SLURM_LOCALID": "0"}
    assert read_place(env).local_size == count


def test_a_batch_script_is_one_process_whatever_it_asked_for():
    assert read_place(BATCH).launcher == "alone"
    assert read_place({**BATCH, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "0"}).launcher == "alone"


def test_the_innermost_launcher_counts():
    """torchrun inside srun: each node's task starts its own workers."""
    assert read_place({**SRUN, **TORCHRUN}).launcher == "torchrun"
    assert read_place({**SRUN, **MPIRUN}).launcher == "mpirun"


@pytest.mark.parametrize(
    "env",
    [
        {**TORCHRUN, "RANK": "8"},
        {**TORCHRUN, "RANK": "-1"},
        {**TORCHRUN, "LOCAL_RANK": "4"},
        {**TORCHRUN, "WORLD_SIZE": "0"},
        {**MPIRUN, "OMPI_COMM_WORLD_RANK": "6"},
        {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_RANK": "2"},
        {**SRUN, "SLURM_PROCID": "7"},
        {**SRUN, "SLURM_NODEID": "3"},
    ],
)
def test_contradictions_are_the_launchers_mistake(env):
    with pytest.raises(UsageError, match="variables contradict each other: rank"):
        read_place(env)


@pytest.mark.parametrize(
    ("env", "name"),
    [
        ({**TORCHRUN, "RANK": "one"}, "RANK"),
        ({**TORCHRUN, "WORLD_SIZE": ""}, "WORLD_SIZE"),
        ({**TORCHRUN, "LOCAL_RANK": "1.0"}, "LOCAL_RANK"),
        ({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "x"}, "OMPI_COMM_WORLD_SIZE"),
        ({**SRUN, "SLURM_LOCALID": "x"}, "SLURM_LOCALID"),
    ],
)
def test_a_variable_that_is_not_a_number_is_named(env, name):
    with pytest.raises(UsageError, match=f"the variable {name} is .*: it must be a whole number"):
        read_place(env)


@pytest.mark.parametrize(("env", "name"), [(MPIRUN, "OMPI_COMM_WORLD_SIZE"), (SRUN, "SLURM_LOCALID")])
def test_a_variable_that_is_missing_is_named(env, name):
    with pytest.raises(UsageError, match=f"the variable {name} is missing"):
        read_place({key: value for key, value in env.items() if key != name})


def test_workers_must_match_an_existing_world():
    place = read_place(TORCHRUN)
    check_workers(place, None)
    check_workers(place, 8)
    with pytest.raises(UsageError, match="--workers 4, but torchrun started 8 workers: omit --workers"):
        check_workers(place, 4)


def test_workers_are_free_if_we_start_them():
    check_workers(read_place({}), 4)
    check_workers(read_place({**TORCHRUN, "PACELINE_MESSAGES": "x"}), 4)


def test_meeting_point_is_what_the_user_says():
    place = Place(nodes=2, launcher="mpirun")
    assert meeting_point(place, {"MASTER_ADDR": "a", "MASTER_PORT": "12"}) == ("a", 12)
    assert meeting_point(place, {"MASTER_ADDR": "a"}) == ("a", None)


def test_meeting_point_on_one_node_is_this_machine():
    assert meeting_point(Place(launcher="srun"), {}) == ("127.0.0.1", None)
    assert meeting_point(Place(launcher="srun"), {"MASTER_PORT": "12"}) == ("127.0.0.1", 12)
    assert meeting_point(Place(launcher="srun"), {"MASTER_ADDR": "node0"}) == ("127.0.0.1", None), (
        "nobody else needs to reach it"
    )


def test_meeting_point_needs_a_number_for_a_port():
    with pytest.raises(UsageError, match="MASTER_PORT is 'abc'"):
        meeting_point(Place(), {"MASTER_PORT": "abc"})
    for port in ("0", "-1", "65536"):
        with pytest.raises(UsageError, match=f"^MASTER_PORT is {port}: a port must be a number from 1 to 65535$"):
            meeting_point(Place(), {"MASTER_PORT": port})


def test_mpirun_on_several_nodes_needs_the_address_of_rank_0():
    with pytest.raises(UsageError, match="add -x MASTER_ADDR="):
        meeting_point(Place(nodes=2, launcher="mpirun"), {})


def test_srun_over_nodes_asks_scontrol(monkeypatch):
    answers = {("hostnames", "n[1-4]"): "n1\nn2\nn3\nn4\n", ("node", "n1"): "NodeName=n1 Arch=x\n   NodeAddr=10.0.0.7 CPUs=2\n"}
    monkeypatch.setattr(place_module, "_scontrol", lambda what, which: answers[what, which])
    assert meeting_point(read_place(SRUN), SRUN) == ("10.0.0.7", None)


def test_srun_without_scontrol_says_what_to_set(monkeypatch):
    def missing(*_: str) -> str:
        raise FileNotFoundError("scontrol")

    monkeypatch.setattr(place_module, "_scontrol", missing)
    with pytest.raises(UsageError, match="set MASTER_ADDR to its host"):
        meeting_point(read_place(SRUN), SRUN)


def test_threads_are_a_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(place_module, "core_count", lambda: 8)
    assert [threads_per_worker(n, {}) for n in (1, 2, 3, 8, 20)] == [8, 4, 2, 1, 1]


def test_threads_are_what_slurm_gave_the_task(monkeypatch):
    monkeypatch.setattr(place_module, "core_count", lambda: 8)
    assert threads_per_worker(2, {"SLURM_CPUS_PER_TASK": "3", "SLURM_STEP_ID": "0"}) == 3
    assert threads_per_worker(2, {"SLURM_CPUS_PER_TASK": "3"}) == 4, "a batch script's share is not a task's"


def test_core_count():
    assert core_count() >= 1


SLURM = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}
MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    "env",
    [
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "0"},
        {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "0"},
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "x"},
    ],
)
def test_counts_below_1_are_refused(env):
    with pytest.raises(UsageError, match=list(env)[-1]):
        read_place(env)
