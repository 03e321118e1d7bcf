"""What a checkpoint costs: the time it adds to training on 2 CPU workers, and the overhead at the default of one per minute.

    python bench/checkpoint.py [--rounds 9] [--models cnn mlp:width=1024] [--out bench/results/checkpoint.json]

Epochs with a checkpoint every few steps and epochs without take turns in the same two processes. The difference between two
adjacent epochs, divided by the number of checkpoints written, is what one checkpoint adds: the copy, the gathering of
statistics, and the writer's share of the core while training continues. It can be below zero if noise is larger than the cost.
`stall` is the wall-clock time that the training thread itself spends on one checkpoint.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from measurement import run_workers, spread, write
from paceline.dist.world import World
from paceline.training import tasks
from paceline.training.build import build
from paceline.training.checkpoint.keeper import Keeper, Progress
from paceline.training.loop import fit

WORKERS, PART_BATCH, EVERY, DEFAULT_S = 2, 128, 6, 60.0


class Timed(Keeper):
    """A keeper that measures how long it stops training."""

    def save(self, progress: Progress) -> None:
        begin = _now()
        super().save(progress)
        self.stalls_s: list[float] = [*getattr(self, "stalls_s", []), _now() - begin]


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # include the GPU work it starts
    return time.perf_counter()


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", nargs="+", default=["cnn", "mlp:width=1024"])
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "checkpoint.json"))
    args = parser.parse_args()
    by_model = {}
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            found = run_workers(measure, WORKERS, model, args.rounds, Path(folder), timeout_s=3600)[0]
        rows = found.pop("rows")
        spreads = {name: spread([row[name] for row in rows], 6) for name in ("added_s", "stall_s", "step_s")}
        cost = {"cost_at_default_percent": round(100 * spreads["added_s"]["median"] / DEFAULT_S, 4)}
        by_model[model] = {**found, "n": len(rows), **spreads, **cost, "rows": rows}
    result = {
        "what": f"time one checkpoint adds to training on 2 CPU workers, one every {EVERY} steps against none",
        "default": "one every 60 s",
        "by_model": by_model,
    }
    print(table(result))
    write(args.out, result)


def table(result: dict[str, Any]) -> str:
    """The result as Markdown, for docs/recovery.md."""
    lines = ["| model | file | step | training stops for | adds in total | at one per minute |", "|---|---|---|---|---|---|"]
    for model, found in result["by_model"].items():
        ms = {name: f"{1e3 * found[name]['median']:.1f} ms" for name in ("step_s", "stall_s", "added_s")}
        low, high = (1e3 * found["added_s"][name] for name in ("min", "max"))
        lines.append(
            f"| {model} | {found['bytes'] / 1e6:.1f} MB | {ms['step_s']} | {ms['stall_s']} | {ms['added_s']} ({low:.1f} to"
            f" {high:.1f}) | {found['cost_at_default_percent']:.3f}% |"
        )
    return "\n".join(lines)


def measure(world: World, model: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Measure on one worker."""
    rows = []
    for number in range(rounds + 1):
        times: dict[str, float] = {}
        for every in ("0", str(EVERY)) if number % 2 else (str(EVERY), "0"):
            options = {"epochs": 1, "model": model, "reference_batch": PART_BATCH, "checkpoint_every": every}
            run = build(*tasks.resolve("fashion-mnist-mini", options), world)
            keeper = Timed(run, folder if world.is_main else None)
            times[every] = fit(run, (), keeper).train_time_s
            if every != "0":
                stalls = keeper.stalls_s
        if number:
            row = {
                "added_s": (times[str(EVERY)] - times["0"]) / len(stalls),
                "stall_s": statistics.median(stalls),
                "step_s": times["0"] / run.sampler.cut(0).steps,
            }
            rows.append(row)
            if world.is_main:
                print(f"{model}, {number}/{rounds}: " + ", ".join(f"{k} {1e3 * v:.2f} ms" for k, v in row.items()), flush=True)
    size = max((path.stat().st_size for path in folder.glob("step-*")), default=0)
    return {"bytes": size, "rows": rows}


if __name__ == "__main__":
    main()
