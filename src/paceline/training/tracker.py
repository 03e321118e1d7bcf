"""The tracker: an observer that also writes a run to TensorBoard (`--tracker`)."""

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import nn

from paceline.contract import Contract
from paceline.errors import UsageError
from paceline.training.observers import Result, Row


def check_tensorboard() -> None:
    """Raise a UsageError if TensorBoard is not installed, before anything is loaded or written."""
    if importlib.util.find_spec("tensorboard") is None:
        raise UsageError("--tracker tensorboard: TensorBoard is not installed; pip install 'paceline[trackers]'")


class TensorBoard:
    """Writes to TensorBoard, in the record's folder. A full disk ends the tracker, not the run."""

    def __init__(self, folder: str, failed: Callable[[str], None] = lambda text: None) -> None:
        self._folder, self._failed, self._writer = folder, failed, cast(Any, None)

    def start(self, contract: Contract) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run repeats some steps: purge_step hides the old points from the first of these on.
        repeated = None if contract.resumed_at is None else contract.resumed_at + 1
        try:
            self._writer = SummaryWriter(self._folder, purge_step=repeated)
        except OSError as error:
            self._give_up(error)
        lines = "\n".join(f"    {what}: {text}" for what, text in contract.lines())
        self._try(lambda writer: writer.add_text("contract", lines))

    def say(self, text: str) -> None:
        pass

    def step(self, row: Row) -> None:
        self._add({f"train/{name}": row[name] for name in ("loss", "lr")}, row["step"])

    def validating(self, epoch: int, done: int, total: int) -> None:
        pass

    def epoch(self, row: Row) -> None:
        shown = {name: value for name, value in row.items() if name.startswith("val_") or name == "samples_per_s"}
        self._add({name.replace("val_", "validation/"): value for name, value in shown.items()}, row["step"])

    def health(self, row: Row) -> None:
        self._add({f"step/{name}_s": value for name, value in row["components_s"].items()}, row["step"])

    def timeline(self, timeline: Row) -> None:
        pass

    def end(self, result: Result, model: nn.Module | None) -> None:
        self._try(lambda writer: writer.close())

    def _add(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._try(lambda writer, name=name, value=value: writer.add_scalar(name, value, step))

    def _try(self, write: Callable[..., Any]) -> None:
        """Write, unless writing has failed before."""
        try:
            if self._writer is not None:
                write(self._writer)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._writer = None
        self._failed(f"the tracker cannot be written and is left out from here on: {error.strerror or error}")
