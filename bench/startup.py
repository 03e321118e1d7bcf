"""Seconds from the command to the end of the first training step, stage by stage, and to the end of the command.

    python bench/startup.py [--rounds 7] [--workers 1 2] [--device-flags "--backend gloo"] [--against HEAD]

Runs the real command (`paceline train fashion-mnist-mini --max-steps 1`) several times. `stages/sitecustomize.py` notes from
outside when each process reaches each stage; of several workers the last one counts. With `--against REV` that revision runs
from a worktree in a temporary folder. The two take turns, so a busy machine slows both; the result has the ratio of each round.
One uncounted run of each kind before the rounds writes the bytecode. CPU seconds are those of all processes. On a busy machine
set OMP_NUM_THREADS=1: one worker on all cores spends its steps waiting for threads that are not running.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measurement import spread, write

ROOT = Path(__file__).resolve().parent.parent
STAGES = {
    "launcher: python is up": ("-", "python"),
    "launcher: main begins": ("-", "main"),
    "launcher: torch is loaded": ("-", "torch loaded"),
    "launcher: all is imported": ("-", "paceline.training.run loaded"),
    "python is up": ("0", "python"),
    "main begins": ("0", "main"),
    "torch begins to load": ("0", "torch begins"),
    "torch is loaded": ("0", "torch loaded"),
    "all is imported": ("0", "paceline.training.run loaded"),
    "world joined": ("0", "joined"),
    "data loaded": ("0", "data"),
    "built": ("0", "built"),
    "first step done": ("0", "stepped"),
    "worker ends": ("0", "end"),
    "launcher ends": ("-", "end"),
}
"""In this order. "0" means any worker; a single process is a worker."""
STEP, END = "first step done", "command ended"


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--device-flags", default="", help="more flags of `paceline train`, in one string")
    parser.add_argument("--against", default="", metavar="REV", help="a git revision to take turns with")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "startup.json"))
    args = parser.parse_args()
    load = os.getloadavg()
    with sources(args.against) as trees:
        by_workers = {str(workers): measure(workers, trees, args) for workers in args.workers}
    result = {
        "what": "seconds since the command at the end of each stage, and CPU seconds of all processes; one training step",
        "device_flags": args.device_flags,
        "against": revision(args.against) if args.against else "",
        "load_average": {"before": [round(value, 2) for value in load], "after": [round(v, 2) for v in os.getloadavg()]},
        "by_workers": by_workers,
    }
    print(table(result))
    write(args.out, result)


@contextmanager
def sources(against: str) -> Iterator[dict[str, Path]]:
    """The `src` folder of each version: this one, and one from a temporary worktree."""
    here = {"now": ROOT / "src"}
    if not against:
        yield here
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), against], cwd=ROOT, check=True)
        try:
            yield {"before": tree / "src", **here}
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def revision(name: str) -> str:
    """The commit that a name refers to."""
    return subprocess.run(["git", "rev-parse", name], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def measure(workers: int, trees: dict[str, Path], args: argparse.Namespace) -> dict[str, Any]:
    """All rounds with this number of workers; the order of the versions alternates."""
    for source in trees.values():
        start(workers, source, args.device_flags)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for repeat in range(args.rounds):
        for name in list(trees)[:: 1 if repeat % 2 == 0 else -1]:
            rows[name].append(start(workers, trees[name], args.device_flags))
        said = ", ".join(f"{name} {found[-1][STEP]:.2f} s, {found[-1][END]:.2f} s in total" for name, found in rows.items())
        print(f"{workers} worker{'s' * (workers > 1)}, {repeat + 1}/{args.rounds}: first step after {said}", flush=True)
    result: dict[str, Any] = {"n": args.rounds}
    for name, found in rows.items():
        result[name] = {stage: spread([row[stage] for row in found]) for stage in found[0]}
    if "before" in rows:
        pairs = list(zip(rows["now"], rows["before"], strict=True))
        result["now / before"] = {
            stage: spread([now[stage] / before[stage] for now, before in pairs]) for stage in (STEP, END, "CPU")
        }
    return {**result, "rows": rows}


def start(workers: int, source: Path, flags: str) -> dict[str, float]:
    """Run the command once; seconds until each stage was reached."""
    with tempfile.TemporaryDirectory() as folder:
        notes, output = Path(folder) / "stages", Path(folder) / "output"
        where = ["--runs-dir", folder, "--name", "run", "--workers", str(workers), "--max-steps", "1"]
        command = [sys.executable, "-m", "paceline", "train", "fashion-mnist-mini", *where, *shlex.split(flags)]
        paths = os.pathsep.join([str(Path(__file__).parent / "stages"), str(source)])
        env = {**os.environ, "PYTHONPATH": paths, "STARTUP_STAGES": str(notes)}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed paceline has its bytecode
        with output.open("w") as file:
            begin = time.monotonic()
            process = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, cwd=folder)
            _, status, usage = os.wait4(process.pid, 0)
            end = time.monotonic()
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, output.read_text()
        times = read_notes(notes, begin)
    found = {stage: times[key] for stage, key in STAGES.items() if key in times}
    return {**found, END: end - begin, "CPU": usage.ru_utime + usage.ru_stime}


def read_notes(path: Path, begin: float) -> dict[tuple[str, str], float]:
    """Seconds by (process, stage): "-" is the launcher, "0" the last worker to reach the stage."""
    lines = [line.split(maxsplit=3) for line in path.read_text().splitlines()]
    launched = any(rank != "-" for _, _, rank, _ in lines)
    times: dict[tuple[str, str], float] = {}
    for when, _, rank, stage in lines:
        key = ("-" if launched and rank == "-" else "0", stage)
        times[key] = max(times.get(key, 0.0), float(when) - begin)
    return times


def table(result: dict[str, Any]) -> str:
    """The result as Markdown: medians, smallest to largest in brackets."""
    lines = []
    for workers, found in result["by_workers"].items():
        versions = [name for name in ("before", "now") if name in found]
        lines += [
            f"{workers} worker{'s' * (int(workers) > 1)}, n = {found['n']}",
            "",
            f"| seconds since the command | {' | '.join(versions)} |",
        ]
        lines.append("|---" * (len(versions) + 1) + "|")
        for stage in [*STAGES, END, "CPU"]:
            if not any(stage in found[name] for name in versions):
                continue
            cells = [_cell(found[name].get(stage)) for name in versions]
            lines.append(f"| {stage} | {' | '.join(cells)} |")
        for stage, ratio in found.get("now / before", {}).items():
            lines.append(f"| now / before: {stage} | | {_cell(ratio)} |")
        lines.append("")
    return "\n".join(lines)


def _cell(values: dict[str, float] | None) -> str:
    return f"{values['median']:.2f} ({values['min']:.2f} to {values['max']:.2f})" if values else ""


if __name__ == "__main__":
    main()
