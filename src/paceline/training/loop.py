"""The training loop: steps and a validation per epoch, until the run ends, reaches its target, is stopped or diverges."""

import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from paceline.core.determinism import deterministic
from paceline.core.parts import Step
from paceline.dist.agree import check_agreement
from paceline.dist.messages import Join, send_join
from paceline.dist.watch import Watch
from paceline.errors import Diverged, Stopped, refuse_exit
from paceline.output import stages
from paceline.phases import Phase, is_auto
from paceline.status import Status
from paceline.training.best import BestEpoch
from paceline.training.build import Run
from paceline.training.capture.captured import capture
from paceline.training.capture.replay import CapturedStep
from paceline.training.checkpoint.keeper import Keeper, Progress
from paceline.training.divergence import check_validation_loss
from paceline.training.growth import Growth
from paceline.training.joining import Arrival, Joining, Joins
from paceline.training.local import LocalSteps, with_local_steps
from paceline.training.meter import EpochMeans, Meter
from paceline.training.monitor import wants_best
from paceline.training.observers import Observer, Result
from paceline.training.plain import make_clock, make_step
from paceline.training.step import Executor
from paceline.training.telling import Teller, tell_failure
from paceline.training.terms import describe_phases
from paceline.training.timing.health import Health
from paceline.training.timing.profile import Profile
from paceline.training.validation import Averaged, Validation
from paceline.training.weights import model_sha256


def fit(
    run: Run,
    observers: Sequence[Observer],
    keeper: Keeper | None = None,
    watch: Watch | None = None,
    arrival: Arrival | None = None,
) -> Result:
    """Train to the end. Raises what ended it, after telling the observers, which rank 0 has. Collective: call on every rank.

    With a keeper, the run continues from its last checkpoint and writes more of them. With a watch, it can be asked to stop.
    `arrival` is how these workers took over from others. If others take over from these, the result is an interrupted run.
    """
    keeper = keeper or Keeper(run)
    with deterministic(run.config.reduce == "exact"), closing(keeper):
        progress = keeper.restore() or Progress(result=Result(status=Status.FAILED, metrics={}))
        progress.result = replace(progress.result, record=run.contract.record)
        progress.aim(run.config.target_accuracy)
        resumed_at = progress.step if keeper.resumes else None
        contract = replace(
            run.contract,
            resumed_at=resumed_at,
            validated=bool(resumed_at) and resumed_at == run.sampler.first_step(progress.epoch),
            took_over_from=arrival.handover.was if arrival is not None else 0,
            extended=keeper.extended,
            branched=keeper.branched,
        )
        if resumed_at and is_auto(run.config.batch_schedule):
            found = describe_phases(run.config, run.world, run.sampler, run.update.schedule, run.parts.at_once)
            contract = replace(contract, phases=found, total_steps=run.update.schedule.total_steps)
        for observer in observers:
            observer.start(contract)
        teller: Teller | None = None
        joins = Joins(run)
        try:
            if workers := joins.wanted(progress.step):  # there were as many as the launcher could guess
                raise Joining(workers, time.time())
            with refuse_exit():
                teller = Teller(run, observers, progress)
                _Fit(run, teller, progress, keeper, watch, joins).train(arrival)
        except Joining as join:
            traceback.clear_frames(join.__traceback__)  # they refer to the graphs: see `_Fit.train`
            result = replace(progress.result, status=Status.INTERRUPTED, why=str(join))
            if teller is not None:
                teller.end(result, failed=True)
            if run.world.is_main:
                send_join(Join(join.workers, join.left_s))
            return result
        except BaseException as error:
            result = tell_failure(run, observers, progress, error)
            if teller is not None:
                teller.end(result, failed=True)
            if isinstance(error, Stopped | Diverged):  # on all workers at once; the first to exit ends the others
                with suppress(RuntimeError):
                    run.world.barrier()  # so wait until rank 0 has closed its record
            raise
    for observer in observers:
        observer.end(progress.result, run.model)
    with refuse_exit():
        teller.end(progress.result, failed=False)
    return progress.result


class _Fit:
    """One run of the loop: what its methods share."""

    def __init__(self, run: Run, teller: Teller, progress: Progress, keeper: Keeper, watch: Watch | None, joins: Joins) -> None:
        self.run, self.teller, self.progress, self.keeper, self.watch, self.joins = run, teller, progress, keeper, watch, joins
        self.save_requested = self.stop_requested = self.check_due = False
        self.clock = make_clock(run)
        self.step = make_step(run, self.clock, watch, teller.say, progress.step)
        teller.hooks.mark = self.step.mark
        self.health = Health(run, self.clock)
        self.profile: Profile | None = None
        self.best: BestEpoch | None = None
        self.growth = Growth(run) if is_auto(run.config.batch_schedule) else None
        self.phase: Phase | None = None
        self._ahead: tuple[int, list[Step]] = (-1, [])

    def train(self, arrival: Arrival | None = None) -> None:
        """All epochs that are left. Raises Joining where other workers take over."""
        run, progress = self.run, self.progress
        if self.watch:
            self.watch.mark(progress.step, "loading")  # a request to stop need not wait for a step now
        for note in run.notes:
            self.teller.say(note)
        # Only this frame refers to the graphs: NCCL does not end while a graph lives that holds some of its work.
        if run.world.device.type == "cuda" and run.config.fast != "off":
            stages.enter("capturing the step as a CUDA graph")
        captured = capture(run, self.step, progress.step, self.teller.say)
        executor = with_local_steps(self.step, captured, run.local_from, run.config.local_steps, self.teller.say)
        validation = Validation(run, self.step, captured) if run.validation_sets else None
        if validation is not None and (note := validation.check()):
            self.teller.say(note)
        averaged = Averaged(run, self.step) if run.update.ema is not None else None
        if validation is not None and wants_best(run.config):
            self.best = BestEpoch(run, progress.result.best, self.keeper.resumes)
        if run.config.profile:
            self.profile = Profile(run, self.clock, progress.step, isinstance(captured, CapturedStep))
        if self.watch:
            self.watch.mark(progress.step, "data")
        stages.stop()
        if arrival is not None:
            arrival.reach("resume")
            self.teller.join(arrival.row(run.sampler, progress.step, run.world.size))
        self.teller.start()
        self.keeper.snapshots.begin(progress.step, self.keeper.resumes)
        for epoch in range(progress.epoch, run.config.epochs):
            self._train_epoch(epoch, executor)
            if self._end_epoch(epoch, validation, averaged):
                break  # with the averaged weights in place, if there are any
            self._hand_over_if_due()
        if self.growth is not None:
            self.teller.say(self.growth.describe(progress.step))
        progress.result = replace(progress.result, status=self._status(), model_sha256=model_sha256(run.model))

    def _status(self) -> Status:
        """How the run ends, or would if this were its last epoch."""
        progress = self.progress
        if progress.hits >= self.run.config.patience:
            return Status.TARGET_REACHED
        return Status.STOPPED_EARLY if self.best is not None and self.best.is_stale(progress.epoch) else Status.DONE

    def _train_epoch(self, epoch: int, executor: Executor) -> None:
        """Train on each sample once, or up to the run's last step. A resumed run starts where it was in the epoch."""
        run, progress = self.run, self.progress
        begin, meter = time.perf_counter() - progress.epoch_time_s, Meter(run.world, waits=self.teller.hooks.waits)
        run.model.train()
        self.health.start(self._samples_done(epoch))
        for step, inputs in self._steps_left(epoch):
            self._look_before(step, epoch, begin)
            self._enter(step)
            self.health.before(step.number)
            if self.profile is not None:
                self.profile.before(step.number)
            requests = self.keeper.requests(), bool(self.watch and self.watch.stop)
            with self.teller.layers.around(step.number):
                values = executor(step, inputs, requests)
            self._tell_steps(meter.push(step.number, values), epoch, begin)
            progress.step += 1
            self.save_requested |= self.keeper.due(progress.step)
            self.check_due |= self._checks_after(progress.step)
            apart = isinstance(executor, LocalSteps) and executor.apart
            self.keeper.snapshots.after(progress.step, apart)
            if apart:
                continue  # in a few steps all parts are equal again: everything that looks at weights waits for that
            if self.check_due:
                self._check(epoch, self._samples_done(epoch), begin)
            if self.growth is not None:
                self.growth.decide(step)
            if self.save_requested or self.stop_requested:
                self._tell_steps(meter.flush(), epoch, begin)
                progress.epoch_time_s = time.perf_counter() - begin
                self._save_or_stop()
            if self.joins.wanted(progress.step) and progress.step < run.sampler.first_step(epoch + 1):  # an epoch ends first
                self._tell_steps(meter.flush(), epoch, begin)
                progress.epoch_time_s = time.perf_counter() - begin
                self._look_at_rest(epoch, begin)
                self._hand_over_if_due()
        self.clock.end()
        if self._steps_in(epoch + 1) > 0:
            self._ahead = epoch + 1, self._cut_steps(epoch + 1, 0)  # while a GPU still works on the last steps
        self._tell_steps(meter.flush(), epoch, begin)
        self.step.mark("reduce")
        run.world.barrier()
        progress.epoch_time_s = time.perf_counter() - begin
        self._look(epoch, self._samples_done(epoch), begin)

    def _steps_left(self, epoch: int) -> Iterator[tuple[Step, Iterator[Any]]]:
        """The epoch's steps that are not done yet, with their inputs. After a step that `--batch-schedule auto` ends a phase
        with, the rest of the epoch is cut again."""
        run, done = self.run, False
        while not done:
            cut, steps = run.sampler, self._cut_steps(epoch, self.progress.step - run.sampler.first_step(epoch))
            inputs = self._inputs(steps, epoch)
            for step in steps:
                yield step, inputs
                if run.sampler is not cut:
                    break
            done = run.sampler is cut or step is steps[-1]

    def _inputs(self, steps: Sequence[Step], epoch: int) -> Iterator[Any]:
        run, passes = self.run, [(step.number, item) for step in steps for item in step.passes]
        return run.train.inputs([item.samples for _, item in passes], epoch, lambda i: run.parts.seed(*passes[i]))

    def _look_before(self, step: Step, epoch: int, begin: float) -> None:
        """Look at the steps of a phase that ends within an epoch, so that no health row has steps of two batches."""
        if self.phase is not None and step.phase != self.phase:
            self._look_at_rest(epoch, begin)

    def _look_at_rest(self, epoch: int, begin: float) -> None:
        """Look at the steps since the last look. Collective: call on every rank."""
        if self.health.has_steps:
            self.step.mark("reduce")
            self.clock.end()
            samples = self._samples_done(epoch)
            self._look(epoch, samples, begin)
            self.health.start(samples)  # even if none of the steps was timed

    def _enter(self, step: Step) -> None:
        """Begin the step's phase, if it is a new one. Collective: call on every rank."""
        run = self.run
        if step.phase != self.phase:
            self.step.mark("reduce")
            run.parts.enter(step.phase)
            self.phase = step.phase
            begins = not step.number or run.sampler.phase_of(step.number - 1) != step.phase
            if run.config.batch_schedule and begins:
                self.teller.phase(step, self.growth.why if self.growth is not None else "schedule")

    def _end_epoch(self, epoch: int, validation: Validation | None, averaged: Averaged | None) -> bool:
        """Validate after an epoch, if the task has data for it, and tell what came out. Whether the run is over."""
        run, progress = self.run, self.progress
        before, trained = replace(progress), progress.means.read()
        self.step.checks.end_epoch()
        samples = self._samples_done(epoch)
        progress.train_time_s += progress.epoch_time_s
        run.parts.average_statistics()
        check_agreement({**run.model.state_dict(), **run.kept()}, run.world, f"after epoch {epoch + 1}")
        if averaged is not None:
            averaged.put_in(epoch)
        metrics = self._validate(epoch, validation)
        self.teller.epoch(epoch, samples, trained, metrics)
        progress.result = replace(
            progress.result,
            epochs=epoch + 1,
            steps=progress.step,
            train_time_s=progress.train_time_s,
            samples_per_s=samples / progress.epoch_time_s,
            metrics=metrics,
        )
        progress.epoch, progress.epoch_time_s, progress.means = epoch + 1, 0.0, EpochMeans()
        over = self._status() != Status.DONE or progress.step >= run.update.schedule.total_steps
        if averaged is not None and not over:
            averaged.take_out()
        with averaged.aside() if averaged is not None and over else nullcontext():
            if over:
                self._save_last(before)
            elif validation is not None:
                run.update.rates.observe(metrics)  # not at the end: an extended run repeats the last validation
            self.teller.epoch_hooks(epoch)
        return over

    def _validate(self, epoch: int, validation: Validation | None) -> dict[str, float]:
        """The metrics of a validation; empty if the task has no data for it."""
        if validation is None:
            return {}
        progress, config = self.progress, self.run.config
        metrics = validation(epoch, partial(self.teller.validating, epoch))
        check_validation_loss(self.run, progress, metrics["loss"], epoch)
        if self.best is not None:
            progress.result = replace(progress.result, best=self.best.update(metrics, epoch + 1, progress.step))
        hit = config.target_accuracy and metrics["accuracy"] >= config.target_accuracy
        progress.hits = progress.hits + 1 if hit else 0
        self.teller.validated(epoch, metrics)
        return metrics

    def _save_last(self, before: Progress) -> None:
        """Write the last snapshot, and the checkpoint that can extend the finished run. Collective: call on every rank.

        Like all other checkpoints it is from before the validation, which an extended run repeats: `--max-steps` may have ended
        the run within an epoch, and a longer run validates only at the end of that epoch.
        """
        self.keeper.snapshots.end(self.progress.step)
        self.step.mark("reduce")  # all workers' statistics are gathered
        if self.keeper.save_last(before):
            self._tell_checkpoint()

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
            self.teller.health({**about, **health})
        if timeline is not None:
            self.teller.timeline(timeline)
        if health is not None:
            self.health.start(samples)  # the next interval does not include this look

    def _steps_in(self, epoch: int) -> int:
        """Steps of an epoch that belong to the run; 0 or less after its last epoch."""
        sampler, total = self.run.sampler, self.run.update.schedule.total_steps
        return min(sampler.cut(epoch).steps, total - sampler.first_step(epoch))

    def _samples_done(self, epoch: int) -> int:
        """Samples of an epoch that are used."""
        sampler = self.run.sampler
        return int(sampler.cut(epoch).bounds[self.progress.step - sampler.first_step(epoch)])

    def _cut_steps(self, epoch: int, done: int) -> list[Step]:
        """The epoch's steps but for the first `done`."""
        (cut, steps), self._ahead = self._ahead, (-1, [])
        return steps if cut == epoch else self.run.steps(epoch, range(done, self._steps_in(epoch)))

    def _tell_steps(self, arrived: Iterable[tuple[int, list[float]]], epoch: int, begin: float) -> None:
        """Pass on the steps whose numbers have arrived, and note the requests that they carry."""
        end = self.run.sampler.first_step(epoch) + self._steps_in(epoch)
        save, stop = self.teller.steps(arrived, epoch, begin, end)
        self.save_requested |= save
        self.stop_requested |= stop

    def _tell_checkpoint(self) -> None:
        """Wait for the checkpoint and call on_checkpoint, if there is such a hook. Collective: call on every rank."""
        if self.teller.hooks.has("on_checkpoint"):
            written = self.run.world.broadcast(self.keeper.wait() if self.run.world.is_main else None)
            if written:
                self.teller.checkpoint(self.progress.epoch)

    def _hand_over_if_due(self) -> None:
        """End these workers with a checkpoint if the schedule wants another number of them. Collective: call on every rank."""
        workers, left_s = self.joins.wanted(self.progress.step), time.time()
        if not workers:
            return
        self.step.mark("reduce")  # all workers' statistics are gathered
        self.keeper.save(self.progress)
        self._tell_checkpoint()
        self.step.mark("checkpoint")
        if not self.run.world.broadcast(self.keeper.wait() if self.run.world.is_main else None):
            self.teller.say(self.joins.refuse(workers))
            return
        raise Joining(workers, left_s)

    def _save_or_stop(self) -> None:
        """Write the checkpoint that is due or requested; end the run if that was requested. Collective: call on every rank."""
        step, saved = self.progress.step, self.keeper.on
        if saved:
            self.step.mark("reduce")  # all workers' statistics are gathered
            self.keeper.save(self.progress)
            self._tell_checkpoint()
        self.step.mark("checkpoint")
        self.save_requested = False
        if self.stop_requested:
            why = (self.watch and self.watch.why_stop()) or "a signal to another worker"
            # The first worker to exit ends the others: all wait until rank 0 has written the checkpoint.
            saved, why = self.run.world.broadcast([self.keeper.wait(), why] if self.run.world.is_main else None)
            written = "a checkpoint was written; the same command with --resume continues"
            raise Stopped(f"stopped by {why} after step {step}; {written if saved else 'no checkpoint was written'}", why)
