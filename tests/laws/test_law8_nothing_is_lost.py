"""Law 8: a checkpoint is complete or absent; the last good one always loads; records are append-only.

The run is killed from outside, at moments nobody chose. After each kill everything on disk must be whole: the newest checkpoint
loads without a complaint, every row of the record can be read, and no row that was there before is gone.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from harness.faults import FLAGS, TASK, variables
from paceline.records import read_metrics, read_result
from paceline.training.checkpoint.file import load_latest

KILLS = 5


def test_killed_at_any_moment(runs: Path) -> None:
    record, env = runs / "x", {**os.environ, **variables(slow_s=0.02)}
    command = [sys.executable, "-m", "paceline", "train", TASK, *FLAGS, "--name", "x", "--resume", "--checkpoint-every", "1"]
    moments = random.Random(8)
    rows, step = b"", 0
    for _ in range(KILLS):
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        wait_for_news(record, rows, process)
        time.sleep(moments.uniform(0, 0.3))
        process.kill()
        _, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, err.decode()
        complaints: list[str] = []
        checkpoint = load_latest(record / "checkpoints", complaints.append)
        assert not complaints
        assert checkpoint is None or checkpoint.step >= step, "an older checkpoint than there was"
        step = checkpoint.step if checkpoint else 0
        now = (record / "metrics.jsonl").read_bytes()
        assert now.startswith(rows[: rows.rfind(b"\n") + 1]), "rows that were there are gone"
        rows = now
        assert read_metrics(record)
    assert step > 0
    done = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert read_result(record)["status"] == "done"
    steps = [row["step"] for row in read_metrics(record) if row["kind"] == "epoch"]
    assert steps == sorted(set(steps)), "an epoch is there twice"
    assert len((record / "course.csv").read_text().splitlines()) == 1 + len(steps)
    assert not list(record.glob("**/.*")), "something half written was left"


def wait_for_news(record: Path, rows: bytes, process: "subprocess.Popen[bytes]") -> None:
    """Until the run has come so far that it writes again."""
    end = time.monotonic() + 60
    while not (record / "metrics.jsonl").exists() or (record / "metrics.jsonl").stat().st_size <= len(rows):
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
