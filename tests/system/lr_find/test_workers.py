"""A learning-rate range test in exact mode has the same curve on any number of workers."""

import json
from pathlib import Path

import pytest

from harness.processes import paceline
from paceline import cli


def test_exact_mode_has_the_same_curve_on_one_worker_and_on_two(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "cnn:width=4,dropout=0.2", "--virtual-workers", "3", "--global-batch", "96"]
    flags += ["--reduce", "exact", "--steps", "40", "--to", "1"]
    command = ["lr-find", "fashion-mnist-mini", *flags, "--runs-dir", str(tmp_path)]
    assert cli.run([*command, "--name", "1"]) == 0
    done = paceline(*command, "--name", "2", "--workers", "2")
    assert done.returncode == 0, done.stderr
    one, two = (json.loads((tmp_path / name / "lr-find.json").read_text()) for name in ("1", "2"))
    assert two["contract"]["workers"] == 2
    assert [two[name] for name in ("points", "advice", "exploded")] == [one[name] for name in ("points", "advice", "exploded")]
    shown, also = done.stdout.splitlines(), capsys.readouterr().out.splitlines()
    assert [line for line in shown if str(tmp_path) not in line] == [line for line in also if str(tmp_path) not in line], (
        "printed once, by rank 0"
    )
