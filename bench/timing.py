"""What measuring in every step costs: images/s with and without the clock and health, or with and without the noise scale.

    python bench/timing.py [--rounds 15] [--epochs 3] [--models cnn resnet:depth=8] [--out bench/results/timing.json]
    python bench/timing.py --of noise [--parts 8 --global-batch 512] [--out bench/results/timing_noise.json]

Both train the same model on the same batches in the same processes. They take turns, a few epochs at a time, so a busy machine
slows both. Each round gives one ratio of times; the result is their median. Without clock and health, it is the same loop with
a clock that does nothing, no hooks on gradients, and no health checks. `--of noise` is what `--batch-schedule auto` measures.
Two CPU workers with one thread each over gloo; on a machine with a GPU, one worker with a captured step (CUDA graph). The first
round is warm-up and is left out.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from measurement import run_workers, spread, write
from paceline.dist.world import World, world
from paceline.training import plain, tasks
from paceline.training.build import build
from paceline.training.loop import fit
from paceline.training.timing.clock import Clock
from paceline.training.timing.health import Health


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=["cnn", "resnet:depth=8"])
    parser.add_argument("--task", default="fashion-mnist-mini")
    parser.add_argument("--of", choices=("clock", "noise"), default="clock")
    parser.add_argument("--parts", type=int, default=0, help="virtual workers [one per worker; 8 with --of noise]")
    parser.add_argument("--global-batch", type=int, default=0)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    parts = args.parts or (8 if args.of == "noise" else 0)
    options = {"epochs": args.epochs, "virtual_workers": parts or None, "global_batch": args.global_batch or None}
    asked = args.task, args.rounds, args.of, {name: value for name, value in options.items() if value}
    gpu, by_model = torch.cuda.is_available(), {}
    for model in args.models:
        if gpu:
            with world() as here:
                rows = measure(here, model, *asked)
        else:
            rows = run_workers(measure, 2, model, *asked, timeout_s=3600)[0]
        by_model[model] = {name: spread([row[name] for row in rows], 4) for name in rows[0]} | {"n": len(rows), "rows": rows}
        print(f"{model}: time with / without {by_model[model]['ratio']}", flush=True)
    where = torch.cuda.get_device_name() if gpu else "2 CPU workers with one thread each, gloo"
    subject = "clock and health" if args.of == "clock" else "the noise scale"
    what = f"images/s of {args.task} with and without {subject}"
    name = "timing.json" if args.of == "clock" else "timing_noise.json"
    result = {"what": what, "where": where, "options": asked[-1], "by_model": by_model}
    write(args.out or str(Path(__file__).parent / "results" / name), result)


def measure(here: World, model: str, task: str, rounds: int, of: str, options: dict[str, Any]) -> list[dict[str, float]]:
    """Measure on one worker."""
    rows: list[dict[str, float]] = []
    for number in range(rounds + 1):
        row: dict[str, float] = {}
        for kind in ("with", "without") if number % 2 else ("without", "with"):
            noise = {"measure_noise": True} if of == "noise" and kind == "with" else {}
            with untimed() if of == "clock" and kind == "without" else nullcontext():
                run = build(*tasks.resolve(task, {"model": model, **options, **noise}), here)
                result = fit(run, ())
            row[kind] = result.epochs * run.sampler.samples / result.train_time_s
        row["ratio"] = row["without"] / row["with"]
        if number:
            rows.append(row)
    return rows


@contextmanager
def untimed() -> Iterator[None]:
    """Without the clock and health checks."""
    with mock.patch.object(plain, "Clock", NoClock), mock.patch.object(Health, "look", return_value=None):
        yield


class NoClock(Clock):
    """A clock that records nothing."""

    def __init__(self, here: World, *_: Any) -> None:
        super().__init__(here)
        self.switch(False)

    def begin(self, step: int) -> None: ...

    def enter(self, stage: str) -> None: ...


if __name__ == "__main__":
    main()
