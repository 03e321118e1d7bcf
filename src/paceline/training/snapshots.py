"""Snapshots (`--snapshots N`): the model's parameters at N evenly spaced steps, small enough to keep them all.

    RECORD/snapshots/step-000000120.safetensors    the parameters after 120 steps, in bfloat16

The first is from before the first step, the last from after the last one. Parameters are copied between two steps and written
in the background, in the format of checkpoints: a file is complete or absent, and has a checksum. With `--ema` they are the
training weights. After a resume, repeated steps write the same files again.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.errors import RecordError, reason
from paceline.training.build import Run
from paceline.training.checkpoint.file import CheckpointError, copy_then_write, path_of, read_tensors, step_of

FOLDER = "snapshots"


class Snapshots:
    """Writes this run's snapshots when they are due. Every worker has one; rank 0's has the folder."""

    def __init__(self, run: Run, folder: Path | None, say: Callable[[str], None]) -> None:
        self._run, self._folder, self._say = run, folder, say
        self._due, self._failed = False, False
        self._last: int | None = None
        self._writing: threading.Thread | None = None

    def begin(self, step: int, resumed: bool) -> None:
        """The run starts at this step. A resumed run has a snapshot of it already, if one was due and could be written."""
        if self._folder is not None:
            self._remove_after(step)
        missing = self._folder is not None and not path_of(self._folder, step).is_file()
        if self._run.config.snapshots and (not resumed or (missing and self._is_due(step))):
            self._take(step)

    def _remove_after(self, step: int) -> None:
        """Remove the snapshots of steps that come again: a run that is shorter now would keep some of them."""
        assert self._folder is not None
        with suppress(OSError, RecordError):
            for later, path in list_snapshots(self._folder.parent):
                if later > step:
                    path.unlink()

    def after(self, step: int, apart: bool) -> None:
        """This many steps are done. While parts have weights of their own (`apart`), a snapshot that is due waits."""
        self._due = self._due or self._is_due(step)
        if self._due and not apart:
            self._take(step)

    def end(self, step: int) -> None:
        """The run ends after this many steps, perhaps earlier than planned. The model has its training weights."""
        if self._run.config.snapshots and self._last != step:
            self._take(step)

    def wait(self) -> None:
        """Wait until the last snapshot is on disk, or has failed."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def _is_due(self, step: int) -> bool:
        """Whether step = floor(i * total / (N - 1)) for some i: with `--batch-schedule auto`, the total changes."""
        count, total = self._run.config.snapshots - 1, self._run.update.schedule.total_steps
        return count > 0 and -(-step * count // total) * total // count == step

    def _take(self, step: int) -> None:
        self._due, self._last = False, step
        if self._folder is None:
            return
        self.wait()  # at most one copy in memory
        write = copy_then_write(self._folder, step, _small(self._run.model))
        self._writing = threading.Thread(target=self._write, args=(write, step), name="snapshots", daemon=True)
        self._writing.start()

    def _write(self, write: Callable[[], None], step: int) -> None:
        try:
            assert self._folder is not None
            self._folder.mkdir(parents=True, exist_ok=True)
            write()
        except Exception as error:  # any: training goes on
            with suppress(Exception):  # say() may print to a pipe without a reader
                if not self._failed:
                    why = reason(error)
                    self._say(f"could not write the snapshot after step {step} to {self._folder}: {why}; training continues")
            self._failed = True


def list_snapshots(record: Path) -> list[tuple[int, Path]]:
    """The snapshots of a record as (step, file), in order; empty if it has none. Raises a RecordError if it cannot be read."""
    folder = record / FOLDER
    try:
        found = [(step_of(path), path) for path in folder.iterdir() if path.is_file()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RecordError(f"cannot read the snapshots in {folder}: {reason(error)}") from None
    return sorted((step, path) for step, path in found if step is not None)


def read_snapshot(path: Path) -> dict[str, Tensor]:
    """The parameters in a snapshot by name, as float32; those that are not floats keep their type.

    Raises a RecordError if the file is damaged or missing.
    """
    try:
        tensors = read_tensors(path)
    except CheckpointError as error:
        raise RecordError(f"cannot read the snapshot {path}: {error}") from None
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


@torch.no_grad()
def _small(model: nn.Module) -> dict[str, Tensor]:
    """The parameters, floats in bfloat16. Those of float64 become float32, not to lose more digits."""
    smaller = {torch.float64: torch.float32, torch.complex128: torch.complex64}
    return {
        name: parameter.detach().to(
            smaller.get(parameter.dtype, torch.bfloat16 if parameter.is_floating_point() else parameter.dtype)
        )
        for name, parameter in model.named_parameters()
    }
