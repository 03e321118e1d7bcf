"""`paceline advise`: how many workers are worth it, from a run's noise scale.

The noise scale is the global batch beyond which more samples per step save few steps (`plan/tradeoff.py`). With a cluster, the
advice is the count beyond which more workers stop saving time (`plan/target.py`), steps included. If the batch of the run
changed, the noise scale is reported per phase, and the advice follows from the last one. If it grew, a batch schedule that
grows with it is suggested (`growing.py`). Nothing here imports torch.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.advise.growing import GREW, Course, read_course, rehearsal, suggest_schedule
from paceline.errors import RecordError, UsageError
from paceline.output import make_table
from paceline.phases import write_batch_schedule
from paceline.plan.cluster import HERE
from paceline.plan.fields import load, own_flags, table_of, task_of, whole, words
from paceline.plan.measured import read_measured
from paceline.plan.phased_plan import PhasedPlan, make_scheduled_plan, phased_tables
from paceline.plan.plan import Plan, make_plan
from paceline.plan.points import Measured
from paceline.plan.request import Request, check_number
from paceline.plan.target import doublings
from paceline.plan.tradeoff import NoiseScale, examples_ratio, read_noise_scale, saved_by_doubling, steps_ratio
from paceline.plan.words import bound_words, count_words, number_words, range_words, time_words
from paceline.records import read_metrics


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the advice is based on."""

    noise: NoiseScale
    samples: int
    """Samples per worker and step."""
    global_batch: int
    """Of the measured run."""
    task: str
    """As given on a command line."""
    flags: str
    """The flags after TASK that train the same model."""
    train_samples: int | None
    """Samples per epoch, which limit the global batch; None: unknown."""
    measured: Measured | None
    """Where a step's time goes; None if the record does not say."""
    plan: Plan | None
    course: Course
    phased: PhasedPlan | None = None
    """The prediction for the record's own batch schedule."""

    def workers(self, batch: float) -> int:
        """The number of workers for about this global batch: at least one, at most what the training set has samples for."""
        most = math.inf if self.train_samples is None else self.train_samples // self.samples
        return int(max(1, min(most, round(batch / self.samples))))


def advise_verb(record: str, cluster: str = "", speed: float = 1.0, runs_dir: str = "runs") -> int:
    """Print the advice for a record. Called by the command line."""
    print("\n".join(advise(Path(record), cluster=cluster, speed=speed, runs_dir=runs_dir)))
    return 0


def advise(record: Path, *, cluster: str = "", speed: float = 1.0, runs_dir: str = "runs") -> list[str]:
    """Which worker counts are worth it, as lines of text; with a cluster (preset, file or `here`), also how fast they are."""
    facts = read_facts(record, cluster=cluster, speed=speed, runs_dir=runs_dir)
    plan = facts.plan or facts.phased
    warnings = [f"warning: {each}" for each in plan.warnings] if plan else []
    lines = [*_say_phases(facts), *_say_noise(facts), *warnings, "", _table(facts), ""]
    if facts.phased is not None:
        lines += ["the whole run, with its batch schedule:", phased_tables(facts.phased), ""]
    chosen = facts.measured.chosen if facts.measured else ""
    lines += [f"{chosen[0].upper()}{chosen[1:]}."] if chosen else []
    return [*lines, *_say_hardware(facts), *_say_growing(facts), _say_next(facts)]


def read_facts(record: Path, *, cluster: str = "", speed: float = 1.0, runs_dir: str = "runs") -> Facts:
    """The noise scale and other facts of a record; a RecordError if it did not measure the noise scale."""
    check_number("speed", speed)
    if speed != 1 and not cluster:
        raise UsageError("--speed is how fast a worker of the cluster is: it needs --cluster")
    path = record if record.exists() else Path(runs_dir) / record
    remedy = "train with --measure-noise --virtual-workers 8, or give paceline advise the TASK"
    try:
        rows = read_metrics(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RecordError(f"{record} is not a record of paceline train: {remedy}") from None
    noise = read_noise_scale(rows)
    if noise is None:
        raise RecordError(f"{record} did not measure the noise scale: {remedy}")
    task, flags, samples, batch, train = _read_contract(path)
    measured, course = None, _read_course(path, rows)
    try:
        measured = read_measured(path)
        batch = measured.base.global_batch
    except RecordError:
        if cluster:
            raise
    plan, phased = None, None
    if cluster and measured is not None and len(measured.phases) > 1:
        phased = make_scheduled_plan(Request(record=str(path), cluster=cluster, speed=speed, runs_dir=runs_dir), measured)
    elif cluster:
        plan = make_plan(Request(record=str(path), cluster=cluster, speed=speed, samples=samples, runs_dir=runs_dir))
    if course.phases:  # the noise scale grows: the last phase is closest to what is left to train
        noise, batch = course.phases[-1][1], course.phases[-1][0].global_batch
    return Facts(
        noise=noise,
        samples=samples,
        global_batch=batch,
        task=task,
        flags=flags,
        train_samples=train,
        measured=measured,
        plan=plan,
        course=course,
        phased=phased,
    )


def _read_course(path: Path, rows: list[dict[str, Any]]) -> Course:
    contract = load(path / "environment.json").get("contract")
    try:
        return read_course(path, rows, contract if isinstance(contract, dict) else {})
    except (KeyError, ValueError, TypeError) as error:
        raise RecordError(f"{path}/metrics.jsonl cannot be read ({words(error)}): train again with --measure-noise") from None


def _say_phases(facts: Facts) -> list[str]:
    """The noise scale in each phase, if the batch changed."""
    phases = facts.course.phases
    if not phases:
        return []
    heads = ["from epoch", "batch", "noise scale", "quartiles", "noise scale / batch"]
    cells = []
    for phase, noise in phases:
        shown = [number_words(noise.scale), range_words(noise.low, noise.high), f"{noise.scale / phase.global_batch:.2g}"]
        cells.append([f"{phase.start:.3g}", f"{phase.global_batch:,}", *shown])
    return [
        make_table(heads, cells, left=0),
        "",
        f"What follows is about the last phase, at a batch of {facts.global_batch:,}.",
    ]


def _say_growing(facts: Facts) -> list[str]:
    """The schedule that follows from the noise scale, if it grew."""
    course = facts.course
    first = course.phases[0][0].global_batch if course.phases else facts.samples
    most = facts.train_samples // 2 if facts.train_samples else None
    pairs = suggest_schedule(course, first, most)
    if course.grew <= GREW:
        return []
    before, after = (number_words(each) for each in course.ends)
    said = f"The noise scale grew from {before} to {after} samples during the run"
    if not pairs:
        return [f"{said}, never more than {course.ratio:g} times a batch of {first:,}: it does not suggest a larger batch."]
    return [
        f"{said}. Doubling the batch whenever it is more than {course.ratio:g} times the batch gives --batch-schedule"
        f' "{write_batch_schedule(pairs)}". To measure its accuracy: paceline rehearse {facts.task}{facts.flags}'
        f" {rehearsal(pairs, math.ceil(course.epochs[-1]))}."
    ]


def _say_noise(facts: Facts) -> list[str]:
    noise, samples = facts.noise, facts.samples
    few = "; from few rows, so a longer run would be more precise" if noise.rows < 10 else ""
    over = "the last phase" if facts.course.phases else "the second half of the run"
    first = (
        f"The noise scale is {number_words(noise.scale)} samples (quartiles over {over}:"
        f" {number_words(noise.low)} and {number_words(noise.high)}{few})."
    )
    if noise.scale < samples:
        saved = saved_by_doubling(noise.scale, samples)
        return [
            first,
            f"One worker's batch of {samples:,} is already beyond it: a second worker saves {saved:.0%} of the steps.",
        ]
    below, at, beyond = (saved_by_doubling(noise.scale, share * noise.scale) for share in (0.25, 1, 4))
    worth = facts.workers(noise.scale)
    more = "; more would need more than the training set per step" if _ends_early(facts) else ""
    return [
        first,
        f"Up to a global batch of about {number_words(noise.scale)} ({count_words(worth)} with {samples:,} samples each{more}),"
        f" doubling the workers saves at least {at:.0%} of the steps ({below:.0%} at a quarter of that batch). At four times"
        f" that batch it saves {beyond:.0%}, and each example contributes a fifth as much.",
    ]


def _table(facts: Facts) -> str:
    """The worker counts: batch, steps and examples relative to the measured run, and the time if it can be predicted."""
    noise, samples = facts.noise.scale, facts.samples
    most = 1 << (min(max(8, 4 * round(facts.noise.high / samples)), 4096) - 1).bit_length()
    heads = ["workers", "batch", "steps", "examples", "doubling saves"]
    predicted = {row["workers"]: row for row in facts.plan.rows} if facts.plan else {}
    heads += [f"{facts.plan.model.measured.unit}/s", "time", "low to high"] if facts.plan else []
    rows = []
    for workers in doublings(facts.workers(most * samples)):
        batch = samples * workers
        ratios = [ratio(noise, batch, facts.global_batch) for ratio in (steps_ratio, examples_ratio)]
        cells = [f"{workers:,}", f"{batch:,}", *(f"{each:.2f}" for each in ratios)]
        cells.append(f"{saved_by_doubling(noise, batch):.0%} of the steps")
        if predicted:
            cells += _predicted_cells(predicted.get(workers))
        rows.append(cells)
    base = "a run at a constant" if facts.course.phases else "the measured run, at a"
    return make_table(heads, rows, left=0) + f"\n(steps and examples relative to {base} global batch of {facts.global_batch:,})"


def _predicted_cells(row: dict[str, float] | None) -> list[str]:
    if row is None or "time_s" not in row:
        return ["-", "-", "-"]
    low, high = time_words(row["time_low_s"]), time_words(row["time_high_s"])
    return [number_words(row["samples_per_s"]), time_words(row["time_s"]), f"{low} to {high}"]


def _say_hardware(facts: Facts) -> list[str]:
    """What communication costs, if it was measured or can be predicted."""
    plan = facts.plan or facts.phased
    if plan is not None:
        returns, cluster = plan.returns, plan.model.cluster
        where = "here" if cluster.name == HERE else f"on {cluster.name}"
        if returns.stop_at is None:
            return [f"Communication does not end returns sooner: {where}, they continue up to {count_words(returns.most)}."]
        why = bound_words(returns, cluster)
        return [f"Including the cost of communication {where}, returns stop at {count_words(returns.stop_at)}: {why}."]
    if facts.measured is None:
        return []
    base, chosen = facts.measured.base, facts.measured.chosen
    if base.workers < 2:
        which = "These steps" if chosen else "The run"
        return [f"{which} had one worker, so the cost of communication was not measured: --cluster predicts it."]
    share = (base.components_s["communication"] + base.components_s["waiting"]) / base.step_s
    return [f"On this hardware, communication and waiting took {share:.0%} of a step with {count_words(base.workers)}."]


def _say_next(facts: Facts) -> str:
    low, worth, high = (facts.workers(n) for n in (facts.noise.low, facts.noise.scale, facts.noise.high))
    width = f" ({low:,} to {high:,} from the noise scale's quartiles)" if low < high else ""
    plan = facts.plan or facts.phased
    if plan is not None:
        worth, width = plan.returns.stop_at or plan.returns.most, ""
    elif _ends_early(facts):
        width = " (more would need more than the training set per step)"
    said = f"Worth it: up to about {count_words(worth)}{width}."
    if worth < 2:
        return said
    return f"{said} To measure their accuracy: paceline rehearse {facts.task}{facts.flags} --workers {worth}."


def _ends_early(facts: Facts) -> bool:
    """Whether the training set is too small for a global batch of the noise scale."""
    return facts.workers(facts.noise.scale) < round(facts.noise.scale / facts.samples)


def _read_contract(path: Path) -> tuple[str, str, int, int, int | None]:
    """The task, its flags, the samples per worker, the global batch, and the samples of the training set.

    A worker gets a part, or the reference batch if parts are smaller: then they exist only for the measurement.
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
