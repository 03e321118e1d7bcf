"""The training loop: epochs of steps, validation after each, until the end, the target, a wish to stop or a loss that is no
longer finite."""

import hashlib
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from paceline.core.carrier import Meter
from paceline.core.determinism import same_bits
from paceline.core.parts import Pass
from paceline.dist.agree import check_agreement
from paceline.dist.messages import headline
from paceline.dist.watch import Watch
from paceline.errors import Diverged, PacelineError, RecordError, Stopped, UsageError, refuse_exit
from paceline.training.build import Run
from paceline.training.capture import prepare as fast
from paceline.training.checkpoint.keeper import Keeper, Progress
from paceline.training.evaluate import Averaged, Validation
from paceline.training.observers import Observer, Result
from paceline.training.timing.health import Health
from paceline.training.timing.profile import Profile

EXPLODED, HOPELESS = 1e4, 1e8
"""Times the loss of the first step, or 1 if that is more. A loss that exploded is a divergence, though it is finite: if both
the last step's and the validation loss did, or the validation loss is hopeless. Early in a run with batch norm a validation
loss of 1e4 by itself only shows that the running statistics are not there yet."""


def fit(run: Run, observers: Sequence[Observer], keeper: Keeper | None = None, watch: Watch | None = None) -> Result:
    """Train to the end. Every worker calls this; rank 0 brings the observers. Raises what ended it, after telling them.

    With a keeper, the run goes on from its last checkpoint and writes more of them; with a watch, it can be asked to stop.
    """
    keeper = keeper or Keeper(run)
    with same_bits(run.config), closing(keeper):
        progress = keeper.restore() or Progress(result=Result(status="failed", metrics={}))
        progress.result = replace(progress.result, record=run.contract.record)
        contract = replace(run.contract, resumed_at=progress.step if keeper.resumes else None)
        for observer in observers:
            observer.start(contract)
        try:
            with refuse_exit():
                _Fit(run, observers, progress, keeper, watch).epochs()
            run.step.captured = None  # NCCL does not end while a graph lives that holds some of its work
        except BaseException as error:
            status = {Diverged: "diverged", KeyboardInterrupt: "interrupted", Stopped: "interrupted"}.get(type(error), "failed")
            result = replace(progress.result, status=status, why=_why(error))
            for observer in observers:
                with suppress(PacelineError):  # a full disk must not hide what happened
                    observer.end(result, None)
            if isinstance(error, Stopped | Diverged):  # on all workers at once; the first to end ends the others
                with suppress(RuntimeError):
                    run.world.barrier()  # so not before rank 0 has closed its record
            raise
    for observer in observers:
        observer.end(progress.result, run.step.model)
    return progress.result


def _why(error: BaseException) -> str:
    """What the result says about an error: our own text, else one line. A loader error's text is a whole traceback."""
    if isinstance(error, PacelineError):
        return str(error)
    return headline(error) if str(error) else type(error).__name__


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
        self.save_wished = self.stop_wished = self.check_due = False
        self.noise_scale: float | None = None
        self._ahead: tuple[int, list[list[Pass]]] = (-1, [])
        self.health, step = Health(run), run.step
        self.profile: Profile | None = None
        if run.config.profile:
            self.profile = Profile(step, progress.step)
        run.step.say = self._say

    def epochs(self) -> None:
        run, progress = self.run, self.progress
        config, world, model = run.config, run.world, run.step.model
        if self.watch:
            self.watch.mark(progress.step, "loading")  # whoever asks to stop now need not wait for a step
        for note in run.notes:
            self._say(note)
        fast.prepare(run, progress.step)
        validation = Validation(run.step, run.validation, run.validation_samples)
        averaged = Averaged(run.step, run.train, run.sampler) if run.step.ema is not None else None
        if self.watch:
            run.step.mark = self.watch.mark
        run.step.mark(progress.step, "data")
        for epoch in range(progress.epoch, config.epochs):
            first = epoch * run.sampler.steps
            self._train_epoch(epoch, first)
            run.step.tell_unfrozen()
            samples_per_s = int(run.sampler.step_bounds[progress.step - first]) / progress.epoch_time_s
            progress.train_time_s += progress.epoch_time_s
            run.step.statistics.average(world)
            check_agreement({**model.state_dict(), **run.step.kept()}, world, f"after epoch {epoch + 1}")
            if averaged is not None:
                averaged.put_in(epoch)
            metrics = validation(epoch)
            self._check_finite(metrics["loss"], progress.step - 1, epoch, "validation loss", self._most_loss())
            if config.target_accuracy and "accuracy" not in metrics:
                raise UsageError(f"--target-accuracy: this task reports {', '.join(metrics)}, and no accuracy to reach")
            row = {
                "epoch": epoch + 1,
                "step": progress.step,
                "time_s": progress.train_time_s,
                "epoch_time_s": progress.epoch_time_s,
                "samples_per_s": samples_per_s,
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
            progress.epoch, progress.epoch_time_s = epoch + 1, 0.0
            hit = config.target_accuracy and metrics["accuracy"] >= config.target_accuracy
            progress.hits = progress.hits + 1 if hit else 0
            if progress.hits >= config.patience or progress.step >= run.step.schedule.total_steps:
                break  # with the averaged weights in place, where there are any
            if averaged is not None:
                averaged.take_out()
        status = "target reached" if progress.hits >= config.patience else "done"
        progress.result = replace(progress.result, status=status, model_sha256=model_sha256(model))

    def _train_epoch(self, epoch: int, first: int) -> None:
        """Train on each sample once, or up to the last step of the run; from the middle, where a resumed run was there."""
        run, progress = self.run, self.progress
        config, bounds = run.config, run.sampler.step_bounds
        begin, meter = time.perf_counter() - progress.epoch_time_s, Meter(run.world)
        steps = self._steps(epoch)
        plan = self._plan(epoch, progress.step - first)
        flat = [(first + i, item) for i, passes in enumerate(plan, progress.step - first) for item in passes]

        inputs = run.train.inputs([item.samples for _, item in flat], epoch, lambda number: run.seed(*flat[number]))
        run.step.model.train()
        self.health.start(int(bounds[progress.step - first]))
        for passes in plan:
            i = progress.step - first
            self.health.before(progress.step)
            if self.profile is not None:
                self.profile.before(progress.step)
            samples = int(bounds[i + 1] - bounds[i])
            values = run.step(progress.step, inputs, passes, samples, self._wishes())
            self._tell(meter.push(progress.step, values), epoch, begin, first + steps)
            progress.step += 1
            self.save_wished |= self.keeper.due(progress.step)
            self.check_due |= bool(config.check_every) and progress.step % config.check_every == 0
            self.check_due |= self.profile is not None and progress.step == self.profile.steps.stop
            if run.step.local is not None and run.step.local.apart:
                continue  # in a few steps all parts are the same again: everything that looks at weights waits for that
            if self.check_due:
                self.check_due = False
                if self.health.due() or (self.profile is not None and progress.step == self.profile.steps.stop):
                    run.step.clock.end()
                    self._look(epoch, int(bounds[progress.step - first]), begin)
                check_agreement(dict(run.step.model.named_parameters()), run.world, f"after step {progress.step}")
            if self.save_wished or self.stop_wished:
                self._tell(meter.flush(), epoch, begin, first + steps)
                progress.epoch_time_s = time.perf_counter() - begin
                self._save_or_stop()
        run.step.clock.end()
        if self._steps(epoch + 1) > 0:
            self._ahead = epoch + 1, self._plan(epoch + 1, 0)  # a GPU has work for some steps more: it need not wait for this
        self._tell(meter.flush(), epoch, begin, first + steps)
        run.step.mark(progress.step, "reduce")
        run.world.barrier()
        progress.epoch_time_s = time.perf_counter() - begin
        self._look(epoch, int(bounds[progress.step - first]), begin)

    def _look(self, epoch: int, samples: int, begin: float) -> None:
        """Put the workers' times of the last steps together, and tell. Every worker reaches this, after the same steps."""
        progress, timed = self.progress, self.run.step.clock.take()
        about = {"step": progress.step, "epoch": epoch + 1, "time_s": progress.train_time_s + time.perf_counter() - begin}
        health = self.health.look(timed, samples)
        timeline = self.profile.after(progress.step, timed) if self.profile is not None else None
        if health is not None:
            for observer in self.observers:
                observer.health({**about, **health})
        if timeline is not None:
            self._show(timeline)
        if health is not None:
            self.health.start(samples)  # what looking and telling took is no part of the next steps

    def _show(self, timeline: Mapping[str, Any]) -> None:
        try:
            for observer in self.observers:  # the recorder is first, so nobody mentions a file that could not be written
                observer.timeline(timeline)
        except RecordError as error:
            self._say(f"the timeline is left out: {error}")

    def _steps(self, epoch: int) -> int:
        """Steps of an epoch, of which the run's last may be cut short; 0 or less after it."""
        sampler, total = self.run.sampler, self.run.step.schedule.total_steps
        return min(sampler.steps, total - epoch * sampler.steps)

    def _plan(self, epoch: int, done: int) -> list[list[Pass]]:
        """The passes of the epoch's steps that are not done yet."""
        planned, passes = self._ahead
        if planned == epoch:
            return passes
        return self.run.plan(epoch, range(done, self._steps(epoch)))

    def _wishes(self) -> tuple[bool, bool]:
        """To write a checkpoint; to stop."""
        return self.keeper.wishes(), bool(self.watch and self.watch.stop)

    def _tell(self, arrived: Iterable[tuple[int, list[float]]], epoch: int, begin: float, end: int) -> None:
        """Pass on the steps whose numbers have arrived. A loss that is not finite ends the run here, on all workers at once."""
        run, progress = self.run, self.progress
        for step, values in arrived:
            metrics, (save, stop) = run.step.read(values)
            self.save_wished |= save
            self.stop_wished |= stop
            self._check_finite(metrics["loss"], step, epoch)
            progress.last_loss = metrics["loss"]
            if progress.first_loss is None:
                progress.first_loss = metrics["loss"]
            progress.result = replace(progress.result, steps=step + 1)
            row = progress.rows.add(metrics, run.config.log_every, step + 1 == end)
            if row is not None:
                row, lr = run.step.explain(row, run.step.schedule.lr(step))
                self.noise_scale = row.get("noise_scale")
                about = {"step": step + 1, "epoch": epoch + 1, "lr": lr}
                time_s = progress.train_time_s + time.perf_counter() - begin
                for observer in self.observers:
                    observer.step({**about, "time_s": time_s, **row})

    def _save_or_stop(self) -> None:
        """Write the checkpoint that is due or wished for; end the run if that was the wish. Every worker reaches this."""
        step, saved = self.progress.step, self.keeper.on
        if saved:
            self.run.step.mark(step, "reduce")  # everybody's statistics are gathered
            self.keeper.save(self.progress)
        self.run.step.mark(step, "checkpoint")
        self.save_wished = False
        if self.stop_wished:
            why = (self.watch and self.watch.why_stop()) or "a signal to another worker"
            # Whoever ends first ends the others: all wait until rank 0 has written it.
            saved, why = self.run.world.broadcast([self.keeper.wait(), why] if self.run.world.is_main else None)
            written = (
                "a checkpoint is written, and the same command with --resume goes on" if saved else "no checkpoint is written"
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
        slower = "--schedule cosine --warmup-epochs 1" if run.config.schedule == "one-cycle" else "a longer --warmup-epochs"
        raise Diverged(
            f"diverged: the {what} is {loss:.4g}{grown} at step {step + 1} (epoch {epoch + 1}),"
            f" lr {run.step.schedule.lr(step):.4g}, global batch {run.sampler.global_batch};"
            f" try a lower --base-lr, {slower}, or --clip-norm 1"
        )

    def _say(self, text: str) -> None:
        for observer in self.observers:
            observer.say(text)
