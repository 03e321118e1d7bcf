"""On one GPU: the same bits on 1 to 4 workers, and what parts, exact sums and checkpoints cost.

    python bench/gpu_parts.py [--model wide_resnet] [--rounds 5] [--out bench/results/gpu_parts.json]

Bits: `paceline train --reduce exact` with 1 to 4 gloo workers that share the GPU, in fp32 and bf16. Speed: one worker over
NCCL, steps of the same global batch as one part, as V parts together, in turn, and with exact sums; these take turns in every
round. Checkpoints: how long one stops training, and the size of its file. Fashion-MNIST mini, with the data on the device.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from checkpoint import Timed
from measurement import spread, write
from paceline.dist.world import World, world
from paceline.training import tasks
from paceline.training.build import build
from paceline.training.loop import fit

PARTS, GLOBAL_BATCH = 8, 1024
WAYS: dict[str, dict[str, Any]] = {
    "one part": {"virtual_workers": 1},
    "together": {"virtual_workers": PARTS},
    "in turn": {"virtual_workers": PARTS, "parts_at_once": 1},
    "exact": {"virtual_workers": PARTS, "reduce": "exact"},
    "exact, 4 at once": {"virtual_workers": PARTS, "reduce": "exact", "parts_at_once": 4},
}


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wide_resnet")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "gpu_parts.json"))
    args = parser.parse_args()
    result = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "model": args.model,
        "bits": {precision: bits(args.model, precision, args.steps) for precision in ("fp32", "bf16")},
    }
    with world() as here:
        result["speed"] = speed(here, args.model, args.rounds)
        result["checkpoint"] = checkpoints(here, args.model)
    write(args.out, result)
    print(Path(args.out).read_text())


def bits(model: str, precision: str, steps: int) -> dict[str, Any]:
    """The model's hash after some steps, for each number of workers."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            "--virtual-workers",
            "4",
            "--reduce",
            "exact",
            "--crop",
            "2",
            "--max-steps",
            str(steps),
            "--precision",
            precision,
        ]
        for workers in ("1", "2", "3", "4"):
            command = [sys.executable, "-m", "paceline", "train", "fashion-mnist-mini", "--model", model, *flags]
            where = ["--workers", workers, "--backend", "gloo", "--runs-dir", folder, "--name", workers]
            subprocess.run([*command, *where], check=True, stdout=subprocess.DEVNULL)
            found[workers] = json.loads((Path(folder) / workers / "result.json").read_text())["model_sha256"]
    return {"steps": steps, "model_sha256": found, "same": len(set(found.values())) == 1}


def speed(here: World, model: str, rounds: int) -> dict[str, Any]:
    """Images/s of each way to run the parts: medians over rounds, after one warm-up round."""
    rows: list[dict[str, float]] = []
    for number in range(rounds + 1):
        row = {}
        for way, options in WAYS.items():
            common = {"epochs": 3, "model": model, "global_batch": GLOBAL_BATCH, "precision": "bf16", "check_every": 0}
            run = build(*tasks.resolve("fashion-mnist-mini", {**common, **options}), here)
            row[way] = fit(run, ()).samples_per_s  # in the last epoch
        if number:
            rows.append(row)
    speeds = {way: spread([row[way] for row in rows]) for way in WAYS}
    return {"global_batch": GLOBAL_BATCH, "parts": PARTS, "precision": "bf16", "n": len(rows), "images_per_s": speeds}


def checkpoints(here: World, model: str) -> dict[str, Any]:
    """How long one checkpoint stops training, and the size of its file."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"epochs": 6, "model": model, "global_batch": 128, "precision": "bf16", "checkpoint_every": "20"}
        run = build(*tasks.resolve("fashion-mnist-mini", options), here)
        keeper = Timed(run, Path(folder))
        fit(run, (), keeper)
        size = max(path.stat().st_size for path in Path(folder).glob("step-*"))
    stalls = [1e3 * stall for stall in keeper.stalls_s]
    return {
        "bytes": size,
        "n": len(stalls),
        "first_ms": stalls[0],
        "median_ms": statistics.median(stalls[1:]),
        "max_ms": max(stalls[1:]),
    }


if __name__ == "__main__":
    main()
