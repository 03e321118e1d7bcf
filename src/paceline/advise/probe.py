"""The run that `paceline advise` reads: an existing record, or a short new run that measures a task's noise scale.

Nothing at the top of this file imports torch.
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config import Config, check_options, flag, make_config, merge_options
from paceline.errors import UsageError
from paceline.output import plural
from paceline.records import find_record, name_for
from paceline.toml import read_recipe

PARTS, EPOCHS = 4, 3
"""The defaults of a probe: it cuts the reference batch into this many parts and compares their gradients, so that it trains as
the user trusts it to. The noise scale settles within a few epochs.
"""


def find_or_train(target: str, options: Mapping[str, Any], recipe: str | None = None) -> Path:
    """The record of this name, or a new record of the task of this name."""
    runs_dir = Path(options.get("runs_dir", Config.runs_dir))
    for path in (Path(target), runs_dir / target):
        if path.is_dir():
            given = [flag(name) for name in options if name != "runs_dir"]
            if given or recipe:
                raise UsageError(
                    f"{given[0] if given else '--recipe'} is only for training, but {path} is an existing record: leave it out"
                )
            return path
    if "/" in target and ":" not in target and not target.endswith(".py"):
        find_record(target, str(runs_dir))  # not a task: the error lists the records
    return train_probe(target, merge_options(read_recipe(recipe), options) if recipe else options)


def train_probe(task: str, options: Mapping[str, Any]) -> Path:
    """Train a task for a few epochs and measure its noise scale. Returns the record's path."""
    make_config(check_options(options))  # report mistakes before torch is loaded
    from paceline.training import tasks
    from paceline.training.run import train

    batch = tasks.resolve(task, options)[1].reference_batch
    defaults = {"epochs": EPOCHS, "name": f"advise-{name_for(task)}-{time.strftime('%Y%m%d-%H%M%S')}"}
    if "virtual_workers" not in options:
        defaults |= {"virtual_workers": math.gcd(batch, PARTS), "global_batch": batch}
    chosen = {**defaults, **options, "measure_noise": True}
    print(
        f"no record named {task}: training the task for {plural(int(chosen['epochs']), 'epoch')} to measure its noise scale",
        flush=True,
    )
    return Path(train(task, **chosen).record)
