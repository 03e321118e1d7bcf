"""The way from the command line to `optimizer.step()`, so that it stays short enough to follow."""

import json
from pathlib import Path

from harness.processes import paceline

TASK = """
import json, traceback
import torch
from paceline import Arrays, Task


def trace(self, closure=None):
    frames = [frame for frame in traceback.extract_stack() if "/paceline/" in frame.filename]
    json.dump([[frame.filename, frame.name] for frame in frames], open("frames.json", "w"))


torch.optim.SGD.step = trace


def task():
    data = lambda: Arrays((torch.ones(8, 1),))
    objective = lambda model, batch: {"loss": model(batch[0])[:, 0]}
    return Task(name="traced", model=lambda: torch.nn.Linear(1, 1), train=data, validation=data, objective=objective)
"""


def test_at_most_eleven_calls_in_seven_files_lead_to_the_optimizer(runs: Path) -> None:
    """From `main` on, in one process. 21 frames in 17 files were too many to follow."""
    Path("traced.py").write_text(TASK)
    done = paceline("train", "traced.py", "--max-steps", "1", "--global-batch", "4")
    assert done.returncode == 0, done.stderr
    frames = json.loads(Path("frames.json").read_text())
    assert 5 < len(frames) <= 11, frames
    assert len({filename for filename, _ in frames}) <= 7, frames
