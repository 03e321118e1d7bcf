"""`paceline learning-curve` in processes: interrupted and continued; and the same subset on any number of workers."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.processes import paceline
from paceline.status import Status

FOLDER = Path("runs/learning-curve-fashion-mnist-mini")
SMALL = ("--model", "linear", "--sizes", "100,200,400", "--seeds", "2", "--epochs", "20")
CURVE = ("learning-curve", "fashion-mnist-mini", *SMALL)


@pytest.fixture(autouse=True)
def here(runs: Path) -> None:
    """Records go to the test's own folder."""


def test_an_interrupted_curve_continues_and_draws_its_fit():
    argv = [sys.executable, "-m", "paceline", *CURVE]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if line.startswith("[2/6]"):
                process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "run the same command" in err
    assert not (FOLDER / "learning-curve.json").exists()
    before = {path: path.read_bytes() for path in FOLDER.glob("*/result.json")}
    assert len(before) >= 2

    done = paceline(*CURVE, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done
    assert "already done" in done.stdout
    assert "\x1b" not in done.stdout
    assert {path: path.read_bytes() for path in before} == before, "finished runs stay"
    found = json.loads((FOLDER / "learning-curve.json").read_text())
    assert [row["samples"] for row in found["learning_curve"]["sizes"]] == [100, 200, 400]
    assert [len(row["errors"]) for row in found["learning_curve"]["sizes"]] == [2, 2, 2]
    assert all(Status(run["status"]).good for run in found["runs"])
    assert paceline("report", str(FOLDER)).returncode == 0
    assert "Error against data size" in (FOLDER / "report.html").read_text()


def test_a_random_subset_is_the_same_on_any_number_of_workers():
    flags = ("--model", "linear", "--train-samples", "96", "--subset", "random", "--seed", "5", "--epochs", "1")
    flags = (*flags, "--virtual-workers", "2", "--global-batch", "32", "--reduce", "exact")
    found = []
    for workers in ("1", "2"):
        own = ("--workers", workers, "--name", workers)
        done = paceline("train", "fashion-mnist-mini", *flags, *own, env={"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done
        found.append(json.loads(Path(f"runs/{workers}/result.json").read_text())["model_sha256"])
    assert found[0] == found[1]
