"""`--workers-schedule` in a run: when the number of workers changes, with how many it starts or continues, what a join cost.

The workers of a run end at the first step boundary at which the schedule wants another number of them: they write a checkpoint,
and rank 0 asks the launcher to continue with that number (`dist/launch.py`). As after any checkpoint (law 5), no step is lost
or repeated, and in exact mode the bits are the same. At the end of an epoch, its validation comes first.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config import Config, check_options
from paceline.core.sampler import Sampler
from paceline.dist.messages import Handover
from paceline.dist.place import core_count
from paceline.dist.world import count_gpus
from paceline.errors import UsageError
from paceline.joins import AUTO, Spot, check_fits, count_workers, is_auto, most_workers
from paceline.output import plural
from paceline.phases import largest_batch, parse_batch_schedule, phases_of_auto
from paceline.training.build import Run
from paceline.training.checkpoint.file import read_facts
from paceline.training.terms import spot_of

_MANY = 10**9  # samples in an epoch, before the data is known: no later count begins at once


class Joining(Exception):
    """These workers end so that another number of them goes on. Raised on all ranks at once."""

    def __init__(self, workers: int, left_s: float) -> None:
        super().__init__(f"the run continues on {plural(workers, 'worker')}")
        self.workers, self.left_s = workers, left_s


class Joins:
    """Says when another number of workers takes over."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._on = bool(run.config.workers_schedule) and run.world.launcher == "paceline"
        self._refused = 0
        """The number of workers that could not take over, because no checkpoint could be written."""

    def wanted(self, step: int) -> int:
        """How many workers take over before this step; 0 if these go on. The same on all workers."""
        run = self._run
        if not self._on or step >= run.update.schedule.total_steps:
            return 0
        count = count_workers(run.config.workers_schedule, spot_at(run.sampler, step))
        return 0 if count in (run.world.size, self._refused) else count

    def refuse(self, workers: int) -> str:
        """Go on without them, until the schedule wants another number. What to tell the user."""
        self._refused = workers
        return f"{plural(workers, 'worker')} cannot take over: no checkpoint could be written; the run continues as it is"


@dataclass
class Arrival:
    """How workers took over from others: what that cost, in seconds."""

    handover: Handover
    components_s: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.components_s["stop"] = self.handover.ended_s - self.handover.left_s

    def reach(self, component: str) -> None:
        """This component is over."""
        self.components_s[component] = time.time() - self.handover.left_s - sum(self.components_s.values())

    def row(self, sampler: Sampler, step: int, workers: int) -> dict[str, Any]:
        """The record's row about it. Components: `stop` (checkpoint and end of the old workers), `start` (processes, imports,
        meeting), `build` (task, data, model) and `resume` (checkpoint, capture, up to the first step)."""
        return {
            "step": step,
            "epoch": spot_at(sampler, step).epoch,
            "workers": workers,
            "was": self.handover.was,
            "join_s": sum(self.components_s.values()),
            "components_s": dict(self.components_s),
        }


def spot_at(sampler: Sampler, step: int) -> Spot:
    """The place before a step."""
    return spot_of(sampler, sampler.phase_of(step), sampler.samples_before(step))


def settle_schedule(options: Mapping[str, Any], launched: Config) -> str:
    """The schedule with the limit of "auto", from the devices of this node. Raises a UsageError if it cannot work here."""
    text, gpus = launched.workers_schedule, count_gpus(launched.backend)
    if is_auto(text) and not most_workers(text):
        parts = launched.virtual_workers
        limit = min(gpus or core_count(), parts or gpus or core_count())
        first, largest = _first_batches(options, parts or limit)
        while parts is None and first and largest % limit:  # V will be this limit
            limit -= 1
        return f"{AUTO}:{limit}"
    most = most_workers(text)
    check_fits(text, launched.virtual_workers or most)
    if gpus and most > gpus:
        raise UsageError(
            f"--workers-schedule has {plural(most, 'worker')} on a node with {plural(gpus, 'GPU')}: use at most {gpus}, or"
            " --backend gloo to share them"
        )
    return text


def first_workers(options: Mapping[str, Any], launched: Config, checkpoints: Path | None) -> int:
    """How many workers to start, by the newest checkpoint of the record that continues or, in a new run, by its first batch.

    Without the task's own defaults this can be a wrong guess for "auto": then the workers hand over at once.
    """
    text = launched.workers_schedule
    most = most_workers(text)
    parts = launched.virtual_workers or most
    facts = read_facts(checkpoints) if checkpoints is not None else None
    with suppress(TypeError, ValueError):  # an older checkpoint has no spot
        if facts is not None:
            return count_workers(text, Spot(**facts.get("spot", {})))
    first, largest = _first_batches(options, parts)
    batches = {"global_batch": first or 1, "largest_batch": largest or most}
    return count_workers(text, Spot(done=0, samples=_MANY, parts=parts, **batches))


def _first_batches(options: Mapping[str, Any], parts: int) -> tuple[int, int]:
    """The first and the largest batch, as far as the given options say; (0, 0) if they do not."""
    given = check_options(options)
    text = given.get("batch_schedule", "")
    pairs = parse_batch_schedule(text)
    if pairs:
        return pairs[0][1], largest_batch(pairs)
    if not text:
        return 0, 0
    largest = given.get("global_batch") or given.get("reference_batch", Config.reference_batch) * parts
    with suppress(UsageError):  # with the task's own defaults it may fit; if not, the workers say so
        return phases_of_auto(text, largest, parts, given.get("smallest_part", Config.smallest_part))[0].global_batch, largest
    return 0, 0
