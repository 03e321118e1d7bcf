"""Kill a run 50 times at random moments, on 1 to 4 workers, and check that it still ends with the same model.

    python bench/soak.py [--kills 50] [--seed 0] [--out bench/results/soak.json]

The run trains a small residual net (batch norm, momentum, augmentation) in exact mode, with four virtual workers. Every attempt
resumes it on a random number of workers and ends with SIGKILL: to a random worker or the launcher at a random moment of
training or start-up, in the middle of writing a checkpoint, or just after a checkpoint was truncated. The last attempt may
finish. The weights must have the same hash, and the record the same numbers, as an uninterrupted run on one worker. Every
sample of every epoch must have been trained on exactly once.
"""

import argparse
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measurement import children, faults, write
from paceline.core.sampler import Sampler
from paceline.records import read_metrics, read_result

EPOCHS, PARTS, GLOBAL_BATCH = 100, 4, 16
FLAGS = ["--virtual-workers", str(PARTS), "--global-batch", str(GLOBAL_BATCH), "--reduce", "exact", "--epochs", str(EPOCHS)]
HOW = ("worker", "worker", "launcher", "start-up", "checkpoint write", "torn checkpoint")


def main() -> int:
    """Run the soak, print and write the tally; 0 if everything is as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "soak.json"))
    args = parser.parse_args()
    out, before = Path(args.out).resolve(), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            tally = soak(args.kills, random.Random(args.seed))
        finally:
            os.chdir(before)
    write(str(out), tally)
    ok = tally["same_hash"] and tally["same_metrics"] and tally["every_sample_once"] and tally["kills"] == args.kills
    print(summary(tally), "PASSED" if ok else "FAILED", sep="\n")
    return not ok


def soak(kills: int, chance: random.Random) -> dict[str, Any]:
    """Run everything in the current folder."""
    assert train("calm", 1, []).wait() == 0
    calm, run = Path("runs/calm"), Path("runs/soak")
    for path in Path("seen").iterdir():
        path.unlink()
    done: list[dict[str, Any]] = []
    while len(done) < kills:
        workers, how = chance.randint(1, 4), chance.choice(HOW)
        before = newest(run)
        planned = []
        if how == "checkpoint write":
            planned = [faults.fail_at(0, before + chance.randint(1, 5), "kill writer")]
        elif how == "torn checkpoint":
            planned = [faults.fail_at(0, before + chance.randint(1, 5), "torn")]
        for struck in Path("seen").glob("struck-*"):
            struck.unlink()
        process = train("soak", workers, planned, slow_s=0.03)
        if how in ("worker", "launcher", "start-up"):
            if how != "start-up":
                await_steps(process, seen_bytes())
            time.sleep(chance.uniform(0, 1.5 if how != "start-up" else 5))
            victim = process.pid
            if how != "launcher":
                victim = chance.choice(worker_pids(process.pid))
            os.kill(victim, signal.SIGKILL)
        code = process.wait(timeout=120)
        struck = how in ("worker", "launcher", "start-up") or Path("seen/struck-0").exists()
        assert code != 0, "the run finished before it could be killed: make it longer"
        assert struck, f"the run ended on its own:\n{Path('soak.log').read_text()[-3000:]}"
        row = {"workers": workers, "how": how, "from_step": before, "newest_checkpoint": newest(run), "exit_code": code}
        done.append(row)
        print(
            f"kill {len(done)} of {kills}: {how} on {workers} worker(s), from step {before} to {row['newest_checkpoint']}",
            flush=True,
        )
    assert train("soak", chance.randint(1, 4), []).wait() == 0
    how_many = {how: sum(row["how"] == how for row in done) for how in dict.fromkeys(HOW)}
    return {
        "what": "a run that was killed many times, compared with the same run uninterrupted",
        "kills": len(done),
        "by_kind": how_many,
        "by_workers": {str(n): sum(row["workers"] == n for row in done) for n in range(1, 5)},
        "steps": read_result(run)["steps"],
        "epochs": EPOCHS,
        "same_hash": read_result(run)["model_sha256"] == read_result(calm)["model_sha256"],
        "same_metrics": rows(run) == rows(calm),
        "every_sample_once": every_sample_once(),
        "model_sha256": read_result(run)["model_sha256"],
        "rows": done,
    }


def train(name: str, workers: int, planned: list[faults.Fault], slow_s: float = 0.0) -> "subprocess.Popen[bytes]":
    """Start the run, or resume it."""
    command = [
        sys.executable,
        "-m",
        "paceline",
        "train",
        faults.TASK,
        *FLAGS,
        "--name",
        name,
        "--resume",
        "--workers",
        str(workers),
    ]
    env = {**os.environ, **faults.variables(planned, slow_s), "OMP_NUM_THREADS": "1"}
    with Path(f"{name}.log").open("ab") as log:
        return subprocess.Popen([*command, "--checkpoint-every", "2"], env=env, stdout=log, stderr=log)


def worker_pids(pid: int) -> list[int]:
    """The launcher's workers, or the process itself if it is the only worker."""
    return [child for child, command in children(pid).items() if "paceline train" in command] or [pid]


def seen_bytes() -> int:
    return sum(path.stat().st_size for path in Path("seen").glob("*.jsonl"))


def await_steps(process: "subprocess.Popen[bytes]", before: int) -> None:
    """Wait until this attempt has begun to train."""
    while seen_bytes() <= before:
        assert process.poll() is None, f"the run ended on its own:\n{Path('soak.log').read_text()[-3000:]}"
        time.sleep(0.01)


def newest(record: Path) -> int:
    steps = [int(re.findall(r"\d+", path.name)[0]) for path in record.glob("checkpoints/step-*.safetensors")]
    return max(steps, default=0)


def rows(record: Path) -> list[dict[str, Any]]:
    """The record's numbers, without times."""
    kept = [row for row in read_metrics(record) if row["kind"] in ("step", "epoch")]
    return [{name: value for name, value in row.items() if "time" not in name and "per_s" not in name} for row in kept]


def every_sample_once() -> bool:
    sampler, steps = Sampler(faults.SAMPLES, GLOBAL_BATCH, PARTS, 0), faults.samples_by_step()
    for epoch in range(EPOCHS):
        for i, (start, stop) in enumerate(itertools.pairwise(sampler.cut(epoch).bounds)):
            expected = sampler.order(epoch)[start:stop]
            if sorted(steps.pop(sampler.first_step(epoch) + i, [])) != sorted(expected.tolist()):
                return False
    return not steps


def summary(tally: dict[str, Any]) -> str:
    """The tally in one line, for docs/recovery.md."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in tally["by_kind"].items())
    weights, metrics = ("equal" if tally[what] else "DIFFER FROM" for what in ("same_hash", "same_metrics"))
    once = "" if tally["every_sample_once"] else "NOT "
    return (
        f"{tally['kills']} kills ({kinds}) on 1 to 4 workers over {tally['steps']} steps: weights {weights} and"
        f" metrics {metrics} those of an uninterrupted run; every sample of every epoch was {once}seen once"
    )


if __name__ == "__main__":
    sys.exit(main())
