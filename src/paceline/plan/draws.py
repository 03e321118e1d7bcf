"""What is not known, drawn at random: every figure of a prediction is an array, its first value the prediction itself.

The other values are `DRAWS` draws with a fixed seed, so that a prediction has the same error bars each time. Drawn are:

    speed     the relative deviation of the measured windows, normal, for all that one worker does
    link      bandwidth between its low and high, half of the draws on either side of typical; latency likewise, in proportion;
              of a fitted link also its residual over the root of its timings, normal, as a factor on every all-reduce, or on
              how long they took in training, which every draw of the link is made to agree with (`model.py`)
    lag       the deviation of one worker's compute, a factor between 1 / 1.5 and 1.5: it comes from a few dozen steps
    noise     the noise scale, log-normal with the quartiles it had over the second half of its run

Low and high in tables are the 5th and 95th percentile. They say what measurement and cluster file leave open, and nothing about
what the model leaves out: other people's traffic, slow nodes, hot devices.
"""

import math
from dataclasses import dataclass

import numpy as np

from paceline.plan.cluster import LOOSE, Cluster, Range, Wire
from paceline.plan.links import Array, Link
from paceline.plan.measured import Measured
from paceline.plan.tradeoff import Noise

DRAWS = 400
_SEED = 20170608


@dataclass(frozen=True, kw_only=True)
class Draws:
    """One value for the prediction, then one a draw."""

    slowness: Array
    """Factor on the time of all that a worker does by itself."""
    intra: Link | None
    inter: Link | None
    reduce: Array
    """Factor on the time of every all-reduce, or on that which they took in training."""
    lag: Array
    """Factor on the deviation of a worker's compute."""
    noise: Array | None


def draw(measured: Measured, cluster: Cluster, noise: Noise | None) -> Draws:
    """Draw what is not known about this record and this cluster."""
    random = np.random.default_rng(_SEED)
    wires = [wire for wire in (cluster.intra, cluster.inter) if wire is not None]
    level = max((wire.level for wire in wires), default=0.0)
    spread = max(point.spread for point in measured.points)
    return Draws(
        slowness=_first(1.0, np.maximum(0.2, 1 + spread * random.standard_normal(DRAWS))),
        intra=_link(cluster.intra, random),
        inter=_link(cluster.inter, random),
        reduce=_first(1.0, np.maximum(0.2, 1 + level * random.standard_normal(DRAWS))),
        lag=_first(1.0, LOOSE ** random.uniform(-1, 1, DRAWS)),
        noise=None if noise is None else _noise(noise, random),
    )


def bars(values: Array) -> tuple[float, float, float]:
    """(prediction, low, high): the 5th and 95th percentile of the draws, stretched to hold the prediction."""
    nominal = float(values[0])
    low, high = (float(each) for each in np.percentile(values[1:], [5, 95]))
    return nominal, min(low, nominal), max(high, nominal)


def _link(wire: Wire | None, random: np.random.Generator) -> Link | None:
    if wire is None:
        return None
    return Link(latency_s=_within(wire.latency_s, random), bytes_per_s=_within(wire.bytes_per_s, random))


def _within(found: Range, random: np.random.Generator) -> Array:
    """Draws between low and high, the typical value their median."""
    place = random.uniform(-1, 1, DRAWS)
    below, above = found.typical - found.low, found.high - found.typical
    return _first(found.typical, found.typical + np.where(place < 0, place * below, place * above))


def _noise(noise: Noise, random: np.random.Generator) -> Array:
    quartile = 0.6745  # of a standard normal
    spread = math.log(noise.high / noise.low) / (2 * quartile)
    return _first(noise.scale, noise.scale * np.exp(spread * random.standard_normal(DRAWS)))


def _first(nominal: float, drawn: Array) -> Array:
    return np.concatenate([[nominal], drawn])
