"""The options of a run: one frozen dataclass that flags, TOML recipes and the record all come from.

A field is a flag (`base_lr` is `--base-lr`, see `flags.py`), a key in TOML (`toml.py`) and a line of the record's
`config.toml`; the text under it is its help. Its roles and bounds are in the field's metadata (`options.py`). Nothing here
imports torch, so that `paceline --help` answers at once.
"""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from functools import cache, partial
from typing import Any, Literal

from paceline.errors import UsageError
from paceline.hints import unknown_key
from paceline.joins import AUTO, parse_workers_schedule
from paceline.options import RemembersGiven, Role, convert, copied, option, option_of
from paceline.phases import largest_batch, parse_batch_schedule
from paceline.settings import Settings, make_settings
from paceline.values import check_record_name, parse_every, parse_milestones
from paceline.values import flag as flag

_place = partial(option, "where it runs")
_data = partial(option, "model and data")
_batch = partial(option, "batch and optimizer")
_schedule = partial(option, "learning-rate schedule")
_run = partial(option, "length, speed and checks of the run")
_record = partial(option, "the record")


@dataclass(frozen=True, kw_only=True)
class Config(RemembersGiven):
    """The options of a run, as the user means them; the contract shows what follows from them.

    A Config remembers which options it was given (`given`). `paceline.train(task, Config(epochs=3))` changes the epochs and
    nothing else: all other options come from the task's defaults, and only then from the defaults here. `dataclasses.replace`
    keeps this, but counts only values that it changes; two Configs with equal options are equal, however they were made.
    """

    workers: int | None = _place(None, Role.TIMING, Role.LAUNCH, Role.PLACE, Role.COMMON, at_least=1, at_most=4096)
    """Workers to start on this node, each on its own GPU, or on the CPU if there is no GPU (default 1). auto: more of them as
    --batch-schedule grows the batch. Not needed under torchrun, srun or mpirun, which start the workers themselves."""
    workers_schedule: str = _place(
        "",
        Role.TIMING,
        Role.LAUNCH,
        Role.PLACE,
        Role.WHOLE_RUN,
        Role.BY_SIZE,
        parse=parse_workers_schedule,
        metavar="EPOCH:WORKERS...",
    )
    """Let workers join during the run: "0:1 1:2 2.5:4" means 2 workers from epoch 1 on. auto, the same as --workers auto: as
    many as keep the samples per worker about constant, up to one per GPU, or per core without GPUs (auto:4: up to 4). Only on
    one node."""
    virtual_workers: int | None = _place(None, Role.MODEL, Role.LAUNCH, Role.STATE, Role.SEVERAL_PARTS, Role.COMMON, at_least=1)
    """V: split every step into V parts, each computed as one worker would (default: one part per worker; with --batch-schedule
    small batches may have fewer). The model depends on V, not on how many workers, from 1 to V, compute it."""
    parts_at_once: int = _place(0, Role.ROUNDING, at_least=0)
    """Parts that a worker runs in one forward pass, with separate batch-norm statistics for each (0: all its parts, or one
    after the other if the model needs that; 1 uses the least memory)."""
    reduce: Literal["fast", "exact"] = _place("fast", Role.MODEL, Role.COMMON)
    """fast: DDP's overlapped averaging. exact: sums that do not depend on their order, so that the model has the same bits on
    any number of workers."""
    nodes: int = _place(1, Role.OPERATION, Role.LAUNCH, Role.PLACE, Role.START, Role.STUDY, at_least=1)
    """Nodes in the run. Start the same command on each node, with its own --node-id."""
    node_id: int = _place(0, Role.OPERATION, Role.LAUNCH, Role.PLACE, Role.START, Role.STUDY, at_least=0)
    """The number of this node, starting at 0."""
    rendezvous: str = _place("", Role.OPERATION, Role.LAUNCH, Role.PLACE, Role.START, Role.STUDY, metavar="HOST:PORT")
    """Address on node 0 where the nodes meet (default: $MASTER_ADDR:$MASTER_PORT). Needed with --nodes."""
    backend: Literal["auto", "nccl", "gloo", "mpi"] = _place("auto", Role.OPERATION, Role.LAUNCH, Role.PLACE, Role.START)
    """What carries the messages between workers: nccl for GPUs, gloo for CPUs, mpi if this torch has it."""
    timeout_s: float = _place(600.0, Role.OPERATION, Role.LAUNCH, at_least=1, at_most=10_000_000)  # four months
    """Seconds without progress after which a worker counts as hung."""
    max_restarts: int = _place(0, Role.OPERATION, Role.LAUNCH, Role.START, Role.WHOLE_RUN, at_least=0)
    """How many times to restart from the last checkpoint when a worker fails."""
    min_workers: int | None = _place(None, Role.OPERATION, Role.LAUNCH, Role.START, Role.WHOLE_RUN, at_least=1)
    """Restart on fewer workers, but no fewer than this, when a device is lost for good (default: never on fewer)."""
    grace_s: float = _place(20.0, Role.OPERATION, Role.LAUNCH, at_least=0, at_most=10_000_000)
    """Seconds after SIGTERM or Ctrl-C to finish the step and write a checkpoint."""

    model: str = _data("", Role.MODEL, Role.STATE, Role.COMMON, metavar="NAME")
    """NAME or NAME:key=value,key=value: linear, mlp, cnn, resnet, wide_resnet, course_wide_resnet (default: the task's)."""
    data_dir: str = _data("", Role.TIMING, Role.IMAGES, Role.COMMON)
    """Folder to search for the data first."""
    init_from: str = _data("", Role.MODEL, metavar="FILE|RECORD")
    """Start from these weights instead of random ones: a record, a .safetensors file or a torch file (.pt, .pth). Names and
    shapes that do not match are listed."""
    set: Settings = _data(Settings(), Role.MODEL, Role.COMMON, metavar="KEY=VALUE")  # noqa: RUF009 (it cannot change)
    """A value for a parameter of task() in your task file, such as --set width=64; repeatable."""
    train_samples: int = _data(0, Role.MODEL, Role.STATE, Role.BY_SIZE, at_least=0)
    """Train on N samples only (0: all)."""
    subset: Literal["first", "random"] = _data("first", Role.MODEL, Role.STATE, Role.BY_SIZE)
    """Which samples --train-samples takes: the first ones, or random ones that follow from --seed, in proportion to labels if
    these are known. A smaller random subset is part of every larger one."""
    pixels: Literal["standard", "unit"] = _data("standard", Role.MODEL, Role.IMAGES)
    """Scale pixels to mean 0 and standard deviation 1 (standard) or to [0, 1] (unit)."""
    crop: int = _data(0, Role.MODEL, Role.IMAGES, Role.AUGMENT, at_least=0)
    """Pad each side by N pixels, then crop at random (0: off)."""
    flip: bool = _data(False, Role.MODEL, Role.IMAGES, Role.AUGMENT)
    """Flip half of the images left to right; the built-in tasks do so by default."""
    erase: float = _data(0.0, Role.MODEL, Role.IMAGES, Role.AUGMENT, at_least=0, at_most=1)
    """Probability of erasing a random rectangle of an image."""
    loader: Literal["auto", "resident", "streaming"] = _data("auto", Role.TIMING)
    """Keep the data set on the worker's device (resident) or stream it through torch's DataLoader (streaming). auto: resident
    if the data is Arrays that fit."""
    loader_workers: int = _data(2, Role.OPERATION, at_least=0, at_most=1024)
    """DataLoader processes per worker when streaming."""
    prefetch: int = _data(2, Role.OPERATION, at_least=1, at_most=10_000)
    """Batches that each loader process makes ahead."""
    pin_memory: Literal["auto", "on", "off"] = _data("auto", Role.OPERATION)
    """Make batches in pinned memory, from which a GPU copies faster. auto and on: for a GPU; off: never."""

    reference_batch: int = _batch(128, Role.MODEL, Role.METHOD, Role.COMMON, at_least=1)
    """The batch on one worker for which base_lr is known to work."""
    global_batch: int | None = _batch(None, Role.MODEL, Role.LAUNCH, Role.STATE, Role.SEVERAL_PARTS, Role.COMMON, at_least=1)
    """Samples per step over all workers (default: reference_batch for each virtual worker). With --batch-schedule: the largest
    batch."""
    batch_schedule: str = _batch(
        "",
        Role.MODEL,
        Role.STATE,
        Role.METHOD,
        Role.SEVERAL_PARTS,
        Role.COMMON,
        Role.BY_SIZE,
        parse=parse_batch_schedule,
        metavar="EPOCH:BATCH...",
    )
    """Change the global batch during the run: "0:1024 1:2048 2.5:4096" means 2,048 from epoch 1 on. auto: start at
    --global-batch / 32 (auto:512: at 512) and double the batch, up to --global-batch, as the measured noise scale grows. none:
    a constant batch."""
    smallest_part: int = _batch(32, Role.MODEL, Role.STATE, Role.METHOD, at_least=1)
    """With --batch-schedule: phases whose V parts would have fewer samples than this are cut into fewer parts."""
    batch_lr_power: float = _batch(0.25, Role.MODEL, Role.METHOD, at_least=0, at_most=1)
    """With --batch-schedule: the learning rate in a phase is multiplied by (its batch / the largest batch) to this power."""
    batch_noise_ratio: float | None = _batch(None, Role.MODEL, Role.METHOD, Role.BY_SIZE, more_than=0)
    """With --batch-schedule auto: the batch doubles when the noise scale is more than this many times the batch (default 0.25
    for muon, which makes good use of large batches, and 2 for all others)."""
    accumulate: int = _batch(1, Role.MODEL, Role.METHOD, at_least=1)
    """Split each part of a step into N micro-batches (less memory, same step)."""
    optimizer: str = _batch("sgd", Role.MODEL, Role.STATE, Role.METHOD, Role.COMMON, metavar="NAME")
    """sgd, adamw, lars, lamb, novograd, muon, or own: the task's own optimizer, the default if it has one."""
    base_lr: float = _batch(0.05, Role.MODEL, Role.METHOD, Role.OPTIMIZER, Role.COMMON, more_than=0)
    """The learning rate at reference_batch."""
    lr_rule: Literal["linear", "sqrt", "none", "adascale"] = _batch("linear", Role.MODEL, Role.METHOD)
    """How the learning rate grows with k = global_batch / reference_batch. adascale: by a gain between 1 and k that each step
    computes from the noise in the gradients of its parts."""
    momentum: float = _batch(0.9, Role.MODEL, Role.METHOD, Role.OPTIMIZER, at_least=0, at_most=1)
    """Momentum of sgd, lars and muon."""
    nesterov: bool = _batch(True, Role.MODEL, Role.METHOD, Role.OPTIMIZER)
    """Use Nesterov momentum (sgd, muon)."""
    beta1: float | None = _batch(None, Role.MODEL, Role.METHOD, Role.OPTIMIZER, at_least=0, less_than=1)
    """First decay rate of adamw and lamb (default 0.9) and of novograd (default 0.95)."""
    beta2: float | None = _batch(None, Role.MODEL, Role.METHOD, Role.OPTIMIZER, at_least=0, less_than=1)
    """Second decay rate of adamw and lamb (default 0.999) and of novograd (default 0.98; 0 only normalizes the gradient)."""
    grad_averaging: bool = _batch(False, Role.MODEL, Role.METHOD, Role.OPTIMIZER)
    """novograd: average gradients into the momentum with weight 1 - beta1 instead of adding them."""
    trust_coefficient: float = _batch(0.001, Role.MODEL, Role.METHOD, Role.OPTIMIZER, at_least=0)
    """lars: how far a step may move a layer, as a fraction of the layer's norm, at a learning rate of 1."""
    adapt_all: bool = _batch(False, Role.MODEL, Role.METHOD, Role.OPTIMIZER)
    """lars, lamb: also scale the steps of norm layers and biases by their own norms."""
    rest: Literal["sgd", "adamw"] = _batch("sgd", Role.MODEL, Role.STATE, Role.METHOD, Role.OPTIMIZER)
    """muon: the optimizer of all parameters that are not hidden matrices: norm layers, biases, embeddings, the last layer."""
    rest_lr: float | None = _batch(None, Role.MODEL, Role.METHOD, Role.OPTIMIZER, at_least=0)
    """muon: the learning rate of these parameters at reference_batch (default: base_lr)."""
    fixed_norm: bool = _batch(False, Role.MODEL, Role.METHOD, Role.OPTIMIZER)
    """muon: rescale every matrix to the norm sqrt(rows) after each step."""
    sam_rho: float = _batch(0.0, Role.MODEL, Role.METHOD, at_least=0)
    """Sharpness-aware steps: take each part's gradient at this distance uphill from the weights (0: off; a step costs twice as
    much)."""
    weight_decay: float = _batch(5e-4, Role.MODEL, Role.METHOD, Role.OPTIMIZER, at_least=0)
    """Weight decay. Norm layers and biases have none unless --decay-all."""
    decay_all: bool = _batch(False, Role.MODEL, Role.METHOD, Role.OPTIMIZER)
    """Also decay norm layers and biases."""
    label_smoothing: float = _batch(0.0, Role.MODEL, Role.METHOD, Role.IMAGES, at_least=0, at_most=1)
    """Label smoothing of the training loss."""
    clip_norm: float = _batch(0.0, Role.MODEL, Role.METHOD, at_least=0)
    """Clip the gradient of the whole step to this norm (0: off)."""
    gradient_noise: float = _batch(0.0, Role.MODEL, Role.METHOD, at_least=0)
    """Add noise of variance X / (1 + step)^0.55 to every step's gradient, the same on all workers (0: off)."""
    norm_part: int = _batch(0, Role.MODEL, Role.METHOD, at_least=0)
    """Batch norm over groups of N samples, in any model ("ghost" batch norm; 0: over each whole part)."""
    ema: float = _batch(0.0, Role.MODEL, Role.METHOD, at_least=0, less_than=1)
    """Keep a moving average of the weights with this decay per step (with --batch-schedule: per largest batch). The average is
    validated and saved, with batch-norm statistics of its own (0: off)."""
    local_steps: int = _batch(0, Role.MODEL, Role.METHOD, Role.SEVERAL_PARTS, at_least=0)
    """Post-local SGD: late in the run, each part trains by itself for N steps between averagings (0: off)."""
    local_after: float = _batch(0.5, Role.MODEL, Role.METHOD, at_least=0, at_most=1)
    """When the local steps begin, as a fraction of the run."""
    measure_noise: bool = _batch(False, Role.MODEL, Role.SEVERAL_PARTS)
    """Measure the gradient noise scale from the parts: the global batch beyond which more workers stop paying off."""

    schedule: Literal["constant", "linear", "cosine", "one-cycle", "step", "own"] = _schedule(
        "one-cycle", Role.MODEL, Role.METHOD, Role.COMMON
    )
    """The learning rate after warm-up: constant, falling to 0 (linear, cosine), up and down again (one-cycle), dropping at
    --step-at (step), or the task's own schedule (own, the default if it has one). The default of a task with only its own
    optimizer is constant."""
    schedule_by: Literal["auto", "step", "epoch"] = _schedule("auto", Role.MODEL, Role.METHOD)
    """Change the learning rate at every step or once per epoch. auto: at every step. A torch scheduler changes it once per
    epoch, unless it is made for a number of steps."""
    warmup_epochs: float = _schedule(0.0, Role.MODEL, Role.METHOD, at_least=0)
    """Warm up over X epochs."""
    warmup_steps: int = _schedule(0, Role.MODEL, Role.METHOD, at_least=0)
    """Warm up over N steps."""
    warmup_from: float | None = _schedule(None, Role.MODEL, Role.METHOD, at_least=0)
    """Where warm-up starts, as a fraction of the peak (default 1/k: at base_lr under the linear rule)."""
    peak_at: float = _schedule(0.3, Role.MODEL, Role.METHOD, at_least=0, at_most=1)
    """Where one-cycle peaks, as a fraction of the run."""
    step_at: str = _schedule("0.5,0.75", Role.MODEL, Role.METHOD, parse=parse_milestones, metavar="X,X")
    """Where the step schedule drops: fractions of the run (0.5,0.75), or epochs (30,60) if the numbers are 1 or more."""
    step_factor: float = _schedule(0.1, Role.MODEL, Role.METHOD, at_least=0)
    """What the step schedule multiplies the learning rate by at each drop."""

    epochs: int = _run(5, Role.MODEL, Role.LENGTH, Role.COMMON, at_least=1)
    """Epochs to train, at most. With --resume, a larger number than before extends a run, finished or not."""
    max_steps: int = _run(0, Role.MODEL, Role.LENGTH, Role.WHOLE_RUN, Role.BY_SIZE, at_least=0)
    """Stop after N steps (0: no limit)."""
    target_accuracy: float = _run(0.0, Role.TIMING, Role.STOP, Role.WHOLE_RUN, Role.BY_SIZE, at_least=0, at_most=1)
    """Stop when validation accuracy reaches this (0: no target) in --patience epochs in a row."""
    patience: int = _run(1, Role.TIMING, Role.STOP, Role.WHOLE_RUN, Role.BY_SIZE, at_least=1)
    """How many epochs in a row must reach --target-accuracy."""
    monitor: str = _run("", Role.TIMING, Role.STOP, Role.WHOLE_RUN, metavar="METRIC")
    """The validation metric that decides which epoch is best: accuracy, loss, or any other that the task reports (default:
    loss)."""
    mode: Literal["auto", "min", "max"] = _run("auto", Role.TIMING, Role.STOP, Role.WHOLE_RUN)
    """Whether a smaller (min) or a larger (max) value of --monitor is better. auto: min if its name says loss or error, else
    max."""
    stop_after: int = _run(0, Role.TIMING, Role.STOP, Role.WHOLE_RUN, at_least=0)
    """Stop after N epochs in which --monitor did not improve (0: train to the end)."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = _run("auto", Role.MODEL, Role.COMMON)
    """bf16 and fp16 run the forward pass under autocast; weights and optimizer stay fp32. fp16 also scales the loss. auto: bf16
    on devices made for it, else fp16 on GPUs made for that (V100, T4), else fp32."""
    fast: Literal["auto", "on", "off"] = _run("auto", Role.ROUNDING)
    """The fast step: channels-last convolutions, fused optimizers and, on a GPU, the whole step as one CUDA graph, compiled if
    the run is long enough for that to pay off (on: always, but never in exact mode). If a model does not allow it, a line says
    why."""
    seed: int = _run(0, Role.MODEL, Role.STUDY, Role.COMMON, at_least=0, at_most=2**64 - 1)  # keys have 64 bits
    """All randomness follows from this number."""
    eval_batch: int = _run(0, Role.MODEL, at_least=0)
    """Samples per forward pass in validation (0: 250, or 1000 on a GPU)."""
    check_every: int = _run(100, Role.OPERATION, at_least=0)
    """Check every N steps, and after each epoch, that all workers hold the same weights (0: only after each epoch)."""

    runs_dir: str = _record("runs", Role.OPERATION, Role.LAUNCH, Role.PLACE, Role.START, Role.STUDY)
    """Folder for the records."""
    name: str = _record(
        "", Role.OPERATION, Role.LAUNCH, Role.PLACE, Role.START, Role.STUDY, Role.COMMON, parse=check_record_name
    )
    """Name of the record (default: task, date and time). If the name is taken, a number is added."""
    resume: str = _record(
        "", Role.OPERATION, Role.LAUNCH, Role.START, Role.STUDY, Role.WHOLE_RUN, Role.COMMON, metavar="RECORD"
    )
    """Continue a record, given by its folder or name, from its last checkpoint. Without a value: the record called --name, or
    this task's newest unfinished record; if there is no such record, start a new run."""
    branch_from: str = _record("", Role.MODEL, Role.LAUNCH, Role.STUDY, Role.WHOLE_RUN, metavar="RECORD")
    """Continue from the last checkpoint of this record, in a new record. Options come from the old record, except those that
    are given, such as another learning rate or more epochs. The old record is not changed."""
    checkpoint_every: str = _record("60s", Role.OPERATION, parse=parse_every, metavar="N|Xs")
    """When to write a checkpoint: every N steps (500) or every X seconds (60s), and at the end of the run; 0: never."""
    keep: int = _record(2, Role.OPERATION, at_least=1)
    """How many checkpoints to keep."""
    save_best: bool = _record(False, Role.OPERATION, Role.STOP, Role.WHOLE_RUN)
    """Save the weights of the best epoch, by --monitor, in best.safetensors (with --ema, the averaged weights)."""
    snapshots: int = _record(0, Role.OPERATION, Role.WHOLE_RUN, at_least=0)
    """Save the parameters at N evenly spaced steps of the run, from before the first to after the last, in bf16 (0: off)."""
    watch_layers: int = _record(0, Role.OPERATION, Role.WHOLE_RUN, at_least=0)
    """Every N steps, record each layer's gradient norm and how far the step moved its weights, as a fraction of their norm (0:
    off)."""
    profile: bool = _record(False, Role.OPERATION, Role.WHOLE_RUN)
    """Write a timeline of a few steps on all workers into the record: forward, backward, every bucket's all-reduce."""
    log_every: int = _record(10, Role.OPERATION, at_least=1)
    """Write a row to metrics.jsonl every N steps."""
    tracker: Literal["none", "tensorboard", "wandb", "mlflow", "trackio"] = _record("none", Role.OPERATION, Role.WHOLE_RUN)
    """Also write to a tracker (pip install 'paceline[trackers]')."""

    replaces: InitVar[Any] = copied
    """For `dataclasses.replace`; not an option."""

    def __post_init__(self, replaces: Any) -> None:
        for field in dataclasses.fields(self):
            option_of(field).check(field.name, getattr(self, field.name))
        object.__setattr__(self, "set", make_settings({} if self.set is None else self.set))
        if self.nesterov and not self.momentum and self.optimizer in ("sgd", "muon"):
            object.__setattr__(self, "nesterov", False)  # without momentum it is plain SGD
        if self.schedule != "own" and self.schedule_by == "auto":
            object.__setattr__(self, "schedule_by", "step")
        for name, usual in zip(("beta1", "beta2"), _BETAS.get(self.optimizer, (0.9, 0.999)), strict=True):
            if getattr(self, name) is None:
                object.__setattr__(self, name, usual)

    def check_combinations(self) -> None:
        """Raise a UsageError for options that do not fit together. `make_config` calls this when all options are known."""
        if self.node_id >= self.nodes:
            raise UsageError(
                f"--node-id is {self.node_id}: with --nodes {self.nodes} it must be between 0 and {self.nodes - 1}"
            )
        if self.workers_schedule:
            self._check_workers_schedule()
        if self.min_workers and self.workers and self.min_workers > self.workers:
            raise UsageError(f"--min-workers is {self.min_workers}: it must be at most --workers {self.workers}")
        if self.warmup_epochs and self.warmup_steps:
            raise UsageError("--warmup-epochs and --warmup-steps are both given: choose one")
        if self.schedule == "one-cycle" and (self.warmup_epochs or self.warmup_steps):
            raise UsageError(
                "one-cycle warms up by itself (--peak-at): use --schedule cosine, linear or constant with a warm-up"
            )
        if self.local_steps and (self.sam_rho or self.measure_noise or self.watch_layers or self.lr_rule == "adascale"):
            raise UsageError(
                "--local-steps cannot be combined with --sam-rho, --measure-noise, --watch-layers or --lr-rule adascale: parts"
                " that train by themselves have no common gradient"
            )
        if self.snapshots == 1:
            raise UsageError("--snapshots is 1: it must be 0 or at least 2, the first step and the last are among them")
        if self.patience > 1 and "target_accuracy" not in self.given:
            raise UsageError(
                f"--patience {self.patience} does nothing without --target-accuracy: it counts the epochs in a row that reach"
                f" the target; give both, or leave --patience out (to stop after {self.patience} epochs without a better one:"
                f" --stop-after {self.patience})"
            )
        if self.mode != "auto" and not self.monitor:
            raise UsageError(
                f"--mode {self.mode} needs --monitor: it says which values of that metric are better; give both, or neither"
            )
        if self.sam_rho and self.accumulate > 1:
            raise UsageError(
                "--sam-rho cannot be combined with --accumulate: every micro-batch would climb by itself; use more"
                " --virtual-workers"
            )

    def _check_workers_schedule(self) -> None:
        if self.workers is not None:
            raise UsageError("--workers and --workers-schedule are both given: choose one")
        if self.nodes > 1:
            raise UsageError("--workers-schedule works on one node: leave it out, or leave out --nodes")
        if self.min_workers is not None:
            raise UsageError("--workers-schedule says how many workers there are: leave it out, or leave out --min-workers")


_BETAS = {"novograd": (0.95, 0.98)}


@cache
def names_with(*roles: Role) -> frozenset[str]:
    """The names of the options that have at least one of these roles."""
    return frozenset(field.name for field in dataclasses.fields(Config) if option_of(field).roles.intersection(roles))


def make_config(*layers: Mapping[str, Any]) -> Config:
    """A Config from layers of options: the task's defaults, a recipe, flags. Later layers win."""
    config = Config(**merge_options(*(check_options(layer) for layer in layers)))
    config.check_combinations()
    return config


def merge_options(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Merge layers of options; later layers win.

    A warm-up in steps replaces one in epochs, and the other way around; so do a number of workers and a schedule of them. A
    batch schedule brings its largest batch as the global batch. Settings are merged key by key.
    """
    merged: dict[str, Any] = {}
    for layer in map(_spell_out, layers):
        settings = [each for each in (merged.get("set"), layer.get("set")) if isinstance(each, Mapping)]
        for name, other in (("warmup_epochs", "warmup_steps"), ("warmup_steps", "warmup_epochs")):
            if name in layer or layer.get("schedule") == "one-cycle":
                merged.pop(other, None)
        for name, other in (("workers", "workers_schedule"), ("workers_schedule", "workers")):
            if layer.get(name):
                merged.pop(other, None)
        if merged.get("global_batch") and layer.get("batch_schedule"):
            text = check_options({"batch_schedule": layer["batch_schedule"]})["batch_schedule"]
            merged["global_batch"] = largest_batch(parse_batch_schedule(text), merged["global_batch"])
        merged |= layer
        if len(settings) == 2:
            merged["set"] = {**settings[0], **settings[1]}
    return merged


def _spell_out(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options, with `--workers auto` as the schedule that it stands for."""
    if options.get("workers") != AUTO:
        return options
    if options.get("workers_schedule"):
        raise UsageError("--workers and --workers-schedule are both given: choose one")
    return {**{name: value for name, value in options.items() if name != "workers"}, "workers_schedule": AUTO}


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert options to the types of their fields.

    Raises a UsageError for an unknown key, and for a value that is wrong whatever the other options are.
    """
    fields = {field.name: field for field in dataclasses.fields(Config)}
    kinds = typing.get_type_hints(Config)
    converted = {}
    for key, value in _spell_out(options).items():
        if key not in fields:
            raise unknown_key(key, fields)
        converted[key] = convert(key, value, kinds[key])
        option_of(fields[key]).check(key, converted[key])
    return converted
