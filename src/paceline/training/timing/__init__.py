"""Where a step's time goes: the clock, the health of a run, the timeline of `--profile`.

Owns every time stamp taken while training.
May import: training.build, dist, records. Start reading at `clock.py`.
"""
