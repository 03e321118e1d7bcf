"""`paceline doctor`: check this machine, and say how to fix what is wrong.

Owns the checks; each is a function in `checks.py` that yields findings.
May import: training, data, dist. Start reading at `checks.py`.
"""
