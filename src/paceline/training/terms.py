"""Work out a run's contract: its steps, learning rates and workers, from the configuration, the world and the data."""

from typing import Any

from paceline.config import Config
from paceline.contract import Contract
from paceline.core.deal import check_parts, count_micros
from paceline.core.sampler import Sampler
from paceline.core.schedules import Schedule, make_schedule
from paceline.dist.world import World, describe_devices
from paceline.errors import UsageError
from paceline.output import plural
from paceline.settings import write_setting


def make_steps(
    config: Config, world: World, samples: int, weights: Any = None, dealt: bool = False
) -> tuple[Sampler, Schedule]:
    """The steps and learning rates that follow from the configuration, the number of workers and the number of samples."""
    parts = config.virtual_workers or world.size
    check_parts(parts, world.size)
    check_comparable(config, parts)
    global_batch = config.global_batch or config.reference_batch * parts
    sampler = Sampler(samples, global_batch, parts, config.seed, weights, dealt)
    schedule = make_schedule(
        config,
        k=global_batch / config.reference_batch,
        steps_per_epoch=sampler.steps,
        total_steps=count_steps(config.epochs, config.max_steps, sampler.steps),
    )
    return sampler, schedule


def count_steps(epochs: int, max_steps: int, steps_per_epoch: int) -> int:
    """The steps of a whole run."""
    total = epochs * steps_per_epoch
    return min(total, max_steps or total)


def describe_batch(sampler: Sampler, schedule: Schedule) -> tuple[str, ...]:
    """Notes about a global batch or a drop of the learning rate that is probably not what the user meant."""
    notes: tuple[str, ...] = ()
    batch, samples, parts = sampler.global_batch, sampler.samples, sampler.parts
    if batch > samples:
        each = f" (each part has {plural(samples // parts, 'sample')}, not {batch // parts:,})" if parts > 1 else ""
        notes += (
            f"the global batch of {batch:,} is larger than the {plural(samples, 'training sample')}: every epoch is a single"
            f" step of {samples:,}{each}, with a learning rate for {batch:,}; use --global-batch {samples // parts * parts} or"
            " less",
        )
    late = [at for at in schedule.step_at if at * schedule.steps_per_epoch >= schedule.total_steps]
    if schedule.shape == "step" and schedule.drops_by_epoch and late:
        ends = schedule.total_steps / schedule.steps_per_epoch
        notes += (f"--step-at {late[0]:g}: the run ends after epoch {ends:g}, before the learning rate drops there",)
    return notes


def check_comparable(config: Config, parts: int) -> None:
    """A UsageError where an option needs several parts per step and there is only one."""
    if parts == 1 and (config.measure_noise or config.lr_rule == "adascale"):
        asks = "--measure-noise" if config.measure_noise else "--lr-rule adascale"
        raise UsageError(f"{asks} compares the gradients of parts, but there is only one part: use --virtual-workers 2 or more")
    if parts == 1 and config.local_steps:
        raise UsageError("--local-steps needs at least two virtual workers: give --virtual-workers, or more --workers")


def make_contract(config: Config, world: World, sampler: Sampler, schedule: Schedule, about: dict[str, Any]) -> Contract:
    """The contract. `about` holds the fields that the task, the data and the record supply: its own optimizer, too."""
    warmup = f"over {plural(schedule.warmup_steps, 'step')} from {schedule.warmup_from:.3g} of the peak, by {schedule.by}"
    if schedule.shape == "one-cycle":
        rise = plural(round(schedule.peak_at * schedule.total_steps), "step")
        warmup = f"over {rise} from {schedule.warmup_from:.3g} of the peak"
    elif not schedule.warmup_steps:
        warmup = "none"
    fields = {
        "workers": world.size,
        "virtual_workers": sampler.parts,
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
        "steps_per_epoch": sampler.steps,
        "epochs": config.epochs,
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
