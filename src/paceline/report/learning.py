"""A learning curve as the page shows it, with every number checked."""

from collections.abc import Mapping
from typing import Any

from paceline.report.series import number, short, text
from paceline.spread import deviation, mean

_MOST = 500  # sizes, seeds of a size, points of a curve
_PARTS = ("sizes", "fit", "check", "predictions")


def view_learning(found: Any, problems: list[str]) -> dict[str, Any] | None:
    """The sizes, the fit, its check and its predictions; None, with a problem if it is broken, without a learning curve."""
    if found is None:
        return None
    if not isinstance(found, dict):
        problems.append("learning-curve.json holds no learning curve")
        return None
    listed = _list(found.get("sizes"))
    sizes = sorted((row for row in map(_size, listed) if row), key=lambda row: float(row["samples"]))
    if len(sizes) < len(listed) or not sizes:
        problems.append(f"learning-curve.json: {len(listed) - len(sizes)} of {len(listed)} sizes cannot be read")
    check, target = _object(found.get("check")), _object(found.get("target"))
    said = _object(found.get("said"))
    view = {
        "metric": text(found.get("metric"), 40) or "error",
        "sizes": sizes,
        "fit": _fit(found.get("fit")),
        "check": {**held, "up_to": number(check.get("up_to")), "sizes": _rows(check.get("sizes"))}
        if (held := _fit(check))
        else None,
        "predictions": _rows(found.get("predictions")),
        "target": number(target.get("error")),
        "said": {name: [text(line, 400) for line in _list(said.get(name))[:20]] for name in _PARTS},
    }
    return {**view, "sentence": _sentence(view)} if sizes else None


def _size(row: Any) -> dict[str, Any] | None:
    about = _object(row)
    samples = number(about.get("samples"))
    errors = [error for each in _list(about.get("errors")) if (error := number(each)) is not None]
    if samples is None or samples <= 0:
        return None
    return {
        "samples": short(samples),
        "errors": [short(error) for error in errors],
        "mean": short(mean(errors)) if errors else None,
        "sd": short(deviation(errors)) if len(errors) > 1 else None,
        "dropped": text(about.get("dropped"), 300),
        **{name: number(about.get(name)) for name in ("epochs", "steps", "batch", "failed")},
    }


def _fit(found: Any) -> dict[str, Any] | None:
    """A fitted curve with its band: rows of samples, error, low and high; the last two may be unknown."""
    rows = [[number(value) for value in _list(row)] for row in _list(_object(found).get("curve"))]
    curve = [row for row in rows if len(row) == 4 and all(value is not None and value > 0 for value in row[:2])]
    return {"curve": [[None if value is None else short(value) for value in row] for row in curve]} if len(curve) > 1 else None


def _rows(found: Any) -> list[dict[str, Any]]:
    """Predictions: samples, the error, and its interval, which may be unknown."""
    return [row for row in map(_predicted, _list(found)) if row]


def _predicted(row: Any) -> dict[str, Any] | None:
    found = {name: number(_object(row).get(name)) for name in ("samples", "value", "low", "high")}
    known = found["samples"] is not None and found["value"] is not None and found["samples"] > 0
    return {name: None if value is None else short(value) for name, value in found.items()} if known else None


def _sentence(view: Mapping[str, Any]) -> str:
    """The curve in a sentence."""
    metric, ended = view["metric"], [row for row in view["sizes"] if row["mean"] is not None]
    if not ended:
        return "No size has a result yet."
    last = ended[-1]
    said = f"{metric.capitalize()} {last['mean']:.4f} with {last['samples']:,} samples"
    if not view["fit"] or not view["predictions"]:
        return f"{said}; no fit."
    row = view["predictions"][0]
    span = f" [90%: {row['low']:.4f} to {row['high']:.4f}]" if row["low"] is not None and row["high"] is not None else ""
    return f"{said}; the fit predicts {row['value']:.4f}{span} with {row['samples']:,}."


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value[:_MOST] if isinstance(value, list) else []
