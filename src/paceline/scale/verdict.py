"""What `paceline scale` measured: as tables, and as a verdict of one sentence. Nothing here imports torch."""

import re
import statistics
from collections.abc import Mapping
from typing import Any

from paceline.output import make_table, plural
from paceline.records import COMPONENTS

_GOOD, _WORTH_SAYING, _NOISE = 0.9, 0.15, 0.02


def table(result: Mapping[str, Any]) -> str:
    """One row per number of workers: images/s against linear, then the components of a step's time."""
    counts = result["counts"]
    heads = ["workers", "batch", f"{result['unit']}/s", "low to high", "speed-up", "of linear"]
    speeds = make_table(heads, [_speed_cells(count) for count in counts], left=0)
    heads = ["workers", "step, ms", *COMPONENTS]
    steps = make_table(heads, [_step_cells(count) for count in counts], left=0)
    windows = "/".join(map(str, sorted({len(count["windows"]) for count in counts})))
    differ = max(abs(count["step_s"] / _window_s(count) - 1) for count in counts)
    note = f"{result['mode']} scaling; speeds are medians of {windows} windows; step times are means over workers, of separate"
    note += " timed steps" + (f", up to {differ:.0%} longer or shorter than those of the windows" if differ >= 0.02 else "")
    fewest = counts[0]["workers"]
    note += f"; linear is relative to {fewest} workers, the fewest measured" if fewest > 1 else ""
    return f"{speeds}\n\n{steps}\n{note}"


def _speed_cells(count: Mapping[str, Any]) -> list[str]:
    speeds = [f"{count['samples_per_s']:,.0f}", f"{count['low']:,.0f} to {count['high']:,.0f}"]
    return [
        f"{count['workers']}",
        f"{count['global_batch']:,}",
        *speeds,
        f"{count['speed_up']:.2f}",
        f"{count['efficiency']:.0%}",
    ]


def _step_cells(count: Mapping[str, Any]) -> list[str]:
    components = [_cell(count["components_s"][name], count["step_s"]) for name in COMPONENTS]
    return [f"{count['workers']}", f"{1e3 * count['step_s']:.2f}", *components]


def _window_s(count: Mapping[str, Any]) -> float:
    """The time of a step in the windows that measure speed, in which steps are not timed one by one."""
    return float(count["global_batch"] / count["samples_per_s"])


def _cell(component_s: float, step_s: float) -> str:
    return f"{1e3 * component_s:.2f} ({component_s / step_s:.0%})"


def verdict(result: Mapping[str, Any]) -> str:
    """One sentence: how well it scales, the largest loss, and what to do about it."""
    counts = result["counts"]
    first, last = counts[0], counts[-1]
    if len(counts) == 1:
        share = {name: last["components_s"][name] / last["step_s"] for name in COMPONENTS if name != "compute"}
        worst = max(share, key=lambda name: share[name])
        head = f"{_workers(last)} train{'s' * (last['workers'] == 1)} {last['samples_per_s']:,.0f} {result['unit']}/s"
        if share[worst] < _WORTH_SAYING:
            compute = last["components_s"]["compute"] / last["step_s"]
            return f"{head}, and compute is {compute:.0%} of a step: measure more workers."
        return f"{head}, but {share[worst]:.0%} of a step is {_NAMES[worst]}: {_fix(worst, last, result['mode'])}."
    times = last["speed_up"] / first["workers"]
    head = f"{_workers(last)} are {times:.2f} times as fast as {_workers(first)} ({last['efficiency']:.0%} of linear)"
    lost = lost_s(first, last)
    worst = max(lost, key=lambda name: lost[name])
    waits = last["components_s"]["input"] / last["step_s"]
    if waits >= _WORTH_SAYING and last["efficiency"] >= _GOOD:
        return f"{head}, but {waits:.0%} of every step is {_NAMES['input']}: {_fix('input', last, result['mode'])}."
    if last["efficiency"] >= _GOOD:
        return f"{head}: try more workers."
    if lost[worst] < _NOISE * last["step_s"]:
        return (
            f"{head}, but no component of a step grew: the machine was busy or the windows were short, so measure again with a"
            " longer --window-s."
        )
    fix = _fix(worst, last, result["mode"])
    return f"{head}; the largest loss is {_NAMES[worst]} ({1e3 * lost[worst]:.1f} ms per step): {fix}."


def lost_s(first: Mapping[str, Any], last: Mapping[str, Any]) -> dict[str, float]:
    """How much longer each component of a step takes than if a sample cost each worker the same as with the fewest workers.

    Components are scaled to the step time of the windows, because the timed steps ran at another moment.
    """
    share = (last["global_batch"] / last["workers"]) / (first["global_batch"] / first["workers"])
    then, now = (_window_s(count) / count["step_s"] for count in (first, last))
    return {name: now * last["components_s"][name] - then * share * first["components_s"][name] for name in COMPONENTS}


_NAMES = {
    "input": "waiting for input",
    "compute": "slower compute",
    "communication": "communication that does not overlap with compute",
    "waiting": "waiting for slower workers",
    "optimizer": "the optimizer",
    "other": "time between steps",
}


def _fix(component: str, count: Mapping[str, Any], mode: str) -> str:
    """What to do about a component that takes too long."""
    devices = str(count["contract"].get("devices", ""))
    match component:
        case "input":
            return "use more --loader-workers, make samples cheaper, or keep the data on the device (--loader resident)"
        case "compute" if "CPU" in devices and _crowded(count, devices):
            return "there are more workers than cores, so use fewer"
        case "compute" if "CPU" in devices:
            return "CPU workers share caches and memory, so use fewer of them, or more machines"
        case "compute" if mode == "strong":
            return "smaller parts use the device less well, so give each worker more samples"
        case "compute":
            return "each device is slower next to the others, so check its clock and power, and the cores that feed it"
        case "communication":
            link = ", or connect the nodes by a faster link" if count.get("nodes", 1) > 1 else ""
            return f"give each worker more samples per step (--reference-batch, with its base lr){link}"
        case "waiting" if count["virtual_workers"] % count["workers"]:
            parts, workers = count["virtual_workers"], count["workers"]
            return f"{parts} parts cannot be dealt evenly to {workers} workers, so use a divisor of {parts}"
        case "waiting":
            waits = [worker["components_s"]["waiting"] for worker in count["by_worker"]]
            if min(waits) > 0.5 * statistics.median(waits):
                return "a different worker is slow in each step, so use larger steps, or give each worker its own cores"
            return f"the others wait for worker {waits.index(min(waits))}, so check its machine"
        case "optimizer":
            return "its cost does not shrink with more workers, so spread it over more samples with larger steps"
    return "this is Python between two steps; paceline train --profile shows when"


def _crowded(count: Mapping[str, Any], devices: str) -> bool:
    """Whether a node's workers have more threads than the node has cores."""
    cores = re.search(r"(\d+) cores?", devices)
    threads = count.get("threads") or 1
    return cores is not None and count["workers"] / count.get("nodes", 1) * threads > int(cores[1])


def _workers(count: Mapping[str, Any]) -> str:
    return plural(count["workers"], "worker")
