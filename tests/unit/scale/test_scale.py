"""`paceline scale` refuses mistakes with one line, before it starts a worker."""

from pathlib import Path
from typing import Any

import pytest

from paceline import cli
from paceline.scale import scale, windows

_SCALE = ("scale", "fashion-mnist-mini", "--model", "mlp:width=256", "--windows", "3", "--window-s", "0.1", "--name", "s")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--workers", "0,2"], "--workers is '0,2': it must be numbers of workers such as 1,2,4"),
        (["--workers", "two"], "must be numbers of workers"),
        (["--global-batch", "512"], "--mode weak gives each worker one part of --reference-batch samples"),
        (
            ["--batch-schedule", "0:64 1:512"],
            "leave out --batch-schedule, or use --mode strong, which measures its largest batch",
        ),
        (
            ["--mode", "strong", "--batch-schedule", "0:64 1:512", "--global-batch", "256"],
            "--global-batch is 256, but the largest batch of --batch-schedule '0:64 1:512' is 512",
        ),
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


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of each count that would be measured."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(scale, "_measure_there", lambda task, options, how: found.append(options))
    monkeypatch.setattr(scale, "_show", lambda folder: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return found


@pytest.mark.parametrize("text", ['"0:64 1:512"', '{"0" = 64, "1" = 512}'])
def test_a_recipe_with_a_growing_batch_is_measured_with_a_constant_one(
    runs: Path, measured: list[dict[str, Any]], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("r.toml").write_text(f"batch_schedule = {text}\nglobal_batch = 512\nvirtual_workers = 2\n")
    flags = (*_SCALE, "--recipe", "r.toml", "--workers", "1,2")
    assert cli.run([*flags, "--mode", "weak"]) == 0
    assert all({"batch_schedule", "global_batch", "virtual_workers"}.isdisjoint(options) for options in measured)
    assert "batch" not in capsys.readouterr().out
    measured.clear()
    assert cli.run([*flags, "--mode", "strong"]) == 0
    batches = [(options.get("batch_schedule"), options["global_batch"], options["virtual_workers"]) for options in measured]
    assert batches == [(None, 512, 2)] * 2
    line = "measuring a constant global batch of 512, the largest of --batch-schedule 0:64 1:512\n"
    assert capsys.readouterr().out.count(line) == 1


@pytest.mark.parametrize(("schedule", "batch"), [("0:64 1:512", 512), ("0:512 2:64", 512), ("auto", 256), ("none", 256)])
def test_strong_scaling_measures_the_largest_batch_of_a_schedule(
    runs: Path, measured: list[dict[str, Any]], schedule: str, batch: int
) -> None:
    assert cli.run([*_SCALE, "--workers", "2", "--mode", "strong", "--batch-schedule", schedule]) == 0
    assert [(options.get("batch_schedule"), options["global_batch"]) for options in measured] == [(None, batch)]


def test_a_schedule_in_a_tasks_defaults_is_left_out(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("points.py").write_text(
        "import torch\nfrom paceline import Arrays, Task\n"
        "def task():\n"
        "    return Task(name='points', train=lambda: Arrays((torch.randn(200, 5),)), model=lambda: torch.nn.Linear(5, 1),\n"
        "                objective=lambda m, b: {'loss': m(b[0]).squeeze(1) ** 2},\n"
        "                defaults={'reference_batch': 16, 'batch_schedule': '0:16 1:64'})\n"
    )
    found = windows.measure_here("points.py", {}, {"windows": 3, "window_s": 0.01})
    assert found is not None
    assert (found["count"]["global_batch"], found["count"]["contract"]["phases"]) == (16, ())
    assert capsys.readouterr().out == "the task's own batch schedule is left out: all steps have the same batch\n"
