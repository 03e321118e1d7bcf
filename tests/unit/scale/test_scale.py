"""`paceline scale` refuses mistakes with one line, before it starts a worker."""

from pathlib import Path

import pytest

from paceline import cli

_SCALE = ("scale", "fashion-mnist-mini", "--model", "mlp:width=256", "--windows", "3", "--window-s", "0.1", "--name", "s")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--workers", "0,2"], "--workers is '0,2': it must be numbers of workers such as 1,2,4"),
        (["--workers", "two"], "must be numbers of workers"),
        (["--global-batch", "512"], "--mode weak gives each worker one part of --reference-batch samples"),
        (["--resume"], "--resume does not apply to scale"),
        (["--windows", "1"], "--windows is 1: it must be at least 3"),
        (["--mode", "both"], "invalid choice: 'both'"),
    ],
)
def test_mistakes_are_one_line(runs: Path, flags: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*_SCALE, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert not runs.exists()


def test_another_record_is_left_alone(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "s").mkdir(parents=True)
    assert cli.run(_SCALE) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "choose another --name" in line
