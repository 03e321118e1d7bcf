"""`paceline advise`: from a run's noise scale, how many workers are worth it.

The noise scale says at which global batch more samples a step stop to save steps (`noise.py`); a cluster, where one is given,
says at which count more workers stop to save time (`target.py`). The smaller of both is the advice. Nothing here imports torch.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RecordError
from paceline.plan.cluster import HERE
from paceline.plan.measured import Measured, read_measured
from paceline.plan.noise import Noise, examples_ratio, read_noise, saved_by_doubling, steps_ratio
from paceline.plan.plan import Plan, Request, make_plan
from paceline.plan.target import doublings
from paceline.plan.words import bound_words, count_words, lay_out, number_words, time_words
from paceline.records import read_metrics


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What advice is given on."""

    noise: Noise
    samples: int
    """A worker's, a step."""
    global_batch: int
    """Of the run that was measured."""
    measured: Measured | None
    """Where a step's time goes, if the record says so."""
    plan: Plan | None


def advise_verb(record: str, cluster: str = "", speed: float = 1.0, runs_dir: str = "runs") -> int:
    """What the command line calls with a record: print the advice."""
    print("\n".join(advise(Path(record), cluster=cluster, speed=speed, runs_dir=runs_dir)))
    return 0


def advise(record: Path, *, cluster: str = "", speed: float = 1.0, runs_dir: str = "runs") -> list[str]:
    """Which worker counts are worth it, as lines; with a cluster (a preset, a file or `here`), also how fast they would be."""
    facts = read_facts(record, cluster=cluster, speed=speed, runs_dir=runs_dir)
    return [*_say_noise(facts), "", _table(facts), "", *_say_hardware(facts), _say_next(facts)]


def read_facts(record: Path, *, cluster: str = "", speed: float = 1.0, runs_dir: str = "runs") -> Facts:
    """The noise scale and what else of use a record holds; a RecordError where it measured none."""
    path = record if record.exists() else Path(runs_dir) / record
    remedy = "train with --measure-noise --virtual-workers 8, or give paceline advise the TASK"
    try:
        rows = read_metrics(path)
    except (OSError, KeyError, TypeError, AttributeError):
        raise RecordError(f"{record} is no record of paceline train: {remedy}") from None
    noise = read_noise(rows)
    if noise is None:
        raise RecordError(f"{record} measured no noise scale: {remedy}")
    measured = None
    try:
        measured = read_measured(path)
        batches = measured.base.global_batch, _samples(path)
    except RecordError:
        if cluster:
            raise
        batches = _batch(path), _samples(path)
    plan = None
    if cluster:
        plan = make_plan(Request(record=str(path), cluster=cluster, speed=speed, samples=batches[1], runs_dir=runs_dir))
    return Facts(noise=noise, samples=batches[1], global_batch=batches[0], measured=measured, plan=plan)


def _say_noise(facts: Facts) -> list[str]:
    noise, part = facts.noise, facts.samples
    worth = max(1, round(noise.scale / part))
    below, at, beyond = (saved_by_doubling(noise.scale, share * noise.scale) for share in (0.25, 1, 4))
    few = " (from few rows: a longer run would say more)" if noise.rows < 10 else ""
    return [
        f"The noise scale is {number_words(noise.scale)} samples (half of the second half of the run lay between"
        f" {number_words(noise.low)} and {number_words(noise.high)}){few}.",
        f"Up to a global batch of about {number_words(noise.scale)}, that is {count_words(worth)} of {part:,}, doubling the"
        f" workers saves {at:.0%} of the steps or more ({below:.0%} at a quarter of it); at four times that batch {beyond:.0%},"
        " and each example teaches a fifth of what it did.",
    ]


def _table(facts: Facts) -> str:
    """Which counts are worth it: batch, steps and examples against the run that was measured, time where it can be known."""
    noise, part = facts.noise.scale, facts.samples
    most = max(8, 4 * round(facts.noise.high / part))
    heads = ["workers", "batch", "steps", "examples", "doubling saves"]
    predicted = {row["workers"]: row for row in facts.plan.rows} if facts.plan else {}
    heads += ["images/s", "time", "low to high"] if predicted else []
    rows = []
    for workers in doublings(1 << (min(most, 4096) - 1).bit_length()):
        batch = part * workers
        ratios = [ratio(noise, batch, facts.global_batch) for ratio in (steps_ratio, examples_ratio)]
        cells = [f"{workers:,}", f"{batch:,}", *(f"{each:.2f}" for each in ratios)]
        cells.append(f"{saved_by_doubling(noise, batch):.0%} of the steps")
        if predicted:
            cells += _predicted_cells(predicted.get(workers))
        rows.append(cells)
    return lay_out(heads, rows) + f"\n(steps and examples: 1 is the run measured, at a global batch of {facts.global_batch:,})"


def _predicted_cells(row: dict[str, float] | None) -> list[str]:
    if row is None or "time_s" not in row:
        return ["-", "-", "-"]
    low, high = time_words(row["time_low_s"]), time_words(row["time_high_s"])
    return [number_words(row["samples_per_s"]), time_words(row["time_s"]), f"{low} to {high}"]


def _say_hardware(facts: Facts) -> list[str]:
    """What communication does, where it was measured or can be predicted."""
    if facts.plan is not None:
        returns, cluster = facts.plan.returns, facts.plan.model.cluster
        where = "here" if cluster.name == HERE else f"on {cluster.name}"
        if returns.stop_at is None:
            return [f"On this hardware nothing else stops it sooner: {where}, returns last to {count_words(returns.most)}."]
        why = bound_words(returns, cluster)
        return [f"With what communication costs {where}, returns stop at {count_words(returns.stop_at)}: {why}."]
    if facts.measured is None:
        return []
    base = facts.measured.base
    if base.workers < 2:
        return ["The run had one worker, so what communication costs was not measured: --cluster predicts it."]
    share = (base.parts_s["communication"] + base.parts_s["waiting"]) / base.step_s
    return [f"On this hardware, communication and waiting were {share:.0%} of a step of {count_words(base.workers)}."]


def _say_next(facts: Facts) -> str:
    low, worth, high = (max(1, round(n / facts.samples)) for n in (facts.noise.low, facts.noise.scale, facts.noise.high))
    width = f" ({low:,} to {high:,} by the noise scale's range)" if low < high else ""
    stop = facts.plan.returns.stop_at if facts.plan is not None else None
    if stop is not None and stop < worth:
        worth, width = stop, ""
    return (
        f"Worth it: up to about {count_words(worth)}{width}. What they do to accuracy: paceline rehearse"
        f" {facts.measured.task if facts.measured else 'TASK'} --workers {max(2, worth)}."
    )


def _contract(path: Path) -> dict[str, int]:
    try:
        found = json.loads((path / "environment.json").read_text())["contract"]
    except (OSError, ValueError, KeyError, TypeError):
        raise RecordError(f"{path} does not say at which batch it trained: its environment.json has no contract") from None
    return dict(found)


def _batch(path: Path) -> int:
    return int(_contract(path)["global_batch"])


def _samples(path: Path) -> int:
    """What a worker would get: a part, or the reference batch where parts are smaller: those are there to measure alone."""
    contract = _contract(path)
    return max(int(contract["part_batch"]), int(contract.get("reference_batch", 0)))
