"""`paceline sharpness` as a user starts it: workers, and Ctrl-C."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

import paceline as package
from harness.engines import PACELINE
from harness.processes import paceline
from ranks.test_sharpness import TASK

FAST = ("--vectors", "4", "--lanczos-steps", "10")


@pytest.fixture(autouse=True)
def record(runs: Path) -> Path:
    Path("quadratic.py").write_text(TASK)
    package.train("quadratic.py:task", epochs=1, name="x")
    return runs / "x"


def test_two_workers_print_and_write_once(record: Path) -> None:
    done = paceline("sharpness", "x", "--workers", "2", "--samples", "0", *FAST)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Hessian, trace") == 1
    assert "last weights on 83 training samples" in done.stdout
    two = json.loads((record / "sharpness.json").read_text())
    (record / "sharpness.json").unlink()
    done = paceline("sharpness", "x", "--json", "--samples", "0", *FAST)
    one = json.loads(done.stdout)
    assert (one["workers"], two["workers"]) == (1, 2)
    assert two["hessian"]["top"] == pytest.approx(one["hessian"]["top"], rel=1e-6)
    assert [each["sharpness"] for each in two["keskar"]] == pytest.approx(
        [each["sharpness"] for each in one["keskar"]], rel=1e-5
    )


def test_after_ctrl_c_finished_measures_are_kept(record: Path) -> None:
    """The second call leaves the Hessian out, and has the numbers of the first."""
    command = [*PACELINE, "sharpness", "x", "--workers", "2", "--measures", "sam,hessian", "--vectors", "10000"]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    partial = record / "sharpness.partial.json"
    end = time.monotonic() + 60
    while not partial.exists() and started.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    assert partial.exists(), started.communicate(timeout=30)
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 130, said
    assert "Traceback" not in said
    kept = json.loads(partial.read_text())
    done = paceline("sharpness", "x", "--json", "--measures", "sam")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sam"] == kept["sam"]
    assert not partial.exists()


def test_an_error_of_the_workers_is_one_line() -> None:
    done = paceline("sharpness", "x", "--workers", "2", "--task", "quadratic.py:model")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
