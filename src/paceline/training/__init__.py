"""The product's training loop: `paceline train` and `paceline.train`.

Owns tasks, building a run, the contract, the step, validation and observers; `capture/`, `timing/` and `checkpoint/` serve it.
May import: data, models, optim, core, dist. Start reading at `run.py`, then `build.py`, `loop.py` and `step.py`.
"""
