"""What a step of each optimizer costs on the tensors of a network, compared with torch's fused AdamW.

    python bench/optimizers.py [--device cuda] [--model wide_resnet] [--rounds 20] [--out bench/results/optimizers.json]

Every optimizer has its own copy of the network and constant gradients; nothing else runs. All of them take turns in each round,
so a busy machine slows all of them. The result is each one's time divided by AdamW's in the same round, as medians. `eager` is
the call as any training loop would make it, waiting for the device once after all steps of a turn (on a GPU ours then replay
their own graph). On a GPU, `graph` is the step as part of a larger graph, as in Paceline's loop. LARS, LAMB and NovoGrad of
torch-optimizer 0.3.0 are measured if they can be imported (`bench/peers/requirements.txt`); they read norms on the host, so
they cannot be captured in a graph. The first round is warm-up and is left out.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from measurement import spread, write
from paceline import models
from paceline.config import Config
from paceline.optim import make_optimizer

OURS = ("sgd", "adamw", "lars", "lamb", "novograd", "muon")
THEIRS = {"lars": "LARS", "lamb": "Lamb", "novograd": "NovoGrad"}
BASE = "adamw"


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="wide_resnet")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=0, help="steps per turn (0: 50 on a GPU, 5 on a CPU)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (0: torch's choice)")
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "optimizers.json"))
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    on_gpu = args.device.startswith("cuda")
    steps = args.steps or (50 if on_gpu else 5)
    tensors = list(network(args).parameters())
    result: dict[str, Any] = {
        "what": "milliseconds per step of the optimizer alone, and the ratio to torch's fused AdamW in the same round",
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} thread(s)",
        "date": time.strftime("%Y-%m-%d"),
        "model": args.model,
        "tensors": len(tensors),
        "parameters": sum(tensor.numel() for tensor in tensors),
        "steps_a_turn": steps,
        "torch_optimizer": their_version(),
    }
    for way in ("eager", "graph") if on_gpu else ("eager",):
        rows: list[dict[str, float]] = []
        candidates = prepare(args, way)
        for number in range(args.rounds + 1):
            row = {name: timed(step, steps, on_gpu) for name, step in candidates.items()}
            if number:
                rows.append(row)
                result[way] = summarize(rows)
            if number == args.rounds or (number and number % 5 == 0):
                write(args.out, result)  # keep what is done if the run is cut short
                print(f"{way}: {number} of {args.rounds} rounds", file=sys.stderr)
    print(table(result))


def network(args: argparse.Namespace) -> nn.Module:
    """A model as in training, with gradients."""
    torch.manual_seed(0)
    model = models.build(args.model, in_channels=1, image_size=28, classes=10)
    model = model.to(args.device, memory_format=torch.channels_last)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 0.01
    return model


def prepare(args: argparse.Namespace, way: str) -> dict[str, Callable[[], Any]]:
    """A step function of each optimizer, by name."""
    on_gpu = args.device.startswith("cuda")
    steps: dict[str, Callable[[], Any]] = {}
    for name in OURS:
        optimizer = make_optimizer(network(args), Config(optimizer=name, base_lr=1e-4))
        for each in getattr(optimizer, "inner", (optimizer,)):
            each.uses_graph = way == "eager"  # the default when the class is used alone
        if on_gpu:  # as in Paceline's loop: a graph can read a changed lr only from a tensor
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(1e-4, device=args.device)
        steps[name] = captured(optimizer.step) if way == "graph" else optimizer.step
    if way == "eager" and their_version():
        import torch_optimizer

        for name, theirs in THEIRS.items():
            make = getattr(torch_optimizer, theirs)
            steps[f"{name}, torch-optimizer"] = make(network(args).parameters(), lr=1e-4, weight_decay=5e-4).step
    return steps


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    """The step as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()

    def replay(held: Any = step) -> None:  # only the optimizer keeps the graph's memory alive
        graph.replay()

    return replay


def timed(step: Callable[[], Any], steps: int, on_gpu: bool) -> float:
    """Milliseconds per step."""
    if on_gpu:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1000 / steps


def summarize(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Medians with spread, over the rounds so far."""
    by_name = {
        name: {"ms": spread([row[name] for row in rows]), "over_adamw": spread([row[name] / row[BASE] for row in rows], 2)}
        for name in rows[0]
    }
    return {"n": len(rows), "by_optimizer": by_name}


def their_version() -> str:
    """The version of torch-optimizer, or "" if it is not installed."""
    try:
        import torch_optimizer
    except ImportError:
        return ""
    return str(torch_optimizer.__version__)


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = ["| optimizer | way | ms per step (median, min to max) | ratio to fused AdamW |", "|---|---|---|---|"]
    for way in ("eager", "graph"):
        for name, found in result.get(way, {}).get("by_optimizer", {}).items():
            ms, ratio = found["ms"], found["over_adamw"]
            lines.append(
                f"| {name} | {way} | {ms['median']:.3f} ({ms['min']:.3f} to {ms['max']:.3f}) |"
                f" {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f}) |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
