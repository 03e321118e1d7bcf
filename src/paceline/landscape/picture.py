"""Loss surfaces and spectra as PNG or SVG files, for papers and documents.

matplotlib draws them (the extra `pictures`). It is imported when a picture is drawn, and used without pyplot, which would keep
state. The same data gives the same bytes. Colors are viridis, and Okabe and Ito's for lines: colorblind readers can tell them
apart.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from paceline.errors import RecordError, UsageError
from paceline.files import replacing
from paceline.landscape.drawable import Line, Surface, as_label, as_values, finer, height_at, read_line, read_surface

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

View = Literal["contour", "3d"]

COLORS = ("#0072b2", "#d55e00", "#00845f", "#b0458a", "#8a6d00", "#1f2937", "#6b4fbb", "#7c8594")
_DASHES = {"train": "-", "validation": "--"}
_STYLE: dict[str, Any] = {
    **{"font.size": 10, "axes.edgecolor": "#8b93a1", "axes.linewidth": 0.8, "axes.labelcolor": "#3b424d", "axes.titlesize": 10},
    **{"xtick.color": "#5a6372", "ytick.color": "#5a6372", "xtick.labelsize": 9, "ytick.labelsize": 9, "grid.color": "#dfe3e9"},
    **{"grid.linewidth": 0.8, "legend.frameon": False, "legend.fontsize": 9, "lines.linewidth": 1.8, "axes.axisbelow": True},
    **{"svg.hashsalt": "paceline", "svg.fonttype": "none", "figure.dpi": 100, "savefig.dpi": 160},
}
_WIDTH = 7.0  # inches: 10 points are readable where the picture is 700 pixels wide
_WIDE = 30.0  # losses that differ by more have a log scale
_LEVELS = 18
_GAP = "#d5d9df"  # where the loss is not finite
_SURFACES = ("plane", "path")
_MARK: dict[str, Any] = {"markeredgewidth": 2, "linestyle": "none"}
_START = _MARK | {"marker": "o", "markerfacecolor": "white", "markeredgecolor": "#3b424d"}
_END = _MARK | {"marker": "s", "color": "#3b424d", "markeredgecolor": "white", "markeredgewidth": 1}
_MODEL = _START | {"markeredgecolor": "#1a1e26", "label": "the model"}


def draw(found: Mapping[str, Any], path: Path, *, view: View = "contour", shown: str = "") -> None:
    """Draw one landscape into a .png or .svg file. `shown` is the set that a surface shows: the first if it is empty."""
    with picture(path) as figure:
        if found.get("kind") in _SURFACES:
            figure.set_size_inches(_WIDTH, 5.4)
            surface = read_surface(found, shown)
            axes, scale = _axes(figure, (1, 1, 1), view), _scale([surface])
            _draw_surface(axes, surface, scale, view)
            _colorbar(figure, [axes], scale)
        else:
            line = read_line(found)
            measures = [measure for measure in ("loss", "accuracy") if any(measure in each for each in line.sets.values())]
            figure.set_size_inches(_WIDTH, 3.3 if len(measures) > 1 else 4.2)
            for place, measure in enumerate(measures):
                _draw_line(figure.add_subplot(1, len(measures), place + 1), line, measure, [line])
        _legend(figure)


def draw_many(
    founds: Sequence[Mapping[str, Any]],
    titles: Sequence[str],
    path: Path,
    columns: int,
    *,
    view: View = "contour",
    common: bool = False,
) -> None:
    """Draw several landscapes as panels of one file: the first set of each surface, the loss of each line.

    With `common` all surfaces have one color scale, and all lines one loss axis.
    """
    rows, width = -(-len(founds) // columns), max(_WIDTH, 2.4 * columns)
    read = [read_surface(found) if found.get("kind") in _SURFACES else read_line(found) for found in founds]
    surfaces, lines = [each for each in read if isinstance(each, Surface)], [each for each in read if isinstance(each, Line)]
    with picture(path) as figure:
        figure.set_size_inches(width, 0.86 * rows * width / columns + 0.3)
        drawn = []
        for place, (each, title) in enumerate(zip(read, titles, strict=True)):
            axes = _axes(figure, (rows, columns, place + 1), view if isinstance(each, Surface) else "contour")
            if isinstance(each, Surface):
                scale = _scale(surfaces if common else [each])
                _draw_surface(axes, each, scale, view)
                drawn.append(axes)
                if not common:
                    _colorbar(figure, [axes], scale)
            else:
                _draw_line(axes, each, "loss", lines if common else [each])
            axes.set_title(as_label(title), pad=18 if isinstance(each, Line) else -4 if view == "3d" else 6)
            _make_room(axes, is_left=place % columns == 0, is_lowest=place + columns >= len(read))
        if common and drawn:
            _colorbar(figure, drawn, _scale(surfaces))
        _legend(figure)


def draw_sharpness(found: Mapping[str, Any], path: Path) -> None:
    """Draw the spectrum in a sharpness.json into a .png or .svg file, with the largest eigenvalues marked."""
    hessian = found.get("hessian")
    hessian = hessian if isinstance(hessian, Mapping) else {}
    density = hessian.get("density")
    x, y = (as_values(density.get(name) if isinstance(density, Mapping) else None) for name in ("x", "y"))
    kept = np.isfinite(x) & np.isfinite(y) if x.ndim == 1 and x.shape == y.shape else np.array([], bool)
    if not kept.any() or y[kept].max() <= 0:
        raise RecordError("this sharpness.json has no spectrum to draw: measure it again with its spectrum")
    x, y, top = x[kept], y[kept], as_values(hessian.get("top")).ravel()
    most = float(y.max())
    with picture(path) as figure:
        figure.set_size_inches(_WIDTH, 3.6)
        axes = figure.add_subplot()
        axes.plot(x, np.maximum(y, most * 1e-8), color=COLORS[0])
        axes.set(yscale="log", ylim=(most * 1e-6, most * 3), xlabel="curvature (eigenvalue of the Hessian)", ylabel="density")
        axes.grid(True)
        top = top[np.isfinite(top)]
        for place, value in enumerate(top):
            axes.axvline(value, color=COLORS[1], linestyle=":", linewidth=1.2, label="" if place else "largest eigenvalues")
        if top.size:
            beside: dict[str, Any] = {"xytext": (-5, 0), "textcoords": "offset points", "ha": "right", "color": COLORS[1]}
            axes.annotate(f"{top.max():.3g}", (float(top.max()), most), **beside)
        _legend(figure)


@dataclass(frozen=True)
class _Scale:
    """The colors and the levels of surfaces."""

    norm: "Normalize"
    levels: list[float]
    ticks: list[float]
    log: bool


@contextmanager
def picture(path: Path) -> Iterator["Figure"]:
    """Yield an empty figure, and write it to the file when the block ends."""
    if path.suffix not in (".png", ".svg"):
        raise UsageError(f"{path} is neither a .png nor a .svg file: end the name of the picture with one of them")
    try:
        import matplotlib.style
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UsageError(f"{path.name} needs matplotlib: pip install 'paceline[pictures]'") from None
    with matplotlib.style.context(["default", _STYLE]):  # not as in the user's matplotlibrc
        figure = Figure(layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        content = io.BytesIO()
        nothing = {"Software": None} if path.suffix == ".png" else {"Date": None, "Creator": None}
        figure.savefig(content, format=path.suffix[1:], metadata=nothing)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_bytes(content.getvalue())
    except OSError as error:
        raise RecordError(f"cannot write the picture to {path}: {error.strerror or error}; choose another file") from error


def _scale(surfaces: Sequence[Surface]) -> _Scale:
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.ticker import MaxNLocator

    low = min(float(np.nanmin(surface.loss)) for surface in surfaces)
    high = max(float(np.nanmax(surface.loss)) for surface in surfaces)
    high = high if high > low else low + (abs(low) or 1.0)
    if log := low > 0 and high / low > _WIDE:
        levels, ticks = np.geomspace(low * (1 - 1e-9), high * (1 + 1e-9), _LEVELS + 1), _round_losses(low, high)
    else:
        levels = np.linspace(low, high, _LEVELS + 1)
        ticks = [tick for tick in map(float, MaxNLocator(7).tick_values(low, high)) if low <= tick <= high]
    return _Scale((LogNorm if log else Normalize)(levels[0], levels[-1]), levels.tolist(), ticks, log)


def _round_losses(low: float, high: float) -> list[float]:
    """At most eight losses such as 0.5 or 20 between two."""
    powers = range(int(np.floor(np.log10(low))), int(np.floor(np.log10(high))) + 1)
    for mantissas in ((1, 2, 5), (1, 3), (1,)):
        kept = [each for power in powers for mantissa in mantissas if low <= (each := float(f"{mantissa}e{power}")) <= high]
        if len(kept) <= 8:
            break
    return kept[:: max(1, -(-len(kept) // 8))]


def _axes(figure: "Figure", where: tuple[int, int, int], view: View) -> "Axes":
    return figure.add_subplot(*where, projection="3d" if view == "3d" else None)


def _draw_surface(axes: "Axes", surface: Surface, scale: _Scale, view: View) -> None:
    if view == "3d":
        _draw_solid(axes, surface, scale)
        return
    loss = np.ma.masked_invalid(surface.loss)
    axes.set_facecolor(_GAP)
    axes.contourf(surface.x, surface.y, loss, scale.levels, norm=scale.norm, cmap="viridis")
    axes.contour(surface.x, surface.y, loss, scale.levels[1:-1], colors="white", linewidths=0.5, alpha=0.35)
    axes.set(xlabel=surface.titles[0], ylabel=surface.titles[1])
    if 0.6 < np.ptp(surface.x) / np.ptp(surface.y) < 1.7:  # else the picture would be a strip
        axes.set_aspect("equal")
    if not surface.is_path:
        axes.plot([0], [0], markersize=8, **_MODEL)
    for place, (name, x, y) in enumerate(surface.paths):
        color = COLORS[place % len(COLORS)]
        axes.plot(x, y, color="white", linewidth=4.5, solid_capstyle="round")
        axes.plot(x, y, "o-", color=color, linewidth=2, label=name, markersize=4, markeredgecolor="white", markeredgewidth=0.7)
        axes.plot(x[:1], y[:1], markersize=9, **_START | {"markeredgecolor": color})
        axes.plot(x[-1:], y[-1:], markersize=9, **_END | {"color": color})
    _name_ends(axes, surface)
    if np.ma.getmaskarray(loss).any():
        axes.plot([], [], "s", markersize=8, color=_GAP, label="not finite")


def _draw_solid(axes: Any, surface: Surface, scale: _Scale) -> None:
    """A surface in 3-D. matplotlib has no log axis there, so the heights are the logarithms. The model is not marked: the mark
    would float in front of the valley that it is in."""
    from matplotlib.colors import Normalize

    to_height = np.log10 if scale.log else np.asarray
    height, ends = to_height(surface.loss), to_height([scale.levels[0], scale.levels[-1]])
    x, y = np.meshgrid(surface.x, surface.y)
    axes.computed_zorder = False  # paths and marks are in front: matplotlib cannot sort them into a surface
    smooth: dict[str, Any] = {"rcount": 80, "ccount": 80, "linewidth": 0, "antialiased": False, "rasterized": True}
    axes.plot_surface(x, y, height, cmap="viridis", norm=Normalize(*ends), zorder=1, **smooth)
    for place, (name, px, py) in enumerate(surface.paths):
        color, points = COLORS[place % len(COLORS)], finer(px, py)
        along = [*points.T, np.array([height_at(surface, height, *point) for point in points.tolist()])]
        axes.plot(*along, color="white", linewidth=4, zorder=2)
        axes.plot(*along, color=color, linewidth=2, label=name, zorder=3)
        axes.plot(*(side[:1] for side in along), markersize=7, zorder=4, **_START | {"markeredgecolor": color})
        axes.plot(*(side[-1:] for side in along), markersize=7, zorder=4, **_END | {"color": color})
    _name_ends(axes, surface)
    axes.set(xlabel=surface.titles[0].partition(",")[0], ylabel=surface.titles[1].partition(",")[0], zlim=ends)
    ticks = scale.ticks if len(scale.ticks) < 5 else scale.ticks[::2]
    axes.set_zticks(to_height(ticks), [f"{tick:g}" for tick in ticks])
    axes.locator_params(axis="x", nbins=5)
    axes.locator_params(axis="y", nbins=5)
    axes.view_init(elev=48, azim=-58)
    axes.set_box_aspect((1, 1, 0.5), zoom=0.95)
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        axis.set_pane_color((1.0, 1.0, 1.0, 0.0))


def _name_ends(axes: Any, surface: Surface) -> None:
    """The marks of the ends of paths, for the legend."""
    if surface.paths:
        for name, mark in (("start", _START), ("end", _END)):
            axes.plot([], [], markersize=7, label=name, **mark)


def _draw_line(axes: "Axes", line: Line, measure: str, alike: Sequence[Line]) -> None:
    """Draw a line's sets; the axis has room for all lines in `alike`."""
    drawn = {name: each[measure] for name, each in line.sets.items() if measure in each}
    for place, (name, values) in enumerate(drawn.items()):
        color = COLORS[place % len(COLORS)]
        axes.plot(line.x, np.where(np.isfinite(values), values, np.nan), _DASHES.get(name, "-."), color=color, label=name)
    every = np.concatenate([each[measure] for one in alike for each in one.sets.values() if measure in each])
    low, high = float(np.min(every[np.isfinite(every)])), float(np.max(every[np.isfinite(every)]))
    if measure == "loss" and low > 0 and high / low > _WIDE:
        ticks = _round_losses(low, high)
        axes.set(yscale="log", ylim=(low / 1.15, high * 1.15))
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    else:
        margin = 0.05 * (high - low) or 0.05 * abs(low) or 1.0
        axes.set_ylim(low - margin, high + margin)
        axes.locator_params(axis="y", nbins=6)
    axes.set(xlabel=line.title, ylabel=measure)
    axes.locator_params(axis="x", nbins=6)
    axes.grid(True)
    for x, name in line.models:
        if line.x.min() <= x <= line.x.max():
            axes.axvline(x, color="#5a6372", linestyle=":", linewidth=1.2)
            above: dict[str, Any] = {"xytext": (0, 3), "textcoords": "offset points", "ha": "center", "fontsize": 9}
            axes.annotate(name, (x, 1), xycoords=("data", "axes fraction"), **above)


def _make_room(axes: Any, *, is_left: bool, is_lowest: bool) -> None:
    """Leave out what the other panels say, and labels that would not fit."""
    if hasattr(axes, "get_zlim"):
        axes.set(xlabel="", ylabel="", xticklabels=[], yticklabels=[], zticklabels=[])
        return
    axes.locator_params(axis="x", nbins=4)
    if axes.get_yscale() == "linear":
        axes.locator_params(axis="y", nbins=5)
    if not is_left:
        axes.set_ylabel("")
    if not is_lowest:
        axes.set_xlabel("")


def _colorbar(figure: "Figure", every: Sequence["Axes"], scale: _Scale) -> None:
    from matplotlib.cm import ScalarMappable

    far = 0.09 if hasattr(every[0], "get_zlim") and len(every) == 1 else 0.02
    bar = figure.colorbar(ScalarMappable(scale.norm, "viridis"), ax=list(every), aspect=28, pad=far)
    bar.set_label("loss (log scale)" if scale.log else "loss")
    bar.set_ticks(scale.ticks, labels=[f"{tick:g}" for tick in scale.ticks])
    bar.minorticks_off()
    bar.outline.set_visible(False)


def _legend(figure: "Figure") -> None:
    """One legend below all panels, each name once."""
    pairs = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    named = {label: handle for handle, label in pairs}
    if named:
        figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=min(6, len(named)))
