"""Scaling measurements and study results as the page shows them, with every number checked."""

from collections.abc import Mapping
from typing import Any

from paceline.output import plural
from paceline.phases import batch_words
from paceline.records import COMPONENTS, unit_of, with_new_names
from paceline.report.series import number, short, text
from paceline.spread import deviation, mean, median
from paceline.status import Status
from paceline.study.results import batches_of, compare_arm, difference_words, final_values, legend, spread_words, step_words


def view_scale(found: Mapping[str, Any], problems: list[str]) -> dict[str, Any] | None:
    """A scale.json: its worker counts in order, its links and its verdict."""
    counts = _list(found.get("counts"))
    rows = [row for row in map(_count, counts) if row]
    if not rows:
        problems.append("scale.json has no worker counts: the measurement ended before its first one")
    elif len(rows) < len(counts):
        problems.append(f"scale.json: {len(counts) - len(rows)} of {plural(len(counts), 'worker count')} cannot be read")
    return {
        "task": text(found.get("task"), 200),
        "mode": text(found.get("mode"), 40),
        "unit": unit_of(found),
        "counts": sorted(rows, key=lambda row: float(row["workers"])),
        "links": [link for link in map(_link, _list(found.get("links"))) if link],
        "verdict": text(found.get("verdict") or found.get("advice")),
    }


def view_study(results: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """A study's results. For each arm: the value of each seed, their spread, and the verdict against the reference."""
    study, metric = results["study"], results["metric"]
    reference, margin, target = study["reference"], number(study["margin"]) or 0.0, number(study["target_accuracy"])
    values = final_values(results, reference)
    planned = _planned(study)
    ended = sum(Status(run["status"]).final for run in results["runs"])
    lost = [run for run in results["runs"] if not Status(run["status"]).good]
    problems += [
        f"{text(run['arm'], 80)}, seed {run.get('seed')}: {text(run.get('why') or run['status'], 300)}" for run in lost
    ]
    return {
        "name": text(study.get("name"), 200),
        "task": text(study.get("task"), 200),
        "about": text(study.get("about")),
        "metric": metric,
        "reference": text(reference, 200),
        "reference_mean": short(mean(values)) if values else None,
        "margin": margin,
        "target": target,
        "arms": [_arm(results, arm, target) for arm in study["arms"]],
        "planned": planned,
        "ended": ended,
        "legend": legend(text(metric), margin, int(number(results.get("per_device")) or 1)),
        "note": text(results.get("note")),
        "mini": results.get("mini") is True or study.get("mini") is True,
    }


def components_of(row: Mapping[str, Any]) -> dict[str, float]:
    """The components of a step in seconds, in the order they are drawn."""
    found = with_new_names(row).get("components_s")
    listed = found.items() if isinstance(found, dict) else ()
    return order_components({text(name, 40): s for name, value in listed if (s := number(value)) is not None})


def order_components(components: Mapping[str, float]) -> dict[str, float]:
    """Components in the order of `records.COMPONENTS`, then those it does not know."""
    names = [*(name for name in COMPONENTS if name in components), *(name for name in components if name not in COMPONENTS)]
    return {name: components[name] for name in names}


def _count(row: Any) -> dict[str, Any] | None:
    if not isinstance(row, dict):
        return None
    workers, speed = number(row.get("workers")), number(row.get("samples_per_s"))
    if workers is None or speed is None or workers < 1:
        return None
    names = (
        *("nodes", "virtual_workers", "global_batch", "low", "high", "speed_up", "efficiency", "step_s", "forward_s"),
        *("backward_s", "compute_spread_s", "steps", "gradient_bytes", "reduce_s"),
    )
    memory = [number(each.get("memory_bytes")) for each in _list(row.get("by_worker")) if isinstance(each, dict)]
    return {
        "workers": int(workers),
        "samples_per_s": speed,
        **{name: number(row.get(name)) for name in names},
        "components_s": components_of(row),
        "windows": len(_list(row.get("windows"))) or None,
        "memory_bytes": max((each for each in memory if each is not None), default=None),
        "buckets": len(_list(row.get("buckets"))) or None,
    }


def _link(row: Any) -> dict[str, float] | None:
    found = {name: number(row.get(name)) for name in ("workers", "bytes", "s")} if isinstance(row, dict) else {}
    return {name: value for name, value in found.items() if value is not None} if found and None not in found.values() else None


def _planned(study: Mapping[str, Any]) -> int | None:
    seeds = study.get("seeds")
    return len(seeds) * len(study["arms"]) if isinstance(seeds, list) else None


def _arm(results: Mapping[str, Any], arm: str, target: float | None) -> dict[str, Any]:
    runs = [run for run in results["runs"] if run["arm"] == arm]
    values = final_values(results, arm)
    facts: Mapping[str, Any] = next((run["contract"] for run in runs if run["contract"]), {})
    found = compare_arm(results, arm)
    is_reference, batches = arm == results["study"]["reference"], batches_of(results, arm)
    good = [run for run in runs if Status(run["status"]).good]
    times = [run["time_to_target_s"] for run in good if run["time_to_target_s"] is not None]
    speeds = [speed for run in good if (speed := number(run.get("samples_per_s")))]
    return {
        "name": text(arm, 200),
        "reference": is_reference,
        "values": [short(value) for value in values],
        "mean": short(mean(values)) if values else None,
        "sd": short(deviation(values)) if len(values) > 1 else None,
        "spread": spread_words(values),
        "runs": len(runs),
        "failed": len(runs) - len(good),
        "reached": len(times),
        "time_to_target_s": median(times) if target and times else None,
        "samples_per_s": median(speeds) if speeds else None,
        "verdict": "reference" if is_reference else found.verdict,
        "why": "" if is_reference else found.why,
        "difference": "" if is_reference else difference_words(found, results["metric"]).rpartition(": ")[0],
        "batch": batch_words(batches) if len(batches) > 1 else "",
        "steps": step_words(results, arm),
        **{name: number(facts.get(name)) for name in ("global_batch", "virtual_workers", "peak_lr")},
    }


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
