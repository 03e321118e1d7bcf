"""Images/s of a run alone, and of two runs that share all cores, by how idle OpenMP threads wait.

    python bench/shared_cores.py [--rounds 5] [--epochs 4]

Runs the real command (`paceline train fashion-mnist-mini`, fp32, 3,000 images); the first epoch is not counted. The ways take
turns within a round, so a busy machine slows all of them. "spinning" is libgomp's default. "passive" is
OMP_WAIT_POLICY=passive, which the command sets by itself when it finds the cores in use ("as it is").
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measurement import spread, write

WAYS = {
    "as it is": {},
    "spinning": {"GOMP_SPINCOUNT": "300000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "shared_cores.json"))
    args = parser.parse_args()
    load = os.getloadavg()
    found: dict[str, dict[str, list[float]]] = {way: {"alone": [], "two at once": []} for way in WAYS}
    for number in range(args.rounds):
        for way, extra in WAYS.items():
            for runs, times in ((1, found[way]["alone"]), (2, found[way]["two at once"])):
                speeds = train_at_once(runs, extra, args.epochs)
                times.append(statistics.mean(speeds))
                print(f"round {number + 1}, {way}, {runs} at once: {times[-1]:,.0f} images/s each", flush=True)
    result = {
        "what": "images/s of each run: median of its epochs after the first, mean of the runs at once",
        "cores": len(os.sched_getaffinity(0)),
        "load_average_before": [round(value, 2) for value in load],
        "by_way": {way: {case: spread(values) for case, values in cases.items()} for way, cases in found.items()},
    }
    print(table(result))
    write(args.out, result)


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = ["| idle threads | one run, images/s | two runs at once, images/s each |", "|---|---|---|"]
    for way, cases in result["by_way"].items():
        cells = [f"{case['median']:,.0f} ({case['min']:,.0f} to {case['max']:,.0f})" for case in cases.values()]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    return "\n".join(lines)


def train_at_once(runs: int, extra: dict[str, str], epochs: int) -> list[float]:
    """Images/s of runs that start together."""
    plain = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    env = {**plain, **extra}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "paceline", "train", "fashion-mnist-mini", f"--epochs={epochs}"]
        command += ["--precision=fp32", "--train-samples=3000", f"--runs-dir={folder}"]
        started = [subprocess.Popen([*command, f"--name=run{i}"], env=env, stdout=subprocess.DEVNULL) for i in range(runs)]
        for process in started:
            if process.wait(600):
                sys.exit(f"a run failed: {' '.join(command)}")
        return [_images_per_s(Path(folder) / f"run{i}" / "metrics.jsonl") for i in range(runs)]


def _images_per_s(metrics: Path) -> float:
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return statistics.median([row["samples_per_s"] for row in rows if row["kind"] == "epoch"][1:])


if __name__ == "__main__":
    main()
