"""What users may rely on: these names, no more and no less, and `import paceline` costs nothing."""

import sys

import pytest

import paceline
from harness.processes import run

PUBLIC = [
    "Arrays",
    "Config",
    "ExactReducer",
    "Images",
    "PacelineError",
    "Result",
    "Sampler",
    "Schedule",
    "Task",
    "World",
    "classify",
    "train",
    "world",
]


def test_the_public_names():
    assert paceline.__all__ == PUBLIC
    assert dir(paceline) == sorted([*PUBLIC, "__version__"])


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_documented(name):
    value = getattr(paceline, name)
    assert value.__name__ == name
    assert value.__doc__
    assert not value.__doc__.startswith(f"{name}("), "a dataclass's own signature is no documentation"
    assert value.__module__.startswith("paceline.")


def test_other_names_are_not_there():
    with pytest.raises(AttributeError, match="module 'paceline' has no attribute 'trian'"):
        paceline.trian  # noqa: B018


def test_the_pieces_for_ones_own_loop_need_nothing_else():
    code = """
import sys
for name in ("paceline.optim", "paceline.core.schedules", "paceline.core.sampler"):
    __import__(name)
    ours = {module for module in sys.modules if module.split(".")[0] == "paceline"}
    heavy = {module for module in ours if module.split(".")[1:2] in (["training"], ["dist"], ["models"], ["cli"], ["records"])}
    assert not heavy, (name, heavy)
    for module in ours:
        del sys.modules[module]
from paceline.core.sampler import Sampler
from paceline.core.schedules import Schedule
print(Sampler(10, 4, 2, seed=0).steps, Schedule(peak_lr=1.0, total_steps=4, steps_per_epoch=2).lr(0))
"""
    done = run([sys.executable, "-c", code])
    assert (done.returncode, done.stdout) == (0, "3 1.0\n"), done.stderr
