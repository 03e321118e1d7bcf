"""`paceline advise`: from a run's noise scale, how many workers are worth it.

The noise scale says at which global batch more samples a step stop to save steps (`noise.py`). With a cluster, the advice is
the count at which more workers stop to save time (`target.py`), in which those steps are. Nothing here imports torch.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import RecordError, UsageError
from paceline.plan.cluster import HERE
from paceline.plan.fields import load, own_flags, table_of, task_of, whole, words
from paceline.plan.measured import Measured, read_measured
from paceline.plan.plan import Plan, Request, check_number, make_plan
from paceline.plan.target import doublings
from paceline.plan.tradeoff import Noise, examples_ratio, read_noise, saved_by_doubling, steps_ratio
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
    task: str
    """As a command line takes it."""
    flags: str
    """What else the same model needs there."""
    train_samples: int | None
    """What an epoch sees: no global batch is larger."""
    measured: Measured | None
    """Where a step's time goes, if the record says so."""
    plan: Plan | None

    def workers(self, batch: float) -> int:
        """The workers whose samples are about this many; one at least, and no more than the training set has batches for."""
        most = math.inf if self.train_samples is None else self.train_samples // self.samples
        return int(max(1, min(most, round(batch / self.samples))))


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
    check_number("speed", speed)
    if speed != 1 and not cluster:
        raise UsageError("--speed says how fast a worker of a cluster is: it needs --cluster")
    path = record if record.exists() else Path(runs_dir) / record
    remedy = "train with --measure-noise --virtual-workers 8, or give paceline advise the TASK"
    try:
        rows = read_metrics(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RecordError(f"{record} is no record of paceline train: {remedy}") from None
    noise = read_noise(rows)
    if noise is None:
        raise RecordError(f"{record} measured no noise scale: {remedy}")
    task, flags, samples, batch, train = _read_contract(path)
    measured = None
    try:
        measured = read_measured(path)
        batch = measured.base.global_batch
    except RecordError:
        if cluster:
            raise
    plan = None
    if cluster:
        plan = make_plan(Request(record=str(path), cluster=cluster, speed=speed, samples=samples, runs_dir=runs_dir))
    return Facts(
        noise=noise,
        samples=samples,
        global_batch=batch,
        task=task,
        flags=flags,
        train_samples=train,
        measured=measured,
        plan=plan,
    )


def _say_noise(facts: Facts) -> list[str]:
    noise, part = facts.noise, facts.samples
    few = " (from few rows: a longer run would say more)" if noise.rows < 10 else ""
    first = (
        f"The noise scale is {number_words(noise.scale)} samples (half of the second half of the run lay between"
        f" {number_words(noise.low)} and {number_words(noise.high)}){few}."
    )
    if noise.scale < part:
        saved = saved_by_doubling(noise.scale, part)
        return [first, f"One worker's batch of {part:,} is already beyond it: a second worker saves {saved:.0%} of the steps."]
    below, at, beyond = (saved_by_doubling(noise.scale, share * noise.scale) for share in (0.25, 1, 4))
    worth = facts.workers(noise.scale)
    more = " (more would take more than the training set)" if _ends_early(facts) else ""
    return [
        first,
        f"Up to a global batch of about {number_words(noise.scale)}, that is {count_words(worth)} of {part:,}{more}, doubling"
        f" the workers saves {at:.0%} of the steps or more ({below:.0%} at a quarter of it); at four times that batch"
        f" {beyond:.0%}, and each example teaches a fifth of what it did.",
    ]


def _table(facts: Facts) -> str:
    """Which counts are worth it: batch, steps and examples against the run that was measured, time where it can be known."""
    noise, part = facts.noise.scale, facts.samples
    most = 1 << (min(max(8, 4 * round(facts.noise.high / part)), 4096) - 1).bit_length()
    heads = ["workers", "batch", "steps", "examples", "doubling saves"]
    predicted = {row["workers"]: row for row in facts.plan.rows} if facts.plan else {}
    heads += [f"{facts.plan.model.measured.unit}/s", "time", "low to high"] if facts.plan else []
    rows = []
    for workers in doublings(facts.workers(most * part)):
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
    share = (base.components_s["communication"] + base.components_s["waiting"]) / base.step_s
    return [f"On this hardware, communication and waiting were {share:.0%} of a step of {count_words(base.workers)}."]


def _say_next(facts: Facts) -> str:
    low, worth, high = (facts.workers(n) for n in (facts.noise.low, facts.noise.scale, facts.noise.high))
    width = f" ({low:,} to {high:,} by the noise scale's range)" if low < high else ""
    if facts.plan is not None:
        worth, width = facts.plan.returns.stop_at or facts.plan.returns.most, ""
    elif _ends_early(facts):
        width = " (a step of more would take more than the training set)"
    said = f"Worth it: up to about {count_words(worth)}{width}."
    if worth < 2:
        return said
    return f"{said} What they do to accuracy: paceline rehearse {facts.task}{facts.flags} --workers {worth}."


def _ends_early(facts: Facts) -> bool:
    """Whether the training set ends before the noise scale is reached."""
    return facts.workers(facts.noise.scale) < round(facts.noise.scale / facts.samples)


def _read_contract(path: Path) -> tuple[str, str, int, int, int | None]:
    """The task, its flags, what a worker would get, the global batch, and the training set's samples.

    A worker gets a part, or the reference batch where parts are smaller: those are there to measure alone.
    """
    about = load(path / "environment.json")
    try:
        contract = table_of(about, "contract")
        reference = whole({"reference_batch": 0, **contract}, "reference_batch", least=0)
        samples = max(whole(contract, "part_batch"), reference)
        train = whole(contract, "train_samples") if contract.get("train_samples") else None
        return task_of(about), own_flags(contract), samples, whole(contract, "global_batch"), train
    except (KeyError, ValueError) as error:
        raise RecordError(f"{path} does not say at which batch it trained: environment.json has {words(error)}") from None
