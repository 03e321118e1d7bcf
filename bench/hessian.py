"""Seconds of a Hessian-vector product, by how it is computed: `paceline sharpness` spends most of its time on these.

    python bench/hessian.py [--device cuda] [--models cnn resnet:depth=20 wide_resnet] [--samples 1000] [--rounds 5]

    double backward, shared     the gradient of (gradient . vector); one graph of the gradient serves all vectors of a pass
    forward over reverse        the gradient's derivative along the vector by forward-mode differentiation, one vector at a time

Both in float32 without TF32, in evaluation mode, on random inputs, with convolutions as (n, c, h, w) or channels-last. The
largest relative difference between the products is written too.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.autograd.forward_ad as forward
from torch import Tensor, nn

from measurement import spread, write
from paceline import models

VECTORS = 4


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--models", nargs="+", default=["cnn", "resnet:depth=20", "wide_resnet"])
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "hessian.json"))
    args = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    for name in args.models:
        for layout in (torch.contiguous_format, torch.channels_last):
            torch.manual_seed(0)
            model = models.build(name, in_channels=1, image_size=28, classes=10).eval().to(args.device, memory_format=layout)
            x = torch.randn(args.samples, 1, 28, 28, device=args.device).to(memory_format=layout)
            y = torch.randint(10, (args.samples,), device=args.device)
            vectors = [[torch.randn_like(weight) for weight in model.parameters()] for _ in range(VECTORS)]
            found: dict[str, list[list[Tensor]]] = {}
            for how, products in (("double backward, shared", double_backward), ("forward over reverse", forward_over_reverse)):
                found[how] = products(model, x, y, vectors)
                seconds = [timed(partial(products, model, x, y, vectors), args.device) / VECTORS for _ in range(args.rounds)]
                row = {"model": name, "layout": str(layout).rpartition(".")[2], "how": how, "n": args.rounds}
                rows.append({**row, "seconds": spread(seconds, 5)})
                print(rows[-1], flush=True)
            first, second = found.values()
            gap = max(
                float((a - b).norm() / a.norm().clamp_min(1e-12))
                for one, other in zip(first, second, strict=True)
                for a, b in zip(one, other, strict=True)
            )
            rows[-1]["difference"] = gap
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    write(args.out, {"what": "seconds per Hessian-vector product", "samples": args.samples, "device": device, "rows": rows})


def double_backward(model: nn.Module, x: Tensor, y: Tensor, vectors: list[list[Tensor]]) -> list[list[Tensor]]:
    """Products by a second backward pass through the graph of the gradient."""
    weights = list(model.parameters())
    gradients = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), weights, create_graph=True)
    return [list(torch.autograd.grad(gradients, weights, vector, retain_graph=True)) for vector in vectors]


def forward_over_reverse(model: nn.Module, x: Tensor, y: Tensor, vectors: list[list[Tensor]]) -> list[list[Tensor]]:
    """Products as the derivative of the gradient, by dual numbers."""
    found = []
    for vector in vectors:
        with forward.dual_level():
            named = zip(model.named_parameters(), vector, strict=True)
            duals = {name: forward.make_dual(weight.detach().requires_grad_(), along) for (name, weight), along in named}
            loss = nn.functional.cross_entropy(torch.func.functional_call(model, duals, (x,)), y)
            gradients = torch.autograd.grad(loss, list(duals.values()))
            found.append([tangent for each in gradients if (tangent := forward.unpack_dual(each).tangent) is not None])
    return found


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds of some work."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
