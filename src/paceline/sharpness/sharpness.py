"""The flow of `paceline sharpness`: open the record, measure what is missing, and keep every finished measure.

All measures look at the same fixed training samples, in float32 and in evaluation mode, and move the trained weights only.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from paceline.dist.world import World
from paceline.errors import UsageError
from paceline.output import is_terminal, stages
from paceline.sharpness import curvature, keskar
from paceline.sharpness.kept import Kept
from paceline.sharpness.surface import Surface
from paceline.training.after import Request
from paceline.training.fixed import fixed
from paceline.training.progress import left_words
from paceline.training.weights import model_sha256

EPSILONS = (1e-3, 5e-4)
_SPACES = {"full": "the full space", "subspace": "a random subspace"}
RHO, ADAPTIVE_RHO = 0.05, 0.5
_DISAGREE = 0.5  # more than kinks (ReLU, max pooling) cause
_OPTIMIZER_BYTES = 300  # per weight: L-BFGS-B keeps 10 pairs of vectors, and more, in float64


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure, and how closely."""

    measures: tuple[str, ...]
    samples: int
    """0: all."""
    top: int
    vectors: int
    steps: int
    seed: int


def measure(request: Request, options: Options, here: World) -> dict[str, Any]:
    """The contents of sharpness.json, which rank 0 writes. Collective: call on every rank."""
    with fixed(request, here, samples=options.samples, seed=options.seed, shared=True) as opened, _full_float32():
        surface = Surface(opened, "train")
        stages.enter("evaluating the loss")
        loss, gradient = surface.gradient(surface.weights)
        _check_finite(surface, loss, gradient, request)
        about = {
            "samples": surface.samples,
            "set": "train",
            "loss": loss,
            "seed": options.seed,
            "weights": request.weights,
            "model_sha256": model_sha256(opened.model),
        }
        kept = Kept(Path(opened.opened.trained.record), about, here)
        if "sam" in options.measures and not kept.has("sam", "adaptive"):
            kept.add(_rises(surface, loss, gradient))
        if "hessian" in options.measures:  # second: what cannot be differentiated twice is reported soon
            _add_spectrum(surface, options, kept)
        if "keskar" in options.measures:
            _add_keskar(surface, (loss, gradient), options, kept)
        return kept.finish()


def _rises(surface: Surface, loss: float, gradient: Tensor) -> dict[str, Any]:
    """How far the loss rises after one step of length rho up the gradient.

    The second is scale-invariant: lengths are measured in units of each weight (ASAM: Kwon et al. 2021).
    """
    stages.enter("SAM: one step up the gradient")
    sizes = surface.weights.double().abs()
    found = {}
    for name, rho, units in (("sam", RHO, torch.ones_like(sizes)), ("adaptive", ADAPTIVE_RHO, sizes)):
        scaled = units * gradient
        step = rho * units * scaled / scaled.norm().clamp_min(1e-300)
        found[name] = {"rho": rho, "rise": surface.loss((surface.weights + step).to(surface.dtype)) - loss}
    return found


def _add_spectrum(surface: Surface, options: Options, kept: Kept) -> None:
    asked = {"vectors": options.vectors, "steps": min(options.steps, surface.size)}
    count = min(options.top, asked["steps"])
    found = kept.get("hessian")
    if found and all(found.get(name) == value for name, value in asked.items()) and len(found.get("top", ())) == count:
        return
    together = _vectors_in_memory(surface, asked["steps"], options.vectors)
    effort = curvature.Effort(top=count, together=together, seed=options.seed, **asked)
    with _progress("Hessian: product") as tell:
        spectrum = curvature.measure(surface.products, surface.weights, effort, tell)
    _check_products(surface, spectrum, kept)
    runs = min(options.vectors, curvature.RUNS)
    density = {"x": spectrum.x, "y": spectrum.y, "near_zero": spectrum.near_zero, "vectors": runs}
    found = {"top": spectrum.top, "residuals": spectrum.residuals, "trace": spectrum.trace, "trace_error": spectrum.trace_error}
    kept.add({"hessian": {**found, **asked, "density": density}})


def _check_products(surface: Surface, spectrum: curvature.Spectrum, kept: Kept) -> None:
    """Compare the first eigenvalue with differences of gradients, and note a large disagreement.

    The shorter difference is for losses that are far from quadratic. A custom layer whose backward is not differentiable can
    look constant to torch, without an error.
    """
    direction, value, size = spectrum.direction.double(), spectrum.top[0], float(surface.weights.double().norm())
    for length in (1e-3 * max(size, 1.0), 1e-4 * max(size, 1.0)):
        steps = [(surface.weights + sign * length * direction).to(surface.dtype) for sign in (1, -1)]
        ahead, behind = (surface.gradient(each)[1] for each in steps)
        slope = float((ahead - behind) @ direction) / (2 * length)
        rounding = 1e-5 * float(ahead.norm()) / length
        if abs(slope - value) <= max(_DISAGREE * max(abs(slope), abs(value)), rounding):
            return
    kept.note(
        "hessian",
        f"the Hessian may be wrong: along its first direction the gradient changes by {slope:.3g}, not by {value:.3g};"
        " does a custom layer's backward work outside autograd?",
    )


def _add_keskar(surface: Surface, start: tuple[float, Tensor], options: Options, kept: Kept) -> None:
    found = list(kept.get("keskar") or [])
    done = {(each["space"], each["epsilon"]) for each in found}
    if start[0] <= -1:
        kept.note("keskar", f"Keskar's sharpness is left out: it divides by 1 + loss, and the loss is {start[0]:.4g}")
        return
    for name, title in _SPACES.items():
        missing = [epsilon for epsilon in EPSILONS if (name, epsilon) not in done]
        if not missing or not _fits(surface, name, kept):
            continue
        stages.enter(f"Keskar: preparing {title}")
        space = None
        if surface.world.is_main:
            space = keskar.full(surface.weights) if name == "full" else keskar.subspace(surface.weights, options.seed)
        for epsilon in missing:
            with _progress(f"Keskar: {title}, epsilon {epsilon:g}, iteration") as tell:
                value = keskar.sharpness(surface, space, epsilon, start, tell)
            found = [*found, {"space": name, "epsilon": epsilon, "sharpness": value}]
            kept.add({"keskar": found})


def _fits(surface: Surface, name: str, kept: Kept) -> bool:
    """Whether rank 0 has the memory for this space. Collective: call on every rank."""
    device = surface.weights.device
    if name == "full":
        needed, free, where = _OPTIMIZER_BYTES * surface.size, psutil.virtual_memory().available, "memory"
    else:
        needed, free = keskar.SUBSPACE * surface.weights.nbytes, _free_bytes(surface.world)
        where = "GPU memory" if device.type == "cuda" else "memory"
    needed, free = surface.world.broadcast([needed, free])
    if needed <= free / 2:
        return True
    kept.note(
        f"keskar, {name}",
        f"Keskar's sharpness in {_SPACES[name]} is left out: it needs {_gigabytes(needed)}, more than half of the"
        f" {_gigabytes(free)} of free {where}",
    )
    return False


def _vectors_in_memory(surface: Surface, steps: int, most: int) -> int:
    """How many Lanczos runs to do at a time: the same on every rank. Raises a UsageError if not even one fits."""
    needed = steps * surface.weights.nbytes + 40 * surface.size
    free = surface.world.broadcast(min(surface.world.gather(_free_bytes(surface.world)), default=0))
    count = int(free / 2 // needed)
    if not count:
        fewer = int((free / 2 - 40 * surface.size) // surface.weights.nbytes)
        raise UsageError(
            f"{steps} Lanczos steps keep {_gigabytes(needed)} of vectors per worker, more than half of the"
            f" {_gigabytes(free)} of free memory: "
            + (f"use --lanczos-steps {fewer}" if fewer > 1 else "leave the Hessian out with --measures keskar,sam")
        )
    return min(count, most, curvature.RUNS)


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:,.3g} GB"


def _free_bytes(here: World) -> int:
    """Memory that this worker's device has left for it."""
    if here.device.type == "cuda":
        sharing = max(1, -(-here.local_size // torch.cuda.device_count()))
        reserved = torch.cuda.memory_reserved(here.device) - torch.cuda.memory_allocated(here.device)
        return int(torch.cuda.mem_get_info(here.device)[0] / sharing + reserved)
    return int(psutil.virtual_memory().available // here.local_size)


def _check_finite(surface: Surface, loss: float, gradient: Tensor, request: Request) -> None:
    """Raise a UsageError if the run diverged."""
    odd = int((~torch.isfinite(surface.weights)).sum())
    if odd or not math.isfinite(loss) or not bool(gradient.isfinite().all()):
        what = f"{odd:,} of its {surface.size:,} weights are not finite" if odd else f"its loss is {loss}"
        if not odd and math.isfinite(loss):
            what = "the gradient of its loss is not finite"
        other = "use --weights best, or " if request.weights == "last" else ""
        raise UsageError(
            f"{request.record} has diverged: {what}, so there is no minimum to measure; {other}train again with a"
            " lower --base-lr"
        )


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show on a terminal how many of its units a stage has done, and the time left."""
    begin_s, shows = time.monotonic(), is_terminal(sys.stdout)
    stages.enter(what.rpartition(" ")[0].rstrip(",:"))

    def tell(done: int, total: int) -> None:
        if shows and done:
            left_s = (time.monotonic() - begin_s) / done * (total - done)
            stages.enter(f"{what} {done:,} of {total:,}, about {left_words(left_s)} left")

    yield tell


@contextmanager
def _full_float32() -> Iterator[None]:
    """No TF32 on GPUs: its products have three digits, and small differences of losses need more."""
    cudnn: Any = torch.backends.cudnn
    parts = cudnn.conv, cudnn.rnn
    before = torch.get_float32_matmul_precision(), [each.fp32_precision for each in parts]
    torch.set_float32_matmul_precision("highest")
    try:
        for each in parts:
            each.fp32_precision = "ieee"
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        for each, kept in zip(parts, before[1], strict=True):
            each.fp32_precision = kept
