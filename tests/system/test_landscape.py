"""`paceline landscape` as a user starts it: any number of workers, killed and continued."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

import paceline as package
from harness.engines import PACELINE, TORCHRUN
from harness.processes import run
from paceline import cli
from unit.landscape.test_landscape import TASK


@pytest.fixture(autouse=True)
def trained(runs: Path) -> None:
    Path("nets.py").write_text(TASK)
    package.train("nets.py:task", epochs=1, name="x", snapshots=3)


def values(name: str) -> tuple[object, ...]:
    found = json.loads(Path(f"runs/x/landscape/{name}.json").read_text())
    return found["x"], found.get("y"), found["sets"], found.get("paths")


def test_any_number_of_workers_gives_the_same_values() -> None:
    """Bit for bit: a point is computed by one worker, on the same samples with the same operations."""
    shapes = {"plane-0": ["--shape", "plane"], "path": ["--shape", "path"]}
    alone = {}
    for name, shape in shapes.items():
        assert cli.run(["landscape", "x", "--points", "7", "--workers", "1", *shape]) == 0
        alone[name] = values(name)
    for start, more in (([*PACELINE], ["--workers", "2"]), ([*TORCHRUN, "--nproc-per-node", "3", "-m", "paceline"], [])):
        for name, shape in shapes.items():
            done = run([*start, "landscape", "x", "--points", "7", *shape, *more])
            assert done.returncode == 0, done.stderr
            assert done.stdout.count(f"runs/x/landscape/{name}.json") == 1, "rank 0 speaks"
            assert values(name) == alone[name]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_surface_that_was_interrupted_continues_on_other_workers(number: signal.Signals) -> None:
    folder = Path("runs/x/landscape")
    command = [*PACELINE, "landscape", "x", "--points", "101", "--workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not any(part.read_text().count("\n") > 2 for part in folder.glob("*.part")):
        time.sleep(0.05)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "stopped by Ctrl-C; points that are done are kept: the same command continues" in error
    (part,) = folder.glob("*.part")
    lines = part.read_text().splitlines()
    kept = sum(len(json.loads(line)) for line in lines[1:] if line.strip())
    done = run([*PACELINE, "landscape", "x", "--points", "101", "--workers", "1"], timeout_s=170)
    assert done.returncode == 0, done.stderr
    before = done.stdout.partition(" were done before")[0].rpartition("(")[2].replace(",", "")
    assert 0 < kept <= int(before) < 101 * 101
    assert not part.exists()
