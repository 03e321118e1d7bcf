"""What a loop of one's own imports loads nothing else of Paceline."""

import sys

from harness.processes import run


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
print(Sampler(10, 4, 2, seed=0).cut(0).steps, Schedule(peak_lr=1.0, total_steps=4, steps_per_epoch=2).lr(0))
"""
    done = run([sys.executable, "-c", code])
    assert (done.returncode, done.stdout) == (0, "3 1.0\n"), done.stderr
