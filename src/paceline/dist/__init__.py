"""Processes and worlds: how workers start, find each other, are watched and end.

Owns the rank variables (only `place.py` reads them), process groups and the launcher.
May import: config, records, files, errors. Start reading at `world.py`, then `launch.py`.
"""
