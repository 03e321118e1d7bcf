"""What exact and fast mode cost: images/s of 2 CPU workers with hand-written DDP, `--reduce fast` and `--reduce exact`.

    python bench/reduce.py [--rounds 9] [--models cnn mlp:width=1024] [--out bench/results/reduce.json]

All three train the same model on the same batches in the same two processes. They take turns epoch by epoch, so a busy machine
slows all of them. Each round gives one value of each ratio; the result is their medians. `plain` is a hand-written loop around
torch's DistributedDataParallel: same data on the device, same augmentation, same optimizer, no metrics, no checks. One thread
per worker. The first round is warm-up and is left out.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from measurement import run_workers, spread, write
from paceline import models
from paceline.config import Config
from paceline.core.exact_sum import ExactReducer
from paceline.data.loaders import Arrays, Resident
from paceline.dist.world import World
from paceline.optim import make_optimizer
from paceline.training import tasks
from paceline.training.build import build
from paceline.training.loop import fit
from paceline.training.task import Task
from paceline.training.terms import make_steps

WORKERS, PART_BATCH = 2, 128
KINDS = ("plain", "fast", "exact")
IMAGES = {"in_channels": 1, "image_size": 28, "classes": 10}


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", nargs="+", default=["cnn", "resnet:depth=8", "mlp:width=1024"])
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "reduce.json"))
    args = parser.parse_args()
    by_model = {model: summarize(run_workers(measure, WORKERS, model, args.rounds, timeout_s=3600)[0]) for model in args.models}
    result = {
        "what": "images/s of 2 one-thread CPU workers on fashion-mnist-mini: hand-written DDP, --reduce fast, --reduce exact",
        "part_batch": PART_BATCH,
        "by_model": by_model,
    }
    print(table(result))
    write(args.out, result)


def table(result: dict[str, Any]) -> str:
    """The result as Markdown, for docs/exact.md."""
    lines = [
        "| model (parameters) | hand-written DDP | fast | exact"
        " | time: fast / hand-written | time: exact / fast | bytes: exact / fast |",
        "|---|---|---|---|---|---|---|",
    ]
    for model, found in result["by_model"].items():
        speeds = " | ".join(f"{found[kind]['median']:,.0f}" for kind in KINDS)
        ratios = [f"{found[name]['median']:.2f} ({found[name]['min']:.2f} to {found[name]['max']:.2f})" for name in RATIOS]
        lines.append(f"| {model} ({found['parameters']:,}) | {speeds} | {' | '.join(ratios)} | {found['bytes_ratio']:.2f} |")
    return "\n".join(lines)


RATIOS = ("fast_over_plain", "exact_over_fast")


def summarize(found: dict[str, Any]) -> dict[str, Any]:
    """Medians over the rounds, and ratios of times within each round."""
    rows = found.pop("rows")
    for row in rows:
        row["fast_over_plain"], row["exact_over_fast"] = row["plain"] / row["fast"], row["fast"] / row["exact"]
    return {**found, "n": len(rows), **{name: spread([row[name] for row in rows]) for name in (*KINDS, *RATIOS)}, "rows": rows}


def measure(world: World, model: str, rounds: int) -> dict[str, Any]:
    """Measure on one worker."""
    rows: list[dict[str, float]] = []
    for number in range(rounds + 1):
        row = {}
        for kind in KINDS[number % 3 :] + KINDS[: number % 3]:
            options = {"epochs": 1, "model": model, "reference_batch": PART_BATCH}
            if kind == "plain":
                row[kind] = plain_epoch(*tasks.resolve("fashion-mnist-mini", options), world)
            else:
                run = build(*tasks.resolve("fashion-mnist-mini", {**options, "reduce": kind}), world)
                row[kind] = fit(run, ()).samples_per_s
        if number:
            rows.append(row)
            if world.is_main:
                print(f"{model}, {number}/{rounds}: " + ", ".join(f"{kind} {row[kind]:,.0f}" for kind in KINDS), flush=True)
    parameters = list(models.build(model, **IMAGES).parameters())
    values = sum(parameter.numel() for parameter in parameters)
    return {"parameters": values, "bytes_ratio": ExactReducer(parameters, WORKERS).nbytes / (8 * values), "rows": rows}


def plain_epoch(task: Task, config: Config, world: World) -> float:
    """Images/s of an epoch with a hand-written DDP loop."""
    data = task.train()
    assert isinstance(data, Arrays)
    loader, rank = Resident(data, task.prepare, world.device), world.rank
    sampler, schedule = make_steps(config, world, len(data))
    model = models.build(config.model, **IMAGES)
    optimizer = make_optimizer(model, config)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    order = sampler.order(0)
    plan = [order[slice(*sampler.part_bounds(0, i)[rank : rank + 2])] for i in range(sampler.cut(0).steps)]
    model.train()
    dist.barrier()
    begin = time.perf_counter()
    for step, (images, labels) in enumerate(loader.batches(plan, 0)):
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr(step)
        torch.nn.functional.cross_entropy(wrapped(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    dist.barrier()
    return len(data) / (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
