"""The contract: what a run is about to do, worked out once, printed before the first step and kept in the record."""

from dataclasses import asdict, dataclass
from typing import Any

from paceline.config import Config
from paceline.core.sampler import Sampler
from paceline.core.schedules import Schedule, make_schedule
from paceline.dist.world import World, describe_devices
from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Everything that follows from the configuration, the world and the data."""

    task: str
    unit: str
    """What samples are called: images, windows."""
    model: str
    parameters: int
    data: str
    train_samples: int
    validation_samples: int
    workers: int
    virtual_workers: int
    parts: str
    """How a worker runs its parts: together, in turn, and why."""
    reduce: str
    nodes: int
    launcher: str
    devices: str
    backend: str
    precision: str
    reference_batch: int
    base_lr: float
    global_batch: int
    part_batch: int
    accumulate: int
    k: float
    lr_rule: str
    peak_lr: float
    optimizer: str
    schedule: str
    warmup: str
    steps_per_epoch: int
    epochs: int
    total_steps: int
    seed: int
    loader: str
    record: str
    resumed_at: int | None = None
    """The step a resumed run goes on from."""

    def lines(self) -> list[tuple[str, str]]:
        """(what, how much) for the eye; of a resumed run only what may have changed."""
        parts = "1 part" if self.virtual_workers == 1 else f"{self.virtual_workers} parts"
        gain = f", times a gain from 1 to {max(1.0, self.k):g}" if self.lr_rule == "adascale" else ""
        accumulate = f", each in {self.accumulate} micro-batches" if self.accumulate > 1 else ""
        lines = [
            ("task", f"{self.task}: {self.train_samples:,} training and {self.validation_samples:,} validation samples"),
            ("data", f"{self.data} ({self.loader})"),
            ("model", f"{self.model}, {self.parameters:,} parameters"),
            ("reference", f"batch {self.reference_batch} at lr {self.base_lr:g}"),
            ("workers", f"P = {self.workers} (V = {parts}, {self.parts}), {self.launcher}, {self.nodes} node(s)"),
            ("global batch", f"{self.global_batch} = {parts} of {self.part_batch}{accumulate}"),
            ("scale", f"k = {self.k:g}, rule {self.lr_rule}: peak lr {self.peak_lr:g}{gain}"),
            ("optimizer", f"{self.optimizer}, {self.schedule}, warm-up {self.warmup}"),
            ("steps", f"{self.steps_per_epoch} an epoch, {self.epochs} epochs, {self.total_steps:,} in all"),
            ("device", f"{self.devices}, backend {self.backend}, {self.precision}, reduce {self.reduce}"),
            ("seed", str(self.seed)),
            ("record", self.record),
        ]
        if self.resumed_at is None:
            return lines
        resumed = f"{self.record}, from step {self.resumed_at} of {self.total_steps:,}"
        return [("resumed", resumed), *(line for line in lines if line[0] in ("workers", "device"))]

    def as_dict(self) -> dict[str, Any]:
        """For the record."""
        return asdict(self)


def plan_run(config: Config, world: World, samples: int) -> tuple[Sampler, Schedule]:
    """The steps and the learning rates that follow from the configuration, the number of workers and of samples."""
    parts = config.virtual_workers or world.size
    check_parts(parts, world.size)
    check_comparable(config, parts)
    global_batch = config.global_batch or config.reference_batch * parts
    sampler = Sampler(samples, global_batch, parts, config.seed)
    total = config.epochs * sampler.steps
    schedule = make_schedule(
        config,
        k=global_batch / config.reference_batch,
        steps_per_epoch=sampler.steps,
        total_steps=min(total, config.max_steps or total),
    )
    return sampler, schedule


def check_parts(parts: int, workers: int) -> None:
    """Every worker computes at least one part."""
    if workers > parts:
        raise UsageError(
            f"{workers} workers for {parts} virtual worker(s): use at most {parts} workers, or more virtual workers"
        )


def check_comparable(config: Config, parts: int) -> None:
    """A UsageError where an option needs several parts a step and there is one."""
    if parts == 1 and (config.measure_noise or config.lr_rule == "adascale"):
        asks = "--measure-noise" if config.measure_noise else "--lr-rule adascale"
        raise UsageError(f"{asks} compares the gradients of parts, and there is one part: use --virtual-workers 2 or more")
    if parts == 1 and config.local_steps:
        raise UsageError("--local-steps needs two virtual workers at least: give --virtual-workers, or more --workers")


def make_contract(config: Config, world: World, sampler: Sampler, schedule: Schedule, about: dict[str, Any]) -> Contract:
    """The contract; `about` holds what the task, the data and the record say of themselves."""
    warmup = f"over {schedule.warmup_steps} steps from {schedule.warmup_from:.3g} of the peak, by {schedule.by}"
    if schedule.shape == "one-cycle":
        warmup = f"over {round(schedule.peak_at * schedule.total_steps)} steps from {schedule.warmup_from:.3g} of the peak"
    elif not schedule.warmup_steps:
        warmup = "none"
    return Contract(
        workers=world.size,
        virtual_workers=sampler.parts,
        reduce=config.reduce,
        nodes=world.nodes,
        launcher={"alone": "in this process", "paceline": "started here"}.get(world.launcher, f"by {world.launcher}"),
        devices=describe_devices(world),
        backend=world.backend,
        precision=config.precision,
        reference_batch=config.reference_batch,
        base_lr=config.base_lr,
        global_batch=sampler.global_batch,
        part_batch=sampler.global_batch // sampler.parts,
        accumulate=config.accumulate,
        k=sampler.global_batch / config.reference_batch,
        lr_rule=config.lr_rule,
        peak_lr=schedule.peak_lr,
        optimizer=_optimizer_words(config),
        schedule=f"{config.schedule} by {config.schedule_by}",
        warmup=warmup,
        steps_per_epoch=sampler.steps,
        epochs=config.epochs,
        total_steps=schedule.total_steps,
        seed=config.seed,
        **about,
    )


def _optimizer_words(config: Config) -> str:
    if config.optimizer == "sgd":
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
        said += f", from {config.local_after:.0%} of the run on {config.local_steps} local steps between averagings"
    return f"{words}, weight decay {config.weight_decay:g}{said}"


def _settings(config: Config) -> str:
    """What the optimizer was told beside its learning rate."""
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
    return ""  # a task's own
