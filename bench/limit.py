"""The fastest step that the device allows for a model, and how far each component of Paceline's step is from it.

    python bench/limit.py [--model wide_resnet] [--batch 128 1024] [--out bench/results/limit.json]

Ceilings, measured here: bytes/s of a large copy (read + written) and flop/s of a large bf16 matrix product of random numbers.
An operation's floor is max(flops / rate, bytes / bandwidth); a component's floor is the sum over its operations. The minimum
number of bytes, with activations in bf16, and weights, their gradients and momentum in fp32:

    convolution, linear   forward: input, weight -> output; input gradient: grad, weight -> grad (not for the model's own
                          input); weight gradient: input, grad -> grad. 2 flops per multiplication in each of the three
    norm and its ReLU     forward: input twice (statistics, then normalize) -> output; backward: input and grad twice -> grad
    residual add          forward: two -> one; backward: one more read, to add the gradients of both paths
    all else              forward: input -> output; backward: the same again
    optimizer             weight, grad, momentum -> weight, momentum

The floor assumes that only a norm and its ReLU are fused, and that everything is read from memory. Fusion by a compiler, or a
cache that holds the data (a batch of 128 may fit), can beat it. Loading the batch, the loss and casts of weights have no floor.
Kernel times come from torch.profiler over a few steps in the middle of the last epoch; the step's time comes from the epochs
before it, without the profiler. `gap` is the step's time minus the time of all kernels.
"""

import argparse
import dataclasses
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before torch: CUDA graphs break if the profiler tears CUPTI down and starts it again
    os.environ.update(TEARDOWN_CUPTI="0", DISABLE_CUPTI_LAZY_REINIT="1")

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from measurement import spread, write
from paceline import models
from paceline.config import Config
from paceline.data.loaders import Arrays
from paceline.dist.world import World, world
from paceline.training import tasks
from paceline.training.build import Run, build
from paceline.training.loop import fit
from paceline.training.task import Task

EPOCHS, PROFILED = 7, 10  # epochs: one for warm-up, five timed, one with some steps profiled
PROBE = 7  # samples in the pass that shapes are read from: a number that no layer has as its number of outputs
FORWARD, INPUT_GRADS, WEIGHT_GRADS = "forward convolutions", "input gradients", "weight gradients"
POINTWISE, MATMUL, OPTIMIZER = "norm, ReLU and other elementwise", "matrix products", "optimizer"
COPIES, COLLECTIVES, OTHER = "copies and layout", "collectives", "other"
COMPONENTS = (FORWARD, INPUT_GRADS, WEIGHT_GRADS, POINTWISE, MATMUL, OPTIMIZER, COPIES, COLLECTIVES, OTHER)
NAMES = (  # the first entry that a kernel's lower-case name contains decides
    ("nccl", COLLECTIVES),
    ("memcpy", COPIES),
    ("memset", COPIES),
    ("tonhwckernel", COPIES),
    ("tonchwkernel", COPIES),
    ("multi_tensor_apply", OPTIMIZER),
    ("triton_for_", OPTIMIZER),  # a compiled optimizer
    ("triton_", POINTWISE),  # before the convolutions: a fused kernel's name may mention a convolution's backward pass
    ("at::native", POINTWISE),
    ("at_cuda_detail", POINTWISE),
    ("wgrad", WEIGHT_GRADS),
    ("reducesplitk", WEIGHT_GRADS),  # the second half of cuDNN's
    ("dgrad", INPUT_GRADS),
    ("fprop", FORWARD),
    ("convolve", FORWARD),
    ("conv2d", FORWARD),
    ("winograd", FORWARD),
    ("bn_fw", POINTWISE),
    ("bn_bw", POINTWISE),
    ("nvjet", MATMUL),
    ("gemm", MATMUL),
    ("gemv", MATMUL),
    ("splitkreduce", MATMUL),
    ("cublas", MATMUL),
    ("cutlass", MATMUL),
    ("elementwise", POINTWISE),
    ("softmax", POINTWISE),
)


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wide_resnet")
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--out", default=str(Path(__file__).parent / "results" / "limit.json"))
    args = parser.parse_args()
    with world() as here:
        if here.device.type == "cuda":
            # Start the profiler once before a CUDA graph is captured, or it may miss the graph's kernels.
            with profile(activities=[ProfilerActivity.CUDA]):
                torch.zeros(1, device=here.device)
        result = {
            "what": "microseconds of each component of a training step on one device, against the minimum its ceilings allow",
            "device": torch.cuda.get_device_name() if here.device.type == "cuda" else "CPU",
            "model": args.model,
            "ceilings": ceilings(here.device),
        }
        print(result["ceilings"], flush=True)
        operations = count_operations(args.model)
        result["by_batch"] = {}
        for batch in args.batch:
            result["by_batch"][str(batch)] = measure(here, args.model, batch, operations, result)
            write(args.out, result)
    print(table(result))


def table(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = []
    for batch, found in result["by_batch"].items():
        lines += [f"{result['model']}, batch {batch}, {found['precision']}, {result['device']}:", ""]
        lines += ["| component | measured, us | floor, us | measured / floor |", "|---|---|---|---|"]
        for component, row in found["parts"].items():
            floor = f"{row['floor_us']:,.0f} | {row['times']:.2f}" if row["times"] else f"{row['floor_us']:,.0f} | -"
            lines.append(f"| {component} | {row['measured_us']:,.0f} | {floor} |")
        step, floor = found["step_us"]["median"], found["floor_us"]
        lines.append(f"| gap: the step minus its kernels | {found['gap_us']:,.0f} | 0 | - |")
        lines.append(f"| **whole step** | {step:,.0f} | {floor:,.0f} | {step / floor:.2f} |")
        lines.append(f"| **images/s** | {found['images_per_s']:,.0f} | {found['images_per_s_at_floor']:,.0f} | |")
        lines += ["", "The largest single costs:", ""]
        for row in found["largest"]:
            lines.append(f"- {row['us']:,.0f} us, {row['share']:.1%} of the step, {row['part']}: `{row['kernel']}`")
        lines.append("")
    return "\n".join(lines)


def ceilings(device: torch.device) -> dict[str, float]:
    """The device's best rates: bytes/s copied (read + written), and flop/s."""
    on_gpu = device.type == "cuda"
    count, side = (1 << 30, 8192) if on_gpu else (64 << 20, 1024)

    source = torch.randint(0, 256, (count,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * count / _seconds(lambda: target.copy_(source), device)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    rate = 2 * side**3 / _seconds(lambda: torch.mm(left, right, out=product), device)
    return {"copy_bytes_per_s": bandwidth, "matrix_flops_per_s": rate}


def _seconds(work: Callable[[], Any], device: torch.device, rounds: int = 9, times: int = 20) -> float:
    """Seconds per call: the median over rounds of many calls, after one warm-up round."""
    found = []
    for _ in range(rounds + 1):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(10_000_000)  # about 5 ms, while the calls queue up: so the device is timed, not the host
            begin.record()
            for _ in range(times):
                work()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1e3 / times)
        else:
            start = time.perf_counter()
            for _ in range(times):
                work()
            found.append((time.perf_counter() - start) / times)
    return statistics.median(found[1:])


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a step: its flops and bytes per sample, and the bytes that do not depend on the batch."""

    component: str
    flops: float
    sample_bytes: float
    fixed_bytes: float = 0.0

    def floor_s(self, batch: int, rate: float, bandwidth: float) -> float:
        return max(self.flops * batch / rate, (self.sample_bytes * batch + self.fixed_bytes) / bandwidth)


def count_operations(spec: str) -> list[Operation]:
    """The operations of a training step, from one small forward pass on the CPU."""
    model = models.build(spec, in_channels=1, image_size=28, classes=10).train()
    inputs = torch.randn(PROBE, 1, 28, 28)
    with torch.no_grad(), _Counting(inputs) as counting:
        model(inputs)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return [*counting.operations, Operation(OPTIMIZER, 0, 0, 5 * 4 * parameters)]


class _Counting(TorchDispatchMode):
    """Records every operation, of modules and functions, together with its backward pass."""

    def __init__(self, inputs: Tensor) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._inputs = inputs
        self._normed: set[int] = set()
        self._kept: list[Any] = []  # keeps memory from being reused: an address must mean one tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._kept.append(result)
        output = result[0] if isinstance(result, tuple) else result
        read = [each for each in args if isinstance(each, Tensor) and _per_sample(each)]
        if read and _per_sample(output) and not func.is_view:
            self._note(func.overloadpacket.__name__, args, read, output)
        return result

    def _note(self, name: str, args: tuple[Any, ...], read: list[Tensor], output: Tensor) -> None:
        x, y = 2 * read[0].numel() / PROBE, 2 * output.numel() / PROBE  # bytes per sample, in bf16
        more = self.operations.append
        if name in ("convolution", "addmm", "mm"):
            weight = args[2] if name == "addmm" else args[1]  # a linear layer's weight is transposed
            flops = output.numel() / PROBE * 2 * (weight[0].numel() if name == "convolution" else len(weight))
            components = (FORWARD, WEIGHT_GRADS, INPUT_GRADS) if name == "convolution" else (MATMUL,) * 3
            first = read[0].data_ptr() == self._inputs.data_ptr()  # the images need no gradient
            for component in components[:2] if first else components:
                more(Operation(component, flops, x + y, 4 * weight.numel()))
        elif "norm" in name:
            self._normed.add(output.data_ptr())
            more(Operation(POINTWISE, 0, 2 * x + y))
            more(Operation(POINTWISE, 0, 2 * (x + y) + x))
        elif name in ("relu", "relu_") and read[0].data_ptr() in self._normed:
            pass  # counted with the norm
        elif name in ("add", "add_"):
            more(Operation(POINTWISE, 0, len(read) * x + y))
            more(Operation(POINTWISE, 0, y))
        else:
            more(Operation(POINTWISE, 0, x + y))
            more(Operation(POINTWISE, 0, x + y))


def _per_sample(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == PROBE


def measure(here: World, model: str, batch: int, operations: list[Operation], result: dict[str, Any]) -> dict[str, Any]:
    """One batch size: the step's time, its kernels by component, and the floors."""
    run = build(*_task(here, model, batch), here)
    watcher = Watcher(run)
    fit(run, (watcher,), watch=watcher)  # type: ignore[arg-type]
    speeds, kernels = watcher.speeds[1:-1], watcher.kernels()
    rate, memory = (result["ceilings"][f"{name}_per_s"] for name in ("matrix_flops", "copy_bytes"))
    floors: Counter[str] = Counter()
    for operation in operations:
        floors[operation.component] += 1e6 * operation.floor_s(batch, rate, memory)
    measured: Counter[str] = Counter()
    for name, us in kernels.items():
        measured[watcher.component_of(name)] += us
    step_us = spread([1e6 * batch / speed for speed in speeds])
    step, floor = step_us["median"], sum(floors.values())
    in_order = [each for each in COMPONENTS if measured[each] or floors[each]]
    in_order += [each for each in measured if each not in COMPONENTS]
    return {
        "precision": run.config.precision,
        "fast": getattr(run.config, "fast", "no such option"),
        "n": len(speeds),
        "step_us": step_us,
        "floor_us": round(floor, 3),
        "flops": batch * sum(each.flops for each in operations),
        "bytes": sum(batch * each.sample_bytes + each.fixed_bytes for each in operations),
        "images_per_s": 1e6 * batch / step,
        "images_per_s_at_floor": 1e6 * batch / floor,
        "gap_us": round(step - sum(measured.values()), 3),
        "parts": {each: _row(measured[each], floors[each]) for each in in_order},
        "profiled_steps": PROFILED,
        "largest": [
            {"kernel": _shorten(name), "part": watcher.component_of(name), "us": round(us, 3), "share": round(us / step, 4)}
            for name, us in kernels.most_common(3)
        ],
        "kernels": {name[:300]: round(us, 3) for name, us in kernels.most_common(40)},
    }


def _task(here: World, model: str, batch: int) -> tuple[Task, Config]:
    """The mini set, repeated to fill an epoch of at least 50 equal steps, so that the fixed cost of an epoch hardly counts."""
    on_gpu = here.device.type == "cuda"
    options: dict[str, Any] = {"model": model, "global_batch": batch, "epochs": EPOCHS, "check_every": 0}
    options["precision"] = "bf16" if on_gpu else "fp32"
    if on_gpu and "fast" in {field.name for field in dataclasses.fields(Config)}:
        options["fast"] = "on"
    task, config = tasks.resolve("fashion-mnist-mini", options)
    samples = batch * (max(50, 25_600 // batch) if on_gpu else 2 * PROFILED)
    data = task.train()
    assert isinstance(data, Arrays)
    repeated = Arrays(tuple(tensor[torch.arange(samples) % len(tensor)] for tensor in data.tensors))
    return dataclasses.replace(task, train=lambda: repeated), config


class Watcher:
    """An observer that notes each epoch's speed, and profiles some steps in the middle of the last epoch."""

    def __init__(self, run: Run) -> None:
        self.speeds: list[float] = []
        self._on_gpu = run.world.device.type == "cuda"
        self._first = run.sampler.first_step(EPOCHS) - run.sampler.cut(0).steps // 2 - PROFILED // 2
        self._profile = profile(activities=[ProfilerActivity.CUDA if self._on_gpu else ProfilerActivity.CPU])
        self._running = False

    stop = ""

    def mark(self, step: int, stage: str) -> None:
        wanted = self._first <= step < self._first + PROFILED
        if wanted == self._running:
            return
        if self._on_gpu:
            torch.cuda.synchronize()  # keep out kernels of the steps before and after
        (self._profile.start if wanted else self._profile.stop)()
        self._running = wanted

    def kernels(self) -> Counter[str]:
        """Microseconds per step of every kernel; on a CPU, of every operation without its callees."""
        found: Counter[str] = Counter()
        if self._on_gpu:
            for event in self._profile.events():
                annotation = getattr(event, "is_user_annotation", False) or event.name.endswith(" Sync")
                if event.device_type == DeviceType.CUDA and not annotation:
                    found[event.name] += event.device_time_total / PROFILED
        else:
            every = Counter({each.key: each.self_cpu_time_total / PROFILED for each in self._profile.key_averages()})
            found.update(dict(every.most_common(8)))
            found["all other operations"] = every.total() - found.total()
        return found

    def component_of(self, name: str) -> str:
        """The component a kernel belongs to; on a CPU every operation is its own component."""
        if not self._on_gpu:
            return name
        return next((component for piece, component in NAMES if piece in name.lower()), OTHER)

    def epoch(self, row: Any) -> None:
        self.speeds.append(row["samples_per_s"])
        print(f"epoch {row['epoch']}: {row['samples_per_s']:,.0f} images/s", flush=True)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def start(self, contract: Any) -> None:
        print("; ".join(text for what, text in contract.lines() if what in ("model", "global batch", "device")), flush=True)

    def step(self, row: Any) -> None:
        pass

    def validating(self, epoch: int, done: int, total: int) -> None:
        pass

    def health(self, row: Any) -> None:
        pass

    def timeline(self, timeline: Any) -> None:
        pass

    def end(self, result: Any, model: Any) -> None:
        pass


def _row(measured_us: float, floor_us: float) -> dict[str, float | None]:
    times = round(measured_us / floor_us, 3) if measured_us and floor_us else None
    return {"measured_us": round(measured_us, 3), "floor_us": round(floor_us, 3), "times": times}


def _shorten(kernel: str) -> str:
    """Without template arguments, at most 80 characters."""
    return kernel.removeprefix("void ").partition("<")[0][:80]


if __name__ == "__main__":
    main()
