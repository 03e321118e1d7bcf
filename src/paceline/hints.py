"""What to use instead of an option that does not exist: the answer for names that other tools use, or the nearest name.

`--lr` is close to `--loader` only in spelling. So a name that users bring from other tools has an answer, which says what to
use here and what it means. All other names get the nearest one.
"""

import difflib
import re
from collections.abc import Iterable

from paceline.errors import UsageError, unknown
from paceline.values import flag

_DEVICE = "not needed: workers use the GPUs they see, one each ({workers=N}); for the CPU, set CUDA_VISIBLE_DEVICES= (empty)"
_GPUS = "use {workers=N} (workers to start on this node, one per GPU; CUDA_VISIBLE_DEVICES chooses the GPUs)"
_PART = "global batch / virtual workers"

TABLE = {
    # Learning rate and optimizer
    "lr learning-rate": "use {base_lr} (the learning rate at {reference_batch}; {lr_rule} scales it with {global_batch})",
    "lr-find lr-finder auto-lr-find auto-lr find-lr lr-range-test": (
        "not an option of a run: paceline lr-find TASK recommends a {base_lr}"
    ),
    "gradient-checkpointing activation-checkpointing checkpoint-activations": (
        "not an option: call torch.utils.checkpoint.checkpoint(..., use_reentrant=False) in your model"
    ),
    "scheduler lr-scheduler lr-schedule lr-scheduler-type sched": (
        "use {schedule} (constant, linear, cosine, one-cycle or step; any other is Task(schedule=...))"
    ),
    "warmup warm-up warmup-ratio": (
        "use {warmup_epochs} or {warmup_steps} with {schedule=cosine}, linear or constant (one-cycle, the default, warms up by"
        " itself)"
    ),
    "milestones": "use {step_at} (epochs such as 30,60, or fractions of the run) with {schedule=step}",
    "gamma lr-decay lr-gamma": "use {step_factor} (what {schedule=step} multiplies the learning rate by at each drop)",
    "optim opt": "use {optimizer} (sgd, adamw, lars, lamb, novograd or muon)",
    "wd l2": "use {weight_decay} (norm layers and biases have none unless {decay_all})",
    "betas adam-beta1 adam-beta2": "use {beta1} and {beta2}",
    "grad-clip clip-grad clip-grad-norm clip gradient-clip-val gradient-clip gradient-clipping max-grad-norm": (
        "use {clip_norm} (clips the gradient of the whole step to this norm)"
    ),
    "ema-decay ema-momentum model-ema model-ema-decay": "use {ema} (the decay per step of the averaged weights)",
    "label-smooth smoothing": "use {label_smoothing}",
    "step-size lr-step-size": "use {step_at} (epochs such as 30,60, or fractions of the run) with {schedule=step}",
    "min-lr eta-min": "not available: cosine and linear schedules end at 0",
    "reprob random-erase": "use {erase} (the probability of erasing a random rectangle of an image)",
    "mixup cutmix": "not built in: a task's prepare can mix the samples of a batch",
    # Batch
    "batch-size batch bs b train-batch-size train-batch": (
        "use {global_batch} (samples per step over all workers) or {reference_batch} (the batch that {base_lr} is tuned for)"
    ),
    "per-device-batch-size per-device-train-batch-size per-gpu-batch-size batch-size-per-gpu local-batch local-batch-size": (
        f"use {{global_batch}} (samples per step over all workers; each part has {_PART})"
    ),
    "micro-batch micro-batch-size microbatch": (
        f"use {{accumulate=N}} (splits each part of a step, which has {_PART} samples, into N micro-batches)"
    ),
    "gradient-accumulation-steps gradient-accumulation grad-accum accum accumulation-steps accumulate-grad-batches": (
        "use {accumulate=N} (splits each part of a step into N micro-batches: less memory, but the same {global_batch})"
    ),
    "val-batch-size eval-batch-size test-batch-size val-batch test-batch per-device-eval-batch-size": (
        "use {eval_batch} (samples per forward pass in validation)"
    ),
    # Workers and nodes
    "gpus gpu ngpus num-gpus n-gpus devices nproc-per-node nproc num-processes processes": _GPUS,
    "world-size": "use {workers=N} (workers to start on each node); with {nodes}, the world has nodes x workers",
    "num-nodes nnodes n-nodes": "use {nodes=N}, and start the same command on each node with its own {node_id}",
    "node-rank machine-rank": "use {node_id} (the number of this node, starting at 0) with {nodes}",
    "master-addr master-address master-port rdzv-endpoint dist-url init-method main-process-ip main-process-port": (
        "use {rendezvous=HOST:PORT} (an address on node 0 where the nodes meet)"
    ),
    "rank local-rank": "not needed: torchrun, srun and mpirun set the rank; without them, {workers=N} starts the workers",
    "num-workers j workers-per-gpu dataloader-num-workers loader-processes": (
        "use {loader_workers} (DataLoader processes per worker); {workers} is the number of training processes, one per GPU"
    ),
    "ddp distributed data-parallel strategy parallel": "not needed: {workers=N} with N above 1 trains with DDP",
    "accelerator device cpu cuda no-cuda use-cuda mps": _DEVICE,
    "dist-backend": "use {backend} (nccl for GPUs, gloo for CPUs, mpi)",
    "sync-bn sync-batchnorm sync-batch-norm": (
        "use {model=cnn:norm=sync} for a built-in model; in your own model, use torch.nn.SyncBatchNorm"
    ),
    "exact bitwise": "use {reduce=exact} (the same bits on any number of workers)",
    "multi-gpu": _GPUS,
    "fsdp deepspeed zero shard": "not available: every worker holds the whole model",
    "find-unused-parameters ddp-find-unused-parameters": "not needed: parameters that a pass does not use are handled",
    # Model, data and task
    "shuffle": "not needed: every epoch has a new order, which depends on {seed} and the epoch",
    "prefetch-factor": "use {prefetch} (batches that each loader process makes ahead)",
    "persistent-workers": "not needed: loader processes are kept for the whole run",
    "drop-last": "not needed: the last two steps of an epoch share what is left, and every sample counts the same",
    "collate-fn collate": "not an option: give Task(collate=...) in your task file",
    "sampler weighted-sampler sample-weights class-balanced": (
        "not an option: give Task(sampling=...) in your task file, such as balanced(labels)"
    ),
    "class-weights class-weight pos-weight": (
        "not an option: return a 'weight' per sample from the objective in your task file, or draw rare classes more often with"
        " Task(sampling=balanced(labels))"
    ),
    "val-split validation-split": "not an option: a task has its own validation data, Task(validation=...)",
    "limit-train-batches overfit-batches": "use {train_samples} (train on the first N samples) or {max_steps}",
    "eval-steps eval-every val-check-interval check-val-every-n-epoch eval-strategy": (
        "not available: a run validates after every epoch"
    ),
    "log-every-n-steps logging-steps log-interval print-freq": "use {log_every} (write a row to metrics.jsonl every N steps)",
    "report-to logger log-with": "use {tracker} (wandb, mlflow, trackio or tensorboard)",
    "dropout drop drop-rate": (
        "it belongs to the model: use {model=cnn:dropout=0.1}, or {set=dropout=0.1} if your task() takes it"
    ),
    "arch architecture net network model-name": "use {model} (a built-in model; a task of your own has its own)",
    "dataset data data-path data-root data-folder": (
        "the task, which is the first argument, chooses the data; {data_dir} is the folder to search first for a built-in task"
    ),
    "limit max-train-samples num-samples": "use {train_samples=N} (train on the first N samples only)",
    "fold folds k-fold kfold num-folds cv": (
        "cross-validation is not available: let task(fold) in your task file choose the samples, and train with {set=fold=0},"
        " then {set=fold=1} and so on"
    ),
    # Precision, speed and bits
    "amp mixed-precision autocast bf16 bfloat16": "use {precision=bf16} (autocast in the forward pass; weights stay fp32)",
    "fp16 float16 half grad-scaler loss-scale": "use {precision=fp16} (autocast with a loss scale that adjusts itself)",
    "fp32 float32 no-amp": "use {precision=fp32}",
    "compile torch-compile jit": "use {fast=on} (on a GPU: the step as one CUDA graph, compiled; auto compiles if it pays off)",
    "deterministic reproducible": (
        "use {reduce=exact} (the same bits on any number of workers); {seed} fixes all random numbers in any mode"
    ),
    "random-seed manual-seed rng-seed seed-everything": "use {seed}",
    # Length of the run
    "max-epochs num-epochs n-epochs num-train-epochs": "use {epochs} (epochs to train, at most)",
    "steps num-steps iterations iters max-iters max-iterations train-steps": "use {max_steps=N} (stop after N steps)",
    "dry-run fast-dev-run": "use {max_steps=3} (stop after a few steps)",
    "early-stopping early-stop earlystopping early-stopping-patience early-stopping-rounds": (
        "use {stop_after=N} (stop after N epochs in which {monitor} did not improve), or {target_accuracy} with {patience}"
    ),
    "metric-for-best-model best-metric eval-metric": "use {monitor} (the metric that decides which epoch is best)",
    "greater-is-better monitor-mode": "use {mode=max} or {mode=min} with {monitor}",
    "min-delta early-stopping-threshold": "not available: with {stop_after=N}, any better value of {monitor} counts",
    "callbacks callback": "use Task(hooks=paceline.Hooks(on_epoch=...)); {save_best}, {stop_after} and {tracker} are built in",
    "modelcheckpoint save-top-k load-best-model-at-end save-best-only keep-best": (
        "use {save_best} (the best epoch's weights, in best.safetensors) with {monitor}, {checkpoint_every} and {keep}"
    ),
    # Records and output
    "output-dir output out out-dir save-dir save save-path log-dir logdir checkpoint-dir ckpt-dir results-dir o": (
        "use {runs_dir} (folder for records) and {name} (this run's folder in it, with its metrics, checkpoints and weights)"
    ),
    "run-name exp-name exp experiment experiment-name tag": "use {name} (name of the record in {runs_dir})",
    "ckpt checkpoint load resume-from resume-from-checkpoint ckpt-path load-checkpoint restore": (
        "use {resume=RECORD} (continues a run from its last checkpoint), {branch_from=RECORD} (continues it in a new record) or"
        " {init_from=FILE} (starts from weights only)"
    ),
    "pretrained weights finetune fine-tune finetune-from init-weights init-checkpoint load-weights pretrained-model"
    " model-name-or-path load-from": (
        "use {init_from=FILE} (weights only, from a record, a .safetensors file or a torch file)"
    ),
    "fork fork-from branch": "use {branch_from=RECORD} (a new record that continues from its last checkpoint)",
    "eval evaluate test test-only eval-only validate do-eval do-predict predict inference": (
        "not an option of training: use paceline evaluate RECORD, or paceline predict RECORD"
    ),
    "save-every save-freq save-steps save-interval ckpt-every checkpoint-freq checkpoint-interval": (
        "use {checkpoint_every} (500: every 500 steps; 60s: every 60 seconds)"
    ),
    "log-interval log-freq logging-steps print-freq log-steps": "use {log_every=N} (a row in metrics.jsonl every N steps)",
    "wandb use-wandb with-wandb": "use {tracker=wandb}",
    "mlflow": "use {tracker=mlflow}",
    "trackio": "use {tracker=trackio}",
    "comet neptune clearml aim": (
        "not built in: {tracker} has wandb, mlflow, trackio and tensorboard; others by Task(hooks=...)"
    ),
    "tensorboard tb": "use {tracker=tensorboard}",
    "wandb-project project-name": "not an option: set WANDB_PROJECT (or MLFLOW_EXPERIMENT_NAME) with {tracker}",
    "verbose v": "not available: {log_every=1} writes every step to metrics.jsonl; {traceback} shows the whole traceback",
    "debug": "use {traceback} (the whole traceback of an error) and {workers=1}, {max_steps=3} for a short run",
    "quiet q silent": "not available: send the output to a file; {runs_dir} has the metrics of every run",
    "config config-file cfg conf c": "use {recipe=FILE} (options from a TOML file or a packaged recipe)",
    "task": "give the task as the first argument, without a flag; {recipe} sets its options",
}
"""Names in other tools, and the answer. `{base_lr}` and `{fast=on}` are options here, with a value."""

VERBS = {
    "fit run start launch": "paceline train TASK",
    "resume continue": "paceline train TASK --resume",
    "ls list history show": "paceline runs",
    "bench benchmark speed": "paceline scale TASK",
    "sweep tune search compare": "paceline study STUDY.toml",
    "lr_find lrfind lr-finder lr_finder find-lr find_lr auto-lr-find auto_lr_find lr-range-test": "paceline lr-find TASK",
    "cost": "paceline plan RECORD --cluster NAME",
    "eval test validate val score": "paceline evaluate RECORD",
    "infer inference generate": "paceline predict RECORD --to FILE",
    "finetune fine-tune": "paceline train TASK --init-from FILE",
    "branch fork": "paceline train TASK --branch-from RECORD",
    "check env info": "paceline doctor",
    "download fetch datasets": "paceline data fetch",
    "dashboard ui serve tensorboard": "paceline board",
}
"""Verbs in other tools, and the command here."""

ANSWERS = {name: answer for names, answer in TABLE.items() for name in names.split()}

_OPTION = re.compile(r"\{(\w+)(?:=([^{}]*))?\}")
_NEAR = 0.75  # with less, --lr would be --loader


def unknown_flag(name: str, known: Iterable[str], see: str) -> UsageError:
    """The error for a flag that does not exist. `see` is the command that lists the flags."""
    names, hint = list(known), f"see {see}"
    if "--set" in names and "--base-lr" not in names:  # a study
        hint += "; options of its runs are given with --set, such as --set epochs=3"
    elif "--set" in names and _plain(name).replace("-", "_").isidentifier():
        hint += f", or use --set {_plain(name)}=VALUE if your task() takes it"
    return UsageError(f"unknown flag {name}: {find_hint(name, names) or hint}")


def unknown_verb(name: str, known: Iterable[str]) -> UsageError:
    """The error for a verb that does not exist."""
    command = next((command for names, command in VERBS.items() if name in names.split()), "")
    return UsageError(f"unknown verb {name!r}: use {command}") if command else unknown("verb", name, known)


def unknown_key(name: str, known: Iterable[str]) -> UsageError:
    """The error for an option in TOML or Python that does not exist."""
    shown = name if len(name) <= 100 else f"{name[:100]}..."
    return UsageError(f"unknown key {shown!r}: {find_hint(shown, known) or 'see paceline train --help-all'}")


def find_hint(name: str, known: Iterable[str]) -> str:
    """What to use instead of a name, in the form of the known names: `--base-lr` or `base_lr`. Empty if there is no hint.

    The answers apply only to verbs that take the options of a run: --workers means something else in `paceline plan`.
    """
    names, name = sorted(known), name[:100]  # matching a long name is slow
    flags = name.startswith("-")
    answer = ANSWERS.get(_plain(name), "")
    if answer and ("--base-lr" if flags else "base_lr") in names:
        return _OPTION.sub(lambda found: _write(found[1], found[2], as_flag=flags or found[1] not in names), answer)
    spelled = {_plain(each): each for each in names}
    near = difflib.get_close_matches(_plain(name), spelled, n=1, cutoff=_NEAR)
    return f"did you mean {spelled[near[0]] if flags else repr(spelled[near[0]])}?" if near else ""


def named_options(answer: str) -> list[str]:
    """The options that an answer of the table names."""
    return [found[1] for found in _OPTION.finditer(answer)]


def _plain(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()


def _write(name: str, value: str | None, *, as_flag: bool) -> str:
    """An option, with a value if there is one, as on the command line or as in TOML."""
    if value is None:
        return flag(name) if as_flag else name
    if as_flag:
        return f"{flag(name)} {value}"
    if name == "set":
        key, _, value = value.partition("=")
        return f"set = {{{key} = {value}}}"
    return f"{name} = {value}" if value.isdecimal() or value.isupper() else f'{name} = "{value}"'
