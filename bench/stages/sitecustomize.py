"""Notes when a `paceline` process reaches each stage, for `bench/startup.py`. Nothing in `src/` depends on it.

Python imports a module of this name at start from any folder in PYTHONPATH, so it runs in the launcher and in every worker,
also with older revisions. It wraps a few functions as their modules are loaded and appends `seconds process rank stage` lines
to the file $STARTUP_STAGES. If a revision does not have a function, that stage is not noted.
"""

import atexit
import os
import sys
import time
from contextlib import contextmanager

_noted: set[str] = set()


def note(stage: str) -> None:
    """Append the time when a stage is reached for the first time."""
    if stage not in _noted:
        _noted.add(stage)
        line = f"{time.monotonic():.6f} {os.getpid()} {os.environ.get('RANK', '-')} {stage}\n"
        with open(os.environ["STARTUP_STAGES"], "a") as file:
            file.write(line)


class Finder:
    """Finds modules through the other finders, and notes the begin and end of their loading."""

    def find_spec(self, name, path=None, target=None):
        if name not in _AFTER or name in _noted:
            return None
        _noted.add(name)
        specs = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None:
            note(f"{name} begins")
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                note(f"{name} loaded")
                _AFTER[name](module)

            spec.loader.exec_module = exec_module
        return spec


def _after_cli(module):
    _before(module, "main", "main")


def _after_world(module):
    original = getattr(module, "world", None)

    @contextmanager
    def world(*args, **kwargs):
        with original(*args, **kwargs) as here:
            note("joined")
            yield here

    if original is not None:
        module.world = world


def _after_build(module):
    _behind(module, "load_data", "data")
    _behind(module, "build", "built")


def _after_step(module):
    _behind(getattr(module, "TrainStep", None) or module.Step, "__call__", "stepped", _wait_for_gpu)  # Step: before 0.1


def _before(owner, name, stage):
    original = getattr(owner, name)

    def noted(*args, **kwargs):
        note(stage)
        return original(*args, **kwargs)

    setattr(owner, name, noted)


def _behind(owner, name, stage, wait=lambda: None):
    original = getattr(owner, name, None)

    def noted(*args, **kwargs):
        result = original(*args, **kwargs)
        if stage not in _noted:
            wait()
            note(stage)
        return result

    if original is not None:
        setattr(owner, name, noted)


def _wait_for_gpu():
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


_AFTER = {
    "torch": lambda module: None,
    "torch._dynamo": lambda module: None,
    "paceline.cli": _after_cli,
    "paceline.training.run": lambda module: None,
    "paceline.dist.world": _after_world,
    "paceline.training.build": _after_build,
    "paceline.training.step": _after_step,
}

if "STARTUP_STAGES" in os.environ:
    note("python")
    sys.meta_path.insert(0, Finder())
    _before(os, "_exit", "end")
    atexit.register(note, "end")
