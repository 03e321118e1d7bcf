"""The training loop: epochs of steps, validation after each, until the end, the target or a loss that is no longer finite."""

import hashlib
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from paceline import models
from paceline.config import Config
from paceline.data.keys import key, seed_all
from paceline.data.loaders import Arrays, Loader, Resident, make_loader
from paceline.data.sampler import Sampler
from paceline.dist.agree import check_agreement
from paceline.dist.world import World
from paceline.errors import Diverged, PacelineError, UsageError
from paceline.optim import make_optimizer
from paceline.training.contract import make_contract, plan_run
from paceline.training.evaluate import average_statistics, evaluate
from paceline.training.observers import Observer, Result, Row
from paceline.training.step import Meter, Step
from paceline.training.task import Task

_INIT = 0x1217  # keeps the numbers that initialise a model apart from those of step 0


class Run:
    """One run of one worker: what it needs, and where it stands."""

    def __init__(self, task: Task, config: Config, world: World) -> None:
        self.task, self.config, self.world = task, config, world
        train, validation = _load(task, config, world)
        self.validation_samples = len(cast(Any, validation))
        self.sampler, schedule = plan_run(config, world, len(cast(Any, train)))
        seed_all(key(config.seed, _INIT))
        model = (task.model() if task.model else _build(config, task, train)).to(world.device)
        optimizer = make_optimizer(model, config)
        self.step = Step(
            model=model, optimizer=optimizer, schedule=schedule, objective=task.objective, world=world, config=config
        )
        self.train_loader = self._loader(train)
        self.validation_loader = self._loader(validation)
        self.about_data = getattr(train, "about", "") or f"{type(train).__name__} of {len(cast(Any, train)):,} samples"
        self.rows = Rows(config, schedule.lr, self.sampler.steps)
        self.result = Result(status="failed", metrics={})
        self.train_time_s = 0.0

    def _loader(self, data: Arrays | Dataset[Any]) -> Loader:
        config = self.config
        return make_loader(data, config.loader, self.task.prepare, self.world.device, config.loader_workers, config.seed)

    def contract(self, record: str) -> Any:
        """What the run is about to do."""
        model = self.step.model
        about = {
            "task": self.task.name,
            "model": self.config.model or type(model).__name__,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "data": self.about_data,
            "train_samples": self.sampler.samples,
            "validation_samples": self.validation_samples,
            "loader": "on the device" if isinstance(self.train_loader, Resident) else "streamed",
            "record": record,
        }
        return make_contract(self.config, self.world, self.sampler, self.step.schedule, about)


def fit(run: Run, observers: Sequence[Observer], record: str = "") -> Result:
    """Train to the end. Every worker calls this; rank 0 brings the observers. Raises what ended it, after telling the observers."""
    contract = run.contract(record)
    run.result = replace(run.result, record=record)
    for observer in observers:
        observer.start(contract)
    try:
        _epochs(run, observers)
    except BaseException as error:
        status = {Diverged: "diverged", KeyboardInterrupt: "interrupted"}.get(type(error), "failed")
        run.result = replace(run.result, status=status, why=str(error) or type(error).__name__)
        for observer in observers:
            with suppress(PacelineError):  # a full disk must not hide what happened
                observer.end(run.result, None)
        raise
    for observer in observers:
        observer.end(run.result, run.step.model)
    return run.result


def model_sha256(model: nn.Module) -> str:
    """A hash of the model's weights and buffers, bit for bit, names included."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _epochs(run: Run, observers: Sequence[Observer]) -> None:
    config, world = run.config, run.world
    hits = step = 0
    for epoch in range(config.epochs):
        begin = time.perf_counter()
        first = step
        step = _train_epoch(run, observers, epoch, step)
        world.barrier()
        epoch_time = time.perf_counter() - begin
        run.train_time_s += epoch_time
        bounds = run.sampler.step_bounds()
        samples_per_s = int(bounds[step - first]) / epoch_time
        average_statistics(run.step.model, world)
        check_agreement(run.step.model.state_dict(), world, f"after epoch {epoch + 1}")
        metrics = evaluate(run.step, run.validation_loader, run.validation_samples)
        row = {
            "epoch": epoch + 1,
            "step": step,
            "time_s": run.train_time_s,
            "epoch_time_s": epoch_time,
            "samples_per_s": samples_per_s,
            **{f"val_{name}": value for name, value in metrics.items()},
        }
        for observer in observers:
            observer.epoch(row)
        run.result = replace(
            run.result, epochs=epoch + 1, steps=step, train_time_s=run.train_time_s, samples_per_s=samples_per_s, metrics=metrics
        )
        hits = hits + 1 if config.target_accuracy and metrics.get("accuracy", 0.0) >= config.target_accuracy else 0
        if hits >= config.patience or step >= run.step.schedule.total_steps:
            break
    status = "target reached" if hits >= config.patience else "done"
    run.result = replace(run.result, status=status, model_sha256=model_sha256(run.step.model))


def _train_epoch(run: Run, observers: Sequence[Observer], epoch: int, step: int) -> int:
    """Train on each sample once (or up to the last step of the run); returns the number of steps taken so far."""
    config, world, sampler = run.config, run.world, run.sampler
    order, bounds = sampler.order(epoch), sampler.step_bounds()
    steps = min(sampler.steps, run.step.schedule.total_steps - step)
    shares = [_share(sampler, order, i, world.rank, config.accumulate) for i in range(steps)]
    batches = run.train_loader.batches([micro for share in shares for micro in share], epoch)
    begin = time.perf_counter() - run.train_time_s
    meter = Meter(world)
    run.step.model.train()
    for i, share in enumerate(shares):
        samples = int(bounds[i + 1] - bounds[i])
        sums = run.step(step, batches, [len(micro) for micro in share], samples)
        _tell(run, observers, meter.push(step, sums, samples), epoch, begin)
        step += 1
        if config.check_every and step % config.check_every == 0:
            check_agreement(dict(run.step.model.named_parameters()), world, f"after step {step}")
    _tell(run, observers, meter.flush(), epoch, begin)
    return step


def _share(sampler: Sampler, order: np.ndarray, step: int, part: int, accumulate: int) -> list[np.ndarray]:
    """The samples of one part of one step, cut into micro-batches."""
    start, stop = sampler.part_bounds(step)[part : part + 2]
    return np.array_split(order[start:stop], min(accumulate, stop - start))


def _tell(run: Run, observers: Sequence[Observer], arrived: Any, epoch: int, begin: float) -> None:
    """Pass on the steps whose numbers have arrived. A loss that is not finite ends the run here, on all workers at the same step."""
    for step, means in arrived:
        metrics = dict(zip(run.step.metrics, means, strict=True))
        if not math.isfinite(metrics["loss"]):
            run.result = replace(run.result, steps=step + 1)
            raise Diverged(
                f"diverged: the loss is {metrics['loss']} at step {step + 1} (epoch {epoch + 1}), lr"
                f" {run.step.schedule.lr(step):.4g}, global batch {run.sampler.global_batch}; try a lower --base-lr, a longer"
                " --warmup-epochs, or --clip-norm 1"
            )
        row = run.rows.add(step, epoch, metrics, time.perf_counter() - begin)
        if row is not None:
            for observer in observers:
                observer.step(row)


class Rows:
    """Means over `log_every` steps, for the record."""

    def __init__(self, config: Config, lr: Any, steps_per_epoch: int) -> None:
        self._every, self._lr, self._steps = config.log_every, lr, steps_per_epoch
        self._sums: dict[str, float] = {}
        self._count = 0

    def add(self, step: int, epoch: int, metrics: dict[str, float], time_s: float) -> Row | None:
        """Add a step; a row when `log_every` are together or the epoch ends."""
        self._sums = {name: self._sums.get(name, 0.0) + value for name, value in metrics.items()}
        self._count += 1
        if self._count < self._every and (step + 1) % self._steps:
            return None
        means = {name: total / self._count for name, total in self._sums.items()}
        self._sums, self._count = {}, 0
        return {"step": step + 1, "epoch": epoch + 1, "lr": self._lr(step), "time_s": time_s, **means}


def _load(task: Task, config: Config, world: World) -> tuple[Any, Any]:
    """Both data sets. A node's first worker goes first: it may have to fetch them, and the others then find them there."""
    if world.local_rank == 0:
        data = task.train(), task.validation()
    world.barrier()
    if world.local_rank != 0:
        data = task.train(), task.validation()
    train, validation = data
    if config.train_samples:
        if not isinstance(train, Arrays):
            raise UsageError("--train-samples needs data held in Arrays; cut your Dataset with torch.utils.data.Subset instead")
        train = train.first(config.train_samples)
    for split, which in ((train, "training"), (validation, "validation")):
        if not len(split):
            raise UsageError(f"task {task.name}: its {which} data is empty")
    return train, validation


def _build(config: Config, task: Task, train: Any) -> nn.Module:
    """The model `--model` names, for the shape of this data's images."""
    shape = tuple(train[0][0].shape)
    if len(shape) != 3:
        raise UsageError(f"--model builds nets for images of shape C x H x W, but task {task.name} has inputs of shape {shape}")
    return models.build(config.model or "cnn", in_channels=shape[0], image_size=shape[-1], classes=task.classes)
