"""Paceline's training loop against a minimal hand-written loop, on the same tensors, in one process.

    python bench/overhead.py [--model wide_resnet] [--batch 128 1024] [--rounds 5] [--out bench/results/overhead.json]

Both have the same model, data on the device, augmentation, precision and optimizer. The hand-written loop has nothing else: no
schedule, sampler, metrics, checkpoints, records, hang detection or checks. On a GPU both are compiled and captured as a CUDA
graph; on a CPU neither is. Their epochs take turns; the result is the ratio of their times, and its spread over rounds.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from measurement import spread, write
from paceline.data import fashion_mnist
from paceline.data.augment import Images
from paceline.dist.world import World, world
from paceline.models import build as build_model
from paceline.training import tasks
from paceline.training.build import build
from paceline.training.loop import fit

LR, MOMENTUM, DECAY, SMOOTHING = 0.05, 0.9, 5e-4, 0.1
PREPARE = Images(mean=0.2860, deviation=0.3530, crop=2, flip=True)


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wide_resnet" if torch.cuda.is_available() else "cnn")
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--data", default="fashion-mnist" if torch.cuda.is_available() else "fashion-mnist-mini")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "overhead.json"))
    args = parser.parse_args()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} thread(s)"
    result: dict[str, Any] = {"device": device, "model": args.model, "data": args.data, "by_batch": {}}
    with world() as here:
        for batch in args.batch:
            result["by_batch"][str(batch)] = measure(here, args, batch)
            write(args.out, result)
    print(table(result))


def table(result: dict[str, Any]) -> str:
    """The result as Markdown, for docs/speed.md."""
    lines = ["| batch | hand-written, images/s | Paceline, images/s | time: Paceline / hand-written |", "|---|---|---|---|"]
    for batch, found in result["by_batch"].items():
        ratio = found["time_ratio"]
        span = f"{ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})"
        lines.append(f"| {batch} | {found['by_hand']['median']:,.0f} | {found['paceline']['median']:,.0f} | {span} |")
    return "\n".join(lines)


def measure(here: World, args: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Both, epoch by epoch in turn."""
    on_gpu = here.device.type == "cuda"
    options = {
        "model": args.model,
        "epochs": args.rounds + 1,
        "global_batch": batch,
        "base_lr": LR,
        "lr_rule": "none",
        "crop": 2,
        "label_smoothing": SMOOTHING,
        "decay_all": True,
        "fast": "on" if on_gpu else "auto",
        "precision": "bf16" if on_gpu else "fp32",
    }
    epoch_by_hand = by_hand(here, args, batch)
    taken: list[dict[str, float]] = []

    class Turns:
        """An observer that runs an epoch by hand after each of Paceline's."""

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: None

        def epoch(self, row: dict[str, Any]) -> None:
            taken.append({"paceline": row["samples_per_s"], "by_hand": epoch_by_hand()})

    fit(build(*tasks.resolve(args.data, options), here), [Turns()])  # type: ignore[list-item]
    rows = taken[1:]  # the first is warm-up
    for row in rows:
        print(f"batch {batch}: by hand {row['by_hand']:,.0f}, Paceline {row['paceline']:,.0f} images/s", file=sys.stderr)
    return {
        "n": len(rows),
        "by_hand": spread([row["by_hand"] for row in rows], 0),
        "paceline": spread([row["paceline"] for row in rows], 0),
        "time_ratio": spread([row["by_hand"] / row["paceline"] for row in rows], 4),
    }


def by_hand(here: World, args: argparse.Namespace, batch: int) -> Callable[[], float]:
    """The bare loop; returns a function that trains an epoch and says its images/s."""
    device, on_gpu = here.device, here.device.type == "cuda"
    data = fashion_mnist.load(args.data)
    images, labels = (torch.from_numpy(array).to(device) for array in (data.train_images, data.train_labels))
    model = build_model(args.model, in_channels=1, image_size=28, classes=10).to(device, memory_format=torch.channels_last)
    rate = torch.tensor(LR, device=device) if on_gpu else LR
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM, nesterov=True, weight_decay=DECAY, fused=True)

    def loss(samples: Tensor) -> Tensor:
        batch, targets = PREPARE.apply((images[samples], labels[samples]), samples, 0)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            logits = model(batch).float()
        return F.cross_entropy(logits, targets, label_smoothing=SMOOTHING)

    differentiated = torch.compile(loss, dynamic=False) if on_gpu else loss

    def step(samples: Tensor, function: Callable[[Tensor], Tensor] = loss) -> None:
        function(samples).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    full = step
    if on_gpu:
        held = torch.randint(len(labels), (batch,), device=device)
        torch.backends.cudnn.benchmark = True
        for _ in range(3):
            step(held, differentiated)
        torch.backends.cudnn.benchmark = False
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            step(held, differentiated)

        def full(samples: Tensor) -> None:  # type: ignore[misc]
            held.copy_(samples)
            graph.replay()

    def epoch() -> float:
        model.train()
        begin = time.perf_counter()
        for samples in torch.split(torch.randperm(len(labels), device=device), batch):
            (full if len(samples) == batch else step)(samples)
        if on_gpu:
            torch.cuda.synchronize()
        return len(labels) / (time.perf_counter() - begin)

    return epoch


if __name__ == "__main__":
    main()
