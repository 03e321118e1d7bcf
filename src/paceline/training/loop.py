"""The training loop: epochs of steps, validation after each, until the end, the target, a request to stop, or a loss that is no
longer finite."""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.core.carrier import PAYLOAD, REQUESTS
from paceline.core.determinism import deterministic
from paceline.core.noise import adascale_gain, noise_scale
from paceline.core.parts import Step
from paceline.dist.agree import check_agreement
from paceline.dist.messages import is_lost_contact, read_first
from paceline.dist.watch import Watch
from paceline.errors import Diverged, PacelineError, RecordError, Stopped, refuse_exit
from paceline.explanation import explain, note_record
from paceline.output import stages
from paceline.status import Status
from paceline.training.build import Run
from paceline.training.capture.captured import CapturedStep, capture
from paceline.training.checkpoint.keeper import Keeper, Progress
from paceline.training.local import LocalSteps, with_local_steps
from paceline.training.meter import EpochMeans, Meter
from paceline.training.observers import Observer, Result
from paceline.training.step import Executor, TrainStep
from paceline.training.task_checks import TaskChecks
from paceline.training.timing.clock import Clock
from paceline.training.timing.health import Health
from paceline.training.timing.profile import Profile
from paceline.training.validation import Averaged, Validation

EXPLODED, HOPELESS = 1e4, 1e8
"""Multiples of the first step's loss, or of 1 if that is more. A finite loss can be a divergence too: if both the last step's
loss and the validation loss exploded, or the validation loss is hopeless. Early in a run with batch norm, a validation loss of
1e4 alone only shows that the running statistics have not settled."""


def fit(run: Run, observers: Sequence[Observer], keeper: Keeper | None = None, watch: Watch | None = None) -> Result:
    """Train to the end. Raises what ended it, after telling the observers, which rank 0 has. Collective: call on every rank.

    With a keeper, the run continues from its last checkpoint and writes more of them. With a watch, it can be asked to stop.
    """
    keeper = keeper or Keeper(run)
    with deterministic(run.config.reduce == "exact"), closing(keeper):
        progress = keeper.restore() or Progress(result=Result(status=Status.FAILED, metrics={}))
        progress.result = replace(progress.result, record=run.contract.record)
        progress.aim(run.config.target_accuracy)
        contract = replace(run.contract, resumed_at=progress.step if keeper.resumes else None, extended=keeper.extended)
        for observer in observers:
            observer.start(contract)
        try:
            with refuse_exit():
                _Fit(run, observers, progress, keeper, watch).train()
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt | Stopped)
            status = Status.DIVERGED if isinstance(error, Diverged) else Status.INTERRUPTED if stopped else Status.FAILED
            about = (is_lost_contact(error) and run.world.failures and read_first(run.world.failures)) or explain(error)
            result = replace(progress.result, status=status, why=about.why, where=about.where, traceback=about.traceback)
            for observer in observers:
                with suppress(PacelineError):  # a full disk must not hide what happened
                    observer.end(result, None)
                    note_record(error, run.contract.record)
            if isinstance(error, Stopped | Diverged):  # on all workers at once; the first to exit ends the others
                with suppress(RuntimeError):
                    run.world.barrier()  # so wait until rank 0 has closed its record
            raise
    for observer in observers:
        observer.end(progress.result, run.model)
    return progress.result


def make_step(
    run: Run, clock: Clock, watch: Watch | None = None, say: Callable[[str], None] = lambda text: None, number: int = 0
) -> TrainStep:
    """The plain step of a run that starts at step `number`."""
    checks = TaskChecks(run.parts, run.forward, say)
    mark = watch.mark if watch else lambda number, phase: None
    return TrainStep(run.parts, run.forward, run.update, clock=clock, checks=checks, mark=mark, sam=run.sam(), number=number)


def make_clock(run: Run) -> Clock:
    """The clock of a run's steps. Call it once per run: it hooks into DDP."""
    engine = run.parts.engine
    clock = Clock(run.world, engine.carrier.cargo if engine.averages else None, run.config.profile)
    if engine.noise is not None or run.config.profile:
        engine.hook_buckets(lambda bucket, average: clock.average(bucket, average, compared=engine.compares))
    return clock


def model_sha256(model: nn.Module) -> str:
    """A hash of the model's weights and buffers, bit for bit, names included."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class _Fit:
    """One run of the loop: what its methods share."""

    def __init__(
        self, run: Run, observers: Sequence[Observer], progress: Progress, keeper: Keeper, watch: Watch | None
    ) -> None:
        self.run, self.observers, self.progress, self.keeper, self.watch = run, observers, progress, keeper, watch
        self.save_requested = self.stop_requested = self.check_due = False
        self.noise_scale: float | None = None
        self.clock = make_clock(run)
        self.step = make_step(run, self.clock, watch, self._say, progress.step)
        self.health = Health(run, self.clock)
        self.profile: Profile | None = None
        self._ahead: tuple[int, list[Step]] = (-1, [])
        self._corners = run.update.schedule.corners()

    def train(self) -> None:
        """All epochs that are left."""
        run, progress = self.run, self.progress
        if self.watch:
            self.watch.mark(progress.step, "loading")  # a request to stop need not wait for a step now
        for note in run.notes:
            self._say(note)
        # Only this frame refers to the graphs: NCCL does not end while a graph lives that holds some of its work.
        if run.world.device.type == "cuda" and run.config.fast != "off":
            stages.enter("capturing the step as a CUDA graph")
        captured = capture(run, self.step, progress.step, self._say)
        executor = with_local_steps(self.step, captured, run.local_from, run.config.local_steps, self._say)
        validation = Validation(run, self.step, captured) if run.validation_sets else None
        if validation is not None and (note := validation.check()):
            self._say(note)
        averaged = Averaged(run, self.step) if run.update.ema is not None else None
        if run.config.profile:
            self.profile = Profile(run, self.clock, progress.step, isinstance(captured, CapturedStep))
        if self.watch:
            self.watch.mark(progress.step, "data")
        stages.stop()
        for epoch in range(progress.epoch, run.config.epochs):
            self._train_epoch(epoch, executor)
            if self._validate(epoch, validation, averaged):
                break  # with the averaged weights in place, if there are any
        status = Status.TARGET_REACHED if progress.hits >= run.config.patience else Status.DONE
        progress.result = replace(progress.result, status=status, model_sha256=model_sha256(run.model))

    def _train_epoch(self, epoch: int, executor: Executor) -> None:
        """Train on each sample once, or up to the run's last step. A resumed run starts where it was in the epoch."""
        run, progress = self.run, self.progress
        bounds, first = run.sampler.step_bounds, epoch * run.sampler.steps
        begin, meter = time.perf_counter() - progress.epoch_time_s, Meter(run.world)
        end = first + self._steps_in(epoch)
        steps = self._steps(epoch, progress.step - first)
        passes = [(step.number, item) for step in steps for item in step.passes]
        inputs = run.train.inputs([item.samples for _, item in passes], epoch, lambda i: run.parts.seed(*passes[i]))
        run.model.train()
        self.health.start(int(bounds[progress.step - first]))
        for step in steps:
            self.health.before(step.number)
            if self.profile is not None:
                self.profile.before(step.number)
            values = executor(step, inputs, self._requests())
            self._tell(meter.push(step.number, values), epoch, begin, end)
            progress.step += 1
            self.save_requested |= self.keeper.due(progress.step)
            self.check_due |= self._checks_after(progress.step)
            if isinstance(executor, LocalSteps) and executor.apart:
                continue  # in a few steps all parts are equal again: everything that looks at weights waits for that
            if self.check_due:
                self._check(epoch, int(bounds[progress.step - first]), begin)
            if self.save_requested or self.stop_requested:
                self._tell(meter.flush(), epoch, begin, end)
                progress.epoch_time_s = time.perf_counter() - begin
                self._save_or_stop()
        self.clock.end()
        if self._steps_in(epoch + 1) > 0:
            self._ahead = epoch + 1, self._steps(epoch + 1, 0)  # while a GPU still works on the last steps
        self._tell(meter.flush(), epoch, begin, end)
        self.step.mark("reduce")
        run.world.barrier()
        progress.epoch_time_s = time.perf_counter() - begin
        self._look(epoch, int(bounds[progress.step - first]), begin)

    def _validate(self, epoch: int, validation: Validation | None, averaged: Averaged | None) -> bool:
        """Validate after an epoch, if the task has data for it, and tell the observers. Whether the run is over."""
        run, progress, config = self.run, self.progress, self.run.config
        before, trained = replace(progress), progress.means.read()
        self.step.checks.end_epoch()
        samples = int(run.sampler.step_bounds[progress.step - epoch * run.sampler.steps])
        samples_per_s = samples / progress.epoch_time_s
        progress.train_time_s += progress.epoch_time_s
        run.parts.average_statistics()
        check_agreement({**run.model.state_dict(), **run.kept()}, run.world, f"after epoch {epoch + 1}")
        if averaged is not None:
            averaged.put_in(epoch)
        metrics = {} if validation is None else validation(epoch, partial(self._tell_validating, epoch))
        if validation is not None:
            self._check_finite(metrics["loss"], progress.step - 1, epoch, "validation loss", self._most_loss())
        row = {
            "epoch": epoch + 1,
            "step": progress.step,
            "time_s": progress.train_time_s,
            "epoch_time_s": progress.epoch_time_s,
            "samples_per_s": samples_per_s,
            **{f"train_{name}": value for name, value in trained.items()},
            **{f"val_{name}": value for name, value in metrics.items()},
            **({"noise_scale": self.noise_scale} if self.noise_scale is not None else {}),
        }
        for observer in self.observers:
            observer.epoch(row)
        progress.result = replace(
            progress.result,
            epochs=epoch + 1,
            steps=progress.step,
            train_time_s=progress.train_time_s,
            samples_per_s=samples_per_s,
            metrics=metrics,
        )
        progress.epoch, progress.epoch_time_s, progress.means = epoch + 1, 0.0, EpochMeans()
        hit = config.target_accuracy and metrics["accuracy"] >= config.target_accuracy
        progress.hits = progress.hits + 1 if hit else 0
        over = progress.hits >= config.patience or progress.step >= run.update.schedule.total_steps
        if averaged is not None and not over:
            averaged.take_out()
        if over:
            self._save_last(before, averaged)
        return over

    def _tell_validating(self, epoch: int, done: int, total: int) -> None:
        for observer in self.observers:
            observer.validating(epoch + 1, done, total)

    def _save_last(self, before: Progress, averaged: Averaged | None) -> None:
        """Write the checkpoint from which the finished run can be extended. Collective: call on every rank.

        Like all others it is from before the validation, which an extended run repeats: `--max-steps` may have ended the run
        within an epoch, and a longer run validates only at the end of that epoch.
        """
        with averaged.aside() if averaged is not None else nullcontext():
            self.step.mark("reduce")  # all workers' statistics are gathered
            self.keeper.save_last(before)

    def _checks_after(self, step: int) -> bool:
        """Whether workers compare their weights after this many steps."""
        every = self.run.config.check_every
        return (bool(every) and step % every == 0) or (self.profile is not None and step == self.profile.steps.stop)

    def _check(self, epoch: int, samples: int, begin: float) -> None:
        """Compare the workers' weights, and look at their times if it is time. Collective: call on every rank."""
        step, self.check_due = self.progress.step, False
        if self.health.due() or (self.profile is not None and step == self.profile.steps.stop):
            self.clock.end()
            self._look(epoch, samples, begin)
        check_agreement(dict(self.run.model.named_parameters()), self.run.world, f"after step {step}")

    def _look(self, epoch: int, samples: int, begin: float) -> None:
        """Combine the workers' times of the last steps, and tell the observers. Collective: call on every rank."""
        progress, timed = self.progress, self.clock.take()
        about = {"step": progress.step, "epoch": epoch + 1, "time_s": progress.train_time_s + time.perf_counter() - begin}
        health = self.health.look(timed, samples)
        timeline = self.profile.after(progress.step, timed) if self.profile is not None else None
        if health is not None:
            for observer in self.observers:
                observer.health({**about, **health})
        if timeline is not None:
            self._show(timeline)
        if health is not None:
            self.health.start(samples)  # the next interval does not include this look

    def _show(self, timeline: Mapping[str, Any]) -> None:
        try:
            for observer in self.observers:  # the recorder is first, so nobody mentions a file that could not be written
                observer.timeline(timeline)
        except RecordError as error:
            self._say(f"the timeline is left out: {error}")

    def _steps_in(self, epoch: int) -> int:
        """Steps of an epoch that belong to the run; 0 or less after its last epoch."""
        sampler, total = self.run.sampler, self.run.update.schedule.total_steps
        return min(sampler.steps, total - epoch * sampler.steps)

    def _steps(self, epoch: int, done: int) -> list[Step]:
        """The epoch's steps that are not done yet."""
        cut, steps = self._ahead
        return steps if cut == epoch else self.run.steps(epoch, range(done, self._steps_in(epoch)))

    def _requests(self) -> tuple[bool, bool]:
        """To write a checkpoint; to stop."""
        return self.keeper.requests(), bool(self.watch and self.watch.stop)

    def _tell(self, arrived: Iterable[tuple[int, list[float]]], epoch: int, begin: float, end: int) -> None:
        """Pass on the steps whose numbers have arrived. A loss that is not finite ends the run here, on all workers at once."""
        run, progress = self.run, self.progress
        for step, values in arrived:
            metrics, weight = run.forward.read(step, values)
            save, stop = values[PAYLOAD - REQUESTS : PAYLOAD]
            self.save_requested |= save > 0
            self.stop_requested |= stop > 0
            self._check_finite(metrics["loss"], step, epoch)
            first, bounds = step - epoch * run.sampler.steps, run.sampler.step_bounds
            progress.means.add(metrics, int(bounds[first + 1] - bounds[first]) * weight)
            progress.last_loss = metrics["loss"]
            if progress.first_loss is None:
                progress.first_loss = metrics["loss"]
            progress.result = replace(progress.result, steps=step + 1)
            noise = dict(zip(_NOISE, values[PAYLOAD:], strict=False))
            row = progress.rows.add(metrics | noise, run.config.log_every, step + 1 == end or step in self._corners)
            if row is not None:
                row, lr = self._explain(row, run.update.schedule.lr(step))
                self.noise_scale = row.get("noise_scale")
                about = {"step": step + 1, "epoch": epoch + 1, "lr": lr}
                time_s = progress.train_time_s + time.perf_counter() - begin
                for observer in self.observers:
                    observer.step({**about, "time_s": time_s, **row})

    def _explain(self, row: Mapping[str, float], lr: float) -> tuple[dict[str, float], float]:
        """A row of means with the noise scale where it is measured, and the learning rate with AdaScale's gain."""
        found = {name: value for name, value in row.items() if name not in _NOISE}
        if self.run.parts.engine.noise is None:
            return found, lr
        variance, square = (row[name] for name in _NOISE)
        found["noise_scale"] = noise_scale(variance, square)
        if self.run.config.lr_rule == "adascale":
            state = torch.tensor((variance, square), dtype=torch.float64)
            found["gain"] = float(adascale_gain(state, self.run.sampler.global_batch, self.run.config.reference_batch))
        return found, lr * found.get("gain", 1.0)

    def _save_or_stop(self) -> None:
        """Write the checkpoint that is due or requested; end the run if that was requested. Collective: call on every rank."""
        step, saved = self.progress.step, self.keeper.on
        if saved:
            self.step.mark("reduce")  # all workers' statistics are gathered
            self.keeper.save(self.progress)
        self.step.mark("checkpoint")
        self.save_requested = False
        if self.stop_requested:
            why = (self.watch and self.watch.why_stop()) or "a signal to another worker"
            # The first worker to exit ends the others: all wait until rank 0 has written the checkpoint.
            saved, why = self.run.world.broadcast([self.keeper.wait(), why] if self.run.world.is_main else None)
            written = (
                "a checkpoint was written; the same command with --resume continues" if saved else "no checkpoint was written"
            )
            raise Stopped(f"stopped by {why} after step {step}; {written}", why)

    def _most_loss(self) -> float:
        """Validation losses above this count as divergence."""
        usual, last = max(1.0, abs(self.progress.first_loss or 0.0)), self.progress.last_loss or 0.0
        return usual * (EXPLODED if last > EXPLODED * usual else HOPELESS)

    def _check_finite(self, loss: float, step: int, epoch: int, what: str = "loss", limit: float = math.inf) -> None:
        if math.isfinite(loss) and loss <= limit:
            return
        run, first = self.run, self.progress.first_loss
        grown = f" (in the first step: {first:.4g})" if math.isfinite(loss) else ""
        if step == 0 and math.isnan(loss):  # no update has happened yet
            raise Diverged("diverged: the loss is nan in the first step, before any update: look for nan or inf in the data")
        slower = "--schedule cosine --warmup-epochs 1" if run.config.schedule == "one-cycle" else "a longer --warmup-epochs"
        raise Diverged(
            f"diverged: the {what} is {loss:.4g}{grown} at step {step + 1} (epoch {epoch + 1}),"
            f" lr {run.update.schedule.lr(step):.4g}, global batch {run.sampler.global_batch};"
            f" try a lower --base-lr, {slower}, or --clip-norm 1"
        )

    def _say(self, text: str) -> None:
        for observer in self.observers:
            observer.say(text)


_NOISE = ("gradient_variance", "gradient_square")
