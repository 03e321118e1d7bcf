"""Law 5: killed at any moment, resumed on any number of workers: in exact mode the same bits, and every sample once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from harness.faults import EPOCHS, FLAGS, SAMPLES, TASK, fail_at, samples_by_step, train_with, variables
from harness.processes import paceline, run_workers
from harness.training import Trained, blobs, train_in
from paceline.core.sampler import Sampler
from paceline.dist.world import World, world
from paceline.records import read_metrics, read_result


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of a run that nothing happened to, on one worker."""
    folder, before = tmp_path_factory.mktemp("uninterrupted"), Path.cwd()
    os.chdir(folder)
    try:
        done = train_with([], "--name", "calm")
        assert done.returncode == 0, done.stderr
        assert_every_sample_once()
    finally:
        os.chdir(before)
    return folder / "runs" / "calm"


def facts(record: Path) -> tuple[str, dict[str, float], list[dict[str, Any]]]:
    """What must be equal: the weights' hash, the metrics, and every row of the record but for its times."""
    result = read_result(record)
    assert result["status"] == "done"
    rows = [row for row in read_metrics(record) if row["kind"] in ("step", "epoch")]
    timeless = [{name: value for name, value in row.items() if "time" not in name and "per_s" not in name} for row in rows]
    return result["model_sha256"], result["metrics"], timeless


def assert_every_sample_once() -> None:
    sampler, steps = Sampler(SAMPLES, 16, 4, 0), samples_by_step()
    assert sorted(steps) == list(range(sampler.first_step(EPOCHS)))
    for step, samples in steps.items():
        epoch, i = sampler.place(step)
        expected = sampler.order(epoch)[slice(*sampler.cut(epoch).bounds[i : i + 2])]
        assert sorted(samples) == sorted(expected.tolist()), f"step {step}"


def test_one_run_survives_every_kind_of_failure(runs: Path, uninterrupted: Path) -> None:
    """One run of two workers that fails in nine ways one after the other, and restarts by itself each time."""
    faults = [
        (fail_at(1, 1, "kill"), "worker 1 was killed by SIGKILL"),  # before the first checkpoint
        (fail_at(0, 4, "kill"), "worker 0 was killed by SIGKILL"),
        (fail_at(1, 7, "raise"), "worker 1 failed first: ValueError: this is what went wrong"),
        (fail_at(1, 8, "hang"), "worker 1 hung: no progress for 3 s at step 8, in forward"),
        (fail_at(0, 10, "out of memory"), "worker 0 failed first: RuntimeError:"),
        (fail_at(0, 11, "kill writer"), "worker 0 was killed by SIGKILL"),
        (fail_at(0, 13, "torn"), "worker 0 was killed by SIGKILL"),
        (fail_at(1, 16, "hang in C"), "worker 1 hung: the others waited for it"),
        (fail_at(1, 17, "exit"), "worker 1 ended with exit code 7"),
        (fail_at(0, 19, "crash"), "worker 0 was killed by SIGSEGV"),
    ]
    flags = ["--workers", "2", "--name", "x", "--max-restarts", str(len(faults)), "--timeout-s", "3"]
    done = train_with([fault for fault, _ in faults], *flags, timeout_s=170)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    for number, ((_, said), line) in enumerate(zip(faults, lines, strict=True), 1):
        assert line.startswith(f"paceline: {said}"), done.stderr
        assert line.endswith(f"; restart {number} of {len(faults)} on 2 workers")
    assert "is damaged" in done.stdout, "the torn checkpoint was not noticed"
    assert "using the previous one" in done.stdout
    assert facts(runs / "x") == facts(uninterrupted)
    assert_every_sample_once()


def test_stopped_and_resumed_on_other_numbers_of_workers(runs: Path, uninterrupted: Path) -> None:
    """Preempted on 3 workers, then killed on 1 without a chance, then stopped on 4, then finished on 2."""
    faults = [fail_at(0, 4, "disk slow"), fail_at(2, 4, "stop"), fail_at(0, 10, "kill"), fail_at(1, 16, "stop")]
    done = train_with(faults, "--name", "x", "--workers", "3")
    assert done.returncode == 143, done.stderr
    stopped_at = read_result(runs / "x")["steps"]
    assert (runs / "x" / "checkpoints" / f"step-{stopped_at:09d}.safetensors").exists(), "it ended before the disk had it"
    assert "stopped by SIGTERM after step" in done.stderr
    assert "a checkpoint was written; the same command with --resume continues" in done.stderr
    assert read_result(runs / "x")["status"] == "interrupted"
    done = train_with(faults, "--name", "x", "--workers", "1", "--resume")
    assert done.returncode == -signal.SIGKILL
    done = train_with(faults, "--resume", "x", "--workers", "4")
    assert done.returncode == 143, done.stderr
    done = train_with(faults, "--resume", "--workers", "2")  # the newest unfinished record of this task
    assert done.returncode == 0, done.stderr
    assert facts(runs / "x") == facts(uninterrupted)
    assert_every_sample_once()
    resumed = [row for row in read_metrics(runs / "x") if row["kind"] == "resume"]
    assert [row["contract"]["workers"] for row in resumed] == [1, 4, 2]
    again = train_with(faults, "--resume", "x")
    assert again.returncode == 0
    assert "already done" in again.stdout
    assert [path.name for path in runs.iterdir()] == ["x"], "a resumed run goes on in its own record"


def test_on_fewer_workers_when_a_device_is_gone(runs: Path, uninterrupted: Path) -> None:
    """Worker 2 of 3 fails whenever it reaches step 5: after the second time its device is no longer used."""
    flags = ["--workers", "3", "--name", "x", "--max-restarts", "3"]
    done = train_with([fail_at(2, 5, "kill", once=False)], *flags, "--min-workers", "2")
    assert done.returncode == 0, done.stderr
    assert "restart 2 of 3 on 2 workers: worker 2's device failed twice and is no longer used" in done.stderr
    assert facts(runs / "x") == facts(uninterrupted)
    assert_every_sample_once()


def test_a_full_disk_costs_checkpoints_not_the_run(runs: Path, uninterrupted: Path) -> None:
    faults = [fail_at(0, 4, "disk full"), fail_at(0, 10, "disk free"), fail_at(1, 13, "kill")]
    done = train_with(faults, "--workers", "2", "--name", "x", "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("could not write the checkpoint at step 6") == 1
    assert "training continues, the last good checkpoint is step 3" in done.stdout
    assert "from step 12 of" in done.stdout, "the checkpoints after the disk had room again were not used"
    assert facts(runs / "x") == facts(uninterrupted)


def test_a_changed_run_is_not_resumed(runs: Path) -> None:
    assert train_with([fail_at(0, 8, "kill")], "--name", "x").returncode == -signal.SIGKILL
    before = {path: path.read_bytes() for path in (runs / "x").rglob("*") if path.is_file()}
    Path("other.py").write_text(
        "import torch\nfrom dataclasses import replace\nfrom harness import faults\nfrom paceline import Arrays\n"
        "def data(change):\n"
        "    task = faults.task()\n"
        "    def train():\n"
        "        pixels, labels, numbers = task.train().tensors\n"
        "        return Arrays((pixels + change, labels, numbers))\n"
        "    return replace(task, train=train)\n"
        "def task():\n    return data(1)\n"
        "def model():\n"
        "    task = faults.task()\n"
        "    return replace(task, model=lambda: torch.nn.Sequential(task.model(), torch.nn.Linear(3, 3)))\n"
    )
    changes = {
        "--virtual-workers was 4, is 2": [TASK, "--virtual-workers", "2"],
        "--seed was 0, is 1": [TASK, "--seed", "1"],
        "--base-lr was 0.02, is 0.5": [TASK, "--base-lr", "0.5", "--epochs", "4"],
        "--reduce was exact, is fast": [TASK, "--reduce", "fast"],
        "the training or validation data is not the same": ["other.py"],
        "the model's parameters have other names or shapes": ["other.py:model"],
    }
    for number, (differs, (task, *flags)) in enumerate(changes.items()):
        workers = "2" if number in (1, 4) else "1"  # one that is seen before the record is opened, one after
        done = paceline("train", task, "--resume", "runs/x", "--workers", workers, *flags, env=variables())
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith(f"paceline: cannot resume: {differs}"), done.stderr
        assert done.stderr.count("\n") == 1
    after = {path: path.read_bytes() for path in (runs / "x").rglob("*") if path.is_file()}
    assert after == before, "a refused resume must leave the record alone"
    assert paceline("train", TASK, "--resume", "nowhere", env=variables()).returncode == 2


def chain(world: World, folder: Path, stop_at: int | None, **more: Any) -> Trained | None:
    """Train, from where the folder's checkpoints are, until a worker raises."""
    passes = 0
    task = blobs(norm=True, dropout=0.2, samples=61)
    objective = task.objective

    def failing(model: Any, batch: Any) -> Any:
        nonlocal passes
        passes += model.training
        if stop_at is not None and passes > stop_at:
            raise InterruptedError
        return objective(model, batch)

    options = {
        "reduce": "exact",
        "virtual_workers": 4,
        "checkpoint_every": "2",
        "optimizer": "adamw",
        "base_lr": 0.01,
        "global_batch": 16,
        "epochs": 5,
        **more,
    }
    task = type(task)(**{**vars(task), "objective": failing})
    try:
        return train_in(world, task, options, folder, resumes=True)
    except (InterruptedError, RuntimeError):  # its own failure, or contact lost with the one that failed
        return None


def test_adamw_and_dropout_on_four_numbers_of_workers(tmp_path: Path) -> None:
    (calm,) = run_workers(chain, 1, tmp_path / "calm", None)
    for workers, passes in ((3, 9), (1, 21), (2, 11)):
        assert run_workers(chain, workers, tmp_path / "x", passes) == [None] * workers
    for last in run_workers(chain, 4, tmp_path / "x", None):
        assert last.result.model_sha256 == calm.result.model_sha256
        assert {name: value.tobytes() for name, value in last.optimizer.items()} == {
            name: value.tobytes() for name, value in calm.optimizer.items()
        }
        assert last.result.metrics == calm.result.metrics


def test_a_finished_run_is_extended_on_other_workers(tmp_path: Path) -> None:
    """Three epochs on one worker, two more on two: the model of five epochs."""
    with world() as here:
        calm = chain(here, tmp_path / "calm", None, schedule="constant")
        assert calm is not None
        assert chain(here, tmp_path / "x", None, schedule="constant", epochs=3) is not None
    for last in run_workers(longer_chain, 2, tmp_path / "x"):
        assert (last.result.model_sha256, last.result.metrics) == (calm.result.model_sha256, calm.result.metrics)


def longer_chain(world: World, folder: Path) -> Trained | None:
    return chain(world, folder, None, schedule="constant", epochs=5)


def local_chain(world: World, folder: Path, stop_at: int | None) -> Trained | None:
    """Parts train by themselves from step 6 of 20 on, averaged after 8, 9, 12, 15, ...: checkpoints are of those steps."""
    return chain(world, folder, stop_at, local_steps=3, local_after=0.3, ema=0.9)


def test_local_steps_and_averaged_weights_on_three_numbers_of_workers(tmp_path: Path) -> None:
    with world() as here:
        calm = local_chain(here, tmp_path / "calm", None)
        assert calm is not None
        assert run_workers(local_chain, 2, tmp_path / "x", 21) == [None] * 2
        assert local_chain(here, tmp_path / "x", 22) is None
    steps = sorted(path.name for path in (tmp_path / "x").iterdir())
    assert steps[-1] == "step-000000012.safetensors"
    for last in run_workers(local_chain, 3, tmp_path / "x", None):
        assert last.result.model_sha256 == calm.result.model_sha256
        assert {name: value.tobytes() for name, value in last.optimizer.items()} == {
            name: value.tobytes() for name, value in calm.optimizer.items()
        }
        assert last.result.metrics == calm.result.metrics


def test_ctrl_c_and_a_second_run_of_the_same_record(runs: Path) -> None:
    """Ctrl-C writes a checkpoint; while a run is on, no other may go on with its record."""
    env = {**os.environ, **variables([fail_at(0, 4, "wait")])}
    command = [sys.executable, "-m", "paceline", "train", TASK, *FLAGS, "--name", "x"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not list(runs.glob("x/checkpoints/step-*")):
        assert time.monotonic() < end
        time.sleep(0.02)
    refused = paceline("train", TASK, "--resume", "x", env=variables())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "stopped by Ctrl-C after step" in err
    assert refused.returncode == 1
    assert "another run is writing to" in refused.stderr
    result = json.loads((runs / "x" / "result.json").read_text())
    newest = max(runs.glob("x/checkpoints/step-*"))
    assert newest.name == f"step-{result['steps']:09d}.safetensors", "the checkpoint is not of the step it stopped after"
