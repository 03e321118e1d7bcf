"""The training loop: epochs of steps, validation after each, until the end, the target or a loss that is no longer finite."""

import hashlib
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from paceline.data.sampler import Sampler
from paceline.dist.agree import check_agreement
from paceline.errors import Diverged, PacelineError, UsageError
from paceline.training.build import Run
from paceline.training.evaluate import average_statistics, evaluate
from paceline.training.observers import Observer, Result, Row
from paceline.training.step import Meter


def fit(run: Run, observers: Sequence[Observer]) -> Result:
    """Train to the end. Every worker calls this; rank 0 brings the observers. Raises what ended it, after telling them."""
    progress = Progress(result=Result(status="failed", metrics={}, record=run.contract.record))
    for observer in observers:
        observer.start(run.contract)
    try:
        _epochs(run, observers, progress)
    except BaseException as error:
        status = {Diverged: "diverged", KeyboardInterrupt: "interrupted"}.get(type(error), "failed")
        result = replace(progress.result, status=status, why=str(error) or type(error).__name__)
        for observer in observers:
            with suppress(PacelineError):  # a full disk must not hide what happened
                observer.end(result, None)
        raise
    for observer in observers:
        observer.end(progress.result, run.step.model)
    return progress.result


def model_sha256(model: nn.Module) -> str:
    """A hash of the model's weights and buffers, bit for bit, names included."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@dataclass
class Progress:
    """Where a run stands."""

    result: Result
    step: int = 0
    train_time_s: float = 0.0
    hits: int = 0
    """Epochs in a row that reached the target."""
    rows: "Rows" = field(default_factory=lambda: Rows())


def _epochs(run: Run, observers: Sequence[Observer], progress: Progress) -> None:
    config, world, model = run.config, run.world, run.step.model
    for epoch in range(config.epochs):
        begin, first = time.perf_counter(), progress.step
        _train_epoch(run, observers, progress, epoch)
        world.barrier()
        epoch_time_s = time.perf_counter() - begin
        progress.train_time_s += epoch_time_s
        samples_per_s = int(run.sampler.step_bounds[progress.step - first]) / epoch_time_s
        average_statistics(model, world)
        check_agreement(model.state_dict(), world, f"after epoch {epoch + 1}")
        metrics = evaluate(run.step, run.validation, run.validation_samples)
        _check_finite(run, metrics["loss"], progress.step - 1, epoch, "validation loss")
        if config.target_accuracy and "accuracy" not in metrics:
            raise UsageError(f"--target-accuracy: this task reports {', '.join(metrics)}, and no accuracy to reach")
        row = {
            "epoch": epoch + 1,
            "step": progress.step,
            "time_s": progress.train_time_s,
            "epoch_time_s": epoch_time_s,
            "samples_per_s": samples_per_s,
            **{f"val_{name}": value for name, value in metrics.items()},
        }
        for observer in observers:
            observer.epoch(row)
        progress.result = replace(
            progress.result,
            epochs=epoch + 1,
            steps=progress.step,
            train_time_s=progress.train_time_s,
            samples_per_s=samples_per_s,
            metrics=metrics,
        )
        hit = config.target_accuracy and metrics["accuracy"] >= config.target_accuracy
        progress.hits = progress.hits + 1 if hit else 0
        if progress.hits >= config.patience or progress.step >= run.step.schedule.total_steps:
            break
    status = "target reached" if progress.hits >= config.patience else "done"
    progress.result = replace(progress.result, status=status, model_sha256=model_sha256(model))


def _train_epoch(run: Run, observers: Sequence[Observer], progress: Progress, epoch: int) -> None:
    """Train on each sample once, or up to the last step of the run."""
    config, world, sampler = run.config, run.world, run.sampler
    order, bounds = sampler.order(epoch), sampler.step_bounds
    steps = min(sampler.steps, run.step.schedule.total_steps - progress.step)
    shares = [_share(sampler, order, i, world.rank, config.accumulate) for i in range(steps)]
    batches = run.train.batches([micro for share in shares for micro in share], epoch)
    begin = time.perf_counter() - progress.train_time_s
    meter = Meter(world)

    def tell(arrived: Iterable[tuple[int, list[float]]]) -> None:
        """Pass on the steps whose numbers have arrived. A loss that is not finite ends the run here, on all workers at once."""
        for step, means in arrived:
            metrics = dict(zip(run.step.metrics, means, strict=True))
            _check_finite(run, metrics["loss"], step, epoch)
            progress.result = replace(progress.result, steps=step + 1)
            last = step + 1 == first + steps
            row = progress.rows.add(metrics, config.log_every, last)
            if row is not None:
                about = {"step": step + 1, "epoch": epoch + 1, "lr": run.step.schedule.lr(step)}
                for observer in observers:
                    observer.step({**about, "time_s": time.perf_counter() - begin, **row})

    first = progress.step
    run.step.model.train()
    for i, share in enumerate(shares):
        samples = int(bounds[i + 1] - bounds[i])
        means = run.step(progress.step, batches, [len(micro) for micro in share], samples)
        tell(meter.push(progress.step, means))
        progress.step += 1
        if config.check_every and progress.step % config.check_every == 0:
            check_agreement(dict(run.step.model.named_parameters()), world, f"after step {progress.step}")
    tell(meter.flush())


def _share(sampler: Sampler, order: np.ndarray, step: int, part: int, accumulate: int) -> list[np.ndarray]:
    """The samples of one part of one step, cut into micro-batches: as many on every worker, and of at least two samples, which
    batch norm needs.
    """
    start, stop = sampler.part_bounds(step)[part : part + 2]
    smallest = int(sampler.step_bounds[step + 1] - sampler.step_bounds[step]) // sampler.parts
    return np.array_split(order[start:stop], max(1, min(accumulate, smallest // 2)))


def _check_finite(run: Run, loss: float, step: int, epoch: int, what: str = "loss") -> None:
    if math.isfinite(loss):
        return
    slower = "--schedule cosine --warmup-epochs 1" if run.config.schedule == "one-cycle" else "a longer --warmup-epochs"
    raise Diverged(
        f"diverged: the {what} is {loss} at step {step + 1} (epoch {epoch + 1}), lr {run.step.schedule.lr(step):.4g},"
        f" global batch {run.sampler.global_batch}; try a lower --base-lr, {slower}, or --clip-norm 1"
    )


@dataclass
class Rows:
    """Means over the steps since the last row."""

    sums: dict[str, float] = field(default_factory=dict)
    count: int = 0

    def add(self, metrics: dict[str, float], every: int, last: bool) -> Row | None:
        """Add a step; a row when `every` of them are together or it is the last of its epoch."""
        self.sums = {name: self.sums.get(name, 0.0) + value for name, value in metrics.items()}
        self.count += 1
        if self.count < every and not last:
            return None
        means = {name: total / self.count for name, total in self.sums.items()}
        self.sums, self.count = {}, 0
        return means
