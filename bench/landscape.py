"""A loss surface by `paceline landscape`, by loss-landscapes (PyPI), and by one pass of a DataLoader per point.

    python bench/landscape.py [--device cuda] [--model wide_resnet] [--points 51] [--samples 1000] [--rounds 3]

All three evaluate the same model on the same samples, at points of a square grid along two random, filter-normalized
directions.
On a GPU Paceline's seconds are those of the whole verb, from opening the record to the written result, without starting
Python; on a CPU those of the command as a user types it, on one worker per core. The other two get the model and the samples
ready-made on the device (on the host for the loader), and only their points are timed:

    loss-landscapes   `random_plane` with its own metric `Loss`: fp32, one batch of all samples that stays on the device
    loader            what the original tool (github.com/tomgoldstein/loss-landscape) does at each point: set every parameter,
                      then a pass over a DataLoader (batch 128, 2 processes), adding up `loss.item()`. It takes minutes, so only
                      `--loop-points` of the grid are done, and their mean is the time of a point.

The peer needs `pip install loss-landscapes`. The precision of ours is that of the run: bf16 on a GPU, fp32 on a CPU.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from measurement import spread, write
from paceline.landscape.directions import random_direction
from paceline.landscape.landscape import Asked, landscape
from paceline.training.after import Request, in_world
from paceline.training.fixed import fixed

BATCH, LOADERS = 128, 2  # of the original tool


def main() -> None:
    """Train a model, time all three, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--task", default="fashion-mnist")
    parser.add_argument("--model", default="wide_resnet")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--points", type=int, default=51)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--loop-points", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "landscape.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = f"{folder}/model"
        paceline.train(args.task, model=args.model, epochs=args.epochs, name="model", runs_dir=folder)
        seconds: dict[str, list[float]] = {"paceline": [], "loss-landscapes": [], "loader": []}
        center: dict[str, float] = {}
        model, inputs, labels = ready(record, args.samples, args.device)
        for _ in range(args.rounds):
            took, center["paceline"] = ours(record, args.points, args.samples, args.device)
            seconds["paceline"].append(took)
            took, center["loader"] = loader(record, model, inputs.cpu(), labels.cpu(), args)
            seconds["loader"].append(took * args.points**2)
            took, center["loss-landscapes"] = peer(model, inputs, labels, args.points)
            seconds["loss-landscapes"].append(took)
            print({name: round(values[-1], 2) for name, values in seconds.items()}, flush=True)
    medians = {name: float(np.median(values)) for name, values in seconds.items()}
    result = {
        "what": f"seconds for a surface of {args.points} x {args.points} points",
        "model": args.model,
        "samples": args.samples,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "seconds": {name: {"n": len(values), **spread(values)} for name, values in seconds.items()},
        "loader_points": args.loop_points,
        "times_faster_than": {name: round(medians[name] / medians["paceline"], 2) for name in medians if name != "paceline"},
        "loss_at_the_model": center,
    }
    print(result["times_faster_than"], center)
    write(args.out, result)


def ours(record: str, points: int, samples: int, device: str) -> tuple[float, float]:
    """The seconds of a whole `paceline landscape`, and the loss at the model."""
    for part in (Path(record) / "landscape").glob("*"):
        part.unlink()
    begin = time.perf_counter()
    if device == "cpu":
        command = [sys.executable, "-m", "paceline", "landscape", record, "--points", str(points), "--samples", str(samples)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    else:
        asked = Asked(points=points, reach=1.0, samples=samples)
        in_world(request_of(record), [], lambda here: landscape(request_of(record), asked, here))
    took = time.perf_counter() - begin
    loss = json.loads((Path(record) / "landscape" / "plane-0.json").read_text())["sets"]["train"]["loss"]
    return took, loss[points // 2][points // 2]


def request_of(record: str) -> Request:
    return Request(record=record, sets=("train",))


def ready(record: str, samples: int, device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """The model in evaluation mode and the same samples, on the device."""
    kept: list[tuple[Tensor, ...]] = []

    def keep(here: Any) -> dict[str, Any]:
        with fixed(request_of(record), here, samples=samples, seed=0) as opened:
            kept.extend(
                tuple(tensor.float() if tensor.is_floating_point() else tensor for tensor in batch)
                for batch in opened.sets["train"].batches
            )
        return {}

    in_world(request_of(record), [], keep)
    inputs, labels = (torch.cat([batch[i] for batch in kept]).to(device) for i in (0, 1))
    return paceline.load(record).to(device).eval(), inputs.contiguous(), labels


def peer(model: nn.Module, inputs: Tensor, labels: Tensor, points: int) -> tuple[float, float]:
    """The seconds of loss-landscapes, and its lowest loss (its grid does not include the model itself)."""
    loss_landscapes, metrics = map(import_module, ("loss_landscapes", "loss_landscapes.metrics"))
    metric = metrics.Loss(nn.functional.cross_entropy, inputs, labels)
    with inputs.device:  # it makes its directions on torch's default device, and fails if the model is on another
        loss_landscapes.random_plane(model, metric, 1, 2, normalization="filter", deepcopy_model=True)  # warm up
        begin = time.perf_counter()
        found = loss_landscapes.random_plane(model, metric, 1, points, normalization="filter", deepcopy_model=True)
        return time.perf_counter() - begin, float(found.min())


@torch.no_grad()
def loader(record: str, model: nn.Module, inputs: Tensor, labels: Tensor, args: argparse.Namespace) -> tuple[float, float]:
    """The mean seconds of a point with one pass of a loader, and the loss at the model."""
    device, pin = torch.device(args.device), args.device == "cuda"
    data = DataLoader(TensorDataset(inputs, labels), batch_size=BATCH, num_workers=LOADERS, pin_memory=pin)
    start = [weight.detach().clone() for weight in model.parameters()]
    named = [random_direction(model, 0, number) for number in (0, 1)]
    zero = [[torch.zeros_like(weight) for weight in start] for _ in named]
    for number, direction in enumerate(named):
        for index, (name, _) in enumerate(model.named_parameters()):
            if name in direction:
                zero[number][index] = direction[name].to(device)
    rng = np.random.default_rng(0)
    places = [(0.0, 0.0), *rng.uniform(-1, 1, (args.loop_points - 1, 2)).tolist()]
    losses, begin = [], 0.0
    for i, (x, y) in enumerate([places[0], *places]):  # the first pass warms up
        if i == 1:
            begin = time.perf_counter()
        for weight, own, first, second in zip(model.parameters(), start, *zero, strict=True):
            weight.data = own + first * x + second * y
        total = 0.0
        for batch, target in data:
            batch, target = batch.to(device), target.to(device)
            total += nn.functional.cross_entropy(model(batch), target).item() * len(batch)
        losses.append(total / len(inputs))
    took = time.perf_counter() - begin
    for weight, own in zip(model.parameters(), start, strict=True):
        weight.data = own
    return took / len(places), losses[1]


if __name__ == "__main__":
    main()
