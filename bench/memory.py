"""GPU memory of one training step: fp32, bf16 and fp16, each with and without gradient checkpointing.

    python bench/memory.py > bench/results/memory.json

A transformer encoder of 12 layers trains on sequences of 256 vectors. Peaks are torch's own count of allocated bytes in one
plain step after two others; weights, gradients and optimizer state are included and stated. Times are medians of 14 steps.
"""

import json
import platform
import statistics
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline import Arrays, Task, classify
from paceline.dist.world import world
from paceline.training import tasks
from paceline.training.build import build
from paceline.training.plain import make_clock, make_step

LAYERS, WIDTH, LENGTH, BATCH = 12, 512, 256, 32


class Encoder(nn.Module):
    """Each layer is recomputed in the backward pass if `recompute`."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(LAYERS)
        )
        self.last = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, preserve_rng_state=False) if self.recompute else layer(x)
        out: Tensor = self.last(x.mean(1))
        return out


def sequences() -> Arrays:
    random = torch.Generator().manual_seed(0)
    return Arrays((torch.randn(8 * BATCH, LENGTH, WIDTH, generator=random), torch.arange(8 * BATCH) % 10))


def measure(precision: str, recompute: bool) -> dict[str, object]:
    task = Task(name="sequences", model=partial(Encoder, recompute), train=sequences, objective=classify())
    options = {"precision": precision, "optimizer": "adamw", "base_lr": 1e-4, "global_batch": BATCH, "fast": "off"}
    with world() as here:
        task, config = tasks.resolve(task, {**options, "reference_batch": BATCH})
        with build(task, config, here) as run:
            step = make_step(run, make_clock(run))
            run.model.train()
            times, peak = [], 0
            for epoch in range(2):
                steps = run.steps(epoch, range(run.sampler.cut(epoch).steps))
                inputs = run.train.inputs([item.samples for each in steps for item in each.passes], epoch, lambda i: None)
                for number, each in enumerate(steps):
                    torch.cuda.synchronize()
                    torch.cuda.reset_peak_memory_stats()
                    begin = time.perf_counter()
                    step(each, inputs)
                    torch.cuda.synchronize()
                    if epoch or number >= 2:
                        times.append(time.perf_counter() - begin)
                        peak = max(peak, torch.cuda.max_memory_allocated())
            weights = sum(parameter.nbytes for parameter in run.model.parameters())
            data = sum(tensor.nbytes for tensor in sequences().tensors)
    return {
        "precision": precision,
        "checkpointing": recompute,
        "peak_bytes": peak,
        "step_ms": 1e3 * statistics.median(times),
        "weights_gradients_state_bytes": 4 * weights,
        "data_bytes": data,
    }


def table(result: dict[str, Any]) -> str:
    """The result as Markdown, for docs/precision.md."""
    lines = ["| precision | checkpointing | peak memory | a step |", "|---|---|---|---|"]
    for row in result["rows"]:
        recomputes = "yes" if row["checkpointing"] else "no"
        lines.append(f"| {row['precision']} | {recomputes} | {row['peak_bytes'] / 2**30:.2f} GiB | {row['step_ms']:.0f} ms |")
    return "\n".join(lines)


def main() -> None:
    rows = []
    for precision in ("fp32", "bf16", "fp16"):
        for recompute in (False, True):
            rows.append(measure(precision, recompute))
            torch.cuda.empty_cache()
    about = {
        "command": "python bench/memory.py",
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "steps": 14,
    }
    model = {"layers": LAYERS, "width": WIDTH, "length": LENGTH, "batch": BATCH}
    print(json.dumps({"about": about, "model": model, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
