"""Warnings about the input of a prediction: noisy timings, counts that contradict each other, timings of another device.

A step with more workers never costs a worker less time, so efficiency cannot rise with the number of workers. Where it does,
in the record or in the prediction made from it, the timings are wrong: other programs used the machine, or more workers than
cores were measured. The size of the contradiction is taken as another deviation of the speed (`doubt`), because the windows of
one number of workers may agree with each other and still all be slow.
"""

import math
import re
import statistics
from collections.abc import Sequence

from paceline.output import plural
from paceline.plan.cluster import Cluster
from paceline.plan.model import Model
from paceline.plan.points import Measured, Point
from paceline.plan.words import count_words, list_words, number_words

_WIDE, _WHOLE = 0.2, 0.6
"""Windows are noisy if their middle half, or all of them, spread over more than this share of the median."""

_APART = 1.3
"""Steps timed one by one may take up to this many times as long as those in the windows, or be this many times shorter."""

_RISE = 0.05
"""Efficiency may rise by this share with more workers: caches and clocks differ a little from run to run."""

_FEW = 3
"""With fewer windows, the spread of the speed is unknown."""

_UNKNOWN = 0.1
"""The deviation of the speed that is assumed if it is unknown."""

_FAR_OFF = 2.0
"""A fit of a link that is typically off by a larger factor gets a warning."""

_HAS_BF16 = re.compile(r"\b(A|B|H|L|GB|GH)\d")  # NVIDIA's data-center GPUs from A100 on


def find_doubt(model: Model, counts: Sequence[int]) -> float:
    """The relative deviation of the measured speeds that their windows do not show; 0 if there is no sign of one."""
    few = _UNKNOWN if _too_few(model.measured) else 0.0
    rises = [math.log(after / before) / 2 for _, before, _, after in (_rise(each) for each in _both(model, counts)) if before]
    return max(few, *rises, 0.0)


def find_warnings(model: Model, counts: Sequence[int]) -> tuple[str, ...]:
    """What makes a prediction for these numbers of workers untrustworthy, and what to do, one line each."""
    measured, cluster = model.measured, model.cluster
    found = [*_say_noise(measured), *_say_timed(measured), *_say_few(measured), *_say_rise(model, counts)]
    if found:
        found.append(_measure_again(measured))
    if cluster.off > _FAR_OFF:
        found.append("latency and bandwidth do not describe the link well: trust this prediction less")
    return (*_say_device(measured, cluster, model.speed), *found)


def relative_iqr(values: Sequence[float]) -> float:
    """The interquartile range over the median; 0 for fewer than two values."""
    if len(values) < 2 or not statistics.median(values):
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / middle


def _say_device(measured: Measured, cluster: Cluster, speed: float) -> list[str]:
    """CPU timings for GPUs, unless --speed says how much faster they are; or fp32 timings for GPUs with bf16."""
    if not cluster.gpu:
        return []
    there = "GPUs" if cluster.gpu == "any" else f"{cluster.gpu} GPUs"
    bf16 = measured.precision == "fp32" and bool(_HAS_BF16.search(cluster.gpu))
    again = f"paceline scale {measured.task}{measured.flags} --workers 1"
    if measured.device == "CPU" and speed == 1:
        timed, has = ("CPUs in fp32", f"{there}, which use bf16") if bf16 else ("CPUs", there)
        return [
            f"compute was timed on {timed}, but {cluster.name} has {has}: time and cost are far too high, and efficiency says"
            f" little; measure on one such GPU ({again}), or give --speed"
        ]
    if measured.device not in ("", "CPU") and bf16 and cluster.gpu not in measured.device:
        return [
            f"compute was timed in fp32 on {measured.device}, but {there} use bf16 by default: measure in bf16"
            f" ({again} --precision bf16), or train there with --precision fp32"
        ]
    return []


def _say_noise(measured: Measured) -> list[str]:
    noisy = [point for point in measured.points if _is_noisy(point)]
    if not noisy:
        return []
    worst = max(noisy, key=lambda point: (max(point.windows) - min(point.windows)) / statistics.median(point.windows))
    others = [f"{workers:,}" for workers in dict.fromkeys(point.workers for point in noisy) if workers != worst.workers]
    also = f"; it was also noisy with {list_words(others)}" if others else ""
    return [
        f"the speed of {count_words(worst.workers)} varied from {number_words(min(worst.windows))} to"
        f" {number_words(max(worst.windows))} {measured.unit}/s (median {number_words(statistics.median(worst.windows))},"
        f" interquartile range {relative_iqr(worst.windows):.0%}){also}"
    ]


def _say_timed(measured: Measured) -> list[str]:
    """On a GPU timed steps are waited for, so they do take longer."""
    apart = [point for point in measured.points if not 1 / _APART <= point.timed <= _APART]
    if measured.device != "CPU" or not apart:
        return []
    worst = max(apart, key=lambda point: abs(math.log(point.timed)))
    return [
        f"with {count_words(worst.workers)}, the steps that gave the components took {worst.timed:.2g} times as long as those"
        f" that gave the speed: the load of the machine changed in between"
    ]


def _say_few(measured: Measured) -> list[str]:
    if not _too_few(measured):
        return []
    fewest = min(len(point.windows) for point in measured.points)
    return [
        f"the record has {fewest or 'no'} measurement{'s' * (fewest != 1)} of a speed, so its spread is unknown:"
        f" {_UNKNOWN:.0%} is assumed"
    ]


def _say_rise(model: Model, counts: Sequence[int]) -> list[str]:
    """Efficiency that rises with the number of workers: as measured, or else as predicted."""
    measured = model.measured
    for what, each in zip(("measured", "predicted"), _both(model, counts), strict=True):
        fewer, before, more, after = _rise(each)
        if not before:
            continue
        said = (
            f"{what} efficiency rises from {before:.0%} with {count_words(fewer)} to {after:.0%} with {more:,}, but more"
            " workers cannot be more efficient; the range low to high is widened"
        )
        crowded = [f"{point.workers:,}" for point in measured.points if _crowd(measured, point) > 1]
        if what == "measured" or not crowded:
            return [said]
        return [f"{said} ({list_words(crowded)} workers shared {plural(measured.cores or 0, 'core')} when measured)"]
    return []


def _both(model: Model, counts: Sequence[int]) -> list[list[tuple[int, float, float]]]:
    """(workers, efficiency, its tolerance) in order of workers: measured in the record, then predicted for weak scaling.

    In strong scaling, efficiency may rise: three workers cannot share 128 samples evenly, four can.
    """
    alike, base = model.measured.alike(), model.measured.base
    each = base.samples_per_s / base.workers
    known = [(point.workers, point.samples_per_s / point.workers / each, _error(point)) for point in alike]
    if not model.as_measured():
        return [known, []]
    error = max(_error(point) for point in alike)
    most = model.cluster.most_workers() or math.inf
    asked = sorted({1, *counts, *(point.workers for point in alike if point.workers <= most)})
    one = float(model.step(1).samples_per_s[0])
    return [known, [(workers, float(model.step(workers).samples_per_s[0]) / workers / one, error) for workers in asked]]


def _rise(found: Sequence[tuple[int, float, float]]) -> tuple[int, float, int, float]:
    """(fewer workers, their efficiency, more workers, theirs): the largest rise beyond its tolerance; zeros: none."""
    pairs = [(lower, upper) for i, lower in enumerate(found) for upper in found[i + 1 :]]
    beyond = [
        (lower, upper) for lower, upper in pairs if upper[1] / lower[1] > 1 + max(_RISE, 2 * math.hypot(lower[2], upper[2]))
    ]
    if not beyond:
        return 0, 0.0, 0, 0.0
    lower, upper = max(beyond, key=lambda pair: pair[1][1] / pair[0][1])
    return lower[0], lower[1], upper[0], upper[1]


def _error(point: Point) -> float:
    """The relative standard error of the median of the windows; 1.35 deviations of a normal are its interquartile range."""
    return 1.25 * relative_iqr(point.windows) / 1.35 / math.sqrt(max(1, len(point.windows)))


def _is_noisy(point: Point) -> bool:
    if len(point.windows) < _FEW:
        return False
    whole = (max(point.windows) - min(point.windows)) / statistics.median(point.windows)
    return relative_iqr(point.windows) > _WIDE or whole > _WHOLE


def _too_few(measured: Measured) -> bool:
    """Whether one of the counts has too few windows. Those of its phases, if it has several, are taken together."""
    counts = {point.workers for point in measured.points}
    spare = [sum(max(0, len(p.windows) - 1) for p in measured.points if p.workers == workers) for workers in counts]
    return min(spare) < _FEW - 1


def _crowd(measured: Measured, point: Point) -> float:
    return math.ceil(point.workers / point.nodes) / (measured.slots or math.inf)


def _measure_again(measured: Measured) -> str:
    """What to do: no more workers than the machine has cores for, and twice the windows."""
    fit = sorted({point.workers for point in measured.points if _crowd(measured, point) <= 1})
    counts = ",".join(map(str, fit if len(fit) > 1 else (1, 2)))
    command = f"paceline scale {measured.task}{measured.flags} --workers {counts} --windows 15"
    return f"measure again while the machine does nothing else: {command}"
