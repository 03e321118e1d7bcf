"""Fixtures that write records to plan from, with known latency, bandwidth and spreads."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Make = Callable[..., Path]


@pytest.fixture
def make_scale(tmp_path: Path) -> Make:
    """Write a record of `paceline scale` and return its folder. Its steps follow the model exactly."""

    def make(name: str = "scale", *, counts: tuple[int, ...] = (1, 2), **change: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "scale.json").write_text(json.dumps(scale_json(counts, **change)))
        return folder

    return make


@pytest.fixture
def make_training(tmp_path: Path) -> Make:
    """Write a record of `paceline train` and return its folder."""

    def make(
        name: str = "run", *, noise: list[Any] | None = None, health: bool = True, steps: int = 235, **contract: Any
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        about = {"task": "fashion-mnist-mini", "cores": 2, "contract": {**CONTRACT, **contract}}
        (folder / "environment.json").write_text(json.dumps(about))
        rows: list[dict[str, Any]] = []
        for i, value in enumerate(noise or []):
            rows.append({"kind": "step", "step": 10 * (i + 1), "loss": 1.0, "noise_scale": value})
        if health:
            rows += [{**HEALTH, "step": 100 * i, "epoch": 1} for i in range(1, 5)]
        rows.append({"kind": "epoch", "epoch": 5, "step": steps, "time_s": 9.0, "val_accuracy": 0.81})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return make


@pytest.fixture
def make_phased(tmp_path: Path) -> Make:
    """Write a record of `paceline train` on one worker whose batch changed, and return its folder.

    6,144 samples per epoch. A step of n samples takes `step_s(n)`: 2 ms of optimizer, the rest is compute.
    """

    def make(
        name: str = "phased",
        *,
        phases: tuple[tuple[int, int, int], ...] = ((0, 256, 8), (2, 512, 8), (4, 1024, 8)),
        epochs: int = 6,
        step_s: Callable[[int], float] = phased_step_s,
        noise: Callable[[float], float] | None = None,
        **contract: Any,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        listed: list[dict[str, Any]] = []
        rows: list[dict[str, Any]] = []
        step, time_s = 0, 0.0
        for i, (start, batch, parts) in enumerate(phases):
            end = phases[i + 1][0] if i + 1 < len(phases) else epochs
            steps = 6144 // batch
            about: dict[str, Any] = {"global_batch": batch, "virtual_workers": parts, "part_batch": batch // parts}
            listed.append({"start": float(start), **about, "steps": steps * (end - start)})
            rows.append({"kind": "phase", "step": step, "epoch": float(start), **about})
            for epoch in range(start, end):
                for quarter in range(4 if noise else 0):
                    at = epoch + (quarter + 1) / 4
                    rows.append({"kind": "step", "step": step + steps * (quarter + 1) // 4, "noise_scale": noise(at)})
                took, step = step_s(batch), step + steps
                time_s += steps * took
                components = {**dict.fromkeys(COMPONENTS_S, 0.0), "compute": took - 0.002, "optimizer": 0.002}
                health = {"kind": "health", "step": step, "epoch": epoch + 1, "steps": steps, "step_s": took}
                health |= {"samples_per_s": batch / took, "components_s": components, "gradient_bytes": 4_000_000}
                rows.append(health)
                timed = {"time_s": time_s, "epoch_time_s": steps * took, "val_accuracy": 0.9}
                rows.append({"kind": "epoch", "epoch": epoch + 1, "step": step, **timed})
        largest = max(batch for _, batch, _ in phases)
        about = {"phases": listed, "virtual_workers": phases[-1][2], "global_batch": largest, "train_samples": 6144}
        about |= {"epochs": epochs, "steps_per_epoch": 6144 // phases[-1][1], "optimizer": "sgd Nesterov 0.9"}
        environment = {"task": "fashion-mnist-mini", "cores": 2, "contract": {**CONTRACT, **about, **contract}}
        (folder / "environment.json").write_text(json.dumps(environment))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return make


def phased_step_s(samples: int) -> float:
    """Not a line: 6 ms at 256 samples, 8 ms at 512, 16 ms at 1,024."""
    return {128: 0.005, 256: 0.006, 512: 0.008, 1024: 0.016}[samples]


CONTRACT = {
    "task": "fashion-mnist-mini",
    "workers": 1,
    "virtual_workers": 1,
    "nodes": 1,
    "devices": "1 x NVIDIA H200",
    "backend": "nccl",
    "global_batch": 128,
    "part_batch": 128,
    "epochs": 5,
    "steps_per_epoch": 47,
    "train_samples": 6000,
    "parameters": 29_434,
    "reduce": "fast",
}
COMPONENTS_S = {"input": 0.001, "compute": 0.03, "communication": 0.0, "waiting": 0.0, "optimizer": 0.002, "other": 0.001}
HEALTH = {
    "kind": "health",
    "time_s": 3.0,
    "samples_per_s": 128 / 0.034,
    "step_s": 0.034,
    "components_s": COMPONENTS_S,
    "gradient_bytes": 4_000_000,
}


def scale_json(
    counts: tuple[int, ...],
    *,
    latency_s: float = 1e-4,
    bytes_per_s: float = 1e9,
    ready: tuple[float, ...] = (1.0,),
    gradient_bytes: int = 4_000_000,
    on_node: int | None = None,
    network: tuple[float, float] = (1e-3, 1e8),
    **change: Any,
) -> dict[str, Any]:
    """What `paceline scale` writes if steps follow the model exactly; `change` goes into every count.

    `on_node` workers per node, joined by a `network` of this latency and bandwidth; None: all on one node.
    """

    def nodes(n: int) -> int:
        return 1 if on_node is None else -(-n // on_node)

    def one_ring(n: int, size: float, latency: float, rate: float) -> float:
        return 2 * (n - 1) * (latency + size / n / rate)

    def ring(n: int, size: float) -> float:
        within = one_ring(min(n, on_node or n), size, latency_s, bytes_per_s)
        return within + one_ring(nodes(n), size, *network)

    sizes = [gradient_bytes / len(ready)] * len(ready)
    found = []
    for n in counts:
        backward = 0.02
        end = 0.0
        for share, size in zip(ready, sizes, strict=True):
            end = max(end, share * backward) + ring(n, size)
        components_s = {**COMPONENTS_S, "communication": max(0.0, end - backward)} if n > 1 else dict(COMPONENTS_S)
        step = sum(components_s.values())
        buckets = [
            {"bytes": size, "ready": share, "ready_s": share * backward} for share, size in zip(ready, sizes, strict=True)
        ]
        speed = 128 * n / step
        found.append(
            {
                "workers": n,
                "nodes": nodes(n),
                "virtual_workers": n,
                "global_batch": 128 * n,
                "contract": {**CONTRACT, "workers": n, "global_batch": 128 * n},
                "samples_per_s": speed,
                "windows": [speed * 0.99, speed, speed * 1.01],
                "step_s": step,
                "components_s": components_s,
                "forward_s": 0.01,
                "backward_s": backward,
                "compute_spread_s": 0.0,
                "gradient_bytes": gradient_bytes,
                "buckets": buckets if n > 1 else [],
                "reduce_s": ring(n, gradient_bytes) if n > 1 else 0.0,
                **change,
            }
        )
    links = [
        {"workers": n, "bytes": size, "s": ring(n, size)} for n in counts if n > 1 for size in (4, 16384, 1 << 20, 1 << 24)
    ]
    return {
        "kind": "scale",
        "task": "fashion-mnist-mini",
        "mode": "weak",
        "unit": "images",
        "environment": {"cores": 2},
        "counts": found,
        "links": links,
    }
