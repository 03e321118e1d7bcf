"""Images/s of 2 CPU workers against 1 worker with one thread, on the mini set, in one run.

    python bench/workers.py [--repeats 5] [--model cnn] [--out bench/results/workers.json]

The two are run in turn, several times, so that a busy machine slows both; each pair gives one ratio, and the median of the
ratios is the result. Both train the same part batch (128 a worker), the first epoch of each run is warm-up and left out.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from paceline.records import environment


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "workers.json"))
    args = parser.parse_args()
    rows = []
    for repeat in range(args.repeats):
        one, two = (images_per_s(workers, args.model, args.epochs) for workers in (1, 2))
        rows.append({"one_worker_images_per_s": one, "two_workers_images_per_s": two, "ratio": two / one})
        print(
            f"{repeat + 1}/{args.repeats}: 1 worker {one:,.0f}, 2 workers {two:,.0f} images/s, ratio {two / one:.3f}",
            flush=True,
        )
    ratios = [row["ratio"] for row in rows]
    result = {
        "what": "images/s training fashion-mnist-mini: 2 CPU workers against 1, one thread each, 128 samples a worker and step",
        "model": args.model,
        "ratio_median": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "n": len(ratios),
        "rows": rows,
        "environment": {name: value for name, value in environment().items() if name != "machine"},
    }
    Path(args.out).write_text(json.dumps(result, indent=2) + "\n")
    print(f"median ratio {result['ratio_median']:.3f} (n = {len(ratios)}, {min(ratios):.3f} to {max(ratios):.3f}), {args.out}")


def images_per_s(workers: int, model: str, epochs: int) -> float:
    """Median over the epochs after the first."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--model", model, "--epochs", str(epochs), "--runs-dir", folder, "--name", "bench", "--workers", str(workers)]
        command = [sys.executable, "-m", "paceline", "train", "fashion-mnist-mini", *flags]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (Path(folder) / "bench" / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row["samples_per_s"] for row in rows if row["kind"] == "epoch" and row["epoch"] > 1)


if __name__ == "__main__":
    main()
