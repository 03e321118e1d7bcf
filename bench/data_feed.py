"""Does an epoch over data larger than memory stay fed on two workers? Single files, tar files and one mapped array.

    python bench/data_feed.py [--repeats 3] [--images 6144] [--limit-mb 1400] [--out bench/results/data_feed.json]

The run, with its two workers and all loader processes, is in a memory cgroup whose limit is smaller than the data. The limit
counts cached pages too, so the data cannot stay in memory. Without the right to make a cgroup (root) there is no limit, and
the result says so. Cached pages of the data are dropped before each run. A small net trains for one epoch. The ways to read
take turns, several times, so a busy machine slows all of them. "wait" is the time per step that workers waited for a batch,
from the record's health rows; "fed" is the rest of the step as a share. The data takes three times its size on disk and is
deleted at the end.
"""

import argparse
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from measurement import spread, write

SIDE = 512  # pixels: an image has 256 KiB
TASK = Path(__file__).parent / "tasks" / "feed.py"
CGROUPS = Path("/sys/fs/cgroup/memory")
WAYS = {
    "files": ["--set", "kind=files"],
    "tar": ["--set", "kind=tar"],
    "mapped array": ["--set", "kind=mapped", "--loader", "streaming"],
}
"""What is measured, and the flags for it."""


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--images", type=int, default=6144)
    parser.add_argument("--limit-mb", type=int, default=1400)
    parser.add_argument("--global-batch", type=int, default=32)
    parser.add_argument("--dir", default=None, help="where to put the data (default: the folder for temporary files)")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "data_feed.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder, cgroup(args.limit_mb) as group:
        make_data(Path(folder), args.images)
        rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        failed: list[str] = []
        for repeat in range(args.repeats):
            for way, flags in WAYS.items():
                if way in failed:
                    continue
                drop_cache(Path(folder))
                try:
                    rows[way].append(measure(Path(folder), flags, group, args))
                except RuntimeError as error:
                    print(error)
                    failed.append(way)
                    continue
                said = ", ".join(f"{name} {value:.3g}" for name, value in rows[way][-1].items())
                print(f"{repeat + 1}/{args.repeats} {way}: {said}", flush=True)
        peak = int((group / "memory.max_usage_in_bytes").read_text()) if group else 0
        hits = int((group / "memory.failcnt").read_text()) if group else 0
    result = {
        "what": "two workers, one loader process each, one epoch over images on disk",
        "images": args.images,
        "data_mb": round(args.images * SIDE * SIDE / 1e6),
        "limit_mb": args.limit_mb if group else None,
        "memory": f"cgroup, {peak / 1e6:.0f} MB used at most, {hits} times at the limit"
        if group
        else "cache dropped before runs",
        "repeats": args.repeats,
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "ways": {
            way: {name: spread([row[name] for row in found]) for name in found[0]} for way, found in rows.items() if found
        },
        "killed_at_this_limit": failed,
    }
    print(table(result))
    write(args.out, result)


def table(result: dict[str, Any]) -> str:
    """The result as Markdown, for docs/data.md."""
    lines = ["| read from | images/s | MB/s | a step | of it waiting for data | fed |", "|---|---|---|---|---|---|"]
    for way, found in result["ways"].items():
        middle = {name: value["median"] for name, value in found.items()}
        low, high = (100 * found["fed"][name] for name in ("min", "max"))
        lines.append(
            f"| {way} | {middle['images_per_s']:,.0f} | {middle['mb_per_s']:.0f} | {middle['step_ms']:.0f} ms |"
            f" {middle['wait_ms']:.1f} ms | {100 * middle['fed']:.0f}% ({low:.0f} to {high:.0f}) |"
        )
    return "\n".join(lines)


def make_data(folder: Path, images: int) -> None:
    """Write the same images in three ways."""
    random = np.random.default_rng(0)
    (folder / "files").mkdir()
    (folder / "tar").mkdir()
    (folder / "mapped").mkdir()
    noise = random.integers(0, 256, (256, SIDE, SIDE), dtype=np.uint8)
    mapped = np.lib.format.open_memmap(folder / "mapped" / "images.npy", "w+", np.uint8, (images, SIDE, SIDE))
    per_tar = images // 16
    for first in range(0, images, per_tar):
        with tarfile.open(folder / "tar" / f"{first:06d}.tar", "w") as tar:
            for number in range(first, min(first + per_tar, images)):
                image = noise[number % 256] ^ np.uint8(number // 256)
                mapped[number] = image
                content = io.BytesIO()
                np.save(content, image)
                (folder / "files" / f"{number:06d}.npy").write_bytes(content.getvalue())
                for ending, data in (("npy", content.getvalue()), ("cls", str(number % 10).encode())):
                    member = tarfile.TarInfo(f"{number:06d}.{ending}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    mapped.flush()
    os.sync()


def drop_cache(folder: Path) -> None:
    """Drop the data's pages from the cache: they were charged to whoever wrote or read them first."""
    for path in folder.rglob("*.*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def cgroup(limit_mb: int) -> Iterator[Path | None]:
    """A memory cgroup with this limit; None if it cannot be made."""
    group = CGROUPS / f"paceline-feed-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit_mb * 10**6))
    except OSError as error:
        print(f"no memory limit ({error}): cached pages are dropped before each run instead")
        yield None
        return
    try:
        yield group
    finally:
        group.rmdir()


def measure(folder: Path, flags: list[str], group: Path | None, args: argparse.Namespace) -> dict[str, float]:
    """One run of one epoch."""
    kind = next(flag.removeprefix("kind=") for flag in flags if flag.startswith("kind="))
    runs = folder / "runs"
    shutil.rmtree(runs, ignore_errors=True)  # of a run that failed
    command = [sys.executable, "-m", "paceline", "train", str(TASK), "--set", f"folder={folder / kind}", *flags]
    command += ["--workers", "2", "--loader-workers", "1", "--epochs", "1", "--global-batch", str(args.global_batch)]
    command += ["--runs-dir", str(runs), "--name", "x", "--checkpoint-every", "0", "--base-lr", "0.01"]

    def join() -> None:
        if group:
            (group / "cgroup.procs").write_text(str(os.getpid()))

    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=join)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode} (-9: --limit-mb is too small)\n{done.stdout}{done.stderr}")
    (record,) = runs.iterdir()
    rows = [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(runs)
    waits = [row | {"wait": row["components_s"]["input"]} for row in rows if row["kind"] == "health" and row["epoch"] == 1]
    wait, step = (statistics.fmean(row[name] for row in waits) for name in ("wait", "step_s"))
    rate = next(row["samples_per_s"] for row in rows if row["kind"] == "epoch" and row["epoch"] == 1)
    return {
        "step_ms": 1e3 * step,
        "wait_ms": 1e3 * wait,
        "fed": 1 - wait / step,
        "images_per_s": rate,
        "mb_per_s": rate * SIDE * SIDE / 1e6,
    }


if __name__ == "__main__":
    main()
