"""Error bars: uncertain inputs drawn at random. Every number in a prediction is an array; its first value is the prediction.

The other values are `DRAWS` draws with a fixed seed, so that the same prediction always has the same error bars. Drawn are:

    speed     a factor on everything a worker does by itself: normal, with the relative deviation of the measured windows, and
              more where measured counts contradict each other (`trust.py`)
    link      bandwidth between its low and high, half of the draws on each side of typical; latency in the same way, in
              proportion. A fitted link also has a factor on every all-reduce: normal, with the fit's residual divided by the
              root of its timings. Where all-reduces were timed in training, the factor is on that time, and every draw of the
              link is made to agree with it (`model.py`)
    lag       a factor between 1 / 1.5 and 1.5 on the deviation of a worker's compute, which is measured in a few dozen steps
    noise     the noise scale: log-normal, with its quartiles over the second half of the run
    beyond    for a batch schedule, times of fewer or more samples than measured, between their bounds (`model.py`)

Low and high in tables are the 5th and 95th percentile. They show the uncertainty of the measurement and of the cluster file,
but not what the model leaves out: other traffic, slow nodes, hot devices.
"""

import math
from dataclasses import dataclass

import numpy as np

from paceline.plan.cluster import LOOSE, Cluster, Range, Wire
from paceline.plan.links import Array, Link
from paceline.plan.points import Measured
from paceline.plan.tradeoff import NoiseScale

DRAWS = 400
_SEED = 20170608


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Arrays with one value for the prediction, then one per draw."""

    slowness: Array
    """Factor on the time of everything a worker does by itself."""
    intra: Link | None
    inter: Link | None
    reduce: Array
    """Factor on the time of every all-reduce, or on the time they took in training."""
    lag: Array
    """Factor on the deviation of a worker's compute."""
    noise: Array | None
    beyond: Array
    """From -1 to 1: which value within its bounds an extrapolated time has; 0: the nominal one."""


def draw(measured: Measured, cluster: Cluster, noise: NoiseScale | None, doubt: float = 0.0) -> Draws:
    """Draw the uncertain inputs of this record and this cluster. `doubt`: another relative deviation of the measured speeds."""
    random = np.random.default_rng(_SEED)
    wires = [wire for wire in (cluster.intra, cluster.inter) if wire is not None]
    level = max((wire.level for wire in wires), default=0.0)
    spread = math.hypot(max(point.spread for point in measured.points), doubt)
    return Draws(
        slowness=_first(1.0, np.maximum(0.2, 1 + spread * random.standard_normal(DRAWS))),
        intra=_link(cluster.intra, random),
        inter=_link(cluster.inter, random),
        reduce=_first(1.0, np.maximum(0.2, 1 + level * random.standard_normal(DRAWS))),
        lag=_first(1.0, LOOSE ** random.uniform(-1, 1, DRAWS)),
        noise=None if noise is None else _noise(noise, random),
        beyond=_first(0.0, random.uniform(-1, 1, DRAWS)),
    )


def bars(values: Array) -> tuple[float, float, float]:
    """(prediction, low, high): the 5th and 95th percentile of the draws, widened to include the prediction."""
    nominal = float(values[0])
    low, high = (float(each) for each in np.percentile(values[1:], [5, 95]))
    return nominal, min(low, nominal), max(high, nominal)


def _link(wire: Wire | None, random: np.random.Generator) -> Link | None:
    if wire is None:
        return None
    return Link(latency_s=_within(wire.latency_s, random), bytes_per_s=_within(wire.bytes_per_s, random))


def _within(found: Range, random: np.random.Generator) -> Array:
    """Draws between low and high, with the typical value as median."""
    place = random.uniform(-1, 1, DRAWS)
    below, above = found.typical - found.low, found.high - found.typical
    return _first(found.typical, found.typical + np.where(place < 0, place * below, place * above))


def _noise(noise: NoiseScale, random: np.random.Generator) -> Array:
    quartile = 0.6745  # of a standard normal
    spread = math.log(noise.high / noise.low) / (2 * quartile)
    return _first(noise.scale, noise.scale * np.exp(spread * random.standard_normal(DRAWS)))


def _first(nominal: float, drawn: Array) -> Array:
    return np.concatenate([[nominal], drawn])
