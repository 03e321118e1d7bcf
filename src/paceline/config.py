"""What a run is told: one frozen dataclass that flags, TOML recipes and the record all come from.

A field is a flag (`base_lr` is `--base-lr`), a key in TOML (`toml.py`) and a line of the record's `config.toml`; the text under
it is its help. Nothing here imports torch, so that `paceline --help` answers at once.
"""

import argparse
import ast
import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import UsageError, unknown
from paceline.values import check_value, short
from paceline.values import flag as flag


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything `paceline train` can be told. Values are as the user means them; what follows from them is the contract."""

    workers: int | None = None
    """Workers to start on this node: one GPU each, or that many CPU workers where there is no GPU (default 1). Under torchrun,
    srun or mpirun the world is already there and this may be left out."""
    virtual_workers: int | None = None
    """V: cut every step into so many parts, each as one worker would have it (default: one a worker). The model depends on V,
    not on how many workers, from 1 to V, compute it."""
    parts_at_once: int = 0
    """Parts a worker runs in one forward pass, batch norm apart for each (0: all it has, or one after the other where the model
    needs that; 1 takes the least memory)."""
    reduce: Literal["fast", "exact"] = "fast"
    """fast: DDP's overlapped averaging. exact: order-free sums, so the model has the same bits on any number of workers."""
    nodes: int = 1
    """Nodes in the run, each started by hand with its own --node-id."""
    node_id: int = 0
    """Which node this is, from 0."""
    rendezvous: str = ""
    """HOST:PORT on node 0 where the nodes meet (default: $MASTER_ADDR:$MASTER_PORT). Needed with --nodes."""
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    """Who carries the messages: nccl for GPUs, gloo for CPUs, mpi where this torch has it."""
    timeout_s: float = 600.0
    """Seconds without progress after which a worker counts as hung."""
    max_restarts: int = 0
    """Start again so many times, from the last checkpoint, when a worker fails."""
    min_workers: int | None = None
    """Restart on fewer workers, down to so many, when a device is gone for good (default: never on fewer)."""
    grace_s: float = 20.0
    """Seconds after SIGTERM or Ctrl-C to finish the step and write a checkpoint in."""

    model: str = ""
    """NAME or NAME:key=value,key=value: linear, mlp, cnn, resnet, wide_resnet, course_wide_resnet (default: the task's)."""
    data_dir: str = ""
    """Folder to look in for the data first."""
    train_samples: int = 0
    """Train on the first so many samples only (0: all)."""
    pixels: Literal["standard", "unit"] = "standard"
    """Scale pixels to mean 0 and deviation 1 (standard) or to [0, 1] (unit)."""
    crop: int = 0
    """Random crop after padding each side by so many pixels."""
    flip: bool = False
    """Flip images left to right half of the time."""
    erase: float = 0.0
    """Probability of erasing a random rectangle of an image."""
    loader: Literal["auto", "resident", "streaming"] = "auto"
    """Keep the data set on the worker's device (resident) or stream it through torch's DataLoader."""
    loader_workers: int = 2
    """Processes a worker's DataLoader uses when streaming."""

    reference_batch: int = 128
    """The batch that base_lr is trusted at, on one worker."""
    global_batch: int | None = None
    """Samples a step over all workers (default: reference_batch for each virtual worker)."""
    accumulate: int = 1
    """Cut each part of a step into so many micro-batches (less memory, same step)."""
    optimizer: str = "sgd"
    """sgd, adamw, lars, lamb, novograd or muon."""
    base_lr: float = 0.05
    """The learning rate at reference_batch."""
    lr_rule: Literal["linear", "sqrt", "none", "adascale"] = "linear"
    """How the learning rate grows with k = global_batch / reference_batch. adascale: by a gain between 1 and k that every step
    works out from the noise in its parts' gradients."""
    momentum: float = 0.9
    """Momentum of sgd, lars and muon."""
    nesterov: bool = True
    """Nesterov's form of momentum (sgd, muon)."""
    beta1: float | None = None
    """First decay rate of adamw, lamb (default 0.9) and novograd (0.95)."""
    beta2: float | None = None
    """Second decay rate of adamw, lamb (default 0.999) and novograd (0.98; 0 is a plainly normalised gradient)."""
    grad_averaging: bool = False
    """novograd: average gradients into the momentum by 1 - beta1 instead of adding them."""
    trust_coefficient: float = 0.001
    """lars: what share of a layer's norm a step may move it by, at a learning rate of 1."""
    adapt_all: bool = False
    """lars, lamb: scale the steps of norms and biases by their own norms too."""
    rest: Literal["sgd", "adamw"] = "sgd"
    """muon: what trains the parameters that are no hidden matrices: norms, biases, embeddings, the last layer."""
    rest_lr: float | None = None
    """muon: the learning rate of the rest at reference_batch (default: base_lr)."""
    fixed_norm: bool = False
    """muon: put every matrix back to the norm sqrt(rows) after each step."""
    sam_rho: float = 0.0
    """Sharpness-aware steps: take each part's gradient so far uphill from the weights (0: off; a step costs twice as much)."""
    weight_decay: float = 5e-4
    """Weight decay; norms and biases have none unless --decay-all."""
    decay_all: bool = False
    """Decay norms and biases too."""
    label_smoothing: float = 0.0
    """Label smoothing of the training loss."""
    clip_norm: float = 0.0
    """Clip the gradient of the whole step to this norm (0: off)."""
    gradient_noise: float = 0.0
    """Add noise of variance this / (1 + step)^0.55 to every step's gradient, the same on all workers (0: off)."""
    norm_part: int = 0
    """Batch norm over cuts of so many samples, in any model ("ghost" batch norm; 0: over each part as it is)."""
    ema: float = 0.0
    """Keep a moving average of the weights with this decay a step; it is what is validated and saved, with batch-norm
    statistics of its own (0: off)."""
    local_steps: int = 0
    """Post-local SGD: late in the run every part trains by itself for so many steps between averagings (0: off)."""
    local_after: float = 0.5
    """Where in the run that begins, as a fraction of it."""
    measure_noise: bool = False
    """Measure the gradient noise scale from the parts: the global batch up to which more workers pay."""

    schedule: Literal["constant", "linear", "cosine", "one-cycle", "step"] = "one-cycle"
    """The learning rate after warm-up: constant, falling to 0 (linear, cosine), up and down again (one-cycle), or falling at
    --step-at (step)."""
    schedule_by: Literal["step", "epoch"] = "step"
    """Move the learning rate every step or once an epoch."""
    warmup_epochs: float = 0.0
    """Warm up over so many epochs."""
    warmup_steps: int = 0
    """Warm up over so many steps."""
    warmup_from: float | None = None
    """Where warm-up starts, as a fraction of the peak (default 1/k: at base_lr under the linear rule)."""
    peak_at: float = 0.3
    """Where one-cycle peaks, as a fraction of the run."""
    step_at: str = "0.5,0.75"
    """Where the step schedule falls, as fractions of the run."""
    step_factor: float = 0.1
    """What the step schedule multiplies the learning rate by there."""

    epochs: int = 5
    """Epochs at most."""
    max_steps: int = 0
    """Stop after so many steps (0: no such limit)."""
    target_accuracy: float = 0.0
    """Stop when validation accuracy reaches this (0: no target) ..."""
    patience: int = 1
    """... in so many epochs in a row."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16 runs the forward pass under autocast; weights and optimizer stay fp32. auto: bf16 on devices made for it."""
    fast: Literal["auto", "on", "off"] = "auto"
    """The fast step: channels-last convolutions, fused optimizers and, on a GPU, the whole step as one CUDA graph, compiled
    where the run is long enough for that to pay (on: always, but never in exact mode). Where a model does not allow it, a line
    says why."""
    seed: int = 0
    """All randomness follows from it."""
    eval_batch: int = 0
    """Samples a forward pass in validation (0: 250, on a GPU 1000)."""
    check_every: int = 100
    """Check every so many steps, and after each epoch, that all workers hold the same weights (0: after each epoch only)."""

    runs_dir: str = "runs"
    """Folder that records go to."""
    name: str = ""
    """Name of the record (default: task, date and time); a number is added where it is taken."""
    resume: str = ""
    """Go on with a record from its last checkpoint: its folder or name. Without one: --name, or this task's newest record that
    did not come to its end; where there is none, start."""
    checkpoint_every: str = "60s"
    """Write a checkpoint every so many steps (500) or seconds (60s); 0 for none."""
    keep: int = 2
    """Checkpoints to keep."""
    profile: bool = False
    """Write a timeline of a few steps over all workers into the record: forward, backward, every bucket's all-reduce."""
    log_every: int = 10
    """A row in metrics.jsonl every so many steps."""
    tracker: Literal["none", "tensorboard"] = "none"
    """Also write to a tracker (pip install 'paceline[trackers]')."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_value(field.name, getattr(self, field.name))
        if self.node_id >= self.nodes:
            raise UsageError(
                f"--node-id is {self.node_id}, but with --nodes {self.nodes} it must lie between 0 and {self.nodes - 1}"
            )
        if self.min_workers and self.workers and self.min_workers > self.workers:
            raise UsageError(f"--min-workers is {self.min_workers}: it must be at most --workers {self.workers}")
        if self.warmup_epochs and self.warmup_steps:
            raise UsageError("--warmup-epochs and --warmup-steps are both given: choose one")
        if self.schedule == "one-cycle" and (self.warmup_epochs or self.warmup_steps):
            raise UsageError(
                "one-cycle warms up by itself (--peak-at): use --schedule cosine, linear or constant with a warm-up"
            )
        if self.nesterov and not self.momentum and self.optimizer in ("sgd", "muon"):
            object.__setattr__(self, "nesterov", False)  # Nesterov's form of no momentum is plain SGD
        for name, usual in zip(("beta1", "beta2"), _BETAS.get(self.optimizer, (0.9, 0.999)), strict=True):
            if getattr(self, name) is None:
                object.__setattr__(self, name, usual)
        if self.local_steps and (self.sam_rho or self.measure_noise or self.lr_rule == "adascale"):
            raise UsageError(
                "--local-steps does not go with --sam-rho, --measure-noise or --lr-rule adascale: parts that train by"
                " themselves have no common gradient"
            )
        if self.sam_rho and self.accumulate > 1:
            raise UsageError(
                "--sam-rho does not go with --accumulate: every micro-batch would climb by itself; use more --virtual-workers"
            )


_BETAS = {"novograd": (0.95, 0.98)}


SECTIONS = {
    "where it runs": "workers",
    "model and data": "model",
    "batch and optimizer": "reference_batch",
    "schedule": "schedule",
    "the run": "epochs",
    "the record": "runs_dir",
}
"""Headings of the help text, each with the first field below it."""


def add_flags(parser: argparse.ArgumentParser, says: Mapping[str, str] | None = None) -> None:
    """One flag a field; one that is not given leaves no attribute behind: recipes may fill it. `says`: a verb's own help."""
    docs, kinds = _docs(), typing.get_type_hints(Config)
    heading = {first: title for title, first in SECTIONS.items()}
    group: Any = parser
    for field in dataclasses.fields(Config):
        if field.name in heading:
            group = parser.add_argument_group(heading[field.name])
        kind, text = kinds[field.name], docs[field.name].replace("%", "%%")
        if field.default not in (None, ""):
            text += f" [{field.default}]"
        text = (says or {}).get(field.name, text)
        if kind is bool:
            group.add_argument(
                flag(field.name), action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text, dest=field.name
            )
        else:
            choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
            metavar = "|".join(choices) if choices else field.name.upper().rsplit("_", 1)[-1]
            alone: dict[str, Any] = {"nargs": "?", "const": "auto", "type": _resume} if field.name == "resume" else {}
            group.add_argument(
                flag(field.name), default=argparse.SUPPRESS, metavar=metavar, help=text, dest=field.name, **alone
            )


def _resume(text: str) -> str:
    if not text:
        raise UsageError("--resume= has no value: name a record, or use --resume alone for the newest unfinished one")
    return text


def make_config(*layers: Mapping[str, Any]) -> Config:
    """A Config from layers of options, the later ones winning: the task's defaults, a recipe, flags."""
    return Config(**merge_options(*(check_options(layer) for layer in layers)))


def merge_options(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Layers of options as one, the later ones winning; one way to say the warm-up replaces the other."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for name, other in (("warmup_epochs", "warmup_steps"), ("warmup_steps", "warmup_epochs")):
            if name in layer or layer.get("schedule") == "one-cycle":
                merged.pop(other, None)
        merged |= layer
    return merged


def check_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as the fields' types; a UsageError for an unknown key or a value that no other option could make right."""
    kinds = typing.get_type_hints(Config)
    converted = {}
    for key, value in options.items():
        if key not in kinds:
            raise unknown("key", key, kinds)
        converted[key] = _convert(key, value, kinds[key])
        check_value(key, converted[key])
    return converted


def to_flags(options: Mapping[str, Any]) -> list[str]:
    """The command-line flags that say these options."""
    flags = []
    for key, value in options.items():
        if isinstance(value, bool):
            flags.append(flag(key) if value else "--no-" + key.replace("_", "-"))
        elif value is not None and (key, value) != ("resume", ""):
            flags.append(f"{flag(key)}={value}")
    return flags


def _convert(key: str, value: Any, kind: Any) -> Any:
    """`value`, from a flag (text), TOML or Python, as the field's type; a UsageError where it does not fit."""
    if isinstance(kind, types.UnionType):  # `int | None`
        if value is None:
            return None
        kind = next(arm for arm in typing.get_args(kind) if arm is not type(None))
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise unknown(f"value for {flag(key)}", short(value), choices)
        return value
    shown = short(repr(value) if isinstance(value, str) else value)
    wrong = UsageError(f"{flag(key)} is {shown}: it must be {_KIND_WORDS[kind]}")
    if kind is bool or isinstance(value, bool):
        if kind is not bool or not isinstance(value, bool):
            raise wrong
        return value
    if kind is str and not isinstance(value, str):
        raise wrong
    if kind is int and isinstance(value, float):
        raise wrong
    try:
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        raise wrong from None


_KIND_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _docs() -> dict[str, str]:
    """Each field's help: the string that stands under it in this file."""
    (tree,) = ast.parse(inspect.getsource(Config)).body
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    pairs: Sequence[tuple[ast.stmt, ast.stmt]] = list(zip(tree.body, tree.body[1:], strict=False))
    for field, text in pairs:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(text, ast.Expr)
            assert isinstance(text.value, ast.Constant)
            docs[field.target.id] = " ".join(str(text.value.value).split())
    return docs
