"""Write docs/gallery.md and its pictures from the results in studies/: `make gallery`, some seconds.

Nothing is trained: `tools/surfaces.py` makes the results. The text is in tools/gallery.md, a Jinja template; a section appears
once its results are committed.
"""

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from paceline import toys
from paceline.landscape.picture import COLORS, draw, draw_many, draw_sharpness, picture
from paceline.spread import deviation, mean
from surfaces import ARMS, LAYERS, NETS

ROOT = Path(__file__).parents[1]
DATA, PICTURES = ROOT / "studies" / "surfaces", ROOT / "docs" / "img" / "gallery"
GAP, GAP_STUDY = ROOT / "studies" / "results" / "gap.json", ROOT / "studies" / "gap.toml"
CURVE = ROOT / "studies" / "results" / "learning-curve.json"
TITLES = {name: f"ResNet-{depth}{'' if skip else ', no skips'}" for name, (depth, skip) in NETS.items()}


def page() -> str:
    """The page, from the template and the committed results."""
    loader = jinja2.FileSystemLoader(ROOT / "tools")
    made = jinja2.Environment(
        loader=loader, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    found = {
        **{"read": read, "image": image, "lowest": lowest, "highest": highest, "below": below, "length": length, "max": max},
        **{"nets": nets(), "titles": TITLES, "arms": ARMS, "sharp": sharp_rows(), "conv_spread": conv_spread},
        **{"gap": gap_rows(), "least_lost": max(filter(is_short, gap_rows()), key=lambda row: row["mean"], default=None)},
        "minima": toys.minima_points(),
    }
    lines = made.get_template("gallery.md").render(found).splitlines()
    kept = [line for line, before in zip(lines, ["", *lines], strict=False) if line or before]  # one empty line at a time
    return "\n".join(kept).strip() + "\n"


def read(name: str) -> Any:
    """A result; None if it is not committed."""
    path = DATA / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def image(name: str, alt: str) -> str:
    """The Markdown of a picture."""
    return f"![{alt}](img/gallery/{name})"


def nets() -> dict[str, Any]:
    """The surfaces of nets with and without skip connections."""
    return {name: found for name in NETS if (found := read(f"plane-{name}")) is not None}


def losses(found: Mapping[str, Any]) -> list[float]:
    """All finite losses of a surface."""
    return [value for row in found["sets"]["train"]["loss"] for value in map(float, row) if math.isfinite(value)]


def lowest(found: Mapping[str, Any]) -> float:
    """The lowest loss of a surface."""
    return min(losses(found))


def highest(found: Mapping[str, Any]) -> float:
    """The highest finite loss of a surface."""
    return max(losses(found))


def below(found: Mapping[str, Any], loss: float) -> float:
    """The share of a surface's points where the loss is lower."""
    return sum(value < loss for value in losses(found)) / (len(found["x"]) * len(found["y"]))


def length(path: Mapping[str, Any]) -> float:
    """From the first to the last point of a path."""
    return math.hypot(path["x"][0] - path["x"][-1], path["y"][0] - path["y"][-1])


def sharp_rows() -> list[list[str]]:
    """Losses and sharpness of the four models; empty until all are measured."""
    evaluated, rows = read("gap-losses"), []
    for name, arm in ARMS.items():
        found = [each for seed in range(3) if (each := read(f"sharpness-{name}-{seed}")) is not None]
        if evaluated is None or not found:
            return []
        runs = [each for each in evaluated["rows"] if each["arm"] == arm]
        rows.append(
            [
                f"{name.replace('-', ', ')} ({arm})",
                spread([each["train_loss"] for each in runs]),
                spread([each["validation_loss"] for each in runs]),
                spread([each["validation_loss"] - each["train_loss"] for each in runs]),
                spread([each["validation_accuracy"] for each in runs], 4),
                *(spread([keskar(each, space) for each in found], 1) + "%" for space in ("full", "subspace")),
                spread([each["adaptive"]["rise"] for each in found]),
                spread([each["hessian"]["top"][0] for each in found], 1),
            ]
        )
    return rows


def gap_rows() -> list[dict[str, Any]]:
    """Accuracy and steps of each arm of studies/gap.toml that has runs."""
    if not GAP.exists():
        return []
    runs = [run for run in json.loads(GAP.read_text())["runs"] if run["status"] == "done"]
    rows = []
    for arm in dict.fromkeys(tomllib.loads(GAP_STUDY.read_text())["arms"]):
        found = [run for run in runs if run["arm"] == arm]
        if found:
            accuracy = [run["metrics"]["accuracy"] for run in found]
            rows.append({"arm": arm, "steps": found[0]["steps"], "mean": mean(accuracy), "accuracy": spread(accuracy, 4)})
    return rows


def is_short(row: Mapping[str, Any]) -> bool:
    """Whether an arm trains 10 epochs at the large batch."""
    return bool(row["steps"] < 200)


def keskar(found: Mapping[str, Any], space: str) -> float:
    """Keskar's sharpness for the larger epsilon."""
    return next(float(each["sharpness"]) for each in found["keskar"] if each["space"] == space and each["epsilon"] == 0.001)


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean ± standard deviation (n)."""
    several = f" ± {deviation(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{several} ({len(values)})"


def conv_spread(name: str) -> float:
    """The largest to the smallest update-to-weight ratio of the convolutions, each its median over a run."""
    rows = read("layers")["runs"][name]["rows"]
    convs = [i for i, layer in enumerate(rows[0]["names"]) if is_conv(layer)]
    middle = [float(np.median([row["update_ratio"][i] for row in rows])) for i in convs]
    return max(middle) / min(middle)


def is_conv(layer: str) -> bool:
    """Whether this layer of the built-in ResNet is a convolution: its stem, and the first and fourth layer of each block."""
    return layer == "0" or layer.endswith((".path.0", ".path.3"))


def draw_all() -> None:
    """Draw every picture whose results are committed."""
    for name, stem in (("plane-resnet-20", "plane"), ("path", "path")):
        if (found := read(name)) is not None:
            draw(found, PICTURES / f"{stem}.svg")
            draw(found, PICTURES / f"{stem}-3d.png", view="3d")
    if len(found := nets()) > 1:
        titles = [TITLES[name] for name in found]
        draw_many(list(found.values()), titles, PICTURES / "skip.svg", 2, common=True)
        draw_many(list(found.values()), titles, PICTURES / "skip-3d.png", 2, view="3d", common=True)
    for name in ("large", "large-untuned"):
        if (line := read(f"between-{name}")) is not None:
            draw({**line, "ends": ["128", "4,096"]}, PICTURES / f"between-{name}.svg")
    for name in ("small", "large") if sharp_rows() else ():
        draw_sharpness(read(f"sharpness-{name}-0"), PICTURES / f"spectrum-{name}.svg")
    if read("layers") is not None:
        draw_layers(read("layers"), PICTURES / "layers.png")
    draw_curve(json.loads(CURVE.read_text())["learning_curve"], PICTURES / "learning-curve.svg")
    draw_toys(PICTURES / "toys.svg")


def draw_layers(found: Mapping[str, Any], to: Path) -> None:
    """Heat maps with one color scale, the first layer at the top."""
    from matplotlib.colors import LogNorm

    with picture(to) as figure:
        figure.set_size_inches(7.0, 5.2)
        panels = figure.subplots(1, len(LAYERS), sharey=True)
        for axes, name in zip(panels, LAYERS, strict=True):
            rows = found["runs"][name]["rows"]
            table = np.array([[np.nan if each is None else each for each in row["update_ratio"]] for row in rows], float).T
            steps, numbers = [row["step"] for row in rows], range(len(table))
            drawn = axes.pcolormesh(steps, numbers, table, norm=LogNorm(1e-4, 1e-1), cmap="viridis", shading="nearest")
            axes.set(title=name.upper(), xlabel="step")
            labels = [layer + (" (conv)" if is_conv(layer) else "") for layer in rows[0]["names"]]
            axes.set_yticks(numbers, labels, fontsize=7)
        panels[0].invert_yaxis()
        figure.colorbar(drawn, ax=list(panels), label="update-to-weight ratio")


def draw_curve(view: Mapping[str, Any], to: Path) -> None:
    """Errors of each seed, the fitted power law and its interval."""
    with picture(to) as figure:
        figure.set_size_inches(7.0, 4.0)
        axes = figure.add_subplot()
        x, y, low, high = np.array(view["fit"]["curve"], float).T
        axes.fill_between(x, low, high, color=COLORS[0], alpha=0.18, linewidth=0, label="90% interval")
        axes.plot(x, y, color=COLORS[0], label="fit")
        for i, row in enumerate(view["sizes"]):
            errors = [each for each in row["errors"] if each is not None]
            places = [row["samples"]] * len(errors)
            axes.plot(places, errors, "o", color=COLORS[1], markersize=4, label="" if i else "seeds")
        axes.set(xscale="log", yscale="log", xlabel="training samples", ylabel="validation error")
        ticks = [tick for tick in (0.02, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5) if min(y) * 0.8 < tick < max(y) * 1.2]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(True)
        axes.legend()


def draw_toys(to: Path) -> None:
    """Contours of both toys with their paths."""
    line = toys.line_toy(0.1, 0, 10)
    minima = toys.minima_toy([0.2], [1.0], 0.9, seeds=50, steps=200, seed=0)
    with picture(to) as figure:
        figure.set_size_inches(7.0, 3.8)
        for axes, found in zip(figure.subplots(1, 2), (line, minima), strict=True):
            z = np.minimum(np.array(found["z"], float), found.get("most") or np.inf)
            levels = np.geomspace(max(z.min(), 1e-2), z.max(), 16) if found.get("log") else np.linspace(z.min(), z.max(), 16)
            axes.contourf(found["x"], found["y"], z, levels, cmap="Greys_r", extend="both", alpha=0.85)
            for color, each in list(zip(COLORS[1:], found["paths"], strict=False))[:3]:
                axes.plot(each["x"], each["y"], color=color, linewidth=1.4, label=each["name"])
            xlim, ylim = ((min(found[side]), max(found[side])) for side in ("x", "y"))
            axes.set(xlabel=found["axes"][0], ylabel=found["axes"][1], title=found["title"], xlim=xlim, ylim=ylim)
            axes.legend(fontsize=7, loc="upper right", frameon=True, framealpha=0.9)


if __name__ == "__main__":
    draw_all()
    (ROOT / "docs" / "gallery.md").write_text(page())
    print(f"written: docs/gallery.md and {len(list(PICTURES.glob('*')))} pictures in docs/img/gallery")
