"""`paceline plan` for a run whose batch changes: the prediction for each number of workers, its tables and its JSON.

`phased.py` computes the times.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from paceline.errors import UsageError
from paceline.output import make_table, plural
from paceline.plan.against import Other, read_other
from paceline.plan.draws import bars, draw
from paceline.plan.model import Model, make_model, slowest_samples
from paceline.plan.phased import Prediction, Schedule, find_phased_returns, find_schedule, phase_rows, predict
from paceline.plan.points import Measured
from paceline.plan.request import MOST_ASKED, Request, as_json_base, introduce_record, make_cluster, parse_counts
from paceline.plan.target import Returns, counts_up_to, price_of
from paceline.plan.trust import find_doubt, find_warnings
from paceline.plan.words import BARS, bound_words, count_words, list_words, money_words, number_words, range_words, time_words


@dataclass(frozen=True, kw_only=True)
class PhasedPlan:
    """A prediction of a run with a batch schedule, ready to be shown."""

    request: Request
    model: Model
    schedule: Schedule
    rows: tuple[dict[str, Any], ...]
    """One per number of workers."""
    phases: tuple[dict[str, Any], ...]
    """Each phase with the largest number of workers."""
    returns: Returns
    other: Other | None
    warnings: tuple[str, ...] = ()


def make_scheduled_plan(request: Request, measured: Measured) -> PhasedPlan:
    """Predict a run whose batch changes."""
    measured, cluster = make_cluster(request.cluster, measured, request.cores)
    model = make_model(measured, cluster, draw(measured, cluster, None), mode="strong", speed=request.speed)
    asked = parse_counts(request.workers, model, batch=MOST_ASKED) if request.workers else []
    schedule = find_schedule(
        measured,
        request.batch_schedule,
        virtual_workers=request.virtual_workers,
        smallest_part=request.smallest_part,
        epochs=request.epochs,
        train_samples=request.train_samples,
        most=asked[-1] if asked else 64,
    )
    if asked and asked[-1] > schedule.parts:
        raise UsageError(
            f"--workers asks for {asked[-1]}, but the schedule has at most {plural(schedule.parts, 'part')}: ask for fewer, or"
            " give --virtual-workers"
        )
    counts = asked or counts_up_to(min(schedule.parts, cluster.most_workers() or schedule.parts))
    doubt, warnings = find_doubt(model, counts), find_warnings(model, counts)
    if doubt:
        model = make_model(measured, cluster, draw(measured, cluster, None, doubt), mode="strong", speed=request.speed)
    other = read_other(request.against, request.runs_dir) if request.against else None
    price = price_of(cluster, request.price)
    return make_phased_plan(request, model, schedule, counts, price=price, other=other, warnings=warnings)


def make_phased_plan(
    request: Request,
    model: Model,
    schedule: Schedule,
    counts: Sequence[int],
    *,
    price: tuple[float, str] | None = None,
    other: Other | None = None,
    warnings: Sequence[str] = (),
) -> PhasedPlan:
    """Predict the run with each of these numbers of workers."""
    one = predict(model, schedule, 1)
    found = [predict(model, schedule, workers) for workers in counts]
    looked = [predict(model, schedule, workers) for workers in counts_up_to(counts[-1])]
    said = [*warnings, *_say_beyond(model, schedule, counts), *_say_other(model, other)]
    return PhasedPlan(
        request=request,
        model=model,
        schedule=schedule,
        rows=tuple(_row(each, one, price, other) for each in found),
        phases=tuple(phase_rows(schedule, found[-1])),
        returns=find_phased_returns(model, looked),
        other=other,
        warnings=tuple(said),
    )


def _row(prediction: Prediction, one: Prediction, price: tuple[float, str] | None, other: Other | None) -> dict[str, Any]:
    """The prediction for one number of workers."""
    times = prediction.time_s
    row: dict[str, Any] = {"workers": prediction.workers, "nodes": prediction.nodes}
    row |= _named("time{}_s", times) | _named("speedup{}", one.time_s / times)
    if price:
        row |= _named("cost{}", times * price[0] * prediction.workers / 3600) | {"currency": price[1]}
    if other is not None:
        row |= _named("times_as_fast{}", other.draws() / times)
    return row


def _named(name: str, values: Any) -> dict[str, float]:
    found = zip(("", "_low", "_high"), bars(np.asarray(values)), strict=True)
    return {name.format(end): value for end, value in found}


def introduce_schedule(plan: PhasedPlan) -> list[str]:
    """What the schedule is, and what the step times come from."""
    schedule, measured = plan.schedule, plan.model.measured
    whose = "the record's own" if schedule.own else "as asked"
    epochs = f"{plural(schedule.epochs, 'epoch')} of {schedule.train_samples:,} {measured.unit}"
    steps = sum(schedule.steps(number) for number in range(len(schedule.phases)))
    first, *others = introduce_record(plan.model, plan.warnings, plan.request)
    lines = [
        first,
        f'schedule: "{schedule.text}" ({whose}), {epochs}, {steps:,} steps, at most {plural(schedule.parts, "part")}'
        " (--virtual-workers)",
        *others,
    ]
    known = [f"{round(point.samples):,}" for point in measured.fewest()]
    if len(known) > 1:
        between = f"step times are interpolated between {list_words(known)} {measured.unit} per worker, as measured"
        lines.append(f"assumed: {between}")
    else:
        lines.append(
            f"assumed: compute is proportional to the samples per worker, because only {known[0]} were measured; high assumes"
            " that fewer samples take as long"
        )
    return [*lines, *_say_parts(plan)]


def _say_parts(plan: PhasedPlan) -> list[str]:
    """What is assumed about workers with several parts, if the record's workers had one each."""
    measured = plan.model.measured
    several = [f"{row['workers']:,}" for row in plan.rows if row["workers"] < plan.schedule.parts]
    if not several or any(point.workers < measured.virtual_workers for point in measured.points):
        return []
    return [
        f"assumed: several parts of a worker, as with {list_words(several)} workers, take as long as one part of as many"
        " samples: only single parts were measured, and batch norm makes several slower (docs/plan.md)"
    ]


def phased_tables(plan: PhasedPlan) -> str:
    """The run with each number of workers, then its phases with the largest."""
    priced, other = any("cost" in row for row in plan.rows), plan.other
    heads = ["workers", "nodes", "time", "low to high", "speedup", "low to high"] + (["cost"] if priced else [])
    heads += [f"vs {other.record}", "low to high"] if other else []
    cells = []
    for row in plan.rows:
        line = [f"{row['workers']:,}", f"{row['nodes']:,}", time_words(row["time_s"])]
        line.append(f"{time_words(row['time_low_s'])} to {time_words(row['time_high_s'])}")
        line += [number_words(row["speedup"]), range_words(row["speedup_low"], row["speedup_high"])]
        line += [money_words(row["cost"], row["currency"])] if priced else []
        if other:
            line += [number_words(row["times_as_fast"]), range_words(row["times_as_fast_low"], row["times_as_fast_high"])]
        cells.append(line)
    phases = make_table(
        ["epoch", "batch", "parts", "steps", "samples per worker", "step ms", "exposed ms", "waiting ms", "time", "share"],
        [_phase_cells(row) for row in plan.phases],
        left=0,
    )
    most = plan.rows[-1]["workers"]
    return f"{make_table(heads, cells, left=0)}\n\nthe phases with {count_words(most)}:\n{phases}"


def _phase_cells(row: dict[str, Any]) -> list[str]:
    components = row["components_s"]
    cells = [f"{row['start']:g}", f"{row['global_batch']:,}", f"{row['parts']:,}", f"{row['steps']:,}"]
    cells.append(f"{row['samples_per_worker']:,}")
    cells += [number_words(1e3 * each) for each in (row["step_s"], components["communication"], components["waiting"])]
    return [*cells, time_words(row["time_s"]), f"{row['share']:.0%}"]


def conclude_schedule(plan: PhasedPlan) -> list[str]:
    """What the tables mean."""
    lines = [_say_returns(plan), *_say_idle(plan)]
    if plan.other is not None:
        row, other = plan.rows[-1], plan.other
        lines.append(
            f"With {count_words(row['workers'])}: {number_words(row['times_as_fast'])} times as fast as {other.record}"
            f" ({range_words(row['times_as_fast_low'], row['times_as_fast_high'])}), which trained for"
            f" {time_words(other.time_s)} ({other.about})."
        )
    lines.append(
        "Time is training only. The steps, and so the model, are the same with any number of workers; its accuracy is what a"
        f" run with --virtual-workers {plan.schedule.parts} on one worker measures (paceline rehearse)."
    )
    return [*lines, f"({BARS})"]


def _say_returns(plan: PhasedPlan) -> str:
    returns, most = plan.returns, plan.rows[-1]["workers"]
    if returns.stop_at is None:
        return f"Returns continue up to {count_words(most)}, the most that were predicted."
    now, after = returns.next_to
    saved = f"{returns.saved:.0%}" if (returns.saved or 0) > 0 else "none"
    return (
        f"Returns stop at {count_words(now)}: {after:,} save {saved} of the time, because"
        f" {bound_words(returns, plan.model.cluster)}."
    )


def _say_idle(plan: PhasedPlan) -> list[str]:
    """Phases with fewer parts than workers."""
    most, idle = plan.rows[-1]["workers"], [row for row in plan.phases if row["idle_workers"]]
    if not idle:
        return []
    fewest = min(row["parts"] for row in idle)
    share = sum(row["share"] for row in idle)
    gpu = "" if plan.model.measured.device == "CPU" else " Steps of such phases are not captured as CUDA graphs."
    return [
        f"With {count_words(most)}, some idle in phases that take {share:.0%} of the time: these have as few as"
        f" {plural(fewest, 'part')}. A smaller --smallest-part makes more.{gpu}"
    ]


def _say_beyond(model: Model, schedule: Schedule, counts: Sequence[int]) -> list[str]:
    """Steps with fewer or more samples per worker than measured."""
    known = [point.samples for point in model.measured.fewest()]
    used = [phase for phase, sizes in zip(schedule.phases, schedule.sizes, strict=True) if sizes]
    asked = sorted({slowest_samples(phase, phase.global_batch, workers) for phase in used for workers in counts})
    beyond = [each for each in asked if not 0.9 * min(known) <= each <= 1.1 * max(known)]
    if not beyond:
        return []
    measured = " to ".join(f"{round(each):,}" for each in dict.fromkeys((min(known), max(known))))
    few = [each for each in beyond if each < min(known)]
    below = "times below have a wide range" if few else ""
    above = "times above follow a straight line, whose error is not in low to high" if beyond[-1] > max(known) else ""
    fix = " ".join(f"{2 * i}:{each}" for i, each in enumerate(sorted({*few, max(round(known[0]), max(asked))}, reverse=True)))
    return [
        f"{f'{beyond[0]:,} to {beyond[-1]:,}' if len(beyond) > 1 else beyond[0]} samples per worker are beyond the {measured}"
        f" that the record measured: {'; '.join(filter(None, (below, above)))}. To measure them, train on one worker, two"
        f' epochs each (--virtual-workers 1 --batch-schedule "{fix}")'
    ]


def _say_other(model: Model, other: Other | None) -> list[str]:
    """Another device than that of the record."""
    mine = model.measured.device
    if other is None or not mine or not other.device:
        return []
    its = "CPU" if "CPU worker" in other.device else other.device.partition(" x ")[2]
    if its == mine or not its:
        return []
    return [f"{other.record} trained on {its}, but the steps were timed on {mine}: the ratio compares two devices, too"]


def phased_json(plan: PhasedPlan) -> dict[str, Any]:
    """The prediction and what it is based on, as a JSON-able dict."""
    schedule = plan.schedule
    return {
        **as_json_base(plan.request, plan.model),
        "schedule": {
            "batch_schedule": schedule.text,
            "own": schedule.own,
            "virtual_workers": schedule.parts,
            "epochs": schedule.epochs,
            "train_samples": schedule.train_samples,
            "sizes": [[list(each) for each in sizes] for sizes in schedule.sizes],
        },
        "rows": list(plan.rows),
        "phases": list(plan.phases),
        "returns": {**asdict(plan.returns), "most": plan.returns.most},
        "against": None if plan.other is None else asdict(plan.other),
        "warnings": list(plan.warnings),
        "sentences": conclude_schedule(plan),
    }
