"""`paceline evaluate` and `paceline predict` as a user starts them: our launcher and torchrun."""

import json
from pathlib import Path

import numpy as np
import pytest

import paceline as package
from harness.engines import PACELINE, TORCHRUN
from harness.processes import run
from unit.training.test_after import TASK


@pytest.fixture(autouse=True)
def trained(runs: Path) -> None:
    Path("my.py").write_text(TASK)
    package.train("my.py:task", epochs=1, name="x")


def test_two_workers_print_and_write_once(runs: Path) -> None:
    own = json.loads((runs / "x" / "result.json").read_text())["metrics"]
    done = run([*TORCHRUN, "--nproc-per-node", "2", "-m", "paceline", "evaluate", "x", "--json"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["metrics"] == own
    done = run([*PACELINE, "predict", "x", "--to", "p.npy", "--workers", "2"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("p.npy: outputs of 33 samples") == 1
    assert np.load("p.npy").shape == (33, 3)


def test_an_error_in_the_workers_is_shown_once() -> None:
    done = run([*PACELINE, "evaluate", "x", "--data", "my.py:broken", "--workers", "2"])
    assert done.returncode == 1
    assert done.stderr.count("no such column") == 2, "the error, and the user's own line"
    assert "Traceback" not in done.stderr
