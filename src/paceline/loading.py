"""Pause Python's garbage collector while a command loads torch.

Loading makes 465,000 objects that all stay alive. The collector would scan them again and again, which takes a sixth of the
time to the first step (`bench/startup.py`). Only the command line does this, in its own process; a program that calls
`paceline.train` keeps its collector settings.
"""

import gc

_paused = False


def pause_collector() -> None:
    """Disable garbage collection until everything is loaded."""
    global _paused
    _paused = True
    gc.disable()


def resume_collector() -> None:
    """Enable garbage collection, but freeze the objects made so far: scanning them takes 0.2 s, in the middle of a step."""
    global _paused
    if _paused:
        _paused = False
        gc.freeze()
        gc.enable()


def load_rest() -> None:
    """Import what torch's optimizers and DDP import on first use (0.8 s), then resume collection."""
    import torch._dynamo  # noqa: F401

    resume_collector()
