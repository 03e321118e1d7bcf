"""The best epoch of a run by `--monitor`: its weights (`--save-best`), and the end after epochs without a better one
(`--stop-after`).

What is known about the best epoch is in the run's result, so every checkpoint has it. best.safetensors says in its own header
which epoch it is from, and a resumed run believes that: the file can be newer than the checkpoint.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.training.build import Run
from paceline.training.monitor import BEST_FILE, make_monitor
from paceline.training.weights import write_weights

_HEADER = "paceline.best"


class BestEpoch:
    """Compares each validation with the best one so far. Every worker has one and comes to the same answer."""

    def __init__(self, run: Run, best: Mapping[str, Any], resumed: bool) -> None:
        """`best` is what the checkpoint says. Collective: call on every rank."""
        self._run, self._monitor = run, make_monitor(run.config)
        self._saves = run.config.save_best and bool(run.contract.record)
        found = self._read_file() if self._saves and resumed else dict(best)
        ours = found.get("metric") == self._monitor.metric and found.get("mode") == self._monitor.mode
        self.best: dict[str, Any] = found if ours else {}

    def update(self, metrics: Mapping[str, float], epoch: int, step: int) -> dict[str, Any]:
        """Take in the validation after epoch number `epoch`, starting at 1. Returns what is known about the best one.

        Raises a UsageError, on all workers, if there is no such metric. Writes the model's weights if they are the best.
        """
        value = self._monitor.read(metrics)
        if self._monitor.is_better(value, self.best.get("value")):
            self.best = {
                "epoch": epoch,
                "step": step,
                "metric": self._monitor.metric,
                "mode": self._monitor.mode,
                "value": value,
                **({"file": BEST_FILE} if self._saves else {}),
            }
            if self._saves and self._run.world.is_main:
                write_weights(self._file, self._run.model, {_HEADER: json.dumps(self.best)})
        return self.best

    def is_stale(self, epoch: int) -> bool:
        """Whether `--stop-after` epochs have passed without a better one."""
        patience = self._run.config.stop_after
        return bool(patience) and epoch - int(self.best.get("epoch", 0)) >= patience

    @property
    def _file(self) -> Path:
        return Path(self._run.contract.record) / BEST_FILE

    def _read_file(self) -> dict[str, Any]:
        """What best.safetensors is about; empty without one. Collective: call on every rank."""
        found = _read_header(self._file) if self._run.world.is_main else None
        return dict(self._run.world.broadcast(found))


def _read_header(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            found = json.loads((file.metadata() or {}).get(_HEADER, "{}"))
    except (OSError, ValueError, SafetensorError):  # missing or damaged: the next validation replaces it
        return {}
    numbers = isinstance(found, dict) and all(isinstance(found.get(name), int | float) for name in ("epoch", "step", "value"))
    return found if numbers else {}
