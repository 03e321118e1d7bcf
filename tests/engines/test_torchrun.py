"""torchrun, and Paceline's own launcher on one node and on two."""

from pathlib import Path

from harness.engines import (
    CONTRACT,
    PACELINE,
    TORCHRUN,
    TRAIN,
    check_apart,
    check_run,
    check_survived,
    free_ports,
    run_together,
)
from harness.faults import FLAGS, TASK, fail_at, variables
from harness.processes import run
from paceline.records import read_result


def test_torchrun_starts_one_world(runs: Path, model: str) -> None:
    done = run([*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "paceline", *TRAIN], timeout_s=90)
    assert done.returncode == 0, done.stderr
    check_run(runs, done.stdout, launcher="by torchrun", model=model)


def test_launchers_at_once_do_not_collide(runs: Path, model: str) -> None:
    torchrun = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "paceline", *TRAIN]
    ours = [*PACELINE, *TRAIN, "--workers", "2", "--seed"]
    for done in run_together(torchrun, [*ours, "1"], [*ours, "2"]):
        assert done.returncode == 0, done.stderr
        assert done.stdout.count(CONTRACT) == 1
    check_apart(runs, 3, model)


def test_two_launchers_are_two_nodes_of_one_world(runs: Path, model: str) -> None:
    (port,) = free_ports(1)
    node = [*PACELINE, *TRAIN, "--workers", "1", "--nodes", "2", "--rendezvous", f"127.0.0.1:{port}", "--node-id"]
    first, second = run_together([*node, "0"], [*node, "1"], timeout_s=90)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    check_run(runs, first.stdout + second.stdout, launcher="started here", nodes=2, model=model)
    assert second.stdout == "", "only rank 0's node speaks"


def test_torchrun_restarts_a_killed_worker_and_is_stopped(runs: Path, uninterrupted: str) -> None:
    """A worker is killed at step 8: torchrun restarts all, and they resume. SIGTERM at step 14; our launcher finishes it."""
    (runs / "x").mkdir(parents=True)  # an older, finished run of this name: not the one to resume
    (runs / "x" / "metrics.jsonl").touch()
    (runs / "x" / "result.json").write_text('{"status": "done", "metrics": {}, "model_sha256": "older"}')
    env = variables([fail_at(1, 8, "kill"), fail_at(0, 14, "stop launcher")])
    train = ["train", TASK, *FLAGS]
    job = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "paceline", *train, "--name", "x"]
    done = run(job, env=env, timeout_s=90)
    assert done.returncode == 1, f"torchrun's own code when it gets a signal:\n{done.stdout}"
    assert "from step 6 of 21" in done.stdout, f"not resumed after the restart:\n{done.stdout}\n{done.stderr}"
    record = runs / "x-2"
    stopped = read_result(record)
    assert stopped["status"] == "interrupted", stopped
    assert (record / "checkpoints" / f"step-{stopped['steps']:09d}.safetensors").exists(), "none of where it stopped"
    done = run([*PACELINE, *train, "--resume", "x-2", "--workers", "3"], env=variables(), timeout_s=60)
    assert done.returncode == 0, done.stderr
    assert f"from step {stopped['steps']} of 21" in done.stdout
    check_survived(record, uninterrupted, [2, 3])


def test_two_nodes_restart_when_a_worker_on_one_is_killed(runs: Path, uninterrupted: str) -> None:
    (port,) = free_ports(1)
    where = ["--workers", "1", "--nodes", "2", "--rendezvous", f"127.0.0.1:{port}", "--max-restarts", "1"]
    node = [*PACELINE, "train", TASK, *FLAGS, "--name", "x", *where, "--node-id"]
    first, second = run_together([*node, "0"], [*node, "1"], env=variables([fail_at(1, 8, "kill")]), timeout_s=90)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stderr.startswith("paceline: worker 0 lost contact with another worker")
    assert second.stderr.startswith("paceline: worker 1 was killed by SIGKILL")
    assert "from step 6 of 21" in first.stdout
    check_survived(runs / "x", uninterrupted, [2])


FAILS = """
import torch
from paceline import Arrays, Task

def objective(model, batch):
    raise ValueError("this is what went wrong")

def task():
    data = lambda: Arrays((torch.ones(8, 1),))
    return Task(name="fails", model=lambda: torch.nn.Linear(1, 1), train=data, validation=data, objective=objective)
"""


def test_workers_of_torchrun_with_the_same_error_print_it_once(runs: Path) -> None:
    Path("fails.py").write_text(FAILS)
    command = ["-m", "paceline", "train", "fails.py", "--global-batch", "4"]
    done = run([*TORCHRUN, "--standalone", "--nproc-per-node", "2", *command], timeout_s=90)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: this is what went wrong") == 1, done.stderr
    assert "  fails.py, line 6, in objective\n" in done.stderr
    assert "paceline/training" not in done.stderr, "no frames of ours"


ONE = """
import os, torch
from paceline import Arrays, Task

def objective(model, batch):
    if os.environ["RANK"] == "1":
        raise ValueError("only here")
    return {"loss": model(batch[0])[:, 0]}

def task():
    return Task(name="one", model=lambda: torch.nn.Linear(1, 1), train=Arrays((torch.ones(64, 1),)), objective=objective)
"""


def test_the_record_has_the_error_of_the_worker_that_failed_first(runs: Path) -> None:
    """Rank 0 writes the record, but knows only that the other worker is gone."""
    Path("my_task.py").write_text(ONE)
    train = ["-m", "paceline", "train", "my_task.py", "--name", "x"]
    done = run([*TORCHRUN, "--standalone", "--nproc-per-node", "2", *train], timeout_s=90)
    assert done.returncode
    assert "paceline: worker 1: ValueError: only here\n  my_task.py, line 7, in objective\n" in done.stderr
    result = read_result(runs / "x")
    assert (result["status"], result["why"]) == ("failed", "ValueError: only here")
    assert result["where"].startswith("my_task.py, line 7, in objective")
