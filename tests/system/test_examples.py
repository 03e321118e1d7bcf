"""The worked examples train, on one worker and on two."""

import json
from pathlib import Path

import pytest

from harness.processes import paceline

EXAMPLES = Path(__file__).parents[2] / "examples"
FLAGS = ("--epochs", "60", "--base-lr", "0.01", "--global-batch", "16")


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_line_is_found(workers: str, runs: Path) -> None:
    from safetensors.torch import load_file

    done = paceline("train", str(EXAMPLES / "line_fit.py"), "--workers", workers, *FLAGS)
    assert done.returncode == 0, done.stderr
    (record,) = runs.glob("*")
    weights = load_file(record / "model.safetensors")
    assert weights["weight"].item() == pytest.approx(10, abs=0.2)
    assert weights["bias"].item() == pytest.approx(2, abs=1)
    assert json.loads((record / "result.json").read_text())["metrics"]["loss"] < 1.5, "the noise has variance 1"
    assert not (record / "course.csv").read_text().splitlines()[1:], "there is no accuracy to write down"


def test_the_character_model_learns(runs: Path) -> None:
    done = paceline("train", str(EXAMPLES / "char_lm.py"), "--workers", "2", "--max-steps", "12", "--loader-workers", "1")
    assert done.returncode == 0, done.stderr
    assert "(streamed)" in done.stdout
    (record,) = runs.glob("*")
    metrics = json.loads((record / "result.json").read_text())["metrics"]
    assert metrics["bits_per_character"] < 5.0, "knowing nothing costs 7 bits"
