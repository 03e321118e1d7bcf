"""`paceline scale`: measure images/s on 1, 2, 4, ... workers and where the rest of linear went.

Owns the timed windows and the verdict printed below the table.
May import: training, records. Start reading at `scale.py`.
"""
