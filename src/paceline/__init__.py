"""Paceline: train the same PyTorch model on any number of workers, without losing accuracy.

The public names are loaded on first use, so that `import paceline` is fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.config import Config as Config
    from paceline.core.exact_sum import ExactReducer as ExactReducer
    from paceline.core.parts import Parts as Parts
    from paceline.core.sampler import Sampler as Sampler
    from paceline.core.schedules import Schedule as Schedule
    from paceline.core.stream import Stream as Stream
    from paceline.data.augment import Images as Images
    from paceline.data.loaders import Arrays as Arrays
    from paceline.data.tar import tar_stream as tar_stream
    from paceline.dist.everyone import print as print
    from paceline.dist.everyone import save as save
    from paceline.dist.everyone import total as total
    from paceline.dist.world import World as World
    from paceline.dist.world import world as world
    from paceline.errors import PacelineError as PacelineError
    from paceline.training.hooks import Hooks as Hooks
    from paceline.training.hooks import Moment as Moment
    from paceline.training.observers import Result as Result
    from paceline.training.run import train as train
    from paceline.training.sampling import Weighted as Weighted
    from paceline.training.sampling import balanced as balanced
    from paceline.training.task import Task as Task
    from paceline.training.task import classify as classify
    from paceline.training.trained import load as load

__version__ = "0.1.0"

_MODULES = {
    "Arrays": "paceline.data.loaders",
    "Config": "paceline.config",
    "ExactReducer": "paceline.core.exact_sum",
    "Hooks": "paceline.training.hooks",
    "Images": "paceline.data.augment",
    "Moment": "paceline.training.hooks",
    "PacelineError": "paceline.errors",
    "Parts": "paceline.core.parts",
    "Result": "paceline.training.observers",
    "Sampler": "paceline.core.sampler",
    "Schedule": "paceline.core.schedules",
    "Stream": "paceline.core.stream",
    "Task": "paceline.training.task",
    "Weighted": "paceline.training.sampling",
    "World": "paceline.dist.world",
    "balanced": "paceline.training.sampling",
    "classify": "paceline.training.task",
    "print": "paceline.dist.everyone",
    "save": "paceline.dist.everyone",
    "total": "paceline.dist.everyone",
    "load": "paceline.training.trained",
    "tar_stream": "paceline.data.tar",
    "train": "paceline.training.run",
    "world": "paceline.dist.world",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
