"""srun, sbatch and salloc on a real cluster of two nodes: each task finds its world, and a batch script starts its own."""

import getpass
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.engines import INSTALL, PACELINE, TRAIN, check_apart, check_run, check_survived, run_together, wait_for
from harness.faults import FLAGS, TASK, fail_at, variables
from harness.listening import listening, outside
from harness.processes import tagged
from harness.slurm import Slurm, cluster, missing

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(missing()), reason=f"Slurm is not complete: {', '.join(missing())} missing: {INSTALL}"),
]

_RAISES = """
import torch
import torch.distributed as dist
from paceline import Arrays, Task

calls = 0

def objective(model, batch):
    global calls
    calls += 1
    if dist.get_rank() == 1 and calls == 3:
        raise ValueError("a mistake in step 3")
    return {"loss": model(batch[0]).square().mean(1)}

def task():
    data = Arrays((torch.ones(512, 8),))
    model = lambda: torch.nn.Linear(8, 8)
    return Task(name="raises", train=lambda: data, validation=lambda: data, objective=objective, model=model)
"""

_PLACE = """
import json
from dataclasses import asdict
from paceline.dist.place import read_place
print(json.dumps(asdict(read_place())))
"""


@pytest.fixture(scope="module")
def started() -> Iterator[Slurm]:
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, cluster(Path(folder)) as slurm:
        yield slurm


@pytest.fixture
def slurm(started: Slurm) -> Iterator[Slurm]:
    """The cluster; a test leaves no job and no task on it."""
    yield started
    wait_for(lambda: not started.jobs(), 20, lambda: f"jobs left behind:\n{started.jobs()}")
    wait_for(lambda: not started.tasks(), 20, lambda: f"processes left behind: {started.tasks()}")


@pytest.mark.parametrize(
    ("flags", "nodes"), [(["-N2", "--ntasks-per-node=1"], 2), (["-N1", "-n2"], 1)], ids=["two nodes", "one node"]
)
def test_srun_starts_one_world(slurm: Slurm, runs: Path, model: str, flags: list[str], nodes: int) -> None:
    done = slurm.run("srun", *flags, *PACELINE, *TRAIN)
    assert done.returncode == 0, done.stderr
    check_run(runs, done.stdout, launcher="by srun", nodes=nodes, model=model)


def test_on_one_node_nobody_else_can_connect(slurm: Slurm, runs: Path) -> None:
    seen, tag = set[str](), uuid.uuid4().hex
    endless = ["train", "fashion-mnist-mini", "--model", "linear", "--epochs", "1000000", "--log-every", "1"]
    env = {**os.environ, **slurm.env, "TAG": tag}
    job = subprocess.Popen(["srun", "-N1", "-n2", *PACELINE, *endless], env=env, stdout=subprocess.PIPE)

    def look() -> bool:
        seen.update(listening({*tagged(tag)} & {*tagged("SLURM_PROCID=")}))  # srun itself listens for its tasks
        return any(path.stat().st_size for path in runs.glob("*/metrics.jsonl"))

    try:
        wait_for(look, 60, slurm.logs)
    finally:
        slurm.run("scancel", f"--user={getpass.getuser()}", timeout_s=20)
        job.communicate(timeout=30)
    assert seen, "no listening socket was seen, so this test shows nothing"
    assert not outside(seen)


def test_two_steps_of_one_job_do_not_collide(slurm: Slurm, runs: Path, model: str) -> None:
    step = " ".join(["srun", "--exact", "-N2", "-n2", *PACELINE, *TRAIN])
    script = f"{step} & one=$!; {step} --seed 1 & two=$!; wait $one && wait $two"
    done = slurm.run("salloc", "-N2", "-n4", "--ntasks-per-node=2", "bash", "-c", script, timeout_s=110)
    assert done.returncode == 0, done.stderr
    assert "Requested nodes are busy" not in done.stderr, "the steps must run at the same time"
    check_apart(runs, 2, model)


def test_two_jobs_do_not_collide(slurm: Slurm, runs: Path, model: str) -> None:
    job = ["srun", "-N2", "-n2", *PACELINE, *TRAIN]
    for done in run_together(job, [*job, "--seed", "1"], env=slurm.env):
        assert done.returncode == 0, done.stderr
    check_apart(runs, 2, model)


def test_a_batch_script_starts_its_own_workers(slurm: Slurm, runs: Path, model: str) -> None:
    script = runs.parent / "job.sh"
    script.write_text(f"#!/bin/bash\n{' '.join([*PACELINE, *TRAIN])} --workers 2\n")
    done = slurm.run("sbatch", "--wait", "-N1", "-n2", "--output=job.out", str(script))
    output = (runs.parent / "job.out").read_text()
    assert done.returncode == 0, done.stderr + output
    check_run(runs, output, launcher="started here", model=model)


def test_contradicting_workers_are_one_line(slurm: Slurm, runs: Path) -> None:
    done = slurm.run("srun", "-n2", *PACELINE, *TRAIN, "--workers", "3", timeout_s=60)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if not line.startswith("srun: ")]
    assert len(lines) == 1, done.stderr
    assert "--workers 3, but srun started 2" in lines[0]
    assert done.stdout == ""
    assert not runs.exists()


def test_a_worker_that_raises_ends_the_job(slurm: Slurm, runs: Path) -> None:
    (runs.parent / "raises.py").write_text(_RAISES)
    done = slurm.run("srun", "-n2", *PACELINE, "train", "raises.py", "--epochs", "50", timeout_s=60)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: a mistake in step 3\n") == 1, f"printed once, without a traceback:\n{done.stderr}"
    assert "  raises.py, line " in done.stderr, "the user's own line"
    assert "Traceback" not in done.stderr, f"the other worker's lost contact must not be reported:\n{done.stderr}"
    (record,) = runs.iterdir()
    assert json.loads((record / "result.json").read_text())["status"] == "failed"


def test_a_requeued_job_resumes(slurm: Slurm, runs: Path, uninterrupted: str) -> None:
    """Requeued at step 5, a job finishes with the same script, here with one task more than before."""
    train = ["train", TASK, *FLAGS, "--name", "x", "--resume", "--checkpoint-every", "1000"]  # only the stop writes one
    step = " ".join(["srun", "-n$((2 + ${SLURM_RESTART_COUNT:-0}))", *PACELINE, *train])
    Path("job.sh").write_text(f"#!/bin/bash\n{step}\n")
    env = variables([fail_at(1, 5, "requeue")])
    flags = ["--requeue", "--open-mode=append", "--output=job.out", "-N2", "-n4"]
    job = slurm.run("sbatch", "--parsable", *flags, "job.sh", env=env).stdout.strip()

    def said() -> str:
        return Path("job.out").read_text() if Path("job.out").exists() else slurm.logs()

    wait_for(lambda: slurm.reason(job) == "BeginTime", 60, said)  # a requeued job waits 120 s in Slurm
    time.sleep(2)  # within the same second, the nodes would mistake it for the job that they are ending
    slurm.run("scontrol", "update", f"jobid={job}", "StartTime=now")
    wait_for(lambda: not slurm.jobs(), 60, said)
    assert said().count("Exited with exit code 143") == 2, said()
    check_survived(runs / "x", uninterrupted, [3])


def test_the_place_of_a_process(slurm: Slurm, runs: Path) -> None:
    """Only a step of several tasks is a world; a batch script, an allocation's shell and a step of one task are single."""
    script = runs.parent / "place.py"
    script.write_text(_PLACE)
    show = [sys.executable, str(script)]
    batch = runs.parent / "job.sh"
    batch.write_text(f"#!/bin/bash\n{' '.join(show)}\n")

    (shell,) = _places(slurm, "salloc", "-N2", "-n3", *show)
    (single,) = _places(slurm, "srun", "-N1", "-n1", *show)
    (shell_step,) = _places(slurm, "srun", "-N1", "-n1", "--pty", *show)
    assert slurm.run("sbatch", "--wait", "-N2", "-n3", "--output=job.out", str(batch), timeout_s=30).returncode == 0
    in_batch = json.loads((runs.parent / "job.out").read_text())
    assert [place["launcher"] for place in (shell, single, shell_step, in_batch)] == ["alone"] * 4

    step = sorted(_places(slurm, "srun", "-N2", "-n3", *show), key=lambda place: place["rank"])
    assert {(place["launcher"], place["size"], place["nodes"], place["run_key"]) for place in step} == {
        ("srun", 3, 2, step[0]["run_key"])
    }
    where = [(place["rank"], place["node"], place["local_rank"], place["local_size"]) for place in step]
    assert where == [(0, 0, 0, 2), (1, 0, 1, 2), (2, 1, 0, 1)]
    steps = _places(slurm, "salloc", "-N1", "-n2", "bash", "-c", f"srun {' '.join(show)}; srun {' '.join(show)}")
    assert len({place["run_key"] for place in (*steps, *step)}) == 3, "every step of every job has a key of its own"


def _places(slurm: Slurm, *command: str) -> list[dict[str, object]]:
    done = slurm.run(*command, timeout_s=30)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
