"""What the noise scale of a run says about a batch that grows: its course, and the schedule that follows from it.

The rule is that of `--batch-schedule auto` (`training/growth.py`): double the batch when the noise scale is more than
`noise_ratio` times the batch, at places an eighth of an epoch apart. Here it is applied to a noise scale that was measured in
another run, usually at a constant batch. A run with the schedule has another noise scale, so the schedule is a first guess, to
be rehearsed. Nothing here imports torch.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import Config
from paceline.errors import UsageError
from paceline.phases import PLACES, Phase, make_phases, noise_ratio, write_batch_schedule
from paceline.plan.stretches import split_rows
from paceline.plan.tradeoff import NoiseScale, is_noise_scale, noise_scale_of
from paceline.toml import read_toml

GREW = 2.0
"""A schedule is suggested to a run with a constant batch if its noise scale grew more than this many times."""

_FEW = 8
"""With fewer values of the noise scale, nothing is said about its growth."""

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Course:
    """The noise scale over a run."""

    epochs: tuple[float, ...]
    """When each value was measured."""
    values: tuple[float, ...]
    ratio: float
    """The batch doubles when the noise scale is more than this many times the batch."""
    phases: tuple[tuple[Phase, NoiseScale], ...]
    """The noise scale in each phase that measured it, if the batch changed."""

    @property
    def ends(self) -> tuple[float, float]:
        """Its medians over the first and the last quarter of the values."""
        quarter = max(1, len(self.values) // 4)
        return float(np.median(self.values[:quarter])), float(np.median(self.values[-quarter:]))

    @property
    def grew(self) -> float:
        """How many times larger it was at the end; 1 if there are too few values."""
        first, last = self.ends if len(self.values) >= _FEW else (1.0, 1.0)
        return last / first


def read_course(path: Path, rows: Sequence[Row], contract: Row) -> Course:
    """The course of the noise scale in a record that measured it."""
    found = [row for row in rows if row.get("kind") == "step" and is_noise_scale(row.get("noise_scale"))]
    ends = [(row["step"], row["epoch"]) for row in rows if row.get("kind") == "epoch" and row.get("step") and row.get("epoch")]
    steps, epochs = zip((0, 0), *ends, strict=True)
    begun = split_rows(rows)
    by_phase = [
        (each.phase, [row["noise_scale"] for row in each.noise if is_noise_scale(row.get("noise_scale"))]) for each in begun
    ]
    return Course(
        epochs=tuple(float(np.interp(row["step"], steps, epochs)) for row in found) if len(steps) > 1 else (),
        values=tuple(float(row["noise_scale"]) for row in found) if len(steps) > 1 else (),
        ratio=_ratio(path, contract),
        phases=tuple((phase, noise_scale_of(values)) for phase, values in by_phase if values) if len(begun) > 1 else (),
    )


def suggest_schedule(course: Course, first: int, most: int | None) -> tuple[tuple[float, int], ...]:
    """The phases that the rule makes of this noise scale, from a batch of `first` up to `most`; empty if it never doubles."""
    pairs, batch = [(0.0, first)], first
    if not course.epochs:
        return ()
    for place in range(1, int(course.epochs[-1] * PLACES)):
        at = place / PLACES
        seen = [value for when, value in zip(course.epochs, course.values, strict=True) if at - 1 / PLACES < when <= at]
        if seen and float(np.median(seen)) > course.ratio * batch and 2 * batch <= (most or 2 * batch):
            batch *= 2
            pairs.append((at, batch))
    return tuple(pairs) if len(pairs) > 1 else ()


def rehearsal(pairs: Sequence[tuple[float, int]], epochs: int) -> str:
    """The flags of `paceline rehearse` that train with this schedule: one part of the first batch per worker."""
    first, largest = pairs[0][1], pairs[-1][1]
    workers = largest // first
    flags = f'--epochs {epochs} --workers {workers} --global-batch {largest} --batch-schedule "{write_batch_schedule(pairs)}"'
    try:
        make_phases(pairs, workers, Config.smallest_part)
    except UsageError:  # a batch does not divide into parts of the default size
        flags += f" --smallest-part {first}"
    return flags


def _ratio(path: Path, contract: Row) -> float:
    """The ratio of the run's optimizer, or the one that it was given."""
    optimizer = str(contract.get("optimizer") or "").partition(" ")[0].strip(",")
    with suppress(UsageError):
        config = read_toml(path / "config.toml", "config.toml")
        given: Any = config.get("batch_noise_ratio")
        if is_noise_scale(given):
            return float(given)
        optimizer = str(config.get("optimizer", optimizer))
    return noise_ratio(optimizer)
