"""Work out a run's contract: its steps, learning rates and workers, from the configuration, the world and the data."""

from typing import Any

from paceline.config import Config
from paceline.contract import Contract
from paceline.core.deal import check_parts, count_micros, count_parts, deal_all
from paceline.core.sampler import Sampler, check_divides
from paceline.core.schedules import Schedule, make_schedule
from paceline.dist.world import World, describe_devices
from paceline.errors import UsageError
from paceline.joins import Spot, check_fits, count_workers, describe_schedule, most_workers
from paceline.joins import is_auto as has_auto_workers
from paceline.output import plural
from paceline.phases import (
    AUTO,
    Phase,
    check_largest,
    check_starts,
    is_auto,
    largest_batch,
    make_phases,
    parse_batch_schedule,
    phases_of_auto,
    place_of,
)
from paceline.settings import write_setting
from paceline.training.grouping import measures_noise


def make_steps(
    config: Config, world: World, samples: int, weights: Any = None, dealt: bool = False
) -> tuple[Sampler, Schedule]:
    """The steps and learning rates that follow from the configuration, the number of workers and the number of samples."""
    global_batch, parts, phases = settle_batch(config, world.size)
    sampler = Sampler(samples, global_batch, parts, config.seed, weights, dealt, phases)
    return sampler, make_schedule(config, sampler)


def settle_batch(config: Config, workers: int) -> tuple[int, int, tuple[Phase, ...]]:
    """The largest global batch, V, and the phases of `--batch-schedule`: for auto the first one, without a schedule none.

    Raises a UsageError for options that no data could be trained with. A study calls this for each arm before its first run.
    """
    parts = config.virtual_workers or most_workers(config.workers_schedule) or workers
    check_parts(parts, workers)
    check_fits(config.workers_schedule, parts, config.epochs)
    if has_auto_workers(config.workers_schedule) and not config.batch_schedule:
        raise UsageError("--workers auto follows --batch-schedule, which is not given: give it, or a number of workers")
    _check_comparable(config, parts)
    pairs = parse_batch_schedule(config.batch_schedule)
    check_largest(pairs, config.global_batch)
    global_batch = config.global_batch or largest_batch(pairs, config.reference_batch * parts)
    check_divides(global_batch, parts)
    check_starts(pairs, config.epochs)
    if pairs or not config.batch_schedule:
        return global_batch, parts, make_phases(pairs, parts, config.smallest_part)
    return global_batch, parts, phases_of_auto(config.batch_schedule, global_batch, parts, config.smallest_part)[:1]


def describe_phases(
    config: Config, world: World, sampler: Sampler, schedule: Schedule, at_once: int = 1
) -> tuple[dict[str, Any], ...]:
    """What the contract says about each phase. `at_once`: parts in a pass; exact sums deal whole groups of that many."""
    if not config.batch_schedule:
        return ()

    def slowest(phase: Phase) -> int:
        workers = world.size
        if config.workers_schedule:
            workers = count_workers(config.workers_schedule, spot_of(sampler, phase, place_of(phase.start, sampler.samples)))
        return max(_counts(config, phase, workers, at_once)) * phase.part_batch

    return tuple(
        {
            "start": phase.start,
            "global_batch": phase.global_batch,
            "virtual_workers": phase.parts,
            "part_batch": phase.part_batch,
            "steps": steps,
            "peak_lr": schedule.peak_lr * (phase.global_batch / sampler.global_batch) ** config.batch_lr_power,
            "samples_per_worker": slowest(phase),
        }
        for phase, steps in zip(sampler.phases, sampler.count_by_phase(schedule.total_steps), strict=True)
    )


def spot_of(sampler: Sampler, phase: Phase, done: int) -> Spot:
    """The place after this many samples, where this is the phase of the next step."""
    return Spot(
        done=done,
        samples=sampler.samples,
        global_batch=phase.global_batch,
        parts=phase.parts,
        largest_batch=sampler.global_batch,
    )


def describe_batch(config: Config, sampler: Sampler, schedule: Schedule) -> tuple[str, ...]:
    """Notes about a global batch or a drop of the learning rate that is probably not what the user meant."""
    notes: tuple[str, ...] = ()
    batch, samples, parts = sampler.global_batch, sampler.samples, sampler.parts
    if batch > samples:
        each = f" (each part has {plural(samples // parts, 'sample')}, not {batch // parts:,})" if parts > 1 else ""
        where = "while it is used, every epoch" if sampler.grows else "every epoch"
        hint = "" if sampler.grows else f"; use --global-batch {samples // parts * parts} or less"
        notes += (
            f"the global batch of {batch:,} is larger than the {plural(samples, 'training sample')}: {where} is a single step"
            f" of {samples:,}{each}, with a learning rate for {batch:,}{hint}",
        )
    if is_auto(config.batch_schedule) and not sampler.grows:
        notes += (
            f"--batch-schedule {config.batch_schedule} starts at the global batch of {batch:,}, so the batch does not grow:"
            f" {_how_to_start_lower(config, batch, parts)}",
        )
    for phase, steps in zip(sampler.phases, sampler.count_by_phase(schedule.total_steps), strict=True):
        if not steps:
            notes += (
                f"no step has the global batch of {phase.global_batch:,} from epoch {phase.start:g} on: the run ends before it,"
                " or its epoch has less than half of such a batch left",
            )
    ends = sampler.samples_before(schedule.total_steps) / samples
    late = [at for at in schedule.step_at if at >= ends]
    if schedule.shape == "step" and schedule.drops_by_epoch and late:
        notes += (f"--step-at {late[0]:g}: the run ends after epoch {ends:g}, before the learning rate drops there",)
    return notes


def _how_to_start_lower(config: Config, batch: int, parts: int) -> str:
    """What lets `--batch-schedule auto` begin below the global batch."""
    larger = "use a larger --global-batch"
    if config.batch_schedule != AUTO:
        return f"start lower, or {larger}"
    if len(phases_of_auto(AUTO, batch, parts, 1)) > 1:
        return f"{larger}, or a smaller --smallest-part than {config.smallest_part}"
    return f"{larger}, whose half has parts of equal size"


def describe_idle(config: Config, sampler: Sampler, schedule: Schedule, workers: int, at_once: int = 1) -> tuple[str, ...]:
    """A note if some workers have no part in steps of some batches of a schedule."""
    used = [
        (phase, steps, max(counts), min(counts))
        for phase, steps in zip(sampler.phases, sampler.count_by_phase(schedule.total_steps), strict=True)
        if steps and (counts := _counts(config, phase, workers, at_once))
    ]
    idle = [phase for phase, _, _, fewest in used if not fewest]
    if not idle:
        return ()
    alone = sum(steps * phase.global_batch for phase, steps, _, _ in used)
    slowest = sum(steps * most * phase.part_batch for phase, steps, most, _ in used)
    few, remedy = f"has only {plural(idle[0].parts, 'part')}", "--smallest-part makes more parts, but changes the model"
    if idle[0].parts >= workers:
        few = f"has only {plural(-(-idle[0].parts // at_once), 'group')} of parts that run at once"
        remedy = "--parts-at-once makes more"
    return (
        f"{workers:,} workers are at most {_times(alone / slowest)} times as fast as one: the batch of"
        f" {idle[0].global_batch:,} {few}; a smaller {remedy}",
    )


def _counts(config: Config, phase: Phase, workers: int, at_once: int) -> list[int]:
    """How many parts each worker has in a step of this phase."""
    return count_parts(deal_all(phase.parts, workers, at_once, config.reduce == "exact", measures_noise(config)))


def _times(ratio: float) -> str:
    return f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"


def _check_comparable(config: Config, parts: int) -> None:
    """A UsageError where an option needs several parts per step and there is only one."""
    if parts == 1 and (config.measure_noise or config.lr_rule == "adascale"):
        asks = "--measure-noise" if config.measure_noise else "--lr-rule adascale"
        raise UsageError(f"{asks} compares the gradients of parts, but there is only one part: use --virtual-workers 2 or more")
    if config.batch_schedule and (config.local_steps or config.lr_rule == "adascale"):
        option = "--local-steps" if config.local_steps else "--lr-rule adascale"
        raise UsageError(f"{option} needs the same global batch in all steps: leave it out, or leave out --batch-schedule")
    if parts == 1 and config.local_steps:
        raise UsageError("--local-steps needs at least two virtual workers: give --virtual-workers, or more --workers")


def make_contract(
    config: Config, world: World, sampler: Sampler, schedule: Schedule, about: dict[str, Any], at_once: int = 1
) -> Contract:
    """The contract. `about` holds the fields that the task, the data and the record supply: its own optimizer, too."""
    rising = schedule.count_rising()
    by = "" if schedule.shape == "one-cycle" else f", by {schedule.by}"
    length = f"{'at most ' if schedule.samples and not schedule.warmup_steps else ''}{plural(rising, 'step')}"
    warmup = f"over {length} from {schedule.warmup_from:.3g} of the peak{by}" if rising or not by else "none"
    fields = {
        "workers": world.size,
        "virtual_workers": sampler.parts,
        "joins": describe_schedule(config.workers_schedule) if config.workers_schedule else "",
        "reduce": config.reduce,
        "nodes": world.nodes,
        "launcher": {"alone": "in this process", "paceline": "started here"}.get(world.launcher, f"by {world.launcher}"),
        "devices": describe_devices(world),
        "backend": world.backend,
        "precision": config.precision,
        "reference_batch": config.reference_batch,
        "base_lr": config.base_lr,
        "global_batch": sampler.global_batch,
        "part_batch": sampler.global_batch // sampler.parts,
        "accumulate": count_micros(config.accumulate, sampler.global_batch // sampler.parts),
        "k": sampler.global_batch / config.reference_batch,
        "lr_rule": config.lr_rule,
        "peak_lr": schedule.peak_lr,
        "optimizer": describe_update(config),
        "schedule": f"{config.schedule} by {schedule.by}{_drop_words(schedule)}",
        "warmup": warmup,
        "phases": describe_phases(config, world, sampler, schedule, at_once),
        "steps_per_epoch": schedule.steps_per_epoch,
        "epochs": config.epochs,
        "epoch_samples": 0 if sampler.weights is None else sampler.samples,
        "total_steps": schedule.total_steps,
        "seed": config.seed,
        "settings": " ".join(write_setting(key, value) for key, value in config.set.items()),
    }
    return Contract(**{**fields, **about})


def _drop_words(schedule: Schedule) -> str:
    if schedule.shape != "step":
        return ""
    places = [f"{at:g}" if schedule.drops_by_epoch else f"{at:.3g}" for at in schedule.step_at]
    where = f"after epoch {', '.join(places)}" if schedule.drops_by_epoch else f"at {', '.join(places)} of the run"
    return f" (times {schedule.step_factor:g} {where})"


def describe_update(config: Config, own: str = "") -> str:
    """The optimizer and what else a step's update does. `own` describes a task's own optimizer."""
    if own:
        words = own
    elif config.optimizer == "sgd":
        momentum = f"{'Nesterov' if config.nesterov else 'momentum'} {config.momentum:g}" if config.momentum else "plain"
        words = f"sgd {momentum}"
    else:
        words = config.optimizer + _settings(config)
    extras = {
        "clipped to norm": config.clip_norm,
        "sharpness-aware within": config.sam_rho,
        "gradient noise": config.gradient_noise,
        "weights averaged by": config.ema,
    }
    said = "".join(f", {what} {value:g}" for what, value in extras.items() if value)
    if config.local_steps:
        local = plural(config.local_steps, "local step")
        said += f", {local} between averagings after {config.local_after:.0%} of the run"
    return f"{words}{said}" if own else f"{words}, weight decay {config.weight_decay:g}{said}"


def _settings(config: Config) -> str:
    """The optimizer's settings besides its learning rate."""
    match config.optimizer:
        case "lars":
            return f" momentum {config.momentum:g}, trust {config.trust_coefficient:g}"
        case "muon":
            kept = ", fixed norm" if config.fixed_norm else ""
            rest = config.base_lr if config.rest_lr is None else config.rest_lr
            return f" momentum {config.momentum:g}{kept}, {config.rest} at base lr {rest:g} for the rest"
        case "novograd":
            averaged = ", gradients averaged" if config.grad_averaging else ""
            return f" betas {config.beta1:g} and {config.beta2:g}{averaged}"
        case "adamw" | "lamb":
            return f" betas {config.beta1:g} and {config.beta2:g}"
    return ""  # one that the task's file added to the registry
