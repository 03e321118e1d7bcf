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
from unit.landscape.test_landscape import TASK


@pytest.fixture(autouse=True)
def trained(runs: Path) -> None:
    Path("my.py").write_text(TASK)
    package.train("my.py:task", epochs=1, name="x", snapshots=3)


def values(name: str) -> tuple[object, ...]:
    found = json.loads(Path(f"runs/x/landscape/{name}.json").read_text())
    return found["x"], found.get("y"), found["sets"], found.get("paths")


def test_any_number_of_workers_gives_the_same_values() -> None:
    """Bit for bit: a point is computed by one worker, on the same samples with the same operations."""
    found: dict[str, set[str]] = {"plane-0": set(), "path": set(), "line-5": set()}
    for start in ([*PACELINE], [*TORCHRUN, "--nproc-per-node", "3", "-m", "paceline"]):
        workers = ["--workers", "2"] if start == [*PACELINE] else []
        for name, more in (("plane-0", []), ("path", ["--shape", "path"]), ("line-5", ["--shape", "line", "--seed", "5"])):
            for count in ([*workers], ["--workers", "1"]) if workers else ([],):
                done = run([*start, "landscape", "x", "--points", "7", *more, *count])
                assert done.returncode == 0, done.stderr
                assert done.stdout.count(f"runs/x/landscape/{name}.json") == 1, "rank 0 speaks"
                found[name].add(json.dumps(values(name)))
    assert all(len(each) == 1 for each in found.values())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_surface_that_was_interrupted_continues_on_other_workers(number: signal.Signals) -> None:
    part = Path("runs/x/landscape/plane-0.part")
    command = [*PACELINE, "landscape", "x", "--points", "101", "--workers", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and (not part.exists() or part.read_text().count("\n") < 3):
        time.sleep(0.05)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "stopped by Ctrl-C; points that are done are kept: the same command continues" in error
    assert part.exists()
    lines = part.read_text().splitlines()
    kept = sum(len(json.loads(line)) for line in lines[1:] if line.strip())
    done = run([*PACELINE, "landscape", "x", "--points", "101", "--workers", "1"], timeout_s=170)
    assert done.returncode == 0, done.stderr
    before = done.stdout.partition(" were done before")[0].rpartition("(")[2].replace(",", "")
    assert 0 < kept <= int(before) < 101 * 101
    assert not part.exists()
