"""Run a step as one CUDA graph, compiled where that pays off.

Owns recording and replaying; the step itself does not know about it.
May import: the rest of training, core, data. Start reading at `captured.py`.
"""
