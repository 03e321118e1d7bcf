"""What a learning curve found: from the results of its study to the fit, its check and its predictions, and these in words.

The error of a run is that of its best epoch: 1 - the highest accuracy, or the lowest loss for a task without accuracy. Small
subsets train for many epochs and overfit at the end, in loss much more than in accuracy. The choice of the epoch by the
validation data makes errors a little too low.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paceline.learning_curve.fit import LEAST_SIZES, STEEPEST, Fit, Interval, NoFitError, Point, drop_near_chance, fit
from paceline.output import make_table, plural
from paceline.spread import deviation, mean
from paceline.status import Status

_TIMES = (2, 4)
"""Predict the error of this many times the largest size."""
_CURVE = 60
"""Points of a curve to draw."""
_SERIES: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "accuracy": ("val_accuracy", lambda values: 1 - max(values)),
    "loss": ("val_loss", min),
}


def make_outcome(
    results: Mapping[str, Any], sizes: Sequence[int], *, chance: float | None = None, target: float | None = None
) -> dict[str, Any]:
    """The sizes with their errors, the fit, the check and the predictions, for `learning-curve.json`."""
    rows = [_row(results, arm, size) for arm, size in zip(results["study"]["arms"], sizes, strict=True)]
    points = [Point(row["samples"], tuple(row["errors"])) for row in rows if row["errors"]]
    dropped = {point.samples: "its error is 0" for point in points if not point.mean > 0}
    dropped |= drop_near_chance(points, chance if results["metric"] == "accuracy" else None)
    for row in rows:
        row["dropped"] = dropped.get(row["samples"], "" if row["errors"] else "no run finished")
    kept = [point for point in points if point.samples not in dropped]
    found: dict[str, Any] = {
        "metric": "error" if results["metric"] == "accuracy" else "loss",
        "task": results["study"]["task"],
        "seeds": len(results["study"]["seeds"]),
        "chance": chance,
        "sizes": rows,
    }
    found |= _fit(kept, found["seeds"], target)
    return found | {"said": _say(found)}


def words(found: Mapping[str, Any]) -> str:
    """The table, the fit, the check and the predictions, for a terminal or a pipe."""
    heads = ["samples", f"{found['metric']}, mean ± sd (n)", "epochs", "steps", "batch", "failed"]
    cells = [
        [
            f"{row['samples']:,}",
            _spread(row["errors"]),
            *("-" if row[name] is None else f"{row[name]:,}" for name in ("epochs", "steps", "batch")),
            str(row["failed"]),
        ]
        for row in found["sizes"]
    ]
    return "\n\n".join([make_table(heads, cells), *("\n".join(lines) for lines in found["said"].values() if lines)])


def _fit(kept: Sequence[Point], seeds: int, target: float | None) -> dict[str, Any]:
    try:
        made = fit(kept)
    except NoFitError as error:
        return {"fit": None, "why": str(error), "check": None, "predictions": [], "target": None}
    first, last = kept[0].samples, kept[-1].samples
    return {
        "fit": _describe(made, first, last * max(_TIMES)),
        "why": "",
        "check": _check(kept),
        "predictions": [{"samples": n * last, **_interval(made.predict(n * last, seeds))} for n in _TIMES],
        "target": {"error": target, **_interval(made.needed(target))} if target else None,
    }


def _row(results: Mapping[str, Any], arm: str, size: int) -> dict[str, Any]:
    runs = [run for run in results["runs"] if run["arm"] == arm]
    good = [run for run in runs if Status(run["status"]).good]
    errors = {run["seed"]: error for run in good if (error := _best(run, results["metric"])) is not None}
    options = results["study"]["arms"][arm]["options"]
    return {
        "samples": size,
        "epochs": options.get("epochs"),
        "steps": max((run["steps"] for run in good), default=None),
        "batch": options.get("global_batch"),
        "failed": len(runs) - len(errors),
        "errors": [round(error, 6) for error in errors.values()],
        "seeds": list(errors),
    }


def _best(run: Mapping[str, Any], metric: str) -> float | None:
    """The error of a run's best epoch."""
    series, best = _SERIES[metric]
    values = [*run.get(series, ()), run["metrics"].get(metric)]
    known = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    return float(best(known)) if known else None


def _check(kept: Sequence[Point]) -> dict[str, Any]:
    """Fit up to a quarter of the data and predict the larger sizes, which were measured."""
    largest = kept[-1].samples
    small, large = [p for p in kept if 4 * p.samples <= largest], [p for p in kept if 4 * p.samples > largest]
    if len(small) < LEAST_SIZES:
        return {"why": f"needs {LEAST_SIZES} sizes up to a quarter of the largest, and there are {len(small)}", "sizes": []}
    try:
        made = fit(small)
    except NoFitError as error:
        return {"why": f"{error} (up to {small[-1].samples:,} samples)", "sizes": []}
    sizes = []
    for point in large:
        predicted = made.predict(point.samples, len(point.errors))
        inside = predicted.low <= point.mean <= predicted.high if math.isfinite(predicted.low) else None
        sizes.append({"samples": point.samples, "measured": point.mean, **_interval(predicted), "inside": inside})
    return {"why": "", "up_to": small[-1].samples, **_describe(made, small[0].samples, largest), "sizes": sizes}


def _describe(made: Fit, first: float, last: float) -> dict[str, Any]:
    """A fit's parameters, and its curve with a band."""
    curve = [[float(m), *_interval(made.band(m)).values()] for m in np.geomspace(first, last, _CURVE)]
    parameters = {name: _interval(made.parameter(name)) for name in "abc"}
    return {**parameters, "floor_known": made.floor_known, "scattered": made.scattered, "curve": curve}


def _interval(found: Interval) -> dict[str, float]:
    return {"value": found.value, "low": found.low, "high": found.high}


def _say(found: Mapping[str, Any]) -> dict[str, list[str]]:
    """The outcome in words: lines about the sizes, the fit, the check and the predictions."""
    metric = found["metric"]
    how = "1 - accuracy" if metric == "error" else "the validation loss"
    sizes = [f"{metric}: {how}, of the best epoch of each run"]
    sizes += [f"left out of the fit: {row['samples']:,} samples: {row['dropped']}" for row in found["sizes"] if row["dropped"]]
    if found["fit"] is None:
        return {"sizes": sizes, "fit": [f"no fit: {found['why']}"], "check": [], "predictions": []}
    fitted, check = _fit_words(found["fit"], metric), _check_words(found["check"])
    return {"sizes": sizes, "fit": fitted, "check": check, "predictions": _predicted(found)}


def _fit_words(found: Mapping[str, Any], metric: str) -> list[str]:
    a, b, c = (found[name] for name in "abc")
    known = math.isfinite(c["low"])
    lines = [f"fit: {metric} = {a['value']:.4g} m^{b['value']:.3f} + {c['value']:.4f}, for m samples"]
    if not known:
        return [*lines, "no intervals: one seed and three sizes leave nothing to measure the spread with"]
    forms = {"a": ".3g", "b": ".3f", "c": ".4f"}
    spans = (f"{name} {found[name]['low']:{form}} to {found[name]['high']:{form}}" for name, form in forms.items())
    lines.append(f"90% intervals: {', '.join(spans)}")
    if b["value"] <= STEEPEST:
        lines.append(f"b is at its limit of {STEEPEST:g}: the error falls faster than a power law, so predictions mean little")
    if not found["floor_known"]:
        lines.append("these sizes cannot show whether the curve levels off: c may be 0")
    if found["scattered"]:
        lines.append("the means are further from the curve than seeds explain: no power law fits well, so intervals are wider")
    return lines


def _check_words(check: Mapping[str, Any]) -> list[str]:
    if check["why"]:
        return [f"no check: {check['why']}"]
    verdicts = {True: "inside", False: "OUTSIDE", None: "no interval"}
    lines = [
        f"  {row['samples']:,}: predicted {_range(row)}, measured {row['measured']:.4f}: {verdicts[row['inside']]}"
        for row in check["sizes"]
    ]
    outside = sum(row["inside"] is False for row in check["sizes"])
    if outside:
        said = f"{outside} of {plural(len(check['sizes']), 'prediction')} missed: do not trust those below further than these"
    else:
        said = "all measured errors are inside the intervals" if check["sizes"][0]["inside"] else ""
    return [f"check: a fit up to {check['up_to']:,} samples, against the larger sizes", *lines, *([said] if said else [])]


def _predicted(found: Mapping[str, Any]) -> list[str]:
    metric, target = found["metric"], found["target"]
    lines = [f"predicted {metric} (mean of {plural(found['seeds'], 'run')}), if the curve goes on like this:"]
    for times, row in zip(_TIMES, found["predictions"], strict=True):
        lines.append(f"  {times} times the data, {row['samples']:,} samples: {_range(row)}")
    if target is None:
        return lines
    low, high = target["low"], target["high"]
    if math.isfinite(target["value"]):
        span = "" if math.isnan(low) else f" [90%: {_count(low)} to {_count(high) if math.isfinite(high) else 'no limit'}]"
        return [*lines, f"{metric} {target['error']:g} would need about {_count(target['value'])} samples{span}"]
    best = f"; within its interval, at least {_count(low)} samples" if math.isfinite(low) else ""
    if not found["fit"]["floor_known"]:
        return [*lines, f"{metric} {target['error']:g}: these sizes cannot say whether more data alone would reach it{best}"]
    level = f"the curve levels off at {found['fit']['c']['value']:.4f}{best}"
    return [*lines, f"{metric} {target['error']:g} is out of reach of more data alone: {level}"]


def _range(row: Mapping[str, float]) -> str:
    span = f" [90%: {row['low']:.4f} to {row['high']:.4f}]" if math.isfinite(row["low"]) else ""
    return f"{row['value']:.4f}{span}"


def _count(samples: float) -> str:
    """A number of samples with two significant digits."""
    return f"{float(f'{samples:.2g}'):,.0f}" if samples < 1e12 else f"{samples:.1e}"


def _spread(errors: Sequence[float]) -> str:
    if not errors:
        return "- (0)"
    return f"{mean(errors):.4f}" + (f" ± {deviation(errors):.4f}" if len(errors) > 1 else "") + f" ({len(errors)})"
