"""What it costs when other workers take over during a run (`--workers-schedule`), component by component.

    python bench/joins.py [--rounds 5] [--model cnn] [--out bench/results/joins.json]

Every round trains the same model three times: on one worker, on two, and with workers that change after each epoch but the last
(1, 2, 1, 2, 1, 2: five joins). Each leaves a `join` row in the record: seconds from the last work of the old
workers to the first step of the new ones. As a check from outside, the seconds that a whole command spends outside of
training are compared with those of the fixed runs. All models of a round must have the same hash (exact mode).
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measurement import spread, write
from paceline.records import read_metrics, read_result

COUNTS = (1, 2, 1, 2, 1, 2)
COMPONENTS = {
    "stop": "checkpoint on disk, old workers ended",
    "start": "processes, imports, workers meet",
    "build": "task, data, model",
    "resume": "checkpoint read, first step ready",
}
"""Of a join, in this order."""


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "joins.json"))
    args = parser.parse_args()
    load = os.getloadavg()
    schedule = " ".join(f"{epoch}:{count}" for epoch, count in enumerate(COUNTS))
    kinds = {
        "1 worker": ["--workers", "1", "--max-restarts", "1"],  # under the launcher, like the others
        "2 workers": ["--workers", "2"],
        "changing": ["--workers-schedule", schedule],
    }
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for number in range(args.rounds + 1):
        for kind, flags in kinds.items():
            found = train(args.model, flags)
            if number:  # the first round writes the bytecode
                runs[kind].append(found)
        print(f"round {number} of {args.rounds} done", flush=True)
    hashes = {run["model_sha256"] for each in runs.values() for run in each}
    assert len(hashes) == 1, f"models differ: {hashes}"
    joins = [join for run in runs["changing"] for join in run["joins"]]
    up, down = ([join for join in joins if (join["workers"] > join["was"]) == more] for more in (True, False))
    outside = {kind: [run["wall_s"] - run["train_s"] for run in each] for kind, each in runs.items()}
    per_join = [
        (changing - fixed) / (len(COUNTS) - 1)
        for changing, fixed in zip(outside["changing"], outside["2 workers"], strict=True)
    ]
    result = {
        "what": "seconds of a join: median, smallest and largest over n joins; fashion-mnist-mini on CPU workers",
        "model": args.model,
        "rounds": args.rounds,
        "load_average": {"before": [round(value, 2) for value in load], "after": [round(v, 2) for v in os.getloadavg()]},
        "same_model_sha256": hashes.pop(),
        "components": COMPONENTS,
        "1 to 2 workers": describe(up),
        "2 to 1 workers": describe(down),
        "whole commands": {
            kind: {
                "wall_s": spread([run["wall_s"] for run in each]),
                "train_s": spread([run["train_s"] for run in each]),
                "outside_training_s": spread(outside[kind]),
            }
            for kind, each in runs.items()
        },
        "more outside training than on 2 workers, per join": {"n": len(per_join), **spread(per_join)},
    }
    print(table(result))
    write(args.out, result)


def table(result: dict[str, Any]) -> str:
    """The result as Markdown, for docs/launchers.md."""

    def cell(found: dict[str, float]) -> str:
        return f"{found['median']:.2f} ({found['min']:.2f} to {found['max']:.2f})"

    lines = [f"| | n | total | {' | '.join(COMPONENTS)} |", "|---|---|---|---|---|---|---|"]
    for kind in ("1 to 2 workers", "2 to 1 workers"):
        found = result[kind]
        cells = (found["total_s"], *(found["components_s"][name] for name in COMPONENTS))
        lines.append(f"| {kind} | {found['n']} | {' | '.join(map(cell, cells))} |")
    return "\n".join(lines)


def train(model: str, flags: list[str]) -> dict[str, Any]:
    """One run: seconds of the command and of training, its joins and the hash of its model."""
    command = [sys.executable, "-m", "paceline", "train", "fashion-mnist-mini", "--model", model, "--epochs", str(len(COUNTS))]
    command += ["--virtual-workers", "2", "--reduce", "exact", "--global-batch", "256", "--name", "x", *flags]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        wall_s = time.perf_counter() - begin
        assert done.returncode == 0, done.stderr
        record = Path(folder, "runs", "x")
        found = read_result(record)
        joins = [row for row in read_metrics(record) if row["kind"] == "join"]
    return {"wall_s": wall_s, "train_s": found["train_time_s"], "model_sha256": found["model_sha256"], "joins": joins}


def describe(joins: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds of these joins: in total, and of each component."""
    components = {name: spread([join["components_s"][name] for join in joins]) for name in COMPONENTS}
    return {"n": len(joins), "total_s": spread([join["join_s"] for join in joins]), "components_s": components}


if __name__ == "__main__":
    main()
