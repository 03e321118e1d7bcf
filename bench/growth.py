"""How cost grows with workers, parameters, samples and parts, and whether any of it grows faster than expected.

    python bench/growth.py [--repeats 5] [--out bench/results/growth.json]

All times except one are CPU time (user and system, all threads) of one worker process: workers that share cores wait for each
other, and that wait says nothing about what a step costs. The exception, start-up by the clock, is wall-clock time. Bytes sent
are the kernel's count for the worker's own TCP connections. Each point is a median over repeats. Every series is fitted by
t = a + b n^c (a, b >= 0, least squares of relative errors). The expected shape e(n), fitted as a + b e(n) to all sizes except
the largest, predicts what the largest should cost and which exponent the same fit would find. A series grows too fast if it
exceeds both: the exponent by 0.15, and the largest size by a factor of 1.3.
"""

import argparse
import math
import os
import resource
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from measurement import run_workers, spread, write
from paceline.core.deal import cut_epoch, deal_parts
from paceline.core.exact_sum import ExactReducer
from paceline.core.sampler import Sampler
from paceline.data.loaders import Arrays
from paceline.dist.agree import check_agreement
from paceline.dist.world import World
from paceline.training import tasks
from paceline.training.build import Run, build
from paceline.training.checkpoint.keeper import Keeper, Progress
from paceline.training.loop import fit
from paceline.training.observers import Result
from paceline.training.task import Task, classify

WORKERS = (1, 2, 4)
WIDTHS = (32, 128, 512, 1024, 2048, 3072)  # of an mlp: 27 thousand to 12 million parameters
SAMPLES = (1_000, 10_000, 100_000, 1_000_000)
PARTS = (2, 8, 32, 128, 512, 1024)  # the samples of one part need no reordering, so no copy
PART_BATCH, STEPS, WARM_UP = 128, 40, 5
ONE_PART, ALL_PARTS = "plan 8 steps, one part of V", "plan 8 steps, all V parts in one pass"
EXPECTED: dict[str, Callable[[float], float]] = {
    "constant": lambda n: 1.0,
    "processes / cores": lambda n: max(1.0, (n + (n > 1)) / (os.cpu_count() or 1)),
    "2 (P - 1) / P": lambda n: 2 * (n - 1) / n,  # a ring all-reduce
    "linear": lambda n: n,
    "n log n": lambda n: n * math.log(n),
}
SHAPES = {  # what is measured -> the growth that is expected
    "start-up": "constant",
    "start-up by the clock": "processes / cores",
    "step": "2 (P - 1) / P",
    "the model's own compute": "constant",
    "step beyond the model": "2 (P - 1) / P",
    "all-reduce": "2 (P - 1) / P",
    "bytes sent per step": "2 (P - 1) / P",
    "optimizer": "linear",
    "all-reduce of gradients": "linear",
    "exact sum": "linear",
    "check_agreement": "linear",
    "checkpoint": "linear",
    "build": "linear",
    "order of an epoch": "n log n",
    "plan of an epoch": "n log n",  # it includes the order
    "bytes of order and plan": "linear",
    ONE_PART: "constant",
    ALL_PARTS: "constant",  # always 8,192 samples per step, in another order
}
Found = dict[str, dict[int, list[float]]]
"""What is measured -> size -> one value per repeat."""


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "growth.json"))
    args = parser.parse_args()
    begin = time.perf_counter()
    series = {}
    for over, measure in (("workers", by_workers), ("parameters", by_parameters), ("samples", by_samples), ("parts", by_parts)):
        found = measure(args.repeats)
        series[over] = {what: judge(points, SHAPES[what], "bytes" in what) for what, points in found.items()}
        print(f"{over}: done after {time.perf_counter() - begin:.0f} s, load {os.getloadavg()[0]:.1f}", flush=True)
    result = {"what": "cost against size, fitted by a + b n^c", "n": args.repeats, "series": series}
    print(table(result))
    write(args.out, result)


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = ["| what | over | sizes | measured | fitted | expected | largest / expected | verdict |", "|---" * 8 + "|"]
    for over, series in result["series"].items():
        for what, found in series.items():
            sizes = f"{int(min(found['points'], key=int)):,} to {int(max(found['points'], key=int)):,}"
            values = ", ".join(_quantity(point["median"], found["unit"]) for point in found["points"].values())
            curve, expected = found["fitted"], found["expected"]
            fitted = f"{_quantity(curve['a'], found['unit'])} + {_quantity(curve['b'], found['unit'])} n^{curve['c']:.2f}"
            should = f"{expected['shape']} (n^{expected['c']:.2f})"
            lines.append(
                f"| {what} | {over} | {sizes} | {values} | {fitted} | {should} | {found['ratio']:.2f} | {found['verdict']} |"
            )
    return "\n".join(lines)


def _quantity(value: float, unit: str) -> str:
    if value == 0:
        return "0"
    scale, prefix = next(
        ((s, p) for s, p in ((1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "u")) if value >= s), (1e-9, "n")
    )
    return f"{value / scale:.3g} {prefix}{unit}"


def judge(points: dict[int, list[float]], shape: str, is_bytes: bool) -> dict[str, Any]:
    """A series with its fitted curve, and whether it grows faster than the expected shape."""
    sizes = np.array(sorted(points), dtype=float)
    values = np.array([statistics.median(points[int(size)]) for size in sizes])
    should = np.array([EXPECTED[shape](size) for size in sizes])
    a, b = _line(should[:-1], values[:-1])
    expected, curve = a + b * should, fit_power(sizes, values)
    ratio, exponent = values[-1] / expected[-1] if expected[-1] else math.inf, fit_power(sizes, expected)["c"]
    faster = curve["c"] > exponent + 0.15 and ratio > 1.3
    return {
        "unit": "B" if is_bytes else "s",
        "points": {str(int(size)): {**spread(points[int(size)], 9), "all": points[int(size)]} for size in sizes},
        "fitted": curve,
        "expected": {"shape": shape, "c": exponent, "at_largest": float(expected[-1])},
        "ratio": float(ratio),
        "verdict": "GROWS FASTER than expected" if faster else "as expected",
    }


def fit_power(sizes: np.ndarray, values: np.ndarray) -> dict[str, float]:
    """Fit a + b n^c; among equally good fits, the one with the smallest c."""
    best, error = {"a": 0.0, "b": 0.0, "c": 0.0}, math.inf
    for c in (0.0, *np.geomspace(0.05, 3, 200)):
        a, b = _line(sizes**c, values) if c else (_line(np.zeros_like(sizes), values)[0], 0.0)
        off = float(np.mean(((a + b * sizes**c - values) / _scale(values)) ** 2))
        if off < 0.99 * error - 1e-9:
            best, error = {"a": float(a), "b": float(b), "c": round(float(c), 3) if b else 0.0}, off
    return best


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Fit y = a + b x with a, b >= 0, by least squares of relative errors."""
    weights = 1 / _scale(y)
    columns = np.stack([weights, x * weights], axis=1)
    choices = [(0.0, 0.0)]
    for free in ([0, 1], [0], [1]):
        found = np.zeros(2)
        found[free] = np.linalg.lstsq(columns[:, free], y * weights, rcond=None)[0]
        if (found >= 0).all():
            choices.append((float(found[0]), float(found[1])))
    return min(choices, key=lambda each: float(np.sum((columns @ np.array(each) - y * weights) ** 2)))


def _scale(values: np.ndarray) -> np.ndarray:
    """What an error is relative to: the value, or the largest value if it is zero."""
    return np.where(values > 0, values, values.max() or 1.0)


def by_workers(repeats: int) -> Found:
    """What one of n workers spends: an mlp of 269,322 parameters, 128 samples per worker and step."""
    found: Found = {"start-up": {}, "start-up by the clock": {}}
    for size in WORKERS * repeats:
        for what, value in zip(tuple(found), _start_up(size), strict=True):
            found[what].setdefault(size, []).append(value)
    for size in WORKERS:
        everyone = run_workers(_worker_costs, size, repeats, timeout_s=600)
        for what in everyone[0]:
            means = [statistics.mean(worker[what][i] for worker in everyone) for i in range(repeats)]
            found.setdefault(what, {})[size] = means
    return found


def _start_up(workers: int) -> tuple[float, float]:
    """A run of one step: CPU time per process (a launcher counts as one process), and wall-clock time."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--workers", str(workers), "--max-steps", "1", "--model", "mlp", "--runs-dir", folder]
        command = [sys.executable, "-m", "paceline", "train", "fashion-mnist-mini", *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return spent / (workers + (workers > 1)), time.perf_counter() - begin


def _worker_costs(world: World, repeats: int) -> dict[str, list[float]]:
    """Costs on one worker: Paceline's step, the bare model on the same shapes, the all-reduce alone."""
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        run = _build(world, {"model": "mlp", "epochs": 50, "max_steps": WARM_UP + STEPS})
        clock = _Clock()
        fit(run, (), watch=clock)  # type: ignore[arg-type]
        step = statistics.median(np.diff(clock.seconds[WARM_UP:]))
        own = _own_compute(run)
        flat = torch.zeros(sum(parameter.numel() for parameter in run.model.parameters()))
        row = {
            "step": step,
            "the model's own compute": own,
            "step beyond the model": max(0.0, step - own),
            "all-reduce": _cpu_s(lambda flat=flat: dist.all_reduce(flat), 20) if world.size > 1 else 0.0,
            "bytes sent per step": (clock.sent[-1] - clock.sent[0]) / STEPS,
        }
        for what, value in row.items():
            found.setdefault(what, []).append(value)
    return found


class _Clock:
    """CPU time at the start of every step; bytes sent after warm-up and at the last step."""

    stop = ""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.sent: list[int] = []

    def mark(self, step: int, stage: str) -> None:
        if step == len(self.seconds) and stage != "loading":
            if step in (WARM_UP - 1, WARM_UP + STEPS - 1):
                self.sent.append(_bytes_sent())
            self.seconds.append(time.process_time())


def _bytes_sent() -> int:
    """Bytes that this process's TCP peers have acknowledged so far (tcpi_bytes_acked of Linux's TCP_INFO)."""
    total = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
            total += struct.unpack_from("Q", info, 120)[0]
    return total


def _own_compute(run: Run) -> float:
    """CPU time of the same model's forward and backward pass and optimizer, without communication."""
    model = run.model
    images, labels = torch.randn(PART_BATCH, 1, 28, 28), torch.randint(0, 10, (PART_BATCH,))

    def step() -> None:
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        run.update.optimizer.step()
        run.update.optimizer.zero_grad(set_to_none=True)

    return _cpu_s(step, STEPS)


def _cpu_s(work: Callable[[], Any], times: int) -> float:
    """The median CPU time of a call, after one warm-up call."""
    spent = []
    for _ in range(times + 1):
        begin = time.process_time()
        work()
        spent.append(time.process_time() - begin)
    return statistics.median(spent[1:])


def _build(world: World, options: dict[str, Any]) -> Run:
    common = {"reference_batch": PART_BATCH, "check_every": 0, "precision": "fp32"}
    return build(*tasks.resolve("fashion-mnist-mini", {**common, **options}), world)


def by_parameters(repeats: int) -> Found:
    """What rank 0 of two workers spends on a model of n parameters, apart from its forward and backward pass."""
    with tempfile.TemporaryDirectory() as folder:
        return run_workers(_parameter_costs, 2, repeats, Path(folder), timeout_s=600)[0]


def _parameter_costs(world: World, repeats: int, folder: Path) -> Found:
    found: Found = {}
    for width in WIDTHS:
        run = _build(world, {"model": f"mlp:width={width}"})
        parameters = list(run.model.parameters())
        grads = [torch.randn_like(parameter) for parameter in parameters]
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad * 1e-3
        flat, reducer = torch.cat([grad.flatten() for grad in grads]), ExactReducer(parameters, parts=2)
        keeper = Keeper(run, folder / str(width) if world.is_main else None)
        progress = Progress(result=Result(status="", metrics={}))

        def checkpoint(keeper: Keeper = keeper, progress: Progress = progress) -> None:
            progress.step += 1
            keeper.save(progress)
            keeper.wait()

        def exact(reducer: ExactReducer = reducer, grads: list[torch.Tensor] = grads) -> None:
            reducer.add(grads)
            reducer.finish()

        work: dict[str, Callable[[], Any]] = {
            "optimizer": run.update.optimizer.step,
            "all-reduce of gradients": lambda flat=flat: dist.all_reduce(flat, dist.ReduceOp.MAX),
            "exact sum": exact,
            "check_agreement": lambda run=run: check_agreement(dict(run.model.named_parameters()), world, "in the bench"),
            "checkpoint": checkpoint,
        }
        for what, call in work.items():
            times = 1 if what == "checkpoint" else 3
            found.setdefault(what, {})[flat.numel()] = [_cpu_s(call, times) for _ in range(repeats)]
        keeper.close()
    return found


def by_samples(repeats: int) -> Found:
    """What one worker spends before and at the start of an epoch of n samples, in steps of 128."""
    return run_workers(_sample_costs, 1, repeats, timeout_s=600)[0]


def _sample_costs(world: World, repeats: int) -> Found:
    found: Found = {}
    for samples in SAMPLES:
        data, few = (Arrays((torch.zeros(n, 1, 8, 8, dtype=torch.uint8), torch.zeros(n).long())) for n in (samples, 100))
        task = Task(
            name="growth",
            train=lambda data=data: data,
            validation=lambda few=few: few,
            objective=classify(),
            classes=10,
        )
        config = tasks.configure(task, {"model": "linear", "reference_batch": PART_BATCH})
        sampler = Sampler(samples, PART_BATCH, 1, 0)

        def plan(sampler: Sampler = sampler, epoch: int = 0) -> list[Any]:
            return cut_epoch(sampler, epoch, range(sampler.cut(epoch).steps), lambda parts: [range(1)], 1)

        def bytes_held(sampler: Sampler = sampler, plan: Callable[..., Any] = plan) -> float:
            tracemalloc.start()
            kept = plan(sampler, 1)
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert kept
            return float(held)

        times = 20 if samples <= 10_000 else 1
        found.setdefault("build", {})[samples] = [
            _cpu_s(lambda t=task, c=config: build(t, c, world), 3) for _ in range(repeats)
        ]
        work = {"order of an epoch": lambda sampler=sampler: sampler.order(0), "plan of an epoch": plan}
        for what, call in work.items():
            found.setdefault(what, {})[samples] = [_cpu_s(call, times) for _ in range(repeats)]
        found.setdefault("bytes of order and plan", {})[samples] = [bytes_held() for _ in range(repeats)]
    return found


def by_parts(repeats: int) -> Found:
    """What planning 8 steps costs a worker with one of V parts of 128 samples, and a worker with all V parts of 8,192."""
    found: Found = {}
    for parts in PARTS:
        for what, global_batch, workers in ((ONE_PART, PART_BATCH * parts, parts), (ALL_PARTS, 8192, 1)):
            sampler = Sampler(8 * global_batch, global_batch, parts, 0)
            groups = deal_parts(parts, workers, 0, parts, whole_groups=False)

            def plan(sampler: Sampler = sampler, groups: list[range] = groups) -> list[Any]:
                return cut_epoch(sampler, 0, range(sampler.cut(0).steps), lambda parts: groups, 1)

            found.setdefault(what, {})[parts] = [_cpu_s(plan, 200) for _ in range(repeats)]
    return found


if __name__ == "__main__":
    main()
