"""`paceline learning-curve`: error against data size, and what more data would give.

Owns the verb, the sizes and their runs (a study), the fit, and the table. May import: study, training, records.
Start reading at `curve.py`.
"""
