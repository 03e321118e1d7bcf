"""Telling a run's observers and hooks what happens: steps, validations, epochs, health, checkpoints, the end."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.core.carrier import PAYLOAD, REQUESTS
from paceline.core.noise import adascale_gain, noise_scale
from paceline.core.parts import Step
from paceline.dist.messages import is_lost_contact, read_first
from paceline.errors import Diverged, PacelineError, RecordError, Stopped
from paceline.explanation import explain, note_record
from paceline.status import Status
from paceline.training.build import Run
from paceline.training.checkpoint.file import path_of
from paceline.training.checkpoint.keeper import FOLDER, Progress
from paceline.training.divergence import check_step_loss
from paceline.training.hook_calls import HookCalls
from paceline.training.layers import LayerWatch
from paceline.training.observers import Observer, Result
from paceline.training.scaler import Skips, read_report

_NOISE = ("gradient_variance", "gradient_square")


class Teller:
    """Tells the observers, which rank 0 has, and this worker's hooks."""

    def __init__(self, run: Run, observers: Sequence[Observer], progress: Progress) -> None:
        self._run, self._observers, self._progress = run, observers, progress
        self.hooks = HookCalls(run)
        reads = run.world.is_main or any(hooks.every_rank for hooks in run.hooks)
        self.layers = LayerWatch(run.model, run.update.norms, run.config.watch_layers if reads else 0)
        self._corners = run.update.schedule.corners()
        self._skips = Skips(self.say) if run.update.scaler is not None else None
        self._noise_scale: float | None = None
        self._epoch_means: dict[str, float] = {}

    def say(self, text: str) -> None:
        """One line that the user should know."""
        for observer in self._observers:
            observer.say(text)

    def start(self) -> None:
        """The first step comes next."""
        progress = self._progress
        self._call("on_start", progress.step, progress.epoch + 1 if progress.step else 0)

    def steps(self, arrived: Iterable[tuple[int, list[float]]], epoch: int, begin: float, end: int) -> tuple[bool, bool]:
        """Steps whose numbers have arrived. Whether one of them carries a request to save, and to stop.

        A loss that is not finite ends the run here, on all workers at once.
        """
        run, progress, saves, stops = self._run, self._progress, False, False
        for step, values in arrived:
            metrics, weight = run.forward.read(step, values)
            save, stop = values[PAYLOAD - REQUESTS : PAYLOAD]
            saves, stops = saves or save > 0, stops or stop > 0
            layers = self.layers.read(step)
            if self._skips is not None and self._skips.read(values, metrics, step, step + 1 == end):
                continue
            check_step_loss(run, progress, metrics["loss"], step, epoch)
            first, bounds = step - run.sampler.first_step(epoch), run.sampler.cut(epoch).bounds
            progress.means.add(metrics, int(bounds[first + 1] - bounds[first]) * weight)
            progress.last_loss = metrics["loss"]
            if progress.first_loss is None:
                progress.first_loss = metrics["loss"]
            progress.result = replace(progress.result, steps=step + 1)
            noise = dict(zip(_NOISE, values[PAYLOAD:], strict=False)) if run.parts.engine.noise is not None else {}
            row = progress.rows.add(metrics | noise, run.config.log_every, step + 1 == end or step in self._corners)
            if row is not None:
                self._step_row({**row, **self._read_scale(values)}, step, epoch, begin)
            if layers is not None:
                self._layers_row(layers, step, epoch, begin)
            if self.hooks.has("on_step"):
                known, lr = self._explain(metrics | noise, run.update.lr(step))
                self.hooks.call("on_step", step=step + 1, epoch=epoch + 1, lr=lr, metrics=known)
        return saves, stops

    def _read_scale(self, values: list[float]) -> dict[str, float]:
        return {} if self._skips is None else read_report(values)

    def _step_row(self, means: Mapping[str, float], step: int, epoch: int, begin: float) -> None:
        found, lr = self._explain(means, self._run.update.lr(step))
        self._noise_scale = found.get("noise_scale")
        time_s = self._progress.train_time_s + time.perf_counter() - begin
        grown = {"global_batch": self._run.sampler.phase_of(step).global_batch} if self._run.config.batch_schedule else {}
        row = {"step": step + 1, "epoch": epoch + 1, "lr": lr, "time_s": time_s, **grown, **found}
        for observer in self._observers:
            observer.step(row)
        self.hooks.row({"kind": "step", **row})

    def _layers_row(self, layers: Mapping[str, Any], step: int, epoch: int, begin: float) -> None:
        time_s = self._progress.train_time_s + time.perf_counter() - begin
        row = {"step": step + 1, "epoch": epoch + 1, "time_s": time_s, **layers}
        for observer in self._observers:
            observer.layers(row)
        self.hooks.row({"kind": "layers", **row})

    def phase(self, step: Step, why: str) -> None:
        """A phase of the batch schedule begins with this step."""
        run, phase = self._run, step.phase
        self._corners = run.update.schedule.corners()  # with --batch-schedule auto the phase is a new one
        row = {
            "step": step.number,
            "epoch": run.sampler.samples_before(step.number) / run.sampler.samples,
            "start": phase.start,
            "global_batch": phase.global_batch,
            "virtual_workers": phase.parts,
            "part_batch": phase.part_batch,
            "lr_scale": run.update.schedule.batch_scale(step.number),
            "total_steps": run.update.schedule.total_steps,
            "why": why,
        }
        for observer in self._observers:
            observer.phase(row)
        self.hooks.row({"kind": "phase", **row})

    def join(self, row: Mapping[str, Any]) -> None:
        """These workers have taken over from others."""
        for observer in self._observers:
            observer.join(row)
        self.hooks.row({"kind": "join", **row})

    def validating(self, epoch: int, done: int, total: int) -> None:
        """How far a validation is."""
        for observer in self._observers:
            observer.validating(epoch + 1, done, total)

    def validated(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """A validation is done, and the model still has the weights that were validated."""
        self._call("on_validation", self._progress.step, epoch + 1, metrics=metrics)

    def epoch(self, epoch: int, samples: int, trained: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """An epoch of this many samples and its validation are done."""
        progress = self._progress
        means = {
            **{f"train_{name}": value for name, value in trained.items()},
            **{f"val_{name}": value for name, value in metrics.items()},
        }
        row = {
            "epoch": epoch + 1,
            "step": progress.step,
            "time_s": progress.train_time_s,
            "epoch_time_s": progress.epoch_time_s,
            "samples": samples,
            "samples_per_s": samples / progress.epoch_time_s,
            **means,
            **({"noise_scale": self._noise_scale} if self._noise_scale is not None else {}),
        }
        for observer in self._observers:
            observer.epoch(row)
        self.hooks.row({"kind": "epoch", **row})
        self._epoch_means = means

    def epoch_hooks(self, epoch: int) -> None:
        """Call on_epoch, with the training weights in the model."""
        self._call("on_epoch", self._progress.step, epoch + 1, metrics=self._epoch_means)

    def health(self, row: Mapping[str, Any]) -> None:
        """Where the time of the last steps went."""
        for observer in self._observers:
            observer.health(row)
        self.hooks.row({"kind": "health", **row})

    def timeline(self, timeline: Mapping[str, Any]) -> None:
        """The timeline of `--profile`."""
        try:
            for observer in self._observers:  # the recorder is first, so nobody mentions a file that could not be written
                observer.timeline(timeline)
        except RecordError as error:
            self.say(f"the timeline is left out: {error}")

    def checkpoint(self, epochs: int) -> None:
        """A checkpoint of the run after this many whole epochs is on disk."""
        step, record = self._progress.step, self._run.contract.record
        path = path_of(Path(record) / FOLDER, step) if record else None
        epoch = min(epochs + 1, self._run.config.epochs)
        self._call("on_checkpoint", step, epoch, checkpoint=path)

    def end(self, result: Result, failed: bool) -> None:
        """The record is complete. After a failure, an error in a hook is printed, not raised."""
        step = max(0, result.steps - 1)
        about = {"step": result.steps, "epoch": result.epochs, "lr": self._run.update.lr(step)}
        for line in self.hooks.end(failed, **about, metrics=result.metrics, result=result):
            self.say(line)

    def _call(self, name: str, step: int, epoch: int, **about: Any) -> None:
        if self.hooks.has(name):
            lr = self._run.update.lr(max(0, step - 1))
            self.hooks.call(name, step=step, epoch=epoch, lr=lr, **about)

    def _explain(self, row: Mapping[str, float], lr: float) -> tuple[dict[str, float], float]:
        """Means with the noise scale where it is measured, and the learning rate with AdaScale's gain."""
        found = {name: value for name, value in row.items() if name not in _NOISE}
        if self._run.parts.engine.noise is None:
            return found, lr
        variance, square = (row[name] for name in _NOISE)
        found["noise_scale"] = noise_scale(variance, square)
        if self._run.config.lr_rule == "adascale":
            state = torch.tensor((variance, square), dtype=torch.float64)
            found["gain"] = float(adascale_gain(state, self._run.sampler.global_batch, self._run.config.reference_batch))
        return found, lr * found.get("gain", 1.0)


def tell_failure(run: Run, observers: Sequence[Observer], progress: Progress, error: BaseException) -> Result:
    """Tell the observers what ended the run: the result as far as it went, and why."""
    stopped = isinstance(error, KeyboardInterrupt | Stopped)
    status = Status.DIVERGED if isinstance(error, Diverged) else Status.INTERRUPTED if stopped else Status.FAILED
    about = (is_lost_contact(error) and run.world.failures and read_first(run.world.failures)) or explain(error)
    result = replace(progress.result, status=status, why=about.why, where=about.where, traceback=about.traceback)
    for observer in observers:
        with suppress(PacelineError):  # a full disk must not hide what happened
            observer.end(result, None)
            note_record(error, run.contract.record)
    return result
