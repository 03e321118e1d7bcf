"""Processes and worlds: who is a worker, how workers start, meet, are watched and end.

Owns the rank variables (`place.py` is their only reader), process groups and the launcher.
May import: config, records, files, errors. Start reading at `world.py`, then `launch.py`.
"""
