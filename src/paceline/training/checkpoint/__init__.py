"""Checkpoints: what goes into one, when it is written, and the file on disk.

Owns the folder `checkpoints/` of a record.
May import: core, dist, records, files. Start reading at `keeper.py`; the file format is `file.py`.
"""
