"""When a run has diverged: a loss that is no longer finite, or a validation loss that has exploded."""

import math

from paceline.errors import Diverged
from paceline.training.build import Run
from paceline.training.checkpoint.keeper import Progress

EXPLODED, HOPELESS = 1e4, 1e8
"""Multiples of the first step's loss, or of 1 if that is more. A finite loss can be a divergence too: if both the last step's
loss and the validation loss exploded, or the validation loss is hopeless. Early in a run with batch norm, a validation loss of
1e4 alone only shows that the running statistics have not settled."""


def check_step_loss(run: Run, progress: Progress, loss: float, step: int, epoch: int) -> None:
    """Raise Diverged if the loss of a step is not finite."""
    if not math.isfinite(loss):
        raise _diverged(run, progress, loss, step, epoch)


def check_validation_loss(run: Run, progress: Progress, loss: float, epoch: int) -> None:
    """Raise Diverged if a validation loss is not finite, or far above the first losses of the run."""
    usual, last = max(1.0, abs(progress.first_loss or 0.0)), progress.last_loss or 0.0
    limit = usual * (EXPLODED if last > EXPLODED * usual else HOPELESS)
    if not (math.isfinite(loss) and loss <= limit):
        raise _diverged(run, progress, loss, progress.step - 1, epoch, "validation loss")


def _diverged(run: Run, progress: Progress, loss: float, step: int, epoch: int, what: str = "loss") -> Diverged:
    grown = f" (in the first step: {progress.first_loss:.4g})" if math.isfinite(loss) else ""
    if step == 0 and math.isnan(loss):  # no update has happened yet
        return Diverged("diverged: the loss is nan in the first step, before any update: look for nan or inf in the data")
    slower = "--schedule cosine --warmup-epochs 1" if run.config.schedule == "one-cycle" else "a longer --warmup-epochs"
    lower = "lr in the task's optimizer" if run.update.is_own else "--base-lr"
    return Diverged(
        f"diverged: the {what} is {loss:.4g}{grown} at step {step + 1} (epoch {epoch + 1}),"
        f" lr {run.update.lr(step):.4g}, global batch {run.sampler.phase_of(step).global_batch};"
        f" try a lower {lower}, {slower}, or --clip-norm 1"
    )
