"""Time to 94% on the full Fashion-MNIST, one GPU: `recipes/speedrun.toml`, many seeds.

    python bench/speedrun.py [--runs 10] [--commands 3] [--out bench/results/speedrun.json]

Every run trains the recipe's fixed number of epochs. The result is the mean final accuracy and the time it took. "From the
first step": the clock starts when the step is ready to run and stops when the last validation is done; all validations are
included. These runs share a process, one seed after the other. "From the process start": the command itself, timed by its
parent, the first time with an empty compile cache. `--recipe` and `--data` try something else.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from measurement import spread, write
from paceline.dist.world import World, world
from paceline.toml import read_recipe
from paceline.training import tasks
from paceline.training.build import build
from paceline.training.loop import fit

ROOT = Path(__file__).resolve().parent.parent
GOAL = 0.94
MARKS = {"step_ready_s": "note: the step is", "last_validation_s": "Epoch = ", "end_s": "done:"}


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default=str(ROOT / "recipes" / "speedrun.toml"))
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--commands", type=int, default=3)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "speedrun.json"))
    args = parser.parse_args()
    commands = from_process_start(args)  # before this process takes the GPU
    runs: list[dict[str, float]] = []
    with world() as here:
        for seed in range(args.runs):
            runs.append(from_first_step(here, args, seed))
            write(args.out, summarize(args, runs, commands))
    summary = summarize(args, runs, commands)
    print(json.dumps({name: value for name, value in summary.items() if name not in ("recipe", "runs")}, indent=2))


def summarize(args: argparse.Namespace, runs: list[dict[str, float]], commands: list[dict[str, float]]) -> dict[str, Any]:
    """The result so far."""
    accuracies = [run["accuracy"] for run in runs]
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "recipe": read_recipe(args.recipe),
        "n": len(runs),
        "mean_accuracy": round(sum(accuracies) / len(accuracies), 5),
        "accuracy": spread(accuracies, 4),
        "runs_that_reach_94": sum(accuracy >= GOAL for accuracy in accuracies),
        "from_first_step_s": spread([run["from_first_step_s"] for run in runs]),
        "training_alone_s": spread([run["training_alone_s"] for run in runs]),
        "runs": runs,
        "commands": commands,
    }


def from_first_step(here: World, args: argparse.Namespace, seed: int) -> dict[str, float]:
    """One run, and the time from its first step to its last validation."""
    run = build(*tasks.resolve(args.data, {**read_recipe(args.recipe), "seed": seed}), here)
    begun: list[float] = []
    ended: list[float] = []

    class Notes:
        """An observer that notes the time when an epoch has been validated."""

        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

        stop = ""

        def mark(self, step: int, stage: str) -> None:
            if not begun and stage != "loading":
                begun.append(time.perf_counter())

        def epoch(self, row: Any) -> None:
            ended.append(time.perf_counter())

    notes: Any = Notes()
    result = fit(run, [notes], watch=notes)
    found = {
        "seed": seed,
        "accuracy": result.metrics["accuracy"],
        "from_first_step_s": round(ended[-1] - begun[0], 3),
        "training_alone_s": round(result.train_time_s, 3),
    }
    print(found, file=sys.stderr, flush=True)
    return found


def from_process_start(args: argparse.Namespace) -> list[dict[str, float]]:
    """Run the command several times with one compile cache, which is empty at first."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled", "PYTHONUNBUFFERED": "1"}
        for number in range(args.commands):
            flags = ["--recipe", args.recipe, "--runs-dir", folder, "--seed", str(100 + number)]
            command = [sys.executable, "-m", "paceline", "train", args.data, *flags]
            begin, marks = time.perf_counter(), {}
            with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    for what, text in MARKS.items():
                        if line.lstrip().startswith(text):
                            marks[what] = round(time.perf_counter() - begin, 2)
            assert process.returncode == 0
            rows.append(marks)
            print(marks, file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    main()
