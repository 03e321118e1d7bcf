"""How long an all-reduce takes; and how to fit a link's latency and bandwidth to timed all-reduces.

With n workers, `bytes` of gradients, latency a per message and bandwidth w in each direction:

    ring   2 (n - 1) a  +  2 (n - 1) / n  bytes / w          (Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69)
    tree   2 ceil(log2 n) a  +  2 bytes / w                  (double binary trees: Sanders et al. 2009; NCCL since 2.4)

A ring moves the fewest bytes, but its latency grows with n, a tree's only with log2(n). Trees are used only between nodes:
within a node, NCCL's tree is a chain, which has the 2 (n - 1) latencies of a ring and moves more bytes. With several nodes of g
workers there are three phases. The workers of each node sum shares of the gradients over their fast link (reduce-scatter, half
a ring). The m nodes reduce over the network, which a node's workers share, by ring or by tree, whichever is faster. Then the
shares are gathered:

    2 (g - 1) a_in + 2 (g - 1) / g bytes / w_in  +  ring or tree over m nodes with a_out, w_out

gloo has only the ring. NCCL's own estimate (src/graph/tuning.cc) of a tree's latency is the same, 2 ((g - 1) a_in + log2(m)
a_out), with log2 rounded down. Its ring is a single one over all P = g m workers, 2 ((P - m) a_in + (m - 1) a_out). The base
latency of a few microseconds that it adds to both is left out here.

Numbers are numpy arrays with one value per draw (`draws.py`), so that one call gives a prediction and its error bars.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link as all-reduces see it; one value per draw."""

    latency_s: Array
    bytes_per_s: Array
    """In one direction, after protocol overheads."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """An all-reduce that was timed without training."""

    workers: int
    nodes: int = 1
    bytes: int
    s: float

    @property
    def on_node(self) -> int:
        """Workers per node."""
        return math.ceil(self.workers / self.nodes)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A link's latency and bandwidth, fitted to timings."""

    latency_s: float
    s_per_byte: float
    latency_spread: float
    """Relative standard error of the latency."""
    bandwidth_spread: float
    residual: float
    """How far the timings are from the fit: root mean square of the differences of logarithms, weighted as in the fit."""
    worst: float
    """The largest factor between a timing and the fit, in either direction."""
    timings: int

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth; infinite if the timings do not depend on the size."""
        return 1 / self.s_per_byte if self.s_per_byte > 0 else math.inf


def ring_s(link: Link, workers: int, size: float) -> Array:
    """An all-reduce around a ring."""
    if workers < 2:
        return np.zeros_like(link.latency_s)
    latencies, passed = ring_terms(workers, size)
    return latencies * link.latency_s + passed / link.bytes_per_s


def tree_s(link: Link, workers: int, size: float) -> Array:
    """An all-reduce up and down double binary trees."""
    if workers < 2:
        return np.zeros_like(link.latency_s)
    return 2 * math.ceil(math.log2(workers)) * link.latency_s + 2 * size / link.bytes_per_s


def faster_s(link: Link, workers: int, size: float, *, trees: bool) -> Array:
    """A ring, or a tree if trees are available and it is faster."""
    ring = ring_s(link, workers, size)
    return np.minimum(ring, tree_s(link, workers, size)) if trees else ring


def ring_terms(workers: int, size: float) -> tuple[float, float]:
    """The number of latencies of a ring, and the bytes over each link."""
    return 2.0 * (workers - 1), 2 * (workers - 1) / workers * size


def fit_link(timings: Sequence[Timing], near: Sequence[float] = (), *, cores: int | None = None) -> Fit:
    """Fit the link within a node: the latency and bandwidth at which a ring is closest to the timings on one node.

    `cores` carry the link. With n times as many workers as cores it takes n times as long, as in the prediction.
    """
    used = [each for each in timings if each.workers > 1 and each.nodes == 1]
    rows = [[crowd(t.workers, cores) * term for term in ring_terms(t.workers, t.bytes)] for t in used]
    return _fit(used, rows, [0.0] * len(used), near)


def fit_network(timings: Sequence[Timing], near: Sequence[float], within: Fit | None, *, cores: int | None = None) -> Fit:
    """Fit the network between nodes. `within` is the link of nodes with several workers; its time is added."""
    used = [each for each in timings if each.nodes > 1]
    rows = [list(ring_terms(t.nodes, t.bytes)) for t in used]
    inside = [0.0 if within is None else _within_s(within, t, cores) for t in used]
    return _fit(used, rows, inside, near)


def crowd(workers: int, slots: int | None) -> float:
    """How many times longer workers take if they share this many slots."""
    return 1.0 if slots is None else max(1.0, workers / slots)


def _within_s(fit: Fit, timing: Timing, cores: int | None) -> float:
    latencies, size = ring_terms(timing.on_node, timing.bytes)
    return crowd(timing.on_node, cores) * (latencies * fit.latency_s + size * fit.s_per_byte)


def _fit(timings: Sequence[Timing], terms: list[list[float]], fixed: list[float], near: Sequence[float]) -> Fit:
    """Least squares of differences of logarithms. A prediction is `fixed` seconds plus the terms times (latency, s per byte).

    Neither may be negative. With logarithms, 4 bytes in 200 us weigh as much as 64 MB in a second, so both ends are used. But
    real links are not straight lines: sizes `near` those that training reduces weigh more; a decade away, a quarter. Each round
    solves (predicted - timed) / sqrt(predicted timed), close to the difference of logarithms, with the previous predictions.
    """
    kept = [i for i, each in enumerate(timings) if each.s > 0 and each.bytes > 0]
    if len({timings[i].bytes for i in kept}) < 2:
        raise ValueError("a fit needs all-reduces of at least two sizes")
    rows, offset = np.array([terms[i] for i in kept]), np.array([fixed[i] for i in kept])
    seconds = np.array([timings[i].s for i in kept])
    weights = np.array([_weight(timings[i].bytes, near) for i in kept])
    weights = np.sqrt(weights / weights.mean())
    scale = seconds
    for _ in range(_ROUNDS):
        scaled = rows * (weights / scale)[:, None]
        found = _not_negative(scaled, (seconds - offset) * weights / scale)
        scale = np.sqrt((rows @ found + offset) * seconds)
    logs = np.log((rows @ found + offset) / seconds)
    errors = weights * logs
    residual = math.sqrt(float(np.mean(errors**2)))
    noise = float(errors @ errors) / max(1, len(kept) - 2)
    spread = np.sqrt(noise * np.diag(np.linalg.pinv(scaled.T @ scaled)))
    relative = [min(1.0, float(s / f)) if f > 0 else 0.0 for s, f in zip(spread, found, strict=True)]
    return Fit(
        latency_s=float(found[0]),
        s_per_byte=float(found[1]),
        latency_spread=relative[0],
        bandwidth_spread=relative[1],
        residual=residual,
        worst=math.exp(float(np.max(np.abs(logs)))),
        timings=len(kept),
    )


_ROUNDS = 50


def _weight(size: float, near: Sequence[float]) -> float:
    decades = min((abs(math.log10(size / each)) for each in near if each > 0), default=0.0)
    return 1 / (1 + decades) ** 2


def _not_negative(rows: Array, wanted: Array) -> Array:
    """The two numbers, both at least 0, that bring the rows' sums closest to `wanted`."""
    both = np.asarray(np.linalg.lstsq(rows, wanted, rcond=None)[0], dtype=np.float64)
    if (both >= 0).all():
        return both
    alone = [max(0.0, float(column @ wanted / (column @ column))) for column in rows.T]
    choices = [np.array([alone[0], 0.0]), np.array([0.0, alone[1]])]
    return min(choices, key=lambda found: float(((rows @ found - wanted) ** 2).sum()))
