"""`--against RECORD`: the measured training time of another run, to compare a prediction with."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.errors import RecordError
from paceline.output import plural
from paceline.plan.draws import DRAWS
from paceline.plan.fields import BadField, load, number, table_of, words
from paceline.plan.links import Array
from paceline.plan.words import time_words
from paceline.records import find_record, read_metrics
from paceline.spread import deviation, mean

_SEED = 20181214


@dataclass(frozen=True, kw_only=True)
class Other:
    """A finished run."""

    record: str
    time_s: float
    """Of training: validation and checkpoints are not included, as in predictions."""
    spread: float
    """The relative standard error of this time, from the times of its epochs."""
    about: str
    """How it trained, and what it reached."""
    device: str

    def draws(self) -> Array:
        """Its time: as measured, then one value per draw."""
        random = np.random.default_rng(_SEED)
        return self.time_s * np.concatenate([[1.0], 1 + self.spread * random.standard_normal(DRAWS)])


def read_other(name: str, runs_dir: str) -> Other:
    """The run in this record; a one-line RecordError if it does not say how long it trained."""
    path = find_record(name, runs_dir)
    try:
        found = read_metrics(path)
        rows = [row for row in found if row.get("kind") == "epoch"]
        times = [number(row, "epoch_time_s", above=True) for row in rows]
        if not times:
            raise BadField("it has no epoch rows")
        total = number(rows[-1], "time_s", above=True)
        contract = table_of(load(path / "environment.json"), "contract")
        joins = [number(row, "join_s") for row in found if row.get("kind") == "join"]
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RecordError(
            f"--against {path} does not say how long it trained ({words(error)}): give a record of paceline train"
        ) from None
    spread = _spread(times, [row.get("step") for row in rows])
    devices = str(contract.get("devices", ""))
    return Other(record=path.name, time_s=total, spread=spread, about=_describe(contract, rows[-1], joins), device=devices)


def _spread(times: Sequence[float], steps: Sequence[Any]) -> float:
    """The relative standard error of a sum of epoch times. Epochs with other numbers of steps are not compared."""
    before = [0, *(step if isinstance(step, int) else 0 for step in steps)]
    alike: dict[int, list[float]] = {}
    for time, one, two in zip(times, before, before[1:], strict=False):
        alike.setdefault(two - one, []).append(time)
    relative = [time / mean(each) for each in alike.values() if len(each) > 1 for time in each]
    return deviation(relative) / math.sqrt(len(times)) if len(relative) > 1 else 0.0


def _describe(contract: Any, last: Any, joins: Sequence[float]) -> str:
    """`sgd at a batch of 128 on 1 x NVIDIA H200, accuracy 0.9450`."""
    optimizer = str(contract.get("optimizer", "")).partition(" ")[0].strip(",")
    phases, batch = contract.get("phases"), contract.get("global_batch")
    at = f"a batch of {batch:,}" if isinstance(batch, int) else ""
    if isinstance(phases, list) and len(phases) > 1:
        at = "a changing batch"
    said = " at ".join(each for each in (optimizer, at) if each)
    if joins:
        said += f" on a changing number of workers, without {time_words(sum(joins))} for {plural(len(joins), 'join')}"
    elif contract.get("devices"):
        said += f" on {contract['devices']}"
    accuracy = last.get("val_accuracy")
    return said + (f", accuracy {accuracy:.4f}" if isinstance(accuracy, float) else "")
