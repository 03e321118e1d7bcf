"""The validation metric that decides which epoch is best (`--monitor`, `--mode`)."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.config import Config
from paceline.errors import unknown

BEST_FILE = "best.safetensors"
"""The weights of the best epoch, in a record (`--save-best`)."""
_SMALLER_IS_BETTER = ("loss", "error", "perplexity", "mse", "mae", "nll")
_SHORT = ("ppl", "mape", "fid", "wer", "cer")  # as words: "fidelity" and "answer" are something else


@dataclass(frozen=True)
class Monitor:
    """A metric, and which of two values of it is better."""

    metric: str
    mode: str
    """"min" or "max"."""

    def read(self, metrics: Mapping[str, float]) -> float:
        """Its value among a validation's metrics. Raises a UsageError that suggests the nearest name."""
        if self.metric not in metrics:
            raise unknown("validation metric for --monitor", self.metric, metrics)
        return metrics[self.metric]

    def is_better(self, value: float, than: float | None) -> bool:
        """Whether a value beats the best one so far; nan never does."""
        if math.isnan(value) or than is None or math.isnan(than):
            return not math.isnan(value)
        return value < than if self.mode == "min" else value > than


def make_monitor(config: Config) -> Monitor:
    """The monitored metric of a run."""
    metric = config.monitor or "loss"
    last = metric.rpartition("/")[2].lower()
    words = re.split("[^a-z]+", last)
    smaller = any(word in last for word in _SMALLER_IS_BETTER) or any(word in words for word in _SHORT)
    return Monitor(metric, config.mode if config.mode != "auto" else "min" if smaller else "max")


def wants_best(config: Config) -> bool:
    """Whether a run keeps track of its best epoch."""
    return bool(config.monitor or config.save_best or config.stop_after)


def describe_best(best: Mapping[str, Any]) -> str:
    """`best: accuracy 0.9132 after epoch 7, in best.safetensors`."""
    where = f", in {best['file']}" if best.get("file") else ""
    return f"best: {best['metric']} {best['value']:.4f} after epoch {best['epoch']}{where}"
