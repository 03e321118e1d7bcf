"""No search for garbage while a command loads torch: the 465,000 objects that this makes stay, and Python would look through
them again and again, for a sixth of the time to the first step (`bench/startup.py`).

Only the command line asks for it, in a process of its own; a program that calls `paceline.train` keeps its collector as it is.
"""

import gc

_paused = False


def pause_collector() -> None:
    """Look for no garbage until all is loaded."""
    global _paused
    _paused = True
    gc.disable()


def resume_collector() -> None:
    """Look for garbage again, but never among what is there by now: that is 0.2 s each time, in the middle of a step."""
    global _paused
    if _paused:
        _paused = False
        gc.freeze()
        gc.enable()


def load_rest() -> None:
    """Import what torch's optimizers and DDP import when they are first used (0.8 s), and resume."""
    import torch._dynamo  # noqa: F401

    resume_collector()
