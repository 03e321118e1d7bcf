"""Checkpoints: what goes into one, when it is written, and the file on disk.

Owns the folder `checkpoints/` of a record.
May import: training.build, training.observers, dist, files. Start reading at `keeper.py`; the file format is `file.py`.
"""
