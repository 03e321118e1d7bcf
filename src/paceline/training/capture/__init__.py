"""Run a step as one CUDA graph, compiled where that pays off.

Owns recording and replaying; the step itself does not know about it.
May import: training.step, core. Start reading at `captured.py`.
"""
