"""Images/s of 2 CPU workers against 1 worker with one thread, on the mini set, in one run.

    python bench/workers.py [--repeats 7] [--part-batch 128 512] [--out bench/results/workers.json]

Four things are measured in turn, several times, so that a busy machine slows all: one worker; two workers; two workers that
only wait for each other after every step, by an all-reduce of one number, and average nothing; and two runs of one worker at
the same time that never talk to each other, which is the most that two cores can give. Each round gives one ratio of each;
medians are the result. The first epoch of each run is warm-up and left out.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from measurement import run_workers, spread, write
from paceline.dist.world import World
from paceline.training import build, loop, step, tasks


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--part-batch", type=int, nargs="+", default=[128, 512], help="samples a worker and step")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "workers.json"))
    args = parser.parse_args()
    result = {
        "what": "images/s training fashion-mnist-mini on CPU workers of one thread: 1 worker, 2 workers, 2 runs apart",
        "model": args.model,
        "by_part_batch": {str(part_batch): measure(part_batch, args) for part_batch in args.part_batch},
    }
    print(table(result))
    write(args.out, result)


def measure(part_batch: int, args: argparse.Namespace) -> dict[str, object]:
    """All rounds at one part batch."""
    rows = []
    for repeat in range(args.repeats):
        one, two, apart = (images_per_s(runs, part_batch, args) for runs in ([1], [2], [1, 1]))
        wait = run_workers(functools.partial(in_step, part_batch=part_batch, model=args.model, epochs=args.epochs), 2)[0]
        rows.append({"one": one, "two": two, "in_step": wait, "two_apart": apart})
        rows[-1] |= {"ratio": two / one, "ratio_in_step": wait / one, "ratio_apart": apart / one}
        print(
            f"part batch {part_batch}, {repeat + 1}/{args.repeats}: 1 worker {one:,.0f}, 2 workers {two:,.0f} images/s,"
            f" ratio {two / one:.3f} (only waiting: {wait / one:.3f}, two runs apart: {apart / one:.3f})",
            flush=True,
        )
    medians = {name: spread([row[name] for row in rows]) for name in rows[0]}
    print(f"part batch {part_batch}: median ratio {medians['ratio']}, apart {medians['ratio_apart']}, n = {len(rows)}")
    return {"n": len(rows), **medians, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """The result as Markdown, for the README."""
    lines = [
        "| samples a worker and step | 1 worker | 2 workers | ratio | that only wait for each other | two runs apart |",
        "|---|---|---|---|---|---|",
    ]
    for part_batch, found in result["by_part_batch"].items():
        one, two = found["one"]["median"], found["two"]["median"]
        ratios = [f"{found[name]['median']:.2f} ({found[name]['min']:.2f} to {found[name]['max']:.2f})" for name in RATIOS]
        lines.append(f"| {part_batch} | {one:,.0f} | {two:,.0f} | {' | '.join(ratios)} |")
    return "\n".join(lines)


RATIOS = ("ratio", "ratio_in_step", "ratio_apart")


def in_step(here: World, part_batch: int, model: str, epochs: int) -> float:
    """As one of two workers that train apart but wait for each other after every step; the images/s of both."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[here.rank :: here.size])  # as Paceline's own workers are
    step.averages = lambda world, config: False  # no DDP
    loop.check_agreement = lambda *_: None  # they do not agree
    options = {"model": model, "epochs": epochs, "reference_batch": part_batch, "log_every": 1_000_000}
    run = build.build(*tasks.resolve("fashion-mnist-mini", options), here)
    run.step.optimizer.register_step_post_hook(lambda *_: dist.all_reduce(torch.zeros(1)))
    speeds: list[float] = []

    class Watcher:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

        def epoch(self, row: Any) -> None:
            speeds.append(row["samples_per_s"])

    loop.fit(run, [Watcher()])  # type: ignore[list-item]
    return statistics.median(speeds[1:])


def images_per_s(runs: list[int], part_batch: int, args: argparse.Namespace) -> float:
    """Start these runs, of so many workers each, at once; the sum of their images/s, each the median of the later epochs."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--model", args.model, "--epochs", str(args.epochs), "--reference-batch", str(part_batch)]
        command = [sys.executable, "-m", "paceline", "train", "fashion-mnist-mini", *flags, "--runs-dir", folder]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        started = [
            subprocess.Popen([*command, "--workers", str(workers), "--name", str(i)], env=env, stdout=subprocess.DEVNULL)
            for i, workers in enumerate(runs)
        ]
        assert not any(process.wait() for process in started)
        return sum(_speed(Path(folder) / str(i)) for i in range(len(runs)))


def _speed(record: Path) -> float:
    rows = [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["samples_per_s"] for row in rows if row["kind"] == "epoch" and row["epoch"] > 1)


if __name__ == "__main__":
    main()
