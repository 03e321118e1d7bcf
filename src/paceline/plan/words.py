"""Predictions as text: rounded numbers, plain-text tables and sentences."""

import math
from collections.abc import Sequence

from paceline.output import plural
from paceline.plan.cluster import Cluster
from paceline.plan.target import Returns

BARS = (
    "low to high: 90% of 400 random draws of the uncertain inputs, which are the speed between windows, the link, the lag,"
    " the noise scale and times beyond the measured samples per worker; errors of the model itself are not included"
)


def number_words(value: float) -> str:
    """Three significant digits: 8,010; 123,000; 4.21."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = 2 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(0, places)}f}"


def range_words(low: float, high: float) -> str:
    """low to high."""
    return f"{number_words(low)} to {number_words(high)}"


def time_words(seconds: float) -> str:
    """12 ms, 4.2 s, 3.1 min, 5.0 h or 2.3 days."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= (2 if unit == "days" else 1.0) * size:
            return f"{seconds / size:.{1 if seconds / size < 100 else 0}f} {unit}"
    return f"{seconds * 1e3:.{1 if seconds < 0.1 else 0}f} ms"


def money_words(value: float, currency: str) -> str:
    """9.81 USD."""
    return f"{value:,.2f} {currency}".rstrip() if 1 <= value < 100 else f"{number_words(value)} {currency}".rstrip()


def count_words(workers: int) -> str:
    """1 worker, 64 workers."""
    return plural(workers, "worker")


def list_words(each: Sequence[object]) -> str:
    """1; 1 and 2; 1, 2 and 4."""
    *first, last = (str(one) for one in each)
    return f"{', '.join(first)} and {last}" if first else last


def bound_words(returns: Returns, cluster: Cluster) -> str:
    """Why returns stop, as the end of a sentence."""
    if returns.saved is None:
        return "with twice as many, a step would need more than the training set (data-bound)"
    several = returns.stop_at is not None and cluster.nodes(returns.next_to[1]) > 1
    link = "the network between nodes" if several and cluster.inter is not None else "the link between workers"
    return {
        "noise": "more samples per step average out little more noise, so the run needs nearly as many steps (noise-bound)",
        "data": "the data set is the limit: an epoch has only a few whole steps of such batches (data-bound)",
        "bandwidth": f"{link} cannot carry the gradients while the backward pass runs (bandwidth-bound)",
        "latency": f"every all-reduce takes many messages over {link}, however few bytes it has (latency-bound)",
        "waiting": "the slowest worker keeps the others waiting (waiting-bound)",
        "cores": "the workers of a node share its cores and slow each other down (core-bound)",
        "overhead": "most of the step does not shrink with the samples per worker (overhead-bound)",
    }[returns.bound]


def returns_words(returns: Returns, cluster: Cluster, what: str) -> str:
    """Where returns stop and why. `what` is what doubling saves."""
    now, after = returns.next_to
    if returns.stop_at is None:
        step = "the last doubling" if after == 2 * now else f"the last increase, from {now:,} to {after:,},"
        saved = "" if returns.most < 2 else f": {step} still saves {returns.saved:.0%} of the {what}"
        text = f"Returns continue up to {count_words(returns.most)}{saved}."
    else:
        more = ("doubling them", "saves") if after == 2 * now else (count_words(after), "save")
        saves = f"only {returns.saved:.0%} of the {what}" if (returns.saved or 0) > 0 else f"none of the {what}"
        why = "" if returns.saved is None else f"{' '.join(more)} {saves}, because "
        text = f"Returns stop at {count_words(now)}: {why}{bound_words(returns, cluster)}."
    if returns.cost_doubles_at is None:
        return f"{text} Worker-hours stay below twice those of the smallest count throughout."
    return (
        f"{text} From {count_words(returns.cost_doubles_at)} on, the run takes at least twice the worker-hours of one worker."
    )
