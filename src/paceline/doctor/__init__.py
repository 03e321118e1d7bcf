"""`paceline doctor`: check this machine, and say how to fix what is wrong.

Owns the measurements and the checks, which turn them into findings: one file per subject.
May import: training, data, dist. Start reading at `checks.py`.
"""
