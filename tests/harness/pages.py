"""Records for pages, written without training: plain files in the formats of real runs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONTRACT = {
    **{"task": "fashion-mnist-mini", "model": "cnn", "parameters": 29434, "data": "fashion-mnist-mini (6,000 + 1,000)"},
    **{"train_samples": 6000, "validation_samples": 1000, "workers": 2, "virtual_workers": 2, "parts": "one per worker"},
    **{"reduce": "fast", "nodes": 1, "launcher": "started here", "devices": "2 CPU workers", "backend": "gloo"},
    **{"precision": "fp32", "reference_batch": 128, "base_lr": 0.05, "global_batch": 256, "part_batch": 128, "accumulate": 1},
    **{"k": 2.0, "lr_rule": "linear", "peak_lr": 0.1, "optimizer": "sgd Nesterov 0.9", "schedule": "one-cycle by step"},
    **{"warmup": "over 22 steps", "steps_per_epoch": 20, "epochs": 3, "total_steps": 60, "seed": 0, "loader": "on the device"},
}
COMPONENTS_S = {"input": 0.001, "compute": 0.02, "communication": 0.004, "waiting": 0.002, "optimizer": 0.002, "other": 0.001}


def make_train(path: Path, *, accuracy: float = 0.88, status: str = "done", **contract: Any) -> Path:
    """A run of three epochs with steps, validations, noise scales and health rows."""
    path.mkdir(parents=True)
    rows: list[Mapping[str, Any]] = []
    for step in range(5, 65, 5):
        epoch, time_s = (step - 1) // 20 + 1, step / 20
        rows.append(
            {
                "kind": "step",
                "step": step,
                "epoch": epoch,
                "lr": 0.1,
                "time_s": time_s,
                "loss": 3 / step,
                "noise_scale": 9 * step,
            }
        )
        if step % 20 == 0:
            ended = {"step": step, "epoch": epoch, "time_s": time_s, "samples_per_s": 7800.0 + step}
            rows.append({"kind": "epoch", **ended, "val_loss": 4 / step, "val_accuracy": accuracy - 0.1 * (3 - epoch)})
            rows.append(
                {
                    "kind": "health",
                    **ended,
                    "step_s": 0.03,
                    "components_s": COMPONENTS_S,
                    "slowest": 1,
                    "lag_s": 0.002,
                    "memory_bytes": 4e8,
                }
            )
    rows.append({"kind": "note", "text": "all workers agree"})
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    about = {
        "when": "2026-11-15T17:52:30+00:00",
        "command": ["paceline", "train", "a b"],
        "versions": {"torch": "2.13.0"},
        "cores": 2,
    }
    (path / "environment.json").write_text(json.dumps({**about, "contract": {**CONTRACT, **contract}}))
    result = {"status": status, "why": "", "epochs": 3, "steps": 60, "train_time_s": 3.0, "samples_per_s": 7860.0}
    (path / "result.json").write_text(json.dumps({**result, "metrics": {"loss": 0.4, "accuracy": accuracy}}))
    return path


PHASES = [
    {"step": 0, "epoch": 0.0, "global_batch": 150, "virtual_workers": 1, "part_batch": 150, "total_steps": 70},
    {"step": 10, "epoch": 0.25, "global_batch": 450, "virtual_workers": 2, "part_batch": 225, "total_steps": 60},
]


def make_growing(path: Path, **contract: Any) -> Path:
    """A run as of `make_train` whose batch grew in its first epoch, by an automatic schedule."""
    planned = [{"start": 0.0, "global_batch": 150, "virtual_workers": 1, "part_batch": 150, "steps": 70}]
    make_train(path, **{"global_batch": 900, "total_steps": 70, "phases": planned, **contract})
    rows = (path / "metrics.jsonl").read_text().splitlines()
    rows[2:2] = [json.dumps({"kind": "phase", **PHASES[1], "lr_scale": 1.0, "why": "the noise scale is 900"})]
    rows[0:0] = [json.dumps({"kind": "phase", **PHASES[0], "lr_scale": 0.7, "why": "the first batch"})]
    (path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    return path


def make_timeline(path: Path) -> Path:
    """Add a profile of two steps on two workers to a run."""
    events = []
    for worker in range(2):
        for step in (21, 22):
            begin = step * 10_000 + worker * 50
            spans = [
                ("forward", 0, 3000, 0),
                ("backward", 3000, 4000, 0),
                ("communication", 6000, 2000, 1),
                ("optimizer", 8100, 500, 0),
            ]
            for kind, start, took, lane in spans:
                args = {"step": step, **({"bucket": 0, "bytes": 117808} if lane else {})}
                name = "all-reduce, bucket 0" if lane else kind
                at = {"ts": begin + start, "dur": took, "pid": worker, "tid": lane}
                events.append({"ph": "X", "name": name, "cat": kind, "args": args, **at})
    bucket = {
        "bucket": 0,
        "bytes": 117808,
        "parameters": ["fc.weight"],
        "ready_s": 0.003,
        "took_s": 0.002,
        "hidden_s": 0.001,
    }
    about = {"workers": 2, "steps": [21, 22], "reduce": "fast", "backend": "gloo", "buckets": [bucket]}
    (path / "timeline.json").write_text(json.dumps({"traceEvents": events, "paceline": about}))
    return path


def make_landscape(path: Path) -> Path:
    """Add a bowl-shaped loss surface to a run."""
    side = [-1.0, -0.5, 0.0, 0.5, 1.0]
    loss = [[0.4 + x * x + y * y for x in side] for y in side]
    (path / "landscape.json").write_text(json.dumps({"x": side, "y": side, "loss": loss, "about": "two directions"}))
    return path


def make_toys(path: Path) -> Path:
    """Toys with a small surface, two paths and one row each."""
    path.mkdir(parents=True)
    side = [-2.0, -1.0, 0.0, 1.0, 2.0]
    surface = {"x": side, "y": side, "z": [[x * x + y * y for x in side] for y in side]}
    point = {"name": "minimum", "x": 0.0, "y": 0.0, "value": 0.0, "eigenvalues": [2.0, 2.0]}
    t = list(range(0, 101, 10))
    path_ = {"t": t, "x": [2 - s / 50 for s in t], "y": [1.0] * len(t), "z": [(2 - s / 50) ** 2 + 1 for s in t]}
    shared = {"about": "a bowl", "axes": ["x", "y"], "clock": "steps", **surface, "points": [point]}
    shared["paths"] = [{"name": "one", **path_}, {"name": "two", **path_, "y": [-1.0] * len(t)}]
    line = {"batch": 1, "steps": 100, "distance": 0.5, "sd": 0.1, "excess": 0.25}
    escape = {"optimizer": "SGD", "noise": 1.0, "row_lr": 0.1, "lr": 0.1, "momentum": 0.0, "effective_lr": 0.1, "seeds": 10}
    escape |= {"flat": 0.5, "low": 0.2, "high": 0.8, "diverged": 0, "long_run": 0.9}
    heavy = {**escape, "optimizer": "momentum", "momentum": 0.9, "lr": 0.01, "flat": 0.25, "low": 0.1}
    toys = [
        {"toy": "line", "title": "Line fit", "log": True, **shared, "rows": [line]},
        {"toy": "minima", "title": "Sharp and flat minimum", "most": 4.0, **shared, "rows": [escape, heavy]},
    ]
    (path / "toys.json").write_text(json.dumps({"kind": "toys", "toys": toys, "environment": {"cores": 2}}))
    return path


def make_scale(path: Path) -> Path:
    """A scaling measurement of 1, 2 and 4 workers."""
    path.mkdir(parents=True)
    counts = []
    for workers, efficiency in ((1, 1.0), (2, 0.9), (4, 0.7)):
        speed = 4000.0 * workers * efficiency
        counts.append(
            {
                **{"workers": workers, "virtual_workers": workers, "global_batch": 128 * workers, "samples_per_s": speed},
                **{"low": speed * 0.95, "high": speed * 1.02, "speed_up": workers * efficiency, "efficiency": efficiency},
                **{
                    "contract": {**CONTRACT, "workers": workers},
                    "step_s": 0.03,
                    "components_s": COMPONENTS_S,
                    "windows": [speed],
                },
            }
        )
    links = [{"workers": 2, "bytes": size, "s": 0.001 + size / 1e9} for size in (4, 1 << 20)]
    found = {"kind": "scale", "task": "fashion-mnist-mini", "mode": "weak", "unit": "images", "counts": counts, "links": links}
    (path / "scale.json").write_text(
        json.dumps({**found, "verdict": "Use two workers.", "environment": {"when": "2026-11-15"}})
    )
    return path
