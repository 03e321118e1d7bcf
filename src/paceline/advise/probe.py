"""The run that `paceline advise` reads: a record that is there, or a short one that measures the noise scale of a task.

Nothing at the top of this file imports torch.
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config import Config, check_options, flag, make_config
from paceline.errors import UsageError
from paceline.records import find_record, name_for
from paceline.toml import read_recipe

PARTS, EPOCHS = 4, 3
"""Of a probe, unless told otherwise: a step of the reference batch is cut into so many parts, whose gradients are compared, so
it trains as the user trusts it to; the noise scale settles within a few epochs.
"""


def find_or_train(target: str, options: Mapping[str, Any], recipe: str | None = None) -> Path:
    """The record called so, or a new one of the task called so."""
    runs_dir = Path(options.get("runs_dir", Config.runs_dir))
    for path in (Path(target), runs_dir / target):
        if path.is_dir():
            given = [flag(name) for name in options if name != "runs_dir"]
            if given or recipe:
                raise UsageError(f"{given[0] if given else '--recipe'} is for training: {path} is a record that is there")
            return path
    if "/" in target and ":" not in target and not target.endswith(".py"):
        find_record(target, str(runs_dir))  # no task is called so: it says which records there are
    return train_probe(target, {**read_recipe(recipe), **options} if recipe else options)


def train_probe(task: str, options: Mapping[str, Any]) -> Path:
    """A few epochs of a task with its noise scale measured; where its record is."""
    make_config(check_options(options))  # a mistake shows before torch is loaded
    from paceline.training import tasks
    from paceline.training.run import train

    batch = tasks.resolve(task, options)[1].reference_batch
    usual = {"epochs": EPOCHS, "name": f"advise-{name_for(task)}-{time.strftime('%Y%m%d-%H%M%S')}"}
    if "virtual_workers" not in options:
        usual |= {"virtual_workers": math.gcd(batch, PARTS), "global_batch": batch}
    asked = {**usual, **options, "measure_noise": True}
    print(f"no record is called {task}: training it for {asked['epochs']} epochs to measure its noise scale", flush=True)
    return Path(train(task, **asked).record)
