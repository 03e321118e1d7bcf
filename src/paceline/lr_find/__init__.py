"""`paceline lr-find`: a learning-rate range test.

Owns the verb, the sweep, the rule that recommends a learning rate, and the picture.
May import: training, records. Start reading at `find.py`.
"""
