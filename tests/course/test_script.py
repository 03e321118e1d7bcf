"""The course's commands run as written (shortened by --epochs alone), and mistakes are one line."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.processes import run

SCRIPT = str(Path(__file__).parents[2] / "fashion_mnist.py")
FIELDS = ("Epoch", "Cumulative Time", "Epoch Time", "Images/sec", "Validation Loss", "Validation Accuracy")
FULL = pytest.mark.skipif(
    not Path("/usr/share/datasets/fashion-mnist").is_dir(), reason="needs the full data: tools/install_system_packages.sh"
)


def script(*args: str, env: dict[str, str] | None = None) -> Any:
    return run([sys.executable, SCRIPT, *args], env={"CUDA_VISIBLE_DEVICES": "", **(env or {})}, timeout_s=170)


def contract(runs: Path) -> dict[str, Any]:
    (record,) = runs.glob("*")
    found: dict[str, Any] = json.loads((record / "environment.json").read_text())["contract"]
    return found


@FULL
@pytest.mark.full_data
@pytest.mark.parametrize(
    ("args", "workers", "global_batch", "peak_lr"),
    [
        (("--epochs", "1", "--num-gpus", "1", "--batch-size", "128"), 1, 128, 0.01),
        (("--epochs", "1", "--num-gpus", "4", "--batch-size", "128"), 4, 512, 0.01),
        (("--epochs", "1", "--num-gpus", "4", "--base-lr", "0.08", "--batch-size", "256"), 4, 1024, 0.08),
    ],
)
def test_the_courses_commands(args: tuple[str, ...], workers: int, global_batch: int, peak_lr: float, runs: Path) -> None:
    done = script(*args)
    assert done.returncode == 0, done.stderr
    assert f"no GPU here: training on {workers} CPU worker{'s' * (workers > 1)} with the small model cnn" in done.stdout
    (line,) = re.findall(r"^Epoch = .*$", done.stdout, re.MULTILINE)
    assert tuple(field.split(" = ")[0] for field in line.split(", ")) == FIELDS
    found = contract(runs)
    assert (found["workers"], found["global_batch"], found["peak_lr"]) == (workers, global_batch, peak_lr)
    assert found["train_samples"] == 60_000
    (record,) = runs.glob("*")
    header, row = (record / "course.csv").read_text().splitlines()
    assert header == "time,val_accuracy"
    assert re.fullmatch(r"\d+\.\d{3},0\.\d{4}", row)


def test_warm_up_is_the_courses_own_and_the_mini_set_steps_in(runs: Path, tmp_path: Path) -> None:
    """Two workers, four epochs: factors .5, .625, .75, .875 of the learning rate, one per epoch. No full data."""
    nowhere = {"PACELINE_DATA": str(tmp_path / "none"), "https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
    code = (
        "import sys, runpy; from pathlib import Path; from paceline.data import fashion_mnist as f;"
        f"f._SYSTEM_FOLDER = Path('/nowhere'); sys.argv = [{SCRIPT!r}, *sys.argv[1:]];"
        f"runpy.run_path({SCRIPT!r}, run_name='__main__')"
    )
    flags = ["--num-gpus", "2", "--epochs", "4", "--warmup-epochs", "4", "--target-accuracy", "1", "--model", "linear"]
    done = run(
        [sys.executable, "-c", code, *flags, "--base-lr", "0.08"], env={"CUDA_VISIBLE_DEVICES": "", **nowhere}, timeout_s=120
    )
    assert done.returncode == 0, done.stderr
    assert "this trains on the mini set that ships with Paceline" in done.stdout
    (record,) = runs.glob("*")
    rows = [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]
    by_epoch = {row["epoch"]: row["lr"] for row in rows if row["kind"] == "step"}
    assert by_epoch == pytest.approx({1: 0.04, 2: 0.05, 3: 0.06, 4: 0.07})


def test_patience_and_target(runs: Path) -> None:
    done = script("--epochs", "9", "--model", "linear", "--target-accuracy", "0.2", "--patience", "2", "--batch-size", "256")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^Epoch = ", done.stdout, re.MULTILINE)) == 2
    assert "target reached" in done.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--num-gpu", "2"), "unknown flag --num-gpu: did you mean --num-gpus?"),
        (("--num-gpus", "0"), "--num-gpus is 0: it must be at least 1"),
        (("--epochs", "x"), "argument --epochs: invalid int value: 'x'"),
        (("--model", "cn", "--epochs", "1"), "unknown model 'cn': did you mean 'cnn'?"),
        (("--num-nodes", "2", "--epochs", "1"), "needs the address of node 0"),
    ],
)
def test_mistakes_are_one_line(args: tuple[str, ...], words: str, runs: Path) -> None:
    done = script(*args)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert not runs.exists()


def test_a_python_without_paceline_uses_the_folders_own_environment(tmp_path: Path) -> None:
    """`python3 fashion_mnist.py` with the system's Python: it goes on in .venv, or says what to do."""
    lonely = tmp_path / "fashion_mnist.py"
    lonely.write_text(Path(SCRIPT).read_text())
    env = {"PYTHONPATH": "", "PYTHONNOUSERSITE": "1"}
    done = run([sys.executable, "-S", str(lonely), "--help"], env=env)
    assert done.returncode == 1
    assert "run `make setup` in this folder first" in done.stderr
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    wrapper = tmp_path / ".venv" / "bin" / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    os.chmod(wrapper, 0o755)
    done = run([sys.executable, "-S", str(lonely), "--help"], env=env)
    assert done.returncode == 0, done.stderr
    assert "--num-gpus" in done.stdout
