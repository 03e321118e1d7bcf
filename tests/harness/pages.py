"""Records for pages, written without training: plain files in the formats of real runs."""

import json
import math
from collections.abc import Mapping, Sequence
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


def make_layers(path: Path, names: Sequence[str] = ("stem", "body.0", "body.1", "head")) -> Path:
    """Add twelve rows about layers to a run: each moves ten times as fast as the one before, the last one not at all."""
    ratios = [10.0 ** (number - 5) for number in range(len(names) - 1)] + [0.0]
    about = {"names": list(names), "gradient_norm": [0.5] * len(names), "update_ratio": ratios}
    with (path / "metrics.jsonl").open("a") as file:
        for step in range(5, 65, 5):
            row = {"kind": "layers", "step": step, "epoch": (step - 1) // 20 + 1, "time_s": step / 20, **about}
            file.write(json.dumps(row) + "\n")
    return path


def make_landscapes(path: Path, kinds: Sequence[str] = ("line", "plane", "path", "between")) -> Path:
    """Add loss surfaces to a run: landscape/line-0.json, plane-0.json, path.json and between-large.json."""
    names = {"line": "line-0", "plane": "plane-0", "between": "between-large"}
    (path / "landscape").mkdir(exist_ok=True)
    for kind in kinds:
        (path / "landscape" / f"{names.get(kind, kind)}.json").write_text(json.dumps(landscape(kind)))
    return path


def landscape(kind: str, side: int = 31) -> dict[str, Any]:
    """What a landscape file holds: a valley that bends, with walls that a linear color scale would hide it under."""
    across = [index * 2 / (side - 1) - 1 for index in range(side)]
    if kind in ("line", "between"):
        x = [(place + 1) * 0.75 - 0.25 for place in across] if kind == "between" else across
        if kind == "line":
            train = [0.09 + 6 * place * place + 0.3 * math.sin(6 * place) ** 2 for place in x]
        else:
            train = [0.12 + 1.4 * math.exp(-(((place - 0.5) / 0.17) ** 2)) + 0.5 * (place - 0.5) ** 2 for place in x]
        sets = {"train": _measures(train), "validation": _measures([loss * 1.05 + 0.14 for loss in train])}
        ends = {"ends": ["demo", "large"]} if kind == "between" else {}
        about = "Loss on the line between two models." if ends else "Loss along one random direction, scaled per filter."
        return {"kind": kind, "about": about, "x": x, "sets": sets, **ends, **MEASURED}
    y = list(across)
    if kind == "path":
        across, y = [2.5 + 7 * place for place in across], [0.5 + 3 * place for place in y]
    rows = [[_valley(place, height, kind) for place in across] for height in y]
    shifted = [[_valley(place + 0.1, height, kind) + 0.12 for place in across] for height in y]
    grids = {"train": _grid(rows), "validation": _grid(shifted)}
    found = {"kind": kind, "x": across, "y": y, "sets": grids, **MEASURED}
    if kind == "plane":
        return {**found, "about": "Loss in the plane of two random directions, scaled per filter."}
    about = "The paths of two runs in the plane of their two widest directions."
    return {**found, "about": about, "explained": [0.71, 0.18], "paths": [_run("small", 1), _run("large", -1)]}


MEASURED = {
    **{"samples": {"train": 1000, "validation": 1000}, "seed": 0, "precision": "bf16", "statistics": "recorded"},
    **{"weights": "model", "time_s": 12.5, "workers": 2, "environment": {}},
}


def _valley(x: float, y: float, kind: str) -> float:
    if kind == "path":
        x, y = x / 7, y / 3
    bend = y - 0.6 * x * x
    return 0.09 + 1.3 * x * x + 9 * bend * bend + 0.12 * math.sin(5 * x) ** 2 + 0.02 * math.exp(5.2 * (x * x + y * y) ** 0.5)


def _measures(loss: list[float]) -> dict[str, list[float]]:
    return {"loss": loss, "accuracy": [max(0.1, math.exp(-0.9 * each)) for each in loss]}


def _grid(rows: list[list[float]]) -> dict[str, list[list[float]]]:
    found = [_measures(row) for row in rows]
    return {"loss": [row["loss"] for row in found], "accuracy": [row["accuracy"] for row in found]}


def _run(name: str, side: int) -> dict[str, Any]:
    """A run that comes down the valley from far away, and ends at the middle or beside it."""
    steps = list(range(0, 260, 20))
    left = [math.exp(-step / 70) for step in steps]
    end = 0.0 if side > 0 else 1.2
    x = [end + (7.5 - end) * each for each in left]
    y = [side * 1.4 * each + 0.25 * math.sin(step / 25) * each for each, step in zip(left, steps, strict=True)]
    loss = [_valley(a, b, "path") for a, b in zip(x, y, strict=True)]
    return {"name": name, "step": steps, "x": x, "y": y, "loss": loss, "off": [1.5 * each for each in left]}


def make_sharpness(path: Path, times: float = 1.0) -> Path:
    """Add sharpness.json to a run, with curvatures that are `times` as large as those of another."""
    (path / "sharpness.json").write_text(json.dumps(sharpness(times)))
    return path


def sharpness(times: float = 1.0) -> dict[str, Any]:
    """What sharpness.json holds: most of the spectrum near zero, a few large eigenvalues."""
    top = [times * each for each in (84.0, 41.0, 30.5, 12.0, 9.5)]
    x = [times * (index * 0.6 - 6) for index in range(170)]
    widths = [(0.0, 1.2 * times, 1.0), *((each, 0.8 * times, 2e-4) for each in top)]
    y = [sum(share * math.exp(-(((place - at) / wide) ** 2) / 2) / wide for at, wide, share in widths) for place in x]
    keskar = [
        {"space": space, "epsilon": epsilon, "sharpness": times * value}
        for space, epsilon, value in (("full", 1e-3, 21.5), ("full", 5e-4, 8.25), ("subspace", 1e-3, 2.125))
    ]
    hessian = {"top": top, "trace": 412.0 * times, "trace_error": 18.0, "vectors": 10, "density": {"x": x, "y": y}}
    rises = {"sam": {"rho": 0.05, "rise": 0.031 * times}, "adaptive": {"rho": 0.5, "rise": 0.044 * times}}
    return {"samples": 1000, "loss": 0.0912, "keskar": keskar, **rises, "hessian": hessian, "environment": {}}


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
