"""The worked examples train on one worker and on two, and so does the README's task."""

import json
import re
from pathlib import Path

import pytest

from harness.processes import paceline

EXAMPLES = Path(__file__).parents[2] / "examples"
FLAGS = ("--epochs", "60", "--base-lr", "0.01", "--global-batch", "16")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_line_fit_finds_the_line(workers: str, runs: Path) -> None:
    from safetensors.torch import load_file

    done = paceline("train", str(EXAMPLES / "line_fit.py"), "--workers", workers, *FLAGS)
    assert done.returncode == 0, done.stderr
    (record,) = runs.glob("*")
    weights = load_file(record / "model.safetensors")
    assert weights["weight"].item() == pytest.approx(10, abs=0.2)
    assert weights["bias"].item() == pytest.approx(2, abs=1)
    assert json.loads((record / "result.json").read_text())["metrics"]["loss"] < 1.5, "the noise has variance 1"
    assert not (record / "course.csv").read_text().splitlines()[1:], "a task without accuracy writes no rows"


def test_char_lm_learns(runs: Path) -> None:
    done = paceline("train", str(EXAMPLES / "char_lm.py"), "--workers", "2", "--max-steps", "12", "--loader-workers", "1")
    assert done.returncode == 0, done.stderr
    assert "(streamed)" in done.stdout
    (record,) = runs.glob("*")
    metrics = json.loads((record / "result.json").read_text())["metrics"]
    assert metrics["bits_per_character"] < 5.0, "an untrained model needs 7 bits"


def test_readme_task_trains(tmp_path: Path) -> None:
    from paceline import train

    text = (EXAMPLES.parent / "README.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "def task" in block)
    (tmp_path / "my_task.py").write_text(code)
    result = train(str(tmp_path / "my_task.py"), epochs=2, precision="fp32", runs_dir=str(tmp_path / "runs"))
    assert result.status == "done"
    assert result.metrics["loss"] < 1, "it starts at about 4"
