"""Read timeline.json, the profile of a few steps, into bars to draw. `training/timing/profile.py` writes the file.

It is in Chrome's trace format. An all-reduce is cut into pieces: those during the worker's backward pass cost nothing (hidden),
the others are time that the step had to wait (exposed).
"""

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from paceline.report.series import number, short, text

_MOST_WORKERS = 16
_MOST_BARS = 6_000
_KINDS = ("input", "forward", "backward", "communication", "waiting", "optimizer", "other")
_ROUNDING = 1e-9  # shorter pieces, in microseconds, are rounding errors


def view_timeline(found: Any, problems: list[str]) -> dict[str, Any] | None:
    """The bars, buckets and facts of a timeline.json; None, with a problem, where it holds none."""
    events = found.get("traceEvents") if isinstance(found, dict) else None
    if not isinstance(events, list):
        problems.append("timeline.json has no traceEvents")
        return None
    spans = [span for span in map(_span, events) if span]
    if any(span["bucket"] is not None for span in spans):  # bucket spans say more than plain communication spans
        spans = [span for span in spans if span["kind"] != "communication" or span["bucket"] is not None]
    if not spans:
        problems.append("timeline.json has no spans to draw")
        return None
    start = min(span["start"] for span in spans)
    workers = sorted({span["worker"] for span in spans})
    shown = set(workers[:_MOST_WORKERS])
    spans = sorted((span for span in spans if span["worker"] in shown), key=lambda span: float(span["start"]))
    backward: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        if span["kind"] == "backward":
            backward[span["worker"]].append((span["start"], span["end"]))
    pieces = [piece for span in spans for piece in _pieces(span, backward[span["worker"]])]
    about = found.get("paceline")
    about = about if isinstance(about, dict) else {}
    bars = [_bar(piece, start) for piece in pieces[:_MOST_BARS]]
    return {
        "bars": bars,
        "workers": workers[:_MOST_WORKERS],
        "left_out": len(workers) - len(shown),
        "cut": len(pieces) > _MOST_BARS,
        "steps": _steps(spans, start),
        "buckets": _buckets(about),
        "reduce": text(about.get("reduce"), 80),
        "backend": text(about.get("backend"), 80),
        "replayed": about.get("replayed") is True,
        "end_ms": short(max(span["end"] - start for span in spans) / 1e3),
    }


def _span(event: Any) -> dict[str, Any] | None:
    if not isinstance(event, dict) or event.get("ph") != "X":
        return None
    start, took, worker = (number(event.get(name)) for name in ("ts", "dur", "pid"))
    if start is None or took is None or took < 0 or worker is None:
        return None
    args = event.get("args")
    args = args if isinstance(args, dict) else {}
    kind = event.get("cat") if event.get("cat") in _KINDS else "other"
    return {
        "name": text(event.get("name"), 120),
        "kind": kind,
        "worker": int(worker),
        "lane": int(kind == "communication"),
        "start": start,
        "end": start + took,
        "step": number(args.get("step")),
        "bucket": number(args.get("bucket")),
        "bytes": number(args.get("bytes")),
    }


def _pieces(span: Mapping[str, Any], backward: list[tuple[float, float]]) -> list[dict[str, Any]]:
    """A span in the pieces it is drawn as: an all-reduce is cut where the worker's backward passes begin and end."""
    if span["kind"] != "communication":
        return [{**span, "hidden_us": None, "first": True}]
    cuts = [span["start"], span["end"]]
    for begin, end in backward:
        cuts += [cut for cut in (begin, end) if span["start"] < cut < span["end"]]
    cuts.sort()
    pieces: list[dict[str, Any]] = []
    for begin, end in pairwise(cuts):
        if end - begin <= _ROUNDING:
            continue
        middle = (begin + end) / 2
        hidden = any(low <= middle <= high for low, high in backward)
        pieces.append({**span, "start": begin, "end": end, "kind": "hidden" if hidden else "exposed"})
    hidden_us = sum(piece["end"] - piece["start"] for piece in pieces if piece["kind"] == "hidden")
    took_us = span["end"] - span["start"]
    return [{**piece, "hidden_us": hidden_us, "took_us": took_us, "first": index == 0} for index, piece in enumerate(pieces)]


def _bar(piece: Mapping[str, Any], start: float) -> dict[str, Any]:
    bar = {
        "name": piece["name"],
        "kind": piece["kind"],
        "worker": piece["worker"],
        "lane": piece["lane"],
        "start_ms": short((piece["start"] - start) / 1e3),
        "took_ms": short((piece["end"] - piece["start"]) / 1e3),
        "first": piece["first"],
    }
    whole = {name: short(piece[name]) for name in ("step", "bucket", "bytes") if piece[name] is not None}
    if piece["hidden_us"] is not None:
        whole |= {"all_ms": short(piece["took_us"] / 1e3), "hidden_ms": short(piece["hidden_us"] / 1e3)}
    return bar | whole


def _steps(spans: list[dict[str, Any]], start: float) -> list[dict[str, Any]]:
    """When each step began on the first worker and ended on the last."""
    ranges: dict[float, list[float]] = {}
    for span in spans:
        if span["step"] is not None:
            known = ranges.setdefault(span["step"], [span["start"], span["end"]])
            known[:] = [min(known[0], span["start"]), max(known[1], span["end"])]
    return [
        {"step": short(step), "start_ms": short((low - start) / 1e3), "end_ms": short((high - start) / 1e3)}
        for step, (low, high) in sorted(ranges.items())
    ]


def _buckets(about: Mapping[str, Any]) -> list[dict[str, Any]]:
    buckets = about.get("buckets")
    rows = [bucket for bucket in buckets if isinstance(bucket, dict)] if isinstance(buckets, list) else []
    names = ("bucket", "bytes", "ready_s", "took_s", "hidden_s")
    found = []
    for row in rows:
        parameters = row.get("parameters")
        listed = [text(name, 120) for name in parameters] if isinstance(parameters, list) else []
        found.append({**{name: number(row.get(name)) for name in names}, "parameters": listed[:200], "count": len(listed)})
    return sorted(found, key=lambda row: (row["bucket"] is None, row["bucket"] or 0))
